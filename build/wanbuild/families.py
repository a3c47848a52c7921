"""The table of Wan variants, one row each: what a source must hold, and the published defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from wanbuild.config import shown
from wanrun.errors import SourceError

if TYPE_CHECKING:
    from wanbuild.source import Source

SCHEDULERS = (
    "diffusers.UniPCMultistepScheduler",
    "diffusers.DPMSolverMultistepScheduler",
    "diffusers.FlowMatchEulerDiscreteScheduler",
)

_TEXT_TO_VIDEO: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "scheduler": SCHEDULERS,
        "text_encoder": ("transformers.UMT5EncoderModel",),
        "tokenizer": ("transformers.T5TokenizerFast", "transformers.T5Tokenizer"),
        "transformer": ("diffusers.WanTransformer3DModel",),
        "vae": ("diffusers.AutoencoderKLWan",),
    }
)

NO_WEIGHTS = frozenset({"scheduler", "tokenizer", "image_processor"})
"""The components that are settings or tables and hold no weights."""


@dataclass(frozen=True)
class Family:
    """One variant. Two rows differ in the pipeline's class, the components or the facts below them.

    Args:
        name: as ``--variant`` and the manifest spell it.
        task: what it makes of what: ``t2v`` is text to video.
        pipeline_class: ``_class_name`` in model_index.json.
        components: name -> the library-qualified classes it may have; every one must be there, no other.
        condition_channels: transformer input channels beyond the latent's.
        image_conditioned: whether the transformer embeds image tokens (``image_dim`` is set).
        expand_timesteps: whether there is a timestep per token.
        steps: default denoising steps.
        guidance_scale: default classifier-free guidance scale.
        flow_shift: shift of the sigmas where scheduler_config.json gives none.
        fps: frames per second of the video.
        sizes: published (width, height) in pixels, the default first.
        num_frames: default frames, 4n + 1.
        negative_prompt: default negative prompt.
        patch: transformer patch (frames, height, width) in latent cells.
        vae_spatial: pixels per latent cell.
        vae_temporal: frames per latent frame.
    """

    name: str
    task: str
    pipeline_class: str
    components: Mapping[str, tuple[str, ...]]
    condition_channels: int = 0
    image_conditioned: bool = False
    expand_timesteps: bool = False
    steps: int = 50
    guidance_scale: float = 5.0
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
    def transformers(self) -> tuple[str, ...]:
        """Names of the transformers, the high-noise one first."""
        return tuple(name for name in self.weight_components if name.startswith("transformer"))


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            Family(name="wan2.1-t2v", task="t2v", pipeline_class="WanPipeline", components=_TEXT_TO_VIDEO),
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
        raise SourceError(
            f"{where} describes a pipeline that is not supported",
            expected=" or ".join(f"{family.pipeline_class} ({family.name})" for family in FAMILIES.values()),
            found=shown(pipeline_class),
            remedy="use a checkpoint of a supported variant, in the diffusers layout",
        )
    return rows


def _misfits(family: Family, source: Source) -> list[str]:
    """What keeps the source from being of the family; empty if it is."""
    wanted, present = set(family.components), set(source.component_names)
    problems = [f"no {name}" for name in sorted(wanted - present)]
    problems += [f"has {name}" for name in sorted(present - wanted)]
    if source.expand_timesteps != family.expand_timesteps:
        problems.append(f"expand_timesteps is {source.expand_timesteps}")
    if (source.boundary_ratio is not None) != ("transformer_2" in wanted):
        problems.append(f"boundary_ratio is {source.boundary_ratio}")
    if problems:
        return problems
    transformer, vae, text = (source.component(n).config for n in ("transformer", "vae", "text_encoder"))
    checks: tuple[tuple[str, object, object], ...] = (
        ("transformer patch_size", list(family.patch), transformer.get("patch_size", list(family.patch))),
        ("transformer has image_dim", family.image_conditioned, transformer.get("image_dim") is not None),
        ("transformer text_dim", text.get("d_model"), transformer.get("text_dim")),
        ("transformer out_channels", vae.get("z_dim"), transformer.get("out_channels")),
    )
    problems += [
        f"{what} is {shown(found)}, not {shown(expected)}"
        for what, expected, found in checks
        if found != expected
    ]
    latent, channels = vae.get("z_dim"), transformer.get("in_channels")
    if not (isinstance(latent, int) and channels == latent + family.condition_channels):
        problems.append(f"transformer in_channels is {shown(channels)} and vae z_dim {shown(latent)}")
    ids, rows = source.tokenizer.vocab_size, text.get("vocab_size")
    # A gather past the table's end is clamped by JAX, in silence.
    if not (isinstance(rows, int) and ids <= rows):
        problems.append(f"tokenizer has {ids} ids, and text_encoder {shown(rows)} embeddings")
    return problems


def family_of(source: Source) -> Family:
    """The variant that the source is of.

    Raises:
        SourceError: saying for each row what does not fit.
    """
    rows = families_of_pipeline(source.pipeline_class, str(source.path))
    misfits = [(family, _misfits(family, source)) for family in rows]
    for family, problems in misfits:
        if not problems:
            return family
    raise SourceError(
        f"{source.path} is of no supported variant: "
        + "; ".join(f"not {family.name}: {', '.join(problems)}" for family, problems in misfits),
        remedy="use a checkpoint of a supported variant, in the diffusers layout",
    )
