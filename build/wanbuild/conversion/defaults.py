"""A model's default options for generation; a distilled model brings its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from wanbuild.convert_options import default_rows
from wanbuild.variants.variant import Variant
from wanrun.artifact.model import Defaults as DefaultOptions
from wanrun.artifact.model import ImageProcessor, Model, Pyramid
from wanrun.denoising.guided_steps import GUIDED
from wanrun.denoising.solvers import solver_table
from wanrun.denoising.steps import explicit_timesteps
from wanrun.errors import UsageError
from wanrun.request.reading import read_request
from wanrun.request.request import Request
from wanrun.request.written import parse_numbers

NUM_TRAIN_TIMESTEPS = 1000
"""The timestep of pure noise, in every published Wan model."""


def check_defaults(given: Mapping[str, Any]) -> None:
    """Raises UsageError for defaults out of range or contradictory, before a checkpoint is downloaded."""
    own = {"num_steps": 1, "guidance_scale": 2.0, "flow_shift": 1.0, "solver": "euler", "boundary": 0.5}
    with_defaults(own, given)


def with_defaults(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's defaults, ``own`` by the manifest's names, replaced by ``given`` ones.

    With two experts ``own`` has the boundary. Keys of ``given`` are those of ``default_rows``; without a
    guidance_scale_2, guidance_scale is for both experts. Raises UsageError for a value out of range or
    without effect, or values that contradict each other.
    """
    with _as_defaults():
        checked = _checked(given)
        timesteps = explicit_timesteps({}, checked)
    _check_experts(own, given)
    _check_shares(given)
    if "guidance_scale" in checked and "guidance_scale_2" in own:
        checked.setdefault("guidance_scale_2", checked["guidance_scale"])
    defaults = {**own, **checked}
    if timesteps is not None:
        defaults |= {"timesteps": timesteps, "num_steps": len(timesteps)}
    if checked:
        table = (defaults["solver"], defaults["num_steps"], defaults["flow_shift"], NUM_TRAIN_TIMESTEPS)
        solver_table(*table, timesteps)
        solver_table(*table)  # the grid that remains if a user drops the timesteps
    return defaults


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given defaults, checked, by the manifest's names."""
    rows = default_rows()
    values = {rows[key].name: value for key, value in given.items()}
    request = read_request([("prompt", ""), *values.items()], Request)
    return {name: getattr(request, name) for name in values}


def _check_experts(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name in ("guidance_scale_2", "boundary"):
        if name in given and "boundary" not in own:
            raise UsageError(
                "no_effect",
                f"the default {name} has no effect: this checkpoint has one transformer",
                remedy="leave it out; it is for checkpoints of two experts",
            )
    first, second = given.get("guidance_scale", own["guidance_scale"]), given.get("guidance_scale_2", 0)
    if second > 1 >= first:
        raise UsageError(
            "no_effect",
            "the default guidance_scale_2 has no effect: guidance is off",
            expected="a guidance_scale above 1, or none of either",
            found=f"guidance_scale {first:g} and guidance_scale_2 {second:g}",
        )


def _check_shares(given: Mapping[str, Any]) -> None:
    start, end = (given.get(name, usual) for name, usual in GUIDED.items())
    if start >= end:
        raise UsageError(
            "out_of_range",
            f"the defaults {' and '.join(GUIDED)} leave no step with guidance",
            expected="a start below the end",
            found=f"{start:g} and {end:g}",
        )


@contextmanager
def _as_defaults() -> Iterator[None]:
    """Rewrites errors about options as errors about defaults, by their keys."""
    keys = {row.name: key for key, row in default_rows().items()}
    try:
        yield
    except UsageError as error:
        what = UsageError(error.code, error.what).spelled(keys.__getitem__)
        words = error.words(keys.__getitem__)
        raise UsageError(error.code, f"a default cannot be used: {what}", **words) from None


def parse_defaults(texts: Sequence[str]) -> dict[str, Any]:
    """Parses the values of ``--default``, each ``NAME=VALUE``; returns them by key.

    Other tools' names are understood as on wanrun's command line: ``num_inference_steps``, ``sample_shift``.
    Raises UsageError for an unknown or repeated name, or a value of the wrong type.
    """
    known, values = default_rows(), dict[str, Any]()
    others = {other: key for key, row in known.items() for other in (row.name, *row.also)}
    for text in texts:
        written, equals, value = text.partition("=")
        name = others.get(written.replace("-", "_"), written)
        if name not in known or not equals:
            expected = f"NAME=VALUE, NAME one of {', '.join(known)}"
            raise UsageError(
                "invalid_value", "--default is not understood", expected=expected, found=repr(text)
            )
        if name in values:
            raise UsageError("conflict", f"--default {name} is given twice")
        row = known[name]
        try:
            values[name] = parse_numbers(value) if row.numbers else row.base(value)
        except (UsageError, ValueError):
            kind = f"{row.kind}, with commas between them" if row.numbers else row.kind
            raise UsageError(
                "wrong_type", f"--default {name} cannot be read", expected=kind, found=repr(value)
            ) from None
    return values


def model_record(
    variant: Variant,
    configs: Mapping[str, Any],
    *,
    image_processor: ImageProcessor | None,
    expand_timesteps: bool,
    defaults: DefaultOptions,
    options: Mapping[str, Any],
    pyramid: Pyramid | None = None,
) -> Model:
    """Returns the manifest's facts of a model, which the runtime needs because it has no model code.

    ``configs`` are parsed, by component. ``defaults`` are those of the options that every model has,
    ``options`` those of options that only this model has. ``pyramid`` is None for steps of a solver's grid.
    """
    chunks = configs["transformer"].chunks
    return Model(
        variant=variant.name,
        task=variant.task_record(configs["transformer"]),
        image_processor=image_processor,
        text_width=configs["text_encoder"].d_model,
        latent_channels=configs["vae"].z_dim,
        vae_spatial=variant.vae_spatial,
        vae_temporal=variant.vae_temporal,
        size_multiple=variant.size_multiple,
        leading_latents=variant.leading_latents,
        num_train_timesteps=NUM_TRAIN_TIMESTEPS,
        expand_timesteps=expand_timesteps,
        flow_map=variant.flow_map,
        chunks=chunks if pyramid is None else msgspec.structs.replace(chunks, pyramid=pyramid),
        defaults=defaults,
        options=options,
    )
