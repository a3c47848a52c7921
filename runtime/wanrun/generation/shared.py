"""The parts of an opened artifact that all its sessions share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wanrun.executables.store import Executables
from wanrun.generation.last_encoded import LastEncoded
from wanrun.opened.artifact import OpenedArtifact
from wanrun.text.beside import CpuEncoder
from wanrun.text.stage import TextStages
from wanrun.weights.buffers import Memory
from wanrun.weights.store import WeightStore


@dataclass(frozen=True)
class Shared:
    """An opened artifact and its loaded parts, one copy for all profiles.

    Attributes:
        opened: the artifact.
        weights: its weights.
        executables: its executables.
        texts: the text stages, which turn prompts into embeddings.
        last_encoded: the encodings of the last images and videos.
    """

    opened: OpenedArtifact
    weights: WeightStore
    executables: Executables
    texts: TextStages
    last_encoded: LastEncoded

    @classmethod
    def of(
        cls, opened: OpenedArtifact, memories: Mapping[str, Memory], text: OpenedArtifact | None = None
    ) -> Shared:
        """Makes the shared parts; nothing is loaded yet.

        Args:
            opened: the artifact.
            memories: memory that is already allocated, by component.
            text: the artifact opened on the CPU for the text encoder; None where that runs with the others.
        """
        executables = Executables(opened)
        weights = WeightStore(opened, executables, opened.program_set.kernels.weight_bits, memories)
        beside = None if text is None else CpuEncoder.of(text)
        return cls(opened, weights, executables, TextStages(opened, beside), LastEncoded())

    def close(self) -> None:
        """Releases everything."""
        self.last_encoded.forget()
        self.texts.close()
        self.executables.close()
        self.weights.close()
