"""Which variant an open checkpoint is of: the row of the table of families that its configs fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wanbuild.config import shown
from wanbuild.models.animate_config import AnimateConfig
from wanbuild.models.clip_config import image_tokens
from wanbuild.source.checkpoint import Source
from wanbuild.variants import IMAGE_ENCODER, Family, families_of_pipeline
from wanrun.errors import SourceError

_CELL = 8
"""Pixels per latent cell of a VAE without patches."""
_CHANNELS = 16
"""Latent channels of a config that leaves them out: the default of the reference classes."""

_Check = tuple[str, object, object]
"""What is compared, what is expected and what is found."""


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


def _misfits(family: Family, source: Source) -> list[str]:
    """What keeps the source from being of the family; empty if it is."""
    wanted, present = set(family.components), set(source.component_names)
    problems = [f"no {name}" for name in sorted(wanted - present)]
    problems += [f"has {name}" for name in sorted(present - wanted)]
    transformer, vae, text = (source.component(n).config for n in ("transformer", "vae", "text_encoder"))
    checks = [*_general_checks(family, source), *_channel_checks(family, transformer, vae)]
    if IMAGE_ENCODER in wanted & present:
        checks += _image_checks(family, source)
    problems += [
        f"{what} is {shown(found)}, not {shown(expected)}"
        for what, expected, found in checks
        if found != expected
    ]
    ids, rows = source.tokenizer.vocab_size, text.get("vocab_size")
    # A gather past the table's end is clamped by JAX, in silence.
    if not (isinstance(rows, int) and ids <= rows):
        problems.append(f"tokenizer has {ids} ids, and text_encoder {shown(rows)} embeddings")
    return problems


def _general_checks(family: Family, source: Source) -> list[_Check]:
    transformer, vae, text = (source.component(n).config for n in ("transformer", "vae", "text_encoder"))
    patch = None if family.vae_spatial == _CELL else family.vae_spatial // _CELL
    has_image = transformer.get("image_dim") is not None
    return [
        ("expand_timesteps", family.expand_timesteps, source.expand_timesteps),
        ("vae patch_size", patch, vae.get("patch_size")),
        ("transformer patch_size", list(family.patch), transformer.get("patch_size", list(family.patch))),
        ("transformer has image_dim", family.encoded_images > 0, has_image),
        ("transformer text_dim", text.get("d_model"), transformer.get("text_dim")),
        ("transformer out_channels", vae.get("z_dim", _CHANNELS), transformer.get("out_channels", _CHANNELS)),
    ]


def _channel_checks(family: Family, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> list[_Check]:
    """What the patch embeddings take in: the latents, and what the video is made of."""
    latent = vae.get("z_dim", _CHANNELS)
    if type(latent) is not int:
        return [("vae z_dim", "an integer", latent)]
    default = AnimateConfig.in_channels if family.task == "animate" else _CHANNELS
    found = transformer.get("in_channels", default)
    checks: list[_Check] = [
        (f"transformer in_channels, for vae z_dim {latent},", family.in_channels(latent), found)
    ]
    if family.task == "animate":
        found = transformer.get("latent_channels", _CHANNELS)
        checks.append(("transformer latent_channels", latent, found))
    if family.task == "vace":
        found = transformer.get("vace_in_channels", 96)
        checks.append(("transformer vace_in_channels", family.control_channels(latent), found))
    return checks


def _image_checks(family: Family, source: Source) -> list[_Check]:
    """Width, number and size of the images that are encoded for the transformer."""
    transformer, encoder = (source.component(name).config for name in ("transformer", IMAGE_ENCODER))
    size, patch = encoder.get("image_size"), encoder.get("patch_size")
    checks: list[_Check] = [
        ("transformer image_dim", encoder.get("hidden_size"), transformer.get("image_dim")),
    ]
    if type(size) is not int or type(patch) is not int or not 0 < patch <= size:
        return [*checks, ("image_encoder image_size and patch_size", "sizes in pixels", [size, patch])]
    # The reference joins the tokens of two images where they have positions, and knows no other number.
    both = family.encoded_images * image_tokens(size, patch)
    positions = None if family.encoded_images == 1 else both
    checks.append(("transformer pos_embed_seq_len", positions, transformer.get("pos_embed_seq_len")))
    if source.image_processor is not None:
        checks.append(("image_processor crop_size", size, source.image_processor.crop_size))
    return checks
