"""A denoising step, and the loop over steps: the transformer, guidance and the solver's update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.attention import Attention
from wanbuild.models.params import bind
from wanbuild.models.transformer import WanTransformer

_History = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Denoiser:
    """What a step computes; ``step`` and ``loop`` are the functions of the two programs.

    Args:
        module: the abstract transformer.
        attention: the attention implementation.
        dtype: compute dtype of the transformer.
        groups: timesteps that the transformer is given: one, or one per latent frame where it is made for a
            timestep per token (diffusers' ``expand_timesteps``). From text alone all of them are the same.
    """

    module: WanTransformer
    attention: Attention
    dtype: Any
    groups: int

    def step(
        self,
        weights: Any,
        kv: Any,
        rope: Any,
        latents: jax.Array,
        history: _History,
        coefficients: jax.Array,
        timestep: jax.Array,
        guidance_scale: jax.Array | None = None,
    ) -> dict[str, Any]:
        """One step.

        Args:
            weights: the transformer's.
            kv: the cross-attention cache of one prompt, or with guidance of two, the positive one first.
            rope: the rotary tables.
            latents: (B, C, T, h, w).
            history: the solver's, see ``solver_step``; of the latents' shape and dtype.
            coefficients: float32 (9,), a row of the solver's table.
            timestep: float32 scalar.
            guidance_scale: float32 scalar; None for no guidance.

        Returns:
            The next latents and history, in the dtype of the latents.
        """
        model = bind(self.module, weights)
        stored = latents.dtype
        latents, history = jax.tree.map(lambda x: x.astype(jnp.float32), (latents, dict(history)))
        batch = latents if guidance_scale is None else jnp.concatenate([latents, latents])
        timesteps = jnp.full((1, self.groups), timestep)
        velocity = model(batch, timesteps, kv, rope, self.attention, self.dtype)
        if guidance_scale is not None:
            conditional, unconditional = jnp.split(velocity, 2)
            velocity = unconditional + guidance_scale * (conditional - unconditional)
        latents, history = solver_step(latents, velocity, history, coefficients)
        state = {"latents": latents, "history": history}
        return jax.tree.map(lambda x: x.astype(stored), state)  # type: ignore[no-any-return]

    def loop(
        self,
        weights: Any,
        kv: Any,
        rope: Any,
        latents: jax.Array,
        history: _History,
        coefficients: jax.Array,
        timesteps: jax.Array,
        first: jax.Array,
        last: jax.Array,
        guidance_scale: jax.Array | None = None,
    ) -> dict[str, Any]:
        """The steps [first, last) of a table; arguments as of ``step``.

        Args:
            coefficients: float32 (N, 9).
            timesteps: float32 (N,).
            first: int32 scalar.
            last: int32 scalar, at most N.
        """

        def body(index: jax.Array, state: dict[str, Any]) -> dict[str, Any]:
            row, timestep = coefficients[index], timesteps[index]
            return self.step(
                weights, kv, rope, state["latents"], state["history"], row, timestep, guidance_scale
            )

        start = {"latents": latents, "history": dict(history)}
        return jax.lax.fori_loop(first, last, body, start)  # type: ignore[no-any-return]


def solver_step(
    x: jax.Array, velocity: jax.Array, history: _History, coefficients: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One step of a linear multistep solver, whichever its table describes.

    Args:
        x: the current sample, float32.
        velocity: the model's output at x, float32.
        history: the last corrected sample ``last`` and the data predictions ``m1`` (newest) and ``m2``.
        coefficients: one row of ``wanrun.solvers.SolverTable.coefficients``.

    Returns:
        The next sample and the next history.
    """
    sigma, c_x, c_last, c_0, c_1, c_2, p_x, p_0, p_1 = coefficients
    m0 = x - sigma * velocity
    last = c_x * x + c_last * history["last"] + c_0 * m0 + c_1 * history["m1"] + c_2 * history["m2"]
    x = p_x * last + p_0 * m0 + p_1 * history["m1"]
    return x, {"last": last, "m1": m0, "m2": history["m1"]}
