"""Finds the variant of an open checkpoint: the row of the table that its configs match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wanbuild.config import shown
from wanbuild.models.clip_config import image_tokens
from wanbuild.source.checkpoint import Source
from wanbuild.source.checkpoint_parts import OPTIONS
from wanbuild.variants.table import variants_of_pipeline
from wanbuild.variants.variant import CHANNELS, IMAGE_ENCODER, Variant
from wanrun.artifact.manifest import TINY_VAE
from wanrun.errors import SourceError

_CELL = 8
"""Pixels per latent cell of a VAE without patches."""

_Check = tuple[str, object, object]
"""The name of a value, the expected value and the found one."""


def variant_of(source: Source) -> Variant:
    """Returns the variant of a source.

    Raises SourceError with the differences from the nearest variant, or from several equally near ones; or
    for a tiny decoder of other latents.
    """
    rows = variants_of_pipeline(source.pipeline_class, str(source.path))
    found = [(variant, misfits(variant, source)) for variant in rows]
    for variant, problems in found:
        if not problems:
            _check_tiny(source, variant)
            return variant
    raise SourceError(
        "unsupported",
        f"{source.path} is of no supported variant: {(said := nearest_misfits(found))}",
        found=given_parts(source, said),
        remedy="use a checkpoint of a supported variant, in the diffusers layout",
    )


def _check_tiny(source: Source, variant: Variant) -> None:
    """Raises SourceError if a tiny decoder's latents are not the VAE's."""
    if (tiny := source.components.get(TINY_VAE)) is None:
        return
    if tiny.weights.name.lower().startswith("lighttae"):  # nothing in it says so
        raise SourceError(
            "mismatch",
            f"{tiny.weights} decodes latents with another mean and deviation than the transformer makes",
            remedy="give taew2_1.safetensors, of madebyollin/taehv",
        )
    channels = source.component("vae").config.get("z_dim", CHANNELS)
    pixels = _CELL * tiny.config["patch_size"]
    if (tiny.config["latent_channels"], pixels) != (channels, variant.vae_spatial):
        raise SourceError(
            "mismatch",
            f"{tiny.weights} decodes other latents than those of {variant.name}",
            expected=f"{channels} channels for {variant.vae_spatial}x{variant.vae_spatial} pixels",
            found=f"{tiny.config['latent_channels']} channels for {pixels}x{pixels} pixels",
            remedy=f"give {'taew2_1' if variant.vae_spatial == _CELL else 'taew2_2'}.safetensors",
        )


def nearest_misfits(found: Sequence[tuple[Variant, Sequence[str]]]) -> str:
    """Returns the differences of a source from the variants that it is nearest to, as text."""
    fewest = min(len(problems) for _, problems in found)
    nearest = [(variant, problems) for variant, problems in found if len(problems) == fewest]
    return "; ".join(f"not {variant.name}: {', '.join(problems)}" for variant, problems in nearest)


def given_parts(source: Source, said: str) -> str | None:
    """Returns the parts given by the user that differences are about, as text; None for none."""
    named = [f"{OPTIONS[name]} {path}" for name, path in source.given.items() if f"{name} " in said]
    return ", ".join(named) or None


def misfits(variant: Variant, source: Source) -> list[str]:
    """Returns the differences between the source and the variant; empty if it matches."""
    wanted, present = set(variant.components), set(source.component_names)
    problems = [f"no {name}" for name in sorted(wanted - present)]
    problems += [f"has {name}" for name in sorted(present - wanted)]
    transformer, vae, text = (source.component(n).config for n in ("transformer", "vae", "text_encoder"))
    checks = [*_general_checks(variant, source), *_channel_checks(variant, transformer, vae)]
    if IMAGE_ENCODER in wanted & present:
        checks += _image_checks(variant, source)
    problems += [
        f"{what} is {shown(found)}, not {shown(expected)}"
        for what, expected, found in checks
        if found != expected
    ]
    ids, rows = source.tokenizer.vocab_size, text.get("vocab_size")
    # JAX silently clamps a gather past the end of the table.
    if not (isinstance(rows, int) and ids <= rows):
        problems.append(f"tokenizer has {ids} ids, and text_encoder {shown(rows)} embeddings")
    return problems


def _general_checks(variant: Variant, source: Source) -> list[_Check]:
    transformer, vae, text = (source.component(n).config for n in ("transformer", "vae", "text_encoder"))
    patch = None if variant.vae_spatial == _CELL else variant.vae_spatial // _CELL
    class_name = f"diffusers.{source.component('transformer').class_name}"
    (expected_class,) = variant.components["transformer"]
    has_image = transformer.get("image_dim") is not None
    scheduler, schedulers = (
        f"diffusers.{source.scheduler_config.get('_class_name')}",
        variant.components["scheduler"],
    )
    return [
        ("transformer", expected_class, class_name),
        ("scheduler", scheduler if scheduler in schedulers else schedulers[0], scheduler),
        ("expand_timesteps", variant.expand_timesteps, source.expand_timesteps),
        ("vae patch_size", patch, vae.get("patch_size")),
        ("transformer patch_size", list(variant.patch), transformer.get("patch_size", list(variant.patch))),
        ("transformer has image_dim", variant.encoded_images > 0, has_image),
        ("transformer text_dim", text.get("d_model"), transformer.get("text_dim")),
        ("transformer out_channels", vae.get("z_dim", CHANNELS), transformer.get("out_channels", CHANNELS)),
    ]


def _channel_checks(variant: Variant, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> list[_Check]:
    """Compares the input channels of the patch embeddings: the latents and the conditioning channels."""
    latent = vae.get("z_dim", CHANNELS)
    if type(latent) is not int:
        return [("vae z_dim", "an integer", latent)]
    named = {"in_channels": f"in_channels, for vae z_dim {latent},"}
    return [
        (f"transformer {named.get(name, name)}", expected, transformer.get(name, default))
        for name, expected, default in variant.channel_fields(latent)
    ]


def _image_checks(variant: Variant, source: Source) -> list[_Check]:
    """Compares width, number and size of the images that are encoded for the transformer."""
    transformer, encoder = (source.component(name).config for name in ("transformer", IMAGE_ENCODER))
    size, patch = encoder.get("image_size"), encoder.get("patch_size")
    checks: list[_Check] = [
        ("transformer image_dim", encoder.get("hidden_size"), transformer.get("image_dim")),
    ]
    if type(size) is not int or type(patch) is not int or not 0 < patch <= size:
        return [*checks, ("image_encoder image_size and patch_size", "sizes in pixels", [size, patch])]
    # With position embeddings, the reference joins the tokens of exactly two images.
    both = variant.encoded_images * image_tokens(size, patch)
    positions = None if variant.encoded_images == 1 else both
    checks.append(("transformer pos_embed_seq_len", positions, transformer.get("pos_embed_seq_len")))
    if source.image_processor is not None:
        checks.append(("image_processor crop_size", size, source.image_processor.crop_size))
    return checks
