"""The description of a variant of Wan: the parts of its source, its published defaults, its differences.

Each kind of variant has a class in its own module, which overrides the kind's specifics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.artifact.media import MediaOption
from wanrun.artifact.model import Pyramid
from wanrun.artifact.task import HeldFrame, Input, Modes, Task, Windows
from wanrun.media.inputs import MEDIA_KINDS, Media

if TYPE_CHECKING:
    import jax

    from wanbuild.variants.conditioner import Conditioner

SCHEDULERS = (
    "diffusers.UniPCMultistepScheduler",
    "diffusers.DPMSolverMultistepScheduler",
    "diffusers.FlowMatchEulerDiscreteScheduler",
    "diffusers.FlowMapEulerDiscreteScheduler",
    "diffusers.SelfForcingFlowMatchScheduler",
)

IMAGE_ENCODER, IMAGE_PROCESSOR = "image_encoder", "image_processor"

Components = Mapping[str, tuple[str, ...]]
"""The allowed library-qualified classes of a component, by component name."""

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

# The published Wan 2.1 checkpoints list the encoder with its projection, which no pipeline uses. FLF2V's
# lists a processor of images and text, of which only the image half exists.
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
"""The components without weights: settings and tables."""

CHANNELS = 16
"""Latent channels if a config omits them: the default of the reference classes."""

Field = tuple[str, object, object]
"""A field of the transformer's config, its required value, and its value if the config omits it."""

Usage = tuple[str, Mapping[str, Any]]
"""A way to use a model, as text for the comparison's table, and its arguments for ``sample_media``."""


Inputs = Mapping[MediaOption, Input]
"""A variant's images and videos by option."""


def takes(*inputs: Input, **others: Input) -> Inputs:
    """Returns inputs by option. The option of a positional input is the name of its array."""
    return MappingProxyType({**{item.array: item for item in inputs}, **others})


def an_image(array: str, *, required: bool = True, **fields: Any) -> Input:
    """Returns an image that programs take under this name."""
    return Input(kind="image", array=array, required=required, **fields)


def a_video(array: str, *, required: bool = True, **fields: Any) -> Input:
    """Returns a video that programs take under this name."""
    return Input(kind="video", array=array, required=required, **fields)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant; subclasses are its kinds.

    Attributes:
        name: the name in ``--variant`` and the manifest.
        task: the manifest's name for the source of the video: ``t2v`` text, ``i2v`` an image, ``flf2v`` a
            first and a last frame, ``ti2v`` text and optionally an image, ``vace`` a video to edit,
            ``animate`` a character and the movements of another.
        pipeline_class: ``_class_name`` in model_index.json.
        also_saved_as: other classes of the reference that take the same parts, and may have saved them.
        components: name -> allowed library-qualified classes; all of them must exist, and no others.
        inputs: images and videos, and how each is prepared.
        modes: the ways to use the model; None: one way.
        windows: how a long video is made; None: a video has one shape.
        held: the first latent frame, if it may be given.
        condition_channels: whether the transformer takes, in addition to the latents' channels,
            ``vae_temporal`` mask channels and as many channels of given latents.
        from_video: whether its steps may begin with a given video instead of only noise.
        leading_latents: latent frames in front of the video's own.
        expand_timesteps: whether there is a timestep per token.
        flow_map: whether a step takes the timestep at which it ends too.
        pyramid: how the steps of a chunk are laid out, as published; None for a solver's own grid.
        solver: of files without a scheduler_config.json, as published.
        guidance_scale: default classifier-free guidance scale; of two experts, the high-noise one's.
        options: the defaults of the options that not every model has, except for the boundary, which is the
            checkpoint's.
        flow_shift: published shift of the sigmas, of files without a scheduler_config.json.
        fps: frames per second of the video.
        sizes: published (width, height) in pixels, the default first.
        num_frames: default frames, 4n + 1; of a window if a video consists of several.
        patch: transformer patch (frames, height, width) in latent cells.
        vae_spatial: pixels per latent cell.
        vae_temporal: frames per latent frame.
    """

    name: str
    task: str
    pipeline_class: str
    also_saved_as: tuple[str, ...] = ()
    components: Components
    inputs: Inputs = field(default_factory=takes)
    modes: Modes | None = None
    windows: Windows | None = None
    held: HeldFrame | None = None
    condition_channels: bool = False
    from_video: bool = False
    leading_latents: int = 0
    expand_timesteps: bool = False
    flow_map: bool = False
    pyramid: Pyramid | None = None
    solver: Literal["unipc", "flow-map", "self-forcing", "dmd"] = "unipc"
    steps: int = 50
    guidance_scale: float = 5.0
    options: Mapping[str, str | int | float] = field(default_factory=lambda: MappingProxyType({}))
    flow_shift: float = 5.0
    fps: int = 16
    sizes: tuple[tuple[int, int], ...] = ((832, 480), (1280, 720))
    num_frames: int = 81
    negative_prompt: str = ""
    patch: tuple[int, int, int] = (1, 2, 2)
    vae_spatial: int = 8
    vae_temporal: int = 4

    reference_videos: ClassVar[int | None] = None
    """The reference's limit on videos per prompt; None for any number."""

    sample_frames: ClassVar[int] = 17
    """Frames of the sample videos next to a toy checkpoint."""

    @property
    def weight_components(self) -> tuple[str, ...]:
        """Names of the components with weights, sorted."""
        return tuple(sorted(self.components.keys() - NO_WEIGHTS))

    @property
    def size_multiple(self) -> int:
        """Width and height must be multiples of this many pixels, the size of a patch at the least size."""
        stages = 1 if self.pyramid is None else self.pyramid.stages
        return self.vae_spatial * max(self.patch[1:]) << (stages - 1)

    @property
    def scheduler(self) -> str:
        """The variant's scheduler among ``published.schedulers.SCHEDULER_CONFIGS``."""
        return self.solver if self.pyramid is None else self.name

    @property
    def transformers(self) -> tuple[str, ...]:
        """Names of the transformers, the high-noise one first."""
        return tuple(name for name in TRANSFORMERS if name in self.components)

    @property
    def previous_frames(self) -> int:
        """The most frames of a window with which the next may begin; 0 if a video is generated in one run."""
        return 0 if self.windows is None else max(self.windows.overlaps)

    @property
    def encoded_images(self) -> int:
        """The number of images whose tokens the transformer embeds; two have positions."""
        return sum(item.encoded for item in self.inputs.values())

    def in_channels(self, latent_channels: int) -> int:
        """Returns the transformer's input channels: the latents' and the condition's."""
        given = self.vae_temporal + latent_channels if self.condition_channels else 0
        return latent_channels + given

    def channel_fields(self, latent_channels: int) -> list[Field]:
        """Returns the fields of the transformer's config that depend on the VAE's latent channels."""
        return [("in_channels", self.in_channels(latent_channels), CHANNELS)]

    def inputs_for(self, transformer: Any) -> Inputs:
        """Returns the inputs, with the sizes that this transformer's config needs."""
        del transformer
        return self.inputs

    def task_record(self, transformer: Any) -> Task:
        """Returns the manifest's record of the task, with this transformer's config."""
        return Task(
            name=self.task,
            inputs=dict(self.inputs_for(transformer)),
            modes=self.modes,
            windows=self.windows,
            held=self.held,
        )

    @property
    def conditioner(self) -> type[Conditioner] | None:
        """The class of the program ``encode_video``; None for a model of text only."""
        return None

    def prepare_arguments(self, transformer: Any, num_frames: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the inputs of the program ``prepare`` in addition to embeddings and image tokens.

        ``num_frames`` is F, frames of the profile.
        """
        del transformer, num_frames
        return {}

    def step_arguments(self, transformer: Any, frames: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the variant's additional inputs of a step.

        ``frames`` is the latent frames in the transformer's patches.
        """
        del transformer, frames
        return {}

    @property
    def reference_class(self) -> str:
        """The equivalent pipeline of diffusers."""
        return self.pipeline_class

    def reference_arguments(self, media: Media, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Returns media and numbers under the reference pipeline's argument names.

        Images and videos are in memory or files; ``numbers`` has num_frames and other options.
        """
        given = {name: getattr(media, name) for name in MEDIA_KINDS}
        return {**{name: value for name, value in given.items() if value not in (None, ())}, **numbers}

    @property
    def usages(self) -> Sequence[Usage]:
        """Returns the ways to use a model: each mode, with and without optional inputs; the last has all."""
        return [("", {})]
