"""What is said of a variant of Wan: what a source must hold, the published defaults, and how it differs.

Each kind of variant has a class in a module of its own, which overrides what is particular to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.media.types import MEDIA_KINDS, Media

if TYPE_CHECKING:
    import jax

    from wanbuild.variants.conditioner import Conditioner

SCHEDULERS = (
    "diffusers.UniPCMultistepScheduler",
    "diffusers.DPMSolverMultistepScheduler",
    "diffusers.FlowMatchEulerDiscreteScheduler",
)

IMAGE_ENCODER, IMAGE_PROCESSOR = "image_encoder", "image_processor"

Components = Mapping[str, tuple[str, ...]]
"""By name, the library-qualified classes that a component may have."""

TEXT_TO_VIDEO: Components = MappingProxyType(
    {
        "scheduler": SCHEDULERS,
        "text_encoder": ("transformers.UMT5EncoderModel",),
        "tokenizer": ("transformers.T5TokenizerFast", "transformers.T5Tokenizer"),
        "transformer": ("diffusers.WanTransformer3DModel",),
        "vae": ("diffusers.AutoencoderKLWan",),
    }
)

TWO_EXPERTS: Components = MappingProxyType({**TEXT_TO_VIDEO, "transformer_2": TEXT_TO_VIDEO["transformer"]})

# The published Wan 2.1 checkpoints list the encoder with its projection, which no pipeline uses, and that of
# FLF2V the processor of images and text, of which there is the images' half.
WITH_IMAGES: Components = MappingProxyType(
    {
        **TEXT_TO_VIDEO,
        IMAGE_ENCODER: ("transformers.CLIPVisionModel", "transformers.CLIPVisionModelWithProjection"),
        IMAGE_PROCESSOR: (
            "transformers.CLIPImageProcessor",
            "transformers.CLIPImageProcessorFast",
            "transformers.CLIPImageProcessorPil",
            "transformers.CLIPProcessor",
        ),
    }
)

NO_WEIGHTS = frozenset({"scheduler", "tokenizer", IMAGE_PROCESSOR})
"""The components that are settings or tables and hold no weights."""

REQUIRED, OPTIONAL, REPLACE = "required", "optional", "replace"
"""When a task takes an input: always, if it is given, or in the mode ``replace`` and only there."""

CHANNELS = 16
"""Latent channels of a config that leaves them out: the default of the reference classes."""

Field = tuple[str, object, object]
"""A field of the transformer's config, what it has to be, and what it is where the config leaves it out."""

Way = tuple[str, Mapping[str, Any]]
"""A way to use a model, for the table of a comparison, and what ``sample_media`` is told for it."""


def takes(**when: str) -> Mapping[str, str]:
    """Images and videos by name, and when each is taken."""
    return MappingProxyType(when)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant; the classes that derive from it are its kinds.

    Attributes:
        name: as ``--variant`` and the manifest spell it.
        task: what it makes a video of: ``t2v`` text, ``i2v`` an image, ``flf2v`` a first and a last frame,
            ``ti2v`` text with an image or without, ``vace`` a video to edit, ``animate`` a character and the
            movements of another.
        pipeline_class: ``_class_name`` in model_index.json.
        components: name -> the library-qualified classes it may have; every one must be there, no other.
        inputs: images and videos by name, and when each is taken.
        condition_channels: whether the transformer takes, beside the latents' channels, ``vae_temporal`` of a
            mask and as many as the latents' of what is given.
        encoded_images: how many images the transformer embeds the tokens of: with two they have positions.
        leading_latents: latent frames in front of the video's own.
        expand_timesteps: whether there is a timestep per token.
        steps: default denoising steps.
        guidance_scale: default classifier-free guidance scale; of the high-noise expert where there are two.
        guidance_scale_2: the same of the low-noise expert; None where there is none.
        conditioning_scale: default weight of the control video; None where there is none.
        flow_shift: shift of the sigmas where scheduler_config.json gives none.
        fps: frames per second of the video.
        sizes: published (width, height) in pixels, the default first.
        num_frames: default frames, 4n + 1; of a window where a video is made of several.
        negative_prompt: default negative prompt.
        patch: transformer patch (frames, height, width) in latent cells.
        vae_spatial: pixels per latent cell.
        vae_temporal: frames per latent frame.
    """

    name: str
    task: str
    pipeline_class: str
    components: Components
    inputs: Mapping[str, str] = field(default_factory=takes)
    condition_channels: bool = False
    encoded_images: int = 0
    leading_latents: int = 0
    expand_timesteps: bool = False
    steps: int = 50
    guidance_scale: float = 5.0
    guidance_scale_2: float | None = None
    conditioning_scale: float | None = None
    flow_shift: float = 5.0
    fps: int = 16
    sizes: tuple[tuple[int, int], ...] = ((832, 480), (1280, 720))
    num_frames: int = 81
    negative_prompt: str = ""
    patch: tuple[int, int, int] = (1, 2, 2)
    vae_spatial: int = 8
    vae_temporal: int = 4

    previous_frames: ClassVar[int] = 0
    """Frames of a window that the next one may begin with; 0 where a video is made at once."""

    reference_videos: ClassVar[int | None] = None
    """The most videos a prompt that the reference makes; None for any number."""

    @property
    def weight_components(self) -> tuple[str, ...]:
        """Names of the components that hold weights, sorted."""
        return tuple(sorted(self.components.keys() - NO_WEIGHTS))

    @property
    def size_multiple(self) -> int:
        """Pixels that widths and heights are multiples of: those of a patch."""
        return self.vae_spatial * max(self.patch[1:])

    @property
    def transformers(self) -> tuple[str, ...]:
        """Names of the transformers, the high-noise one first."""
        return tuple(name for name in TRANSFORMERS if name in self.components)

    def in_channels(self, latent_channels: int) -> int:
        """Channels that the transformer takes: the latents', and those of what is given."""
        given = self.vae_temporal + latent_channels if self.condition_channels else 0
        return latent_channels + given

    def channel_fields(self, latent_channels: int) -> list[Field]:
        """The fields of the transformer's config that the VAE's latent channels decide."""
        return [("in_channels", self.in_channels(latent_channels), CHANNELS)]

    def facts(self, transformer: Any) -> dict[str, Any]:
        """What the manifest says of the model beside what it says of all.

        Args:
            transformer: the transformer's config.
        """
        del transformer
        return {}

    @property
    def conditioner(self) -> type[Conditioner] | None:
        """The program ``encode_video``; None for text alone."""
        return None

    @property
    def least_frames(self) -> tuple[int, str]:
        """The fewest frames that a profile may have, 4n + 1, and why."""
        return 1, "a video"

    def prepare_arguments(self, transformer: Any, num_frames: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What the program ``prepare`` takes besides embeddings and image tokens.

        Args:
            transformer: the transformer's config.
            num_frames: F, frames of the profile.
        """
        del transformer, num_frames
        return {}

    def step_arguments(self, transformer: Any, frames: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What a step takes besides what all take.

        Args:
            transformer: the transformer's config.
            frames: latent frames in the transformer's patches.
        """
        del transformer, frames
        return {}

    @property
    def reference_class(self) -> str:
        """The pipeline of diffusers that makes the same."""
        return self.pipeline_class

    def reference_arguments(self, media: Media, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Media and numbers by the names that the reference's pipeline has for them.

        Args:
            media: in memory or as files.
            numbers: num_frames and other options.
        """
        given = {name: getattr(media, name) for name in MEDIA_KINDS}
        return {**{name: value for name, value in given.items() if value not in (None, ())}, **numbers}

    @property
    def ways(self) -> Sequence[Way]:
        """The ways to use the model: in each mode, without and with what is optional; the last has all."""
        return [("", {})]

    def sample_frames(self, num_frames: int) -> int:
        """Frames of the videos that a profile is tried with."""
        return num_frames
