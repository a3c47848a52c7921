"""A model's default options for generation; a distilled model brings its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from wanbuild.variants.variant import Variant
from wanrun.artifact.model import Defaults as DefaultOptions
from wanrun.artifact.model import ImageProcessor, Model
from wanrun.denoising.schedule import explicit_timesteps
from wanrun.denoising.solvers import solver_table
from wanrun.errors import UsageError
from wanrun.request.reading import read_request
from wanrun.request.request import Request
from wanrun.request.rows import rows
from wanrun.request.written import parse_numbers
from wanrun.rows import Row

NUM_TRAIN_TIMESTEPS = 1000
"""The timestep of pure noise, in every published Wan model."""


@dataclass(frozen=True)
class Defaults:
    """Given defaults of a model; None: the variant's or the checkpoint's own. Names are JSON keys.

    Args:
        steps: denoising steps.
        guidance_scale: scale of the high-noise expert, or of the only one; alone, it applies to both experts.
        guidance_scale_2: scale of the low-noise expert.
        boundary: share of the training timesteps below which the low-noise expert runs.
        flow_shift: shift of the sigmas.
        solver: a key of ``wanrun.denoising.solvers.SOLVERS``.
        timesteps: explicit decreasing timesteps, one per step.
        fps: frames per second of the video.
    """

    steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    boundary: float | None = None
    flow_shift: float | None = None
    solver: str | None = None
    timesteps: Sequence[float] | None = None
    fps: float | None = None

    def check(self) -> None:
        """Checks the options that do not depend on the checkpoint, before it is downloaded.

        Raises:
            UsageError: for a value out of range, or values that contradict each other.
        """
        own = {"num_steps": 1, "guidance_scale": 2.0, "flow_shift": 1.0, "solver": "euler", "boundary": 0.5}
        self.applied(own)

    def applied(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a model's defaults, with the given values in place.

        Args:
            own: the variant's and the checkpoint's defaults, by the manifest's names; with two experts the
                boundary is among them.

        Raises:
            UsageError: for a value out of range or without effect, or values that contradict each other.
        """
        with _as_defaults():
            given = self._given()
            timesteps = explicit_timesteps({}, given)
        self._check_experts(own)
        if "guidance_scale" in given and "guidance_scale_2" in own:
            given.setdefault("guidance_scale_2", given["guidance_scale"])
        defaults = {**own, **given}
        if timesteps is not None:
            defaults |= {"timesteps": timesteps, "num_steps": len(timesteps)}
        if given:
            table = (defaults["solver"], defaults["num_steps"], defaults["flow_shift"], NUM_TRAIN_TIMESTEPS)
            solver_table(*table, timesteps)
            solver_table(*table)  # the grid that remains if a user drops the timesteps
        return defaults

    def _given(self) -> dict[str, Any]:
        """Returns the given values, checked, by the manifest's names."""
        names = {key: row.name for key, row in default_rows().items()}
        values = {names[key]: value for key, value in dataclasses.asdict(self).items() if value is not None}
        request = read_request([("prompt", ""), *values.items()], Request)
        return {name: getattr(request, name) for name in values}

    def _check_experts(self, own: Mapping[str, Any]) -> None:
        for name in ("guidance_scale_2", "boundary"):
            if getattr(self, name) is not None and "boundary" not in own:
                raise UsageError(
                    f"the default {name} has no effect: this checkpoint has one transformer",
                    remedy="leave it out; it is for checkpoints of two experts",
                )
        first = own["guidance_scale"] if self.guidance_scale is None else self.guidance_scale
        if self.guidance_scale_2 is not None and self.guidance_scale_2 > 1 >= first:
            raise UsageError(
                "the default guidance_scale_2 has no effect: guidance is off",
                expected="a guidance_scale above 1, or none of either",
                found=f"guidance_scale {first:g} and guidance_scale_2 {self.guidance_scale_2:g}",
            )


@contextmanager
def _as_defaults() -> Iterator[None]:
    """Rewrites errors about options as errors about defaults, by their keys."""
    keys = {row.name: key for key, row in default_rows().items()}
    try:
        yield
    except UsageError as error:
        raise UsageError(f"a default cannot be used: {error.spelled(lambda name: keys[name])}") from None


def default_rows() -> dict[str, Row]:
    """Returns the options that can be defaults, by their keys."""
    by_key = {row.key: row for row in rows()}
    return {field.name: by_key[field.name] for field in dataclasses.fields(Defaults)}


def parse_defaults(texts: Sequence[str]) -> dict[str, Any]:
    """Parses the values of ``--default``, each ``NAME=VALUE``; returns them by key.

    Other tools' names are understood as on wanrun's command line: ``num_inference_steps``, ``sample_shift``.

    Raises:
        UsageError: for an unknown or repeated name, or a value of another kind.
    """
    known, values = default_rows(), dict[str, Any]()
    others = {other: key for key, row in known.items() for other in (row.name, *row.also)}
    for text in texts:
        written, equals, value = text.partition("=")
        name = others.get(written.replace("-", "_"), written)
        if name not in known or not equals:
            expected = f"NAME=VALUE, NAME one of {', '.join(known)}"
            raise UsageError("--default is not understood", expected=expected, found=repr(text))
        if name in values:
            raise UsageError(f"--default {name} is given twice")
        row = known[name]
        try:
            values[name] = parse_numbers(value) if row.numbers else row.base(value)
        except (UsageError, ValueError):
            kind = f"{row.kind}, with commas between them" if row.numbers else row.kind
            raise UsageError(f"--default {name} cannot be read", expected=kind, found=repr(value)) from None
    return values


def model_record(
    variant: Variant,
    configs: Mapping[str, Any],
    *,
    image_processor: ImageProcessor | None,
    expand_timesteps: bool,
    defaults: DefaultOptions,
    options: Mapping[str, Any],
) -> Model:
    """Returns the manifest's facts of a model, which the runtime needs because it has no model code.

    Args:
        variant: the model's variant.
        configs: its components' parsed configs by name.
        image_processor: how images are prepared for the image encoder; None for a model without one.
        expand_timesteps: whether the transformer takes a timestep per token.
        defaults: defaults of the options that every model has.
        options: defaults of the model's own options.
    """
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
        defaults=defaults,
        options=options,
    )
