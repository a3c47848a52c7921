"""The programs of a video that is made chunk by chunk: the steps of a chunk, and its cache.

``cache`` is a tree of arrays of fixed sizes that only these programs know. ``chunk`` is the number of a chunk
from 0, an int32 scalar, from which follow its place in time and how much of the cache counts.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.attention_forms import attention_form
from wanbuild.models.causal import Chunked
from wanbuild.models.low_rank import with_slots
from wanbuild.models.params import bind
from wanbuild.programs.denoiser import Denoiser
from wanbuild.programs.profile_parts import ProfileParts
from wanbuild.programs.spec import ProgramSpec
from wanbuild.programs.step_programs import prepare, row_of, state_of

_NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


def piece_of(parts: ProfileParts) -> int:
    """Returns the most latent frames of a piece with which chunks are decoded whole, within the option's."""
    first, *others = parts.chunks
    alone = parts.model.chunks is not None and parts.model.chunks.alone
    fitting = math.gcd(first - 1, *(length - alone for length in others))
    return next(size for size in range(parts.options.vae_decode_chunk, 0, -1) if fitting % size == 0)


def begin(parts: ProfileParts) -> ProgramSpec:
    """Returns the program of the cache before the first chunk: zeros, made where they are needed."""

    def begin() -> dict[str, Any]:
        return {"cache": jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), _cache(parts))}

    return parts.spec(begin, {})


def chunk(parts: ProfileParts, frames: int | None = None, halvings: int = 0) -> ProgramSpec:
    """Returns the program of a step of a chunk: its latents (1, C, T, h, w), history -> those after the step.

    It takes ``cache`` and ``chunk`` in addition to what ``step_programs.step`` takes. ``frames`` is T, None
    for that of most chunks; ``halvings`` is how often h and w are half of the video's.
    """
    module: Chunked = parts.modules["transformer"]
    denoiser = Denoiser(module, attention_form(parts.kernels), parts.dtype)
    _, *cells = parts.latent_shape
    height, width = (length >> halvings for length in cells)
    shape = (frames or module.chunks.each, height, width)

    def chunk(transformer: Any, kv: Any, cache: Any, chunk: jax.Array, **given: Any) -> dict[str, Any]:
        model = bind(module, with_slots(transformer, given.get("lora")))
        past, rope = model.beside(cache, chunk, shape)
        (blocks,) = model.stacks
        condition = {**given.pop("condition", {}), **model.condition(cache)}
        return denoiser.step(
            transformer, {blocks: {**kv[blocks], **past}}, rope, condition=condition, **given
        )

    def of_chunk(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*array.shape[:2], *shape), array.dtype)

    state = jax.tree.map(of_chunk, state_of(parts))
    arguments = {"transformer": parts.weights["transformer"], **parts.lora, **parts.outputs(prepare)}
    arguments |= {"cache": _cache(parts), "chunk": _NUMBER, **state, **row_of(parts)}
    return parts.spec(chunk, arguments, donate=tuple(state))


def remember(parts: ProfileParts) -> ProgramSpec:
    """Returns the program cache, latents (1, C, T, h, w) float32 of a finished chunk -> cache with it.

    T is that of most chunks; the latents of a shorter one have zeros behind them. The cache is donated.
    """
    module: Chunked = parts.modules["transformer"]
    attention = attention_form(parts.kernels)

    def remember(
        transformer: Any, kv: Any, cache: Any, chunk: jax.Array, latents: jax.Array, lora: Any = None
    ) -> dict[str, Any]:
        model = bind(module, with_slots(transformer, lora))
        return {"cache": model.remember(cache, kv, latents, chunk, attention, parts.dtype)}

    batch, channels, _, *cells = parts.latents.shape
    latents = jax.ShapeDtypeStruct((batch, channels, module.chunks.each, *cells), jnp.float32)
    arguments = {"transformer": parts.weights["transformer"], **parts.lora, **parts.outputs(prepare)}
    arguments |= {"cache": _cache(parts), "chunk": _NUMBER, "latents": latents}
    return parts.spec(remember, arguments, donate=("cache",))


def _cache(parts: ProfileParts) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the abstract cache, as it is passed."""
    module: Chunked = parts.modules["transformer"]
    cache: dict[str, jax.ShapeDtypeStruct] = parts.passed(module.cache(parts.latent_shape, parts.dtype))
    return cache
