"""The table of Wan variants, one row each: what a source must hold, and the published defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from wanbuild.config import shown
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.errors import ArtifactError, SourceError

SCHEDULERS = (
    "diffusers.UniPCMultistepScheduler",
    "diffusers.DPMSolverMultistepScheduler",
    "diffusers.FlowMatchEulerDiscreteScheduler",
)

IMAGE_ENCODER, IMAGE_PROCESSOR = "image_encoder", "image_processor"

_TEXT_TO_VIDEO: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "scheduler": SCHEDULERS,
        "text_encoder": ("transformers.UMT5EncoderModel",),
        "tokenizer": ("transformers.T5TokenizerFast", "transformers.T5Tokenizer"),
        "transformer": ("diffusers.WanTransformer3DModel",),
        "vae": ("diffusers.AutoencoderKLWan",),
    }
)

_TWO_EXPERTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {**_TEXT_TO_VIDEO, "transformer_2": _TEXT_TO_VIDEO["transformer"]}
)

# The published Wan 2.1 checkpoints list the encoder with its projection, which no pipeline uses, and that of
# FLF2V the processor of images and text, of which there is the images' half.
_WITH_IMAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **_TEXT_TO_VIDEO,
        IMAGE_ENCODER: ("transformers.CLIPVisionModel", "transformers.CLIPVisionModelWithProjection"),
        IMAGE_PROCESSOR: (
            "transformers.CLIPImageProcessor",
            "transformers.CLIPImageProcessorFast",
            "transformers.CLIPImageProcessorPil",
            "transformers.CLIPProcessor",
        ),
    }
)

_VACE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {**_TEXT_TO_VIDEO, "transformer": ("diffusers.WanVACETransformer3DModel",)}
)

_ANIMATE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {**_WITH_IMAGES, "transformer": ("diffusers.WanAnimateTransformer3DModel",)}
)

NO_WEIGHTS = frozenset({"scheduler", "tokenizer", IMAGE_PROCESSOR})
"""The components that are settings or tables and hold no weights."""


REQUIRED, OPTIONAL, REPLACE = "required", "optional", "replace"
"""When a task takes an input: always, if it is given, or in the mode ``replace`` and only there."""


def _inputs(**when: str) -> Mapping[str, str]:
    return MappingProxyType(when)


@dataclass(frozen=True)
class Family:
    """One variant. Two rows differ in the pipeline's class, the components or the facts below them.

    Args:
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
        num_frames: default frames, 4n + 1; of a segment where a video is made of several.
        negative_prompt: default negative prompt.
        patch: transformer patch (frames, height, width) in latent cells.
        vae_spatial: pixels per latent cell.
        vae_temporal: frames per latent frame.
    """

    name: str
    task: str
    pipeline_class: str
    components: Mapping[str, tuple[str, ...]]
    inputs: Mapping[str, str] = field(default_factory=_inputs)
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

    @property
    def weight_components(self) -> tuple[str, ...]:
        """Names of the components that hold weights, sorted."""
        return tuple(sorted(self.components.keys() - NO_WEIGHTS))

    @property
    def size_multiple(self) -> int:
        """Pixels that widths and heights are multiples of: those of a patch."""
        return self.vae_spatial * max(self.patch[1:])

    def in_channels(self, latent_channels: int) -> int:
        """Channels that the transformer takes: the latents', and those of what is given."""
        given = self.vae_temporal + latent_channels if self.condition_channels else 0
        return latent_channels + given

    def control_channels(self, latent_channels: int) -> int:
        """Channels of VACE's control: what stays of the video, what is made anew, and an unfolded mask."""
        return 2 * latent_channels + self.vae_spatial**2

    @property
    def transformers(self) -> tuple[str, ...]:
        """Names of the transformers, the high-noise one first."""
        return tuple(name for name in TRANSFORMERS if name in self.components)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            Family(name="wan2.1-t2v", task="t2v", pipeline_class="WanPipeline", components=_TEXT_TO_VIDEO),
            Family(
                name="wan2.1-i2v",
                task="i2v",
                pipeline_class="WanImageToVideoPipeline",
                components=_WITH_IMAGES,
                inputs=_inputs(image=REQUIRED),
                condition_channels=True,
                encoded_images=1,
                steps=40,
            ),
            Family(
                name="wan2.1-flf2v",
                task="flf2v",
                pipeline_class="WanImageToVideoPipeline",
                components=_WITH_IMAGES,
                inputs=_inputs(image=REQUIRED, last_image=REQUIRED),
                condition_channels=True,
                encoded_images=2,
                flow_shift=16.0,
                sizes=((1280, 720), (832, 480)),
            ),
            Family(
                name="wan2.1-vace",
                task="vace",
                pipeline_class="WanVACEPipeline",
                components=_VACE,
                inputs=_inputs(video=OPTIONAL, mask=OPTIONAL, reference_image=OPTIONAL),
                conditioning_scale=1.0,
                flow_shift=16.0,
                sizes=((1280, 720), (832, 480)),
            ),
            Family(
                name="wan2.2-t2v",
                task="t2v",
                pipeline_class="WanPipeline",
                components=_TWO_EXPERTS,
                steps=40,
                guidance_scale=4.0,
                guidance_scale_2=3.0,
                flow_shift=12.0,
                sizes=((1280, 720), (832, 480)),
            ),
            Family(
                name="wan2.2-i2v",
                task="i2v",
                pipeline_class="WanImageToVideoPipeline",
                components=_TWO_EXPERTS,
                inputs=_inputs(image=REQUIRED, last_image=OPTIONAL),
                condition_channels=True,
                steps=40,
                guidance_scale=3.5,
                guidance_scale_2=3.5,
                sizes=((1280, 720), (832, 480)),
            ),
            Family(
                name="wan2.2-ti2v",
                task="ti2v",
                pipeline_class="WanPipeline",
                components=_TEXT_TO_VIDEO,
                inputs=_inputs(image=OPTIONAL),
                expand_timesteps=True,
                fps=24,
                sizes=((1280, 704), (704, 1280)),
                num_frames=121,
                vae_spatial=16,
            ),
            Family(
                name="wan2.2-animate",
                task="animate",
                pipeline_class="WanAnimatePipeline",
                components=_ANIMATE,
                inputs=_inputs(
                    image=REQUIRED,
                    pose_video=REQUIRED,
                    face_video=REQUIRED,
                    background_video=REPLACE,
                    mask_video=REPLACE,
                ),
                condition_channels=True,
                encoded_images=1,
                leading_latents=1,
                steps=20,
                guidance_scale=1.0,
                fps=30,
                sizes=((1280, 720), (832, 480)),
                num_frames=77,
            ),
        )
    }
)


def families_of_pipeline(pipeline_class: object, where: str) -> tuple[Family, ...]:
    """The rows with this pipeline class.

    Raises:
        SourceError: if there is none, naming those that there are.
    """
    rows = tuple(family for family in FAMILIES.values() if family.pipeline_class == pipeline_class)
    if not rows:
        names: dict[str, list[str]] = {}
        for family in FAMILIES.values():
            names.setdefault(family.pipeline_class, []).append(family.name)
        raise SourceError(
            f"{where} describes a pipeline that is not supported",
            expected=" or ".join(f"{cls} ({', '.join(variants)})" for cls, variants in names.items()),
            found=shown(pipeline_class),
            remedy="use a checkpoint of a supported variant, in the diffusers layout",
        )
    return rows


def family_named(variant: object, where: Path) -> Family:
    """The row of this name.

    Args:
        variant: as a manifest spells it.
        where: the artifact, for the message.

    Raises:
        ArtifactError: if there is none.
    """
    if not isinstance(variant, str) or variant not in FAMILIES:
        raise ArtifactError(
            f"{where} is of a variant that this wanbuild does not know",
            expected=" or ".join(FAMILIES),
            found=shown(variant),
            remedy="use the version of wanbuild that made it",
        )
    return FAMILIES[variant]
