"""The face inputs of Wan Animate's transformer: tokens of a face's motion, and attention to them by frame.

Source: diffusers' WanAnimateFaceEncoder and WanAnimateFaceBlockCrossAttention. Axes: P prompts, F video
frames, T latent frames of the transformer (a reference image's first), J face tokens of one latent frame,
B batch, S tokens, N heads, K head dimension, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from wanbuild.models.animate_config import AnimateConfig
from wanbuild.models.layers import Linear, RMSNorm, layer_norm
from wanbuild.models.params import param
from wanbuild.models.partition import constrain
from wanbuild.models.sequence import TokenAttention

_TAPS = 3

STORED = ("prompts", None, None, "stored_heads", None)
"""Names of the axes of an adapter's keys and values, as they are kept on a mesh."""


def causal_taps(x: jax.Array, stride: int) -> jax.Array:
    """Stacks every frame with the two before it, as input of a convolution along time in one matmul.

    Frames (P, F, C), the first one repeated in front, become (P, (F - 1) / stride + 1, 3 C), rounded down.
    The last axis is channels, and taps within a channel, in the order of a flattened kernel (O, C, 3).
    """
    frames = x.shape[1]
    x = jnp.concatenate([x[:, :1]] * (_TAPS - 1) + [x], axis=1)
    windows = [x[:, tap : tap + frames : stride] for tap in range(_TAPS)]
    stacked = jnp.stack(windows, axis=-1)
    return stacked.reshape(*stacked.shape[:2], -1)


class FaceEncoder(nnx.Module):
    """The layers that turn motion vectors into face tokens, in float32 for any storage dtype."""

    EPS = 1e-6  # the reference's value; the config's is not used here

    def __init__(self, config: AnimateConfig, dtype: Any) -> None:
        hidden, self.heads = config.face_encoder_hidden_dim, config.face_encoder_num_heads
        self.conv1_local = Linear(_TAPS * config.motion_encoder_dim, self.heads * hidden, dtype, (None, None))
        self.conv2 = Linear(_TAPS * hidden, hidden, dtype, (None, None))
        self.conv3 = Linear(_TAPS * hidden, hidden, dtype, (None, None))
        self.out_proj = Linear(hidden, config.dim, dtype, ("embed", None))
        self.padding_tokens = param((1, 1, 1, config.dim), dtype, (None, None, None, "embed"))

    def __call__(self, motions: jax.Array) -> jax.Array:
        """Returns the face tokens of every latent frame, float32 (P, T, J, D), of motion vectors (P, F, C).

        F is 4n + 1, C is motion_encoder_dim, and T is n + 2: zeros for the reference image, then F's latent
        frames. The last of their J = heads + 1 tokens is the same for all of these.
        """
        P = len(motions)
        x = self.conv1_local(causal_taps(motions, stride=1))
        x = x.reshape(P, -1, self.heads, x.shape[-1] // self.heads).swapaxes(1, 2)
        x = self._activated(x.reshape(P * self.heads, *x.shape[2:]))
        x = self._activated(self.conv2(causal_taps(x, stride=2)))
        x = self._activated(self.conv3(causal_taps(x, stride=2)))
        x = self.out_proj(x)
        x = x.reshape(P, self.heads, *x.shape[1:]).swapaxes(1, 2)
        same = jnp.broadcast_to(self.padding_tokens[...].astype(x.dtype), (*x.shape[:2], 1, x.shape[-1]))
        x = jnp.concatenate([x, same], axis=2)
        return jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, 0)))

    def _activated(self, x: jax.Array) -> jax.Array:
        return jax.nn.silu(layer_norm(x, self.EPS))


class FaceAdapter(nnx.Module):
    """Attention from the tokens of every latent frame to that frame's face tokens.

    Unlike in the blocks, queries and keys are normalised per head. ``dtype`` is the storage dtype of the
    matmul weights, ``norm_dtype`` that of the norms.
    """

    def __init__(self, config: AnimateConfig, dtype: Any, norm_dtype: Any) -> None:
        dim = config.dim
        self.to_q = Linear(dim, dim, dtype, ("heads", "embed"))
        self.to_k = Linear(dim, dim, dtype, ("heads", "embed"))
        self.to_v = Linear(dim, dim, dtype, ("heads", "embed"))
        self.to_out = Linear(dim, dim, dtype, ("embed", "heads"))
        self.norm_q = RMSNorm(config.attention_head_dim, norm_dtype, config.eps)
        self.norm_k = RMSNorm(config.attention_head_dim, norm_dtype, config.eps)
        self.heads, self.eps = config.num_attention_heads, config.eps

    def kv(self, tokens: jax.Array, dtype: Any) -> dict[str, jax.Array]:
        """Returns ``k`` and ``v``, (P, T, J, N, K) in dtype, of face tokens, float32 (P, T, J, D).

        It runs once per generation.
        """
        y = layer_norm(tokens, self.eps).astype(dtype)
        key = self.norm_k(self._split_heads(self.to_k(y, out_dtype=jnp.float32)))
        kv = {"k": key.astype(dtype), "v": self._split_heads(self.to_v(y))}
        return {name: constrain(x, *STORED) for name, x in kv.items()}

    def __call__(self, x: jax.Array, kv: Mapping[str, jax.Array], attention: TokenAttention) -> jax.Array:
        """Returns what the adapter adds to tokens (B, S, D), in float32; a latent frame has S / T of them.

        The tokens of a frame are consecutive. ``kv`` has ``k`` and ``v`` (P, T, J, N, K), B a multiple of P;
        consecutive videos share a face.
        """
        y = layer_norm(x, self.eps).astype(x.dtype)
        q = self.norm_q(self._split_heads(self.to_q(y, out_dtype=jnp.float32))).astype(x.dtype)
        out = attention.to_frames(q, kv["k"], kv["v"])
        return self.to_out(out.reshape(x.shape), out_dtype=jnp.float32)

    def _split_heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], self.heads, -1)
