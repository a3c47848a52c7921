"""The table of Wan variants, one row each: what a source must hold, and the published defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from wanbuild.config import shown
from wanrun.errors import ArtifactError, SourceError
from wanrun.manifest import TRANSFORMERS

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

_TWO_EXPERTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {**_TEXT_TO_VIDEO, "transformer_2": _TEXT_TO_VIDEO["transformer"]}
)

NO_WEIGHTS = frozenset({"scheduler", "tokenizer", "image_processor"})
"""The components that are settings or tables and hold no weights."""


_CELL = 8
"""Pixels per latent cell of a VAE without patches."""
_CHANNELS = 16
"""Latent channels of a config that leaves them out: the default of the reference classes."""


@dataclass(frozen=True)
class Family:
    """One variant. Two rows differ in the pipeline's class, the components or the facts below them.

    Args:
        name: as ``--variant`` and the manifest spell it.
        task: what it makes of what: ``t2v`` is text to video, ``ti2v`` text, with an image or without.
        pipeline_class: ``_class_name`` in model_index.json.
        components: name -> the library-qualified classes it may have; every one must be there, no other.
        condition_channels: transformer input channels beyond the latent's.
        image_conditioned: whether the transformer embeds image tokens (``image_dim`` is set).
        expand_timesteps: whether there is a timestep per token.
        steps: default denoising steps.
        guidance_scale: default classifier-free guidance scale; of the high-noise expert where there are two.
        guidance_scale_2: the same of the low-noise expert; None where there is none.
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
    guidance_scale_2: float | None = None
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
        return tuple(name for name in TRANSFORMERS if name in self.components)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            Family(name="wan2.1-t2v", task="t2v", pipeline_class="WanPipeline", components=_TEXT_TO_VIDEO),
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
                name="wan2.2-ti2v",
                task="ti2v",
                pipeline_class="WanPipeline",
                components=_TEXT_TO_VIDEO,
                expand_timesteps=True,
                fps=24,
                sizes=((1280, 704), (704, 1280)),
                num_frames=121,
                vae_spatial=16,
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


def _misfits(family: Family, source: Source) -> list[str]:
    """What keeps the source from being of the family; empty if it is."""
    wanted, present = set(family.components), set(source.component_names)
    problems = [f"no {name}" for name in sorted(wanted - present)]
    problems += [f"has {name}" for name in sorted(present - wanted)]
    transformer, vae, text = (source.component(n).config for n in ("transformer", "vae", "text_encoder"))
    patch = None if family.vae_spatial == _CELL else family.vae_spatial // _CELL
    checks: tuple[tuple[str, object, object], ...] = (
        ("expand_timesteps", family.expand_timesteps, source.expand_timesteps),
        ("vae patch_size", patch, vae.get("patch_size")),
        ("transformer patch_size", list(family.patch), transformer.get("patch_size", list(family.patch))),
        ("transformer has image_dim", family.image_conditioned, transformer.get("image_dim") is not None),
        ("transformer text_dim", text.get("d_model"), transformer.get("text_dim")),
        ("transformer out_channels", vae.get("z_dim", _CHANNELS), transformer.get("out_channels", _CHANNELS)),
    )
    problems += [
        f"{what} is {shown(found)}, not {shown(expected)}"
        for what, expected, found in checks
        if found != expected
    ]
    latent, channels = vae.get("z_dim", _CHANNELS), transformer.get("in_channels", _CHANNELS)
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
        SourceError: saying what does not fit the row that is nearest, or the rows that are equally near.
    """
    rows = families_of_pipeline(source.pipeline_class, str(source.path))
    misfits = [(family, _misfits(family, source)) for family in rows]
    fewest = min(len(problems) for _, problems in misfits)
    nearest = [(family, problems) for family, problems in misfits if len(problems) == fewest]
    if not fewest:
        return nearest[0][0]
    raise SourceError(
        f"{source.path} is of no supported variant: "
        + "; ".join(f"not {family.name}: {', '.join(problems)}" for family, problems in nearest),
        remedy="use a checkpoint of a supported variant, in the diffusers layout",
    )


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
