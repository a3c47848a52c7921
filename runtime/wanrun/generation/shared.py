"""The parts of an opened artifact that all its sessions share."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from wanrun.generation.conditioning import LastEncoded
from wanrun.opened.artifact import OpenedArtifact
from wanrun.text.stage import TextStages
from wanrun.weights.store import WeightStore


@dataclass(frozen=True)
class Shared:
    """The loaded parts of an opened artifact, one copy for all profiles.

    Attributes:
        weights: its weights and executables.
        texts: the text stages, which turn prompts into embeddings.
        last_encoded: the encodings of the last images and videos.
    """

    weights: WeightStore
    texts: TextStages
    last_encoded: LastEncoded = field(default_factory=WeakKeyDictionary)

    @property
    def opened(self) -> OpenedArtifact:
        """The artifact."""
        return self.weights.opened

    def close(self) -> None:
        """Releases everything."""
        self.last_encoded.clear()
        self.texts.close()
        self.weights.close()
