"""A profile's shape and build options: with the model and the target, they determine its programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import msgspec

from wanrun.artifact.model import MAX_STEPS
from wanrun.artifact.parameters import DtypePolicy
from wanrun.artifact.programs import Precision, Profile, ProfileOptions
from wanrun.artifact.record import MAX_SIZE
from wanrun.artifact.roles import LOOPS, forms_of
from wanrun.errors import UsageError


@dataclass(frozen=True)
class BuildOptions:
    """Choices that change a profile's programs; recorded in the manifest.

    Args:
        dtype: compute dtype of the text encoder and the transformer.
        vae_dtype: compute dtype of the VAE.
        vae_precision: of the VAE's float32 products on chips: ``highest``, or ``high``, which is three passes
            in bfloat16 on a TPU and TF32 on an NVIDIA GPU.
        scheduler_dtype: dtype of latents and solver history between steps; sums are in float32.
        vae_decode_chunk: latent frames decoded at a time.
        vae_encode_chunk: latent frames encoded at a time.
        loop: forms of the denoising loop: ``step``, one step a call; ``scan``, all in one call; ``both`` of
            these; ``stream``, one layer a call; or ``all``.
        max_steps: the most steps of the scan form; its coefficient table is padded to this length.

    Raises:
        UsageError: naming the first option that is out of range.
    """

    dtype: str = "bfloat16"
    vae_dtype: str = "float32"
    vae_precision: Precision = "high"
    scheduler_dtype: str = "float32"
    vae_decode_chunk: int = 1
    vae_encode_chunk: int = 1
    loop: str = "both"
    max_steps: int = 100

    def __post_init__(self) -> None:
        if self.loop not in LOOPS:
            raise UsageError("--loop cannot be built", expected=" or ".join(LOOPS), found=self.loop)
        if not 1 <= self.max_steps <= MAX_STEPS:
            raise UsageError(
                "--max-steps is out of range", expected=f"1 to {MAX_STEPS}", found=self.max_steps
            )
        for option in ("vae_decode_chunk", "vae_encode_chunk"):
            if not 1 <= (chunk := getattr(self, option)) <= MAX_SIZE:
                raise UsageError(
                    f"--{option.replace('_', '-')} is out of range", expected=f"1 to {MAX_SIZE}", found=chunk
                )

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms of the denoising loop."""
        return forms_of(self.loop)

    @classmethod
    def of(cls, recorded: ProfileOptions) -> BuildOptions:
        """Returns the choices that a profile was built with."""
        return cls(**{choice.name: getattr(recorded, choice.name) for choice in fields(cls)})

    def recorded(self, dtypes: Mapping[str, DtypePolicy]) -> ProfileOptions:
        """Returns the record of these choices in the manifest.

        Args:
            dtypes: storage dtypes by component, which change the programs too.
        """
        stored = {
            option: dtypes[name].weights
            for option, name in (
                ("weights_dtype", "transformer"),
                ("text_weights_dtype", "text_encoder"),
                ("image_weights_dtype", "image_encoder"),
                ("vae_weights_dtype", "vae"),
            )
            if name in dtypes
        }
        return msgspec.convert({**asdict(self), **stored}, ProfileOptions)


@dataclass(frozen=True)
class Shape:
    """The static shape of one generation, which a profile's name says.

    Args:
        width: pixels.
        height: pixels.
        num_frames: frames, 4n + 1.
        num_videos: videos per prompt.
        guidance: whether classifier-free guidance doubles the batch.
        num_references: reference images; each is a latent frame in front of the video's.

    Raises:
        UsageError: for a number that no manifest may hold.
    """

    width: int
    height: int
    num_frames: int
    num_videos: int
    guidance: bool
    num_references: int = 0

    def __post_init__(self) -> None:
        for size in fields(self):
            if getattr(self, size.name) > MAX_SIZE:
                raise UsageError(f"{size.name} cannot be built", expected=f"{MAX_SIZE} at most")

    @classmethod
    def of(cls, profile: Profile) -> Shape:
        """Returns the shape of a profile."""
        return cls(**{size.name: getattr(profile, size.name) for size in fields(cls)})
