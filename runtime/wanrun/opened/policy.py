"""Options for loading an artifact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from wanrun.artifact.programs import Profile
from wanrun.errors import UsageError, field

VERIFY = ("fast", "sha256")
MEMORY = ("auto", "low")
TRANSFER = ("auto", "direct", "staged")
TEXT_ENCODERS = ("jax", "torch")
EMBEDDINGS = ("all", "artifact", "none")


@dataclass(frozen=True)
class LoadPolicy:
    """How an artifact is loaded.

    Args:
        allow_compile: compile a program without a fitting executable, from StableHLO into the user's cache.
        verify: 'fast' checks every row's crc32c while reading; 'sha256' also every parameter's sha256.
        memory: 'auto' keeps everything loaded, and as much of two experts as fits; 'low' releases the text
            encoder after encoding and holds one expert at a time.
        transfer: how weights come to the devices of a mesh. 'direct' gives every device its part of each
            parameter; 'staged' gives it 1/N of the rows of a large one, and the devices exchange the rest.
            'auto' is 'staged' where the devices have their own memory or belong to several processes. CPU
            devices of one process share the host's copy, which costs nothing.
        loop: 'step' or 'scan', the form of the denoising loop; None: step if the profile has it.
        first_expert: the transformer that is needed first; None for the high-noise one.
        text_encoder: 'jax' runs the artifact's programs; 'torch' runs the same weights with transformers.
        text_encoder_device: of the torch text encoder its torch device, by default the CPU. Of the artifact's
            own 'cpu', which runs its CPU program beside an accelerator; None for where all programs run.
        embeddings: which stored prompt embeddings may be used: the artifact's and the user's cache
            ('all'), the 'artifact' ones, or 'none'.
        weights: a folder or URL that holds the components instead of the artifact's ``weights`` folder.
        lazy: load nothing before it is used.
        retune: compile the profile's programs here too, and keep those that are faster than the artifact's.
        tuned: use what an earlier ``retune`` has kept.
        trial: use executables that were built elsewhere and have not been tried on this chip. It is for the
            trial itself: see ``wanrun.trust``.

    Raises:
        UsageError: for an unknown choice, or weights that do not exist.
    """

    allow_compile: bool = False
    verify: str = "fast"
    memory: str = "auto"
    transfer: str = "auto"
    loop: str | None = None
    first_expert: str | None = None
    text_encoder: str = "jax"
    text_encoder_device: str | None = None
    embeddings: str = "all"
    weights: str | None = None
    lazy: bool = False
    retune: bool = False
    tuned: bool = True
    trial: bool = False

    def __post_init__(self) -> None:
        for name, choices in (
            ("verify", VERIFY),
            ("memory", MEMORY),
            ("transfer", TRANSFER),
            ("text_encoder", TEXT_ENCODERS),
            ("embeddings", EMBEDDINGS),
        ):
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"{name} cannot be {getattr(self, name)!r}",
                    expected="one of " + ", ".join(choices),
                )
        if self.text_encoder == "jax" and self.text_encoder_device not in (None, "cpu"):
            raise UsageError(
                f"{field('text_encoder_device')} cannot be {self.text_encoder_device!r}",
                expected=f"cpu, or {field('text_encoder')} torch with a device of torch",
            )
        if self.weights is not None:
            from wanrun.opened.location import weights_location

            weights_location(self.weights)

    @property
    def low_memory(self) -> bool:
        """Whether as little as possible is kept in memory."""
        return self.memory == "low"


class PolicyChoices(TypedDict, total=False):
    """The fields of ``LoadPolicy`` as keywords."""

    allow_compile: bool
    verify: str
    memory: str
    transfer: str
    loop: str | None
    first_expert: str | None
    text_encoder: str
    text_encoder_device: str | None
    embeddings: str
    weights: str | None
    lazy: bool
    retune: bool
    tuned: bool
    trial: bool


class ShapeChoices(TypedDict, total=False):
    """Keywords that choose a profile.

    Attributes:
        size: (width, height) in pixels; None: the first built profile's.
        num_frames: frames; None: the first built profile's.
        num_videos: videos per prompt, 1 by default.
        guidance: whether classifier-free guidance is on; None: as the model is published.
        num_references: reference images, 0 by default.
        profile: a profile's name, instead of all others; None: the first built one that fits.
    """

    size: tuple[int, int] | None
    num_frames: int | None
    num_videos: int
    guidance: bool | None
    num_references: int
    profile: str | None


class ProfileChoices(ShapeChoices, total=False):
    """Keywords that choose a profile and a target.

    Attributes:
        target: a target's name; None: the target that matches this machine.
    """

    target: str | None


def choices_of(profile: Profile) -> ShapeChoices:
    """Returns the keywords that choose a profile."""
    return {
        "size": (profile.width, profile.height),
        "num_frames": profile.num_frames,
        "num_videos": profile.num_videos,
        "guidance": profile.guidance,
        "num_references": profile.num_references,
    }


class LoadChoices(ProfileChoices, PolicyChoices, total=False):
    """The keywords of ``wanrun.load`` that choose what is loaded, and how."""
