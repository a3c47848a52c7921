"""The programs that run only the steps' attention, for a target whose attention is a kernel of ours.

StableHLO has a kernel whole: compiled again it repeats the kernel's faults. So its result is compared, on the
chip, with that of the same function by XLA's operations, ``ProgramSpec.plain``. Both call what a layer calls,
``TokenAttention``: with its padding, its number of keys, its exchanges between devices, and the passes before
and after it. There is a program for each shape that a layer has.

Axes: B batch, S tokens without padding, N heads, K head dimension, P prompts, T keys. One device computes a
video at a time, halves of a mesh the two passes of guidance.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from wanbuild.models.attention import Attention, blocked_attention
from wanbuild.models.attention_forms import attention_form
from wanbuild.models.blocks import kept_dtype
from wanbuild.models.partition import gathered_tokens, shared_tokens
from wanbuild.models.passes import Unrotated
from wanbuild.models.sequence import TokenAttention
from wanbuild.programs.profile_parts import ProfileParts
from wanbuild.programs.spec import ProgramSpec
from wanbuild.programs.step_programs import prepare


def is_kernel(parts: ProfileParts) -> bool:
    """Whether the attention of a profile's steps is a kernel of ours."""
    config = parts.configs["transformer"]
    return attention_form(parts.kernels).is_kernel(parts.dtype, config.attention_head_dim)


def is_kernel_of_images(parts: ProfileParts) -> bool:
    """Whether a kernel of ours computes the attention of the steps, and they attend to images."""
    return "image_encoder" in parts.modules and is_kernel(parts)


def among(parts: ProfileParts) -> ProgramSpec:
    """Returns the program of the tokens' attention to one another.

    Inputs: q, k and v (B, S, N, K) in the compute dtype, of which q and k are to be multiplied by inverse
    (B, S, 1) and weight (N·K,), and rotated by cos and sin (S, K / 2), all float32.
    """

    def attend(
        tokens: TokenAttention,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        inverse: jax.Array,
        weight: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
    ) -> jax.Array:
        def unrotated(x: jax.Array) -> Unrotated:
            flat = shared_tokens(x.reshape(*x.shape[:2], -1), 1)
            return Unrotated(flat.astype(kept_dtype(x)), shared_tokens(inverse, 1), weight)

        tables = shared_tokens(cos, 0), shared_tokens(sin, 0)
        return tokens.among(unrotated(q), unrotated(k), shared_tokens(v, 1), *tables)

    videos, _ = _batch(parts)
    config, tokens = parts.configs["transformer"], _tokens(parts)
    heads = _heads(parts, videos, tokens)
    table = jax.ShapeDtypeStruct((tokens, config.attention_head_dim // 2), jnp.float32)
    factors = {
        "inverse": jax.ShapeDtypeStruct((videos, tokens, 1), jnp.float32),
        "weight": jax.ShapeDtypeStruct((config.dim,), jnp.float32),
    }
    return _compared(
        parts, attend, {"q": heads, "k": heads, "v": heads, **factors, "cos": table, "sin": table}
    )


def to_text(parts: ProfileParts) -> ProgramSpec:
    """Returns the program of the tokens' attention to text: q (B, S, N, K), k and v (P, T, N, K)."""
    return _compared(parts, _to, _queries(parts) | _keys(parts, _batch(parts)[1], parts.max_length))


def to_image(parts: ProfileParts) -> ProgramSpec:
    """Returns the same to images, P = 1; with padding of their tokens a mask, bool (T,), is an input too."""
    cache = parts.outputs(prepare)["kv"][next(iter(parts.modules["transformer"].stacks))]
    tokens = cache["image_k"].shape[2]
    mask = {"mask": jax.ShapeDtypeStruct((tokens,), jnp.bool)} if "image_mask" in cache else {}
    return _compared(parts, _to, _queries(parts) | _keys(parts, 1, tokens) | mask)


def _to(
    tokens: TokenAttention, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    return tokens.to(tokens.scaled(shared_tokens(q, 1).astype(jnp.float32), q.dtype), k, v, mask)


def _compared(
    parts: ProfileParts, attend: Callable[..., jax.Array], arguments: dict[str, Any]
) -> ProgramSpec:
    """Returns a program of a function that takes the attention of the tokens, and these arguments by name."""
    count = _tokens(parts)

    def by(kernel: Attention) -> ProgramSpec:
        tokens = TokenAttention(kernel, count)

        def attention(**given: jax.Array) -> dict[str, Any]:
            return {"out": gathered_tokens(attend(tokens, **given), count)}

        return parts.spec(attention, arguments)

    return dataclasses.replace(by(attention_form(parts.kernels)), plain=by(blocked_attention).function)


def _tokens(parts: ProfileParts) -> int:
    return math.prod(parts.configs["transformer"].grid(parts.latent_shape))


def _batch(parts: ProfileParts) -> tuple[int, int]:
    """Returns the videos that are computed at once, and their prompts."""
    if parts.mesh is None:
        return 1, 1
    passes = 2 if parts.shape.guidance and "guidance" in parts.mesh.shape else 1
    return passes * parts.shape.num_videos, passes


def _heads(parts: ProfileParts, batch: int, tokens: int) -> jax.ShapeDtypeStruct:
    config = parts.configs["transformer"]
    shape = batch, tokens, config.num_attention_heads, config.attention_head_dim
    return jax.ShapeDtypeStruct(shape, parts.dtype)


def _queries(parts: ProfileParts) -> dict[str, Any]:
    return {"q": _heads(parts, _batch(parts)[0], _tokens(parts))}


def _keys(parts: ProfileParts, batch: int, tokens: int) -> dict[str, Any]:
    return dict.fromkeys(("k", "v"), _heads(parts, batch, tokens))
