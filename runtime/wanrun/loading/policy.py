"""The choices of how an artifact is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from wanrun.errors import UsageError

MEMORY = ("auto", "low")
TEXT_ENCODERS = ("jax", "torch")
EMBEDDINGS = ("all", "artifact", "none")


@dataclass(frozen=True)
class LoadPolicy:
    """How an artifact is loaded.

    Args:
        allow_compile: compile from the StableHLO where no executable fits, into the user's cache.
        verify: 'fast' checks every row's crc32c while reading; 'sha256' also every parameter's sha256.
        memory: 'auto' keeps all that was loaded, of two experts as much as fits; 'low' frees the text encoder
            after encoding, and holds one expert at a time.
        loop: 'step' or 'scan', the form of the denoising loop; None: step where the profile has it.
        first_expert: the transformer that is needed first; None for the high-noise one.
        text_encoder: 'jax' runs the artifact's programs; 'torch' the same weights with transformers.
        text_encoder_device: torch device of the latter.
        embeddings: which stored prompt embeddings may be used: the artifact's and the user's cache
            ('all'), the 'artifact' ones, or 'none'.
        weights: a folder or URL that holds the components instead of the artifact's ``weights`` folder.
        lazy: load nothing before it is used.

    Raises:
        UsageError: for a choice that there is not, or weights that cannot be had.
    """

    allow_compile: bool = False
    verify: str = "fast"
    memory: str = "auto"
    loop: str | None = None
    first_expert: str | None = None
    text_encoder: str = "jax"
    text_encoder_device: str = "cpu"
    embeddings: str = "all"
    weights: str | None = None
    lazy: bool = False

    def __post_init__(self) -> None:
        for name, choices in (
            ("memory", MEMORY),
            ("text_encoder", TEXT_ENCODERS),
            ("embeddings", EMBEDDINGS),
        ):
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"{name} cannot be {getattr(self, name)!r}",
                    expected="one of " + ", ".join(choices),
                )
        if self.weights is not None:
            from wanrun.loading.tensorstore_reader import weights_location

            weights_location(self.weights)

    @property
    def low_memory(self) -> bool:
        """Whether as little as possible is held at a time."""
        return self.memory == "low"


class PolicyChoices(TypedDict, total=False):
    """The fields of ``LoadPolicy`` as keywords."""

    allow_compile: bool
    verify: str
    memory: str
    loop: str | None
    first_expert: str | None
    text_encoder: str
    text_encoder_device: str
    embeddings: str
    weights: str | None
    lazy: bool


class ProfileChoices(TypedDict, total=False):
    """What chooses a profile and a target, as keywords.

    Attributes:
        size: (width, height) in pixels; the first built profile's where None.
        num_frames: frames; the first built profile's where None.
        num_videos: videos per prompt, 1 by default.
        guidance: whether classifier-free guidance is on; as the model is published where None.
        num_references: reference images of a VACE model, 0 by default.
        target: a target's name; the one that matches this machine where None.
    """

    size: tuple[int, int] | None
    num_frames: int | None
    num_videos: int
    guidance: bool | None
    num_references: int
    target: str | None


class LoadChoices(ProfileChoices, PolicyChoices, total=False):
    """The keywords of ``wanrun.load`` that choose what is loaded, and how."""
