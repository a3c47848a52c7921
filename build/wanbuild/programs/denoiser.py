"""The denoising step and the loop over steps: transformer, guidance and the solver's update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.attention import Attention
from wanbuild.models.low_rank import with_slots
from wanbuild.models.params import bind
from wanbuild.models.partition import mesh_sizes
from wanbuild.models.transformer import WanTransformer
from wanrun.denoising.steps import TABLES

_Arrays = Mapping[str, jax.Array]

SKIPPING = 2
"""The number of the pass that skips layers."""


@dataclass(frozen=True)
class Denoiser:
    """The computation of a step; ``step`` and ``loop`` are the functions of the two programs.

    ``module`` is abstract, and ``dtype`` is the compute dtype of the transformer.
    """

    module: WanTransformer
    attention: Attention
    dtype: Any

    def step(
        self,
        transformer: Any,
        kv: Any,
        rope: Any,
        latents: jax.Array,
        history: _Arrays,
        coefficients: jax.Array,
        timestep: jax.Array,
        guidance_scale: jax.Array | None = None,
        condition: _Arrays | None = None,
        frame_mask: jax.Array | None = None,
        conditioning_scale: jax.Array | None = None,
        lora: Any = None,
        guidance_projection: jax.Array | None = None,
        skip_scale: jax.Array | None = None,
        skip_layers: jax.Array | None = None,
        nag: jax.Array | None = None,
        next_timestep: jax.Array | None = None,
    ) -> dict[str, Any]:
        """Computes one step; returns the next latents and history, in the dtype of the latents.

        Args:
            kv: the cross-attention cache of one prompt; with guidance of two, the positive prompt first.
                Where the scale is 1 only that one is read.
            latents: (B, C, T, h, w).
            history: the solver's history, see ``solver_step``; arrays of the latents' shape and dtype.
            coefficients: float32 (9,), a row of the solver's table.
            timestep: float32 scalar.
            guidance_scale: float32 scalar, see ``guided``; None for no guidance.
            condition: the output of ``encode_video``, the same for all videos.
            frame_mask: float32 (T,), for a model with a timestep per token (diffusers' ``expand_timesteps``):
                zero for a held frame and one for the others. The condition has the held frame's latents as
                ``first_frame`` (C, 1, h, w).
            conditioning_scale: float32 (control blocks,), for a model with control blocks.
            lora: the slots' arrays, for a transformer that has slots.
            guidance_projection: float32 scalar, see ``guided``; None for programs without.
            skip_scale: float32 scalar, see ``guided``; None for programs without.
            skip_layers: float32 (layers,), not 0 for those that a third pass leaves out.
            nag: float32 (3,), see ``NAG``; None for programs without. With it the cache is of
                two prompts in any case.
            next_timestep: float32 scalar, the one at which the step ends; only for a flow map, else None.
        """
        model, together = bind(self.module, with_slots(transformer, lora)), at_once(guidance_scale)
        batch, timesteps, condition = model_inputs(
            latents, timestep, together, condition, frame_mask, next_timestep
        )
        if conditioning_scale is not None:
            condition["scale"] = conditioning_scale
        predictor = model.predictor(batch, timesteps, kv, rope, condition, self.attention, self.dtype, nag)

        def predict(turn: jax.Array | int | None) -> jax.Array:
            prompt = None if together else turn
            if skip_layers is None or turn is None:
                return predictor(prompt)
            prompt = None if together else jnp.where(turn == 1, 1, 0)
            return predictor(prompt, jnp.where(turn == SKIPPING, skip_layers, 0))

        velocity = guided(predict, guidance_scale, guidance_projection, skip_scale)
        return updated(velocity, latents, history, coefficients)

    def loop(
        self,
        latents: jax.Array,
        history: _Arrays,
        first: jax.Array,
        last: jax.Array,
        **given: Any,
    ) -> dict[str, Any]:
        """Computes the steps [first, last) of a table; arguments and result as for ``step``.

        ``first`` and ``last`` are int32 scalars, ``last`` at most N. ``given`` has the other arguments of
        ``step``: those in ``TABLES`` as tables, with N rows under the table's name; the others are the same
        in every step.
        """
        tables = {name: given.pop(table) for name, table in TABLES.items() if table in given}

        def body(index: jax.Array, state: dict[str, Any]) -> dict[str, Any]:
            return self.step(**given, **state, **{name: table[index] for name, table in tables.items()})

        start: dict[str, Any] = {"latents": latents, "history": dict(history)}
        return jax.lax.fori_loop(first, last, body, start)  # type: ignore[no-any-return]


def at_once(guidance_scale: jax.Array | None) -> bool:
    """Whether halves of a mesh make the two passes of guidance at once, as a doubled batch."""
    return guidance_scale is not None and "guidance" in mesh_sizes()


def passes(guidance_scale: jax.Array | None, skip_scale: jax.Array | None = None) -> jax.Array | int:
    """Returns how many passes a step makes, int32: one where the scale is 1, three if one skips layers."""
    if guidance_scale is None:
        return 1
    more = 2 if skip_scale is None else jnp.where(skip_scale == 0, 2, 3)
    return jnp.where(guidance_scale == 1, 1, more)


def guided(
    predict: Callable[[jax.Array | int | None], jax.Array],
    scale: jax.Array | None,
    projection: jax.Array | None = None,
    skip_scale: jax.Array | None = None,
) -> jax.Array:
    """Returns a step's velocity: unconditional + scale x (conditional - unconditional).

    It is a loop of one turn to three: at a scale of 1, only the conditional pass is made. Where halves of a
    mesh make both at once, both are made at any scale.

    Args:
        predict: returns the velocity of a pass, float32 (B, C, T, h, w): 0 has the positive prompt, 1 the
            negative one, ``SKIPPING`` the positive one and some layers less. Where halves of a mesh make two
            at once, those of the doubled batch, at None too.
        scale: float32 scalar; None for no guidance.
        projection: float32 scalar; where it is not 0, each video's unconditional velocity is replaced by the
            conditional one's projection on it (CFG-Zero*, arXiv 2503.18886); None for never.
        skip_scale: float32 scalar; where it is not 0, the difference of the conditional velocity from that of
            pass ``SKIPPING`` is added so many times (skip-layer guidance, arXiv 2411.18664); None for never.
    """
    if scale is None:
        return predict(None)
    if skip_scale is not None:
        return _led_away(predict, scale, projection, skip_scale)
    if at_once(scale):
        conditional, unconditional = jnp.split(predict(None), 2)
        return _combined(conditional, unconditional, scale, projection)

    def one(prompt: jax.Array, velocity: jax.Array) -> jax.Array:
        found = predict(prompt)
        return jnp.where(prompt == 0, found, _combined(velocity, found, scale, projection))

    shape = jax.eval_shape(predict, 0).shape
    return jax.lax.fori_loop(0, passes(scale), one, jnp.zeros(shape, jnp.float32))


def _led_away(
    predict: Callable[[jax.Array | int | None], jax.Array],
    scale: jax.Array,
    projection: jax.Array | None,
    skip_scale: jax.Array,
) -> jax.Array:
    """Returns ``guided``'s result where a pass may skip layers; the conditional velocity waits for it."""
    together, turns = at_once(scale), passes(scale, skip_scale)

    def one(turn: jax.Array, made: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        conditional, velocity = made
        if together:
            found, unconditional = jnp.split(predict(turn * SKIPPING), 2)
            conditional = jnp.where(turn == 0, found, conditional)
            velocity = jnp.where(turn == 0, _combined(found, unconditional, scale, projection), velocity)
            skipping = turn == 1
        else:
            found = predict(turn)
            conditional = jnp.where(turn == 0, found, conditional)
            both = _combined(conditional, found, scale, projection)
            velocity = jnp.where(turn == 0, found, jnp.where(turn == 1, both, velocity))
            skipping = turn == SKIPPING
        return conditional, jnp.where(skipping, velocity + skip_scale * (conditional - found), velocity)

    shape = list(jax.eval_shape(predict, 0).shape)
    shape[0] //= 1 + together
    nothing = jnp.zeros(shape, jnp.float32)
    last = jnp.maximum(turns - 1, 1) if together else turns
    return jax.lax.fori_loop(0, last, one, (nothing, nothing))[1]


def _combined(
    conditional: jax.Array, unconditional: jax.Array, scale: jax.Array, projection: jax.Array | None
) -> jax.Array:
    if projection is not None:
        axes = tuple(range(1, conditional.ndim))
        product, square = (
            jnp.sum(one * unconditional, axes, keepdims=True) for one in (conditional, unconditional)
        )
        unconditional = jnp.where(projection == 0, 1, product / (square + 1e-8)) * unconditional
    both = unconditional + scale * (conditional - unconditional)
    return jnp.where(scale == 1, conditional, both)


def model_inputs(
    latents: jax.Array,
    timestep: jax.Array,
    together: bool,
    condition: _Arrays | None,
    frame_mask: jax.Array | None,
    next_timestep: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Returns the transformer's latents, timesteps and condition.

    Arguments are those of ``Denoiser.step``; ``together`` doubles the batch: see ``at_once``.
    """
    latents = latents.astype(jnp.float32)
    condition, timesteps, batch = dict(condition or {}), timestep[None, None], latents
    if next_timestep is not None:
        condition["next_timestep"] = next_timestep
    if frame_mask is not None:
        # The velocity of a held frame has no effect: its latents are put in again at the end.
        mask = frame_mask[:, None, None]
        batch = (1 - mask) * condition.pop("first_frame") + mask * latents
        timesteps = (frame_mask * timestep)[None]
    return jnp.concatenate([batch, batch]) if together else batch, timesteps, condition


def updated(
    velocity: jax.Array, latents: jax.Array, history: _Arrays, coefficients: jax.Array
) -> dict[str, Any]:
    """Returns the state after a step of a velocity, float32 (B, C, T, h, w); see ``solver_step``.

    The state keeps the dtype of the latents before the step; sums are in float32.
    """
    stored = latents.dtype
    latents, history = jax.tree.map(lambda x: x.astype(jnp.float32), (latents, dict(history)))
    latents, history = solver_step(latents, velocity, history, coefficients)
    state = {"latents": latents, "history": history}
    return jax.tree.map(lambda x: x.astype(stored), state)  # type: ignore[no-any-return]


def solver_step(
    x: jax.Array, velocity: jax.Array, history: _Arrays, coefficients: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes one step of the linear multistep solver that the table describes.

    From the sample x and the transformer's output at x, both float32, it returns the next sample and history.
    The history is the last corrected sample ``last`` and the data predictions ``m1`` (newest) and ``m2``;
    ``coefficients`` is one row of ``wanrun.denoising.solvers.SolverTable.coefficients``.
    """
    sigma, c_x, c_last, c_0, c_1, c_2, p_x, p_0, p_1 = coefficients
    m0 = x - sigma * velocity
    last = c_x * x + c_last * history["last"] + c_0 * m0 + c_1 * history["m1"] + c_2 * history["m2"]
    x = p_x * last + p_0 * m0 + p_1 * history["m1"]
    return x, {"last": last, "m1": m0, "m2": history["m1"]}
