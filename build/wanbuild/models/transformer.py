"""The Wan diffusion transformer: patch embedding, condition embedder, one scanned block, output head.

Source: diffusers' WanTransformer3DModel. Axes: B batch, S tokens, N heads, K head dimension, D width,
L layers, P prompts, T text tokens, I image tokens. Matmuls run in the compute dtype with float32
accumulation; norms, modulation and the condition embedder run in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from wanbuild.models.attention import Attention
from wanbuild.models.blocks import KV, OF_PROMPTS, Rope, WanBlock, modulated
from wanbuild.models.condition_embedder import ConditionEmbedder
from wanbuild.models.layers import Linear
from wanbuild.models.loops import at, map_leading
from wanbuild.models.params import Stack, param, scan_beside, scan_layers, stacked
from wanbuild.models.partition import (
    constrain,
    gathered_tokens,
    shared_tokens,
    token_groups,
)
from wanbuild.models.prompt_rows import PromptRows
from wanbuild.models.rope import rope_tables
from wanbuild.models.sequence import TokenAttention
from wanbuild.models.transformer_config import TransformerConfig

Cache = Mapping[str, KV]
"""Keys and values by stack of layers: ``blocks``, and the second stack of a variant that has one."""

Carry = dict[str, jax.Array]
"""What layers pass on: ``x``, tokens (B, S, D) in the compute dtype, and a variant's further tokens."""

Context = Mapping[str, jax.Array]
"""What keys and values are computed from: see ``WanTransformer.context``."""

Condition = Mapping[str, jax.Array]
"""A video's conditions besides text: ``channels``, float32 (C, T, h, w), which are appended to the latents'
channels, and a variant's other inputs. Empty for text only."""


@dataclass(frozen=True)
class ApplyBlock:
    """Maps a block, tokens (B, S, D) and one layer of its cache to the next tokens.

    On a chip, long videos go through one after the other, which takes less memory.

    Args:
        modulation: shared by all blocks of a step, as are the other arguments: see ``WanBlock.__call__``.
        groups: the row of modulation of each token.
        prompt: the prompt that all videos are of, int32; None if B / P consecutive ones are of each.
        nag: float32 (3,), by which the first prompt's videos are guided away from the second prompt, see
            ``models.nag``; None for programs without. With it the prompt is a number.
    """

    modulation: jax.Array
    rope: Rope
    attention: TokenAttention
    groups: jax.Array | None
    prompt: jax.Array | int | None = None
    nag: jax.Array | None = None

    def of_prompt(self, kv: KV) -> KV:
        """Returns the keys and values of one layer to which the videos attend."""
        if self.prompt is None:
            return kv
        own = {name: at(kv[name], self.prompt) for name in OF_PROMPTS}
        return {**kv, **own}

    def _with_negative(self, kv: KV) -> KV:
        """Returns ``of_prompt``'s, and those of the negative prompt that the first is guided away from."""
        own = self.of_prompt(kv)
        if self.nag is None:
            return own
        assert self.prompt is not None
        settings = jnp.where(jnp.equal(self.prompt, 0), self.nag, 1)
        return {**own, **{f"negative_{name}": at(kv[name], 1) for name in OF_PROMPTS}, "nag": settings}

    def __call__(self, block: WanBlock, x: jax.Array, kv: KV) -> jax.Array:
        kv, attention = self._with_negative(kv), self.attention.of_layer(kv)
        if len(x) == 1 or block.ffn.parts(x) == 1:
            return block(x, kv, self.modulation, self.rope, attention, self.groups)

        def one(given: tuple[jax.Array, KV, jax.Array]) -> jax.Array:
            x, own, modulation = given
            return block(x, {**kv, **own}, modulation, self.rope, attention, self.groups)

        prompts = {name: kv[name] for name in OF_PROMPTS}
        each = jax.tree.map(
            lambda array: jnp.repeat(array, len(x) // len(array), axis=0)[:, None],
            (x, prompts, self.modulation),
        )
        return jax.lax.map(one, each).reshape(x.shape)


def spatial_shape(latents: jax.Array) -> tuple[int, int, int]:
    """Returns frames, rows and columns of latents (B, C, T, h, w)."""
    _, _, T, h, w = latents.shape
    return T, h, w


def in_patches(latents: jax.Array, patch: tuple[int, int, int]) -> jax.Array:
    """Returns the raw values of latents (B, C, T, h, w) by patches of a size, (B, S, C·patch volume)."""
    B, C = latents.shape[:2]
    (pt, ph, pw), (T, H, W) = patch, spatial_shape(latents)
    x = latents.reshape(B, C, T // pt, pt, H // ph, ph, W // pw, pw).transpose(0, 2, 4, 6, 1, 3, 5, 7)
    return x.reshape(B, -1, C * pt * ph * pw)


def padded(tokens: jax.Array, multiple: int) -> tuple[jax.Array, jax.Array | None]:
    """Pads tokens (1, I, D) with zeros to a multiple; returns their mask, bool (I,), None if all real."""
    count = tokens.shape[1]
    extra = -count % multiple
    if not extra:
        return tokens, None
    return jnp.pad(tokens, ((0, 0), (0, extra), (0, 0))), jnp.arange(count + extra) < count


class WanTransformer(nnx.Module):
    """The denoiser.

    ``dtype`` is the storage dtype of the matmul weights, ``norm_dtype`` that of norms, the condition embedder
    and scale_shift_table.
    """

    def __init__(
        self, config: TransformerConfig, dtype: Any = jnp.bfloat16, norm_dtype: Any = jnp.float32
    ) -> None:
        self.config = config
        patch_in = config.in_channels * config.patch_volume
        patch_out = config.out_channels * config.patch_volume
        self.patch_embedding = Linear(patch_in, config.dim, dtype, ("embed", None))
        self.condition_embedder = ConditionEmbedder(config, norm_dtype)
        self.blocks = stacked(WanBlock(config, dtype, norm_dtype), config.num_layers)
        self.scale_shift_table = param((1, 2, config.dim), norm_dtype, (None, None, "embed"))
        self.proj_out = Linear(config.dim, patch_out, dtype, (None, "embed"))

    @property
    def stacks(self) -> dict[str, Sequence[int]]:
        """The stacks of layers, ``blocks`` first, with the layers of ``blocks`` that their own follow."""
        return {"blocks": range(self.config.num_layers)}

    def prepare(
        self, embeddings: jax.Array, latent_shape: tuple[int, int, int], dtype: Any, **inputs: Any
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """Returns the constants of a generation: the cross-attention cache and the rotary tables.

        Prompt embeddings are (P, T, text_dim), ``latent_shape`` is latent frames, rows and columns, and the
        cache is in dtype. ``inputs`` are the other arguments of ``context``.
        """
        context = self.context(embeddings, dtype, **inputs)
        return self.caches(context, dtype), self.rope(latent_shape)

    def context(
        self,
        embeddings: jax.Array,
        dtype: Any,
        image_tokens: jax.Array | None = None,
        image_multiple: int = 1,
    ) -> dict[str, jax.Array]:
        """Returns what the keys and values of all layers are computed from, in dtype.

        The dict has ``text`` (P, T, D) of prompt embeddings (P, T, text_dim), and its ``pieces`` where not
        all rows are computed (``PromptRows``). A model that takes N images has ``image`` (1, I, D) too, of
        the image encoder's tokens (N, tokens, image_dim) padded to a multiple of ``image_multiple``, and if
        there is padding ``image_mask``, bool (I,).
        """
        prompts = PromptRows.of(embeddings)
        text = prompts.map(lambda rows: self.condition_embedder.text(rows).astype(dtype))
        context = {"text": constrain(text, "prompts", None, None)}
        if prompts.pieces is not None:
            context["pieces"] = prompts.pieces
        if image_tokens is not None:
            image, mask = padded(self.condition_embedder.image(image_tokens).astype(dtype), image_multiple)
            context["image"] = image
            if mask is not None:
                context["image_mask"] = mask
        return context

    def rope(self, latent_shape: tuple[int, int, int]) -> dict[str, jax.Array]:
        """Returns the rotary tables."""
        cos, sin = rope_tables(self.config.grid(latent_shape), self.config.attention_head_dim)
        return {"cos": shared_tokens(cos, 0), "sin": shared_tokens(sin, 0)}

    def caches(self, context: Context, dtype: Any) -> dict[str, Any]:
        """Computes the keys and values of every stack of layers."""

        def cache(name: str) -> KV:
            stack = Stack(getattr(self, name))
            return map_leading(  # type: ignore[no-any-return]
                lambda layer: self.keys(name, stack.layer(layer, whole=False), context, dtype), stack.scanned
            )

        return {name: cache(name) for name in self.stacks}

    def keys(self, stack: str, layer: Any, context: Context, dtype: Any) -> KV:
        """Returns the keys and values of one layer of a stack."""
        del stack, dtype
        text = PromptRows(context["text"], context.get("pieces"))
        return layer.attn2.kv(text, context.get("image"), context.get("image_mask"))  # type: ignore[no-any-return]

    def patchify(self, latents: jax.Array) -> jax.Array:
        """(B, C, T, h, w) -> tokens of raw values (B, S, C·patch volume), in the order of the conv weight.

        On a mesh S has padding, and devices share the tokens.
        """
        self.config.grid(spatial_shape(latents))
        return shared_tokens(in_patches(latents, self.config.patch_size), 1)

    def unpatchify(self, tokens: jax.Array, latent_shape: tuple[int, int, int]) -> jax.Array:
        """(B, S, patch volume·C) -> (B, C, T, h, w)."""
        t, h, w = self.config.grid(latent_shape)
        pt, ph, pw = self.config.patch_size
        x = tokens.reshape(-1, t, h, w, pt, ph, pw, self.config.out_channels)
        return x.transpose(0, 7, 1, 4, 2, 5, 3, 6).reshape(len(tokens), -1, *latent_shape)

    def embed(self, latents: jax.Array, condition: Condition, dtype: Any) -> jax.Array:
        """Embeds latents (B, C, T, h, w), with the condition's channels, as tokens (B, S, D) in dtype."""
        if (channels := condition.get("channels")) is not None:
            channels = jnp.broadcast_to(channels, (len(latents), *channels.shape))
            latents = jnp.concatenate([latents, channels], axis=1)
        return self.patch_embedding(self.patchify(latents).astype(dtype))

    def carry(self, x: jax.Array, condition: Condition) -> Carry:
        """Returns what layers pass on, of embedded tokens (B, S, D)."""
        del condition
        return {"x": x}

    def apply_block(self, apply: ApplyBlock, block: WanBlock, carry: Carry, kv: KV) -> Carry:
        """Applies a layer of the stack ``blocks``."""
        return {**carry, "x": apply(block, carry["x"], kv)}

    def _skippable(
        self, apply: ApplyBlock, block: WanBlock, carry: Carry, extra: tuple[KV, jax.Array]
    ) -> Carry:
        """Applies a block, or not."""
        kv, skipped = extra
        applied = self.apply_block(apply, block, carry, kv)
        return jax.tree.map(lambda before, after: jnp.where(skipped == 0, after, before), carry, applied)

    def apply_beside(self, apply: ApplyBlock, layer: Any, carry: Carry, kv: KV, extra: Any) -> Carry:
        """Applies a layer of the second stack; ``extra`` is its part of ``per_layer_beside``."""
        raise NotImplementedError

    def per_layer_beside(self, condition: Condition) -> Any:
        """Returns arrays with a part for each layer of the second stack, or None."""
        del condition

    def run_blocks(
        self,
        carry: Carry,
        apply: ApplyBlock,
        cache: Cache,
        condition: Condition,
        skipped: jax.Array | None = None,
    ) -> Carry:
        """Runs all layers from what ``carry`` returns, with the keys and values of every stack in ``cache``.

        ``apply`` applies a block to tokens, with its keys and values. ``skipped`` is float32 (L,), not 0 for
        each of ``blocks`` that is skipped; None for none.
        """
        main: Callable[..., Carry] = functools.partial(self.apply_block, apply)
        blocks, *beside = self.stacks
        each: Any = cache[blocks]
        if skipped is not None:
            main, each = functools.partial(self._skippable, apply), (each, skipped)
        if not beside:
            return scan_layers(self.blocks, main, carry, each)  # type: ignore[no-any-return]
        side = beside[0]
        return scan_beside(  # type: ignore[no-any-return]
            self.blocks,
            getattr(self, side),
            self.stacks[side],
            main,
            lambda layer, carry, extra: self.apply_beside(apply, layer, carry, *extra),
            carry,
            each,
            (cache[side], self.per_layer_beside(condition)),
        )

    def time(self, timesteps: jax.Array, condition: Condition) -> tuple[jax.Array, jax.Array]:
        """Returns the embedding of timesteps (1 or B, G), and its modulations: see ``ConditionEmbedder``."""
        del condition
        return self.condition_embedder.time(timesteps)

    def begin(
        self, latents: jax.Array, timesteps: jax.Array, condition: Condition, dtype: Any
    ) -> dict[str, Any]:
        """Returns what a step's layers begin with; arguments as of a call.

        The dict has ``carry``, which layers pass on; ``modulation``, float32 (1 or B, G, 6, D), of all of
        them; and ``embedding``, float32 (1 or B, G, D), which ``end`` takes.
        """
        timesteps = timesteps if timesteps.ndim == 2 else jnp.atleast_1d(timesteps)[:, None]
        embedding, modulation = self.time(timesteps, condition)
        carry = self.carry(self.embed(latents, condition, dtype), condition)
        return {"carry": carry, "modulation": modulation, "embedding": embedding}

    def applying(
        self,
        modulation: jax.Array,
        rope: Rope,
        latent_shape: tuple[int, int, int],
        attention: Attention,
        prompt: jax.Array | int | None = None,
        nag: jax.Array | None = None,
    ) -> ApplyBlock:
        """Returns how a step's blocks are applied; ``prompt`` is that of all videos, see ``ApplyBlock``.

        With ``nag`` None means the first one.
        """
        prompt = 0 if prompt is None and nag is not None else prompt
        count = math.prod(self.config.grid(latent_shape))
        groups = token_groups(count, modulation.shape[1])
        return ApplyBlock(modulation, rope, TokenAttention(attention, count), groups, prompt, nag)

    def end(self, carry: Carry, embedding: jax.Array, latent_shape: tuple[int, int, int]) -> jax.Array:
        """Returns the velocity of what the last layer passes on, float32 (B, out_channels, T, h, w)."""
        x, count = carry["x"], math.prod(self.config.grid(latent_shape))
        groups = token_groups(count, embedding.shape[1])
        head = self.scale_shift_table[...].astype(jnp.float32) + embedding[..., None, :]
        x = modulated(x, head[..., 1, :], head[..., 0, :], self.config.eps, groups).astype(x.dtype)
        x = gathered_tokens(self.proj_out(x, out_dtype=jnp.float32), count)
        return self.unpatchify(x, latent_shape)

    def predictor(
        self,
        latents: jax.Array,
        timesteps: jax.Array,
        cache: Cache,
        rope: Rope,
        condition: Condition,
        attention: Attention,
        dtype: Any,
        nag: jax.Array | None = None,
    ) -> Callable[..., jax.Array]:
        """Returns a function that predicts the flow velocity by prompt; all prompts share its beginning.

        Args:
            latents: float32 (B, C, T, h, w).
            timesteps: float32 () or (B,), or (1 or B, G), where each of the G applies to S / G consecutive
                tokens: G is S for one per token, and T for one per latent frame.
            cache: cross-attention cache for P prompts.
            condition: conditions shared by all B.
            nag: see ``ApplyBlock``.

        The function takes the prompt's number, an int32 scalar, and returns the velocity, float32 (B,
        out_channels, T, h, w). None: B is a multiple of P, and B / P consecutive videos are of each. Its
        second argument is ``skipped`` of ``run_blocks``.
        """
        shape, begun = spatial_shape(latents), self.begin(latents, timesteps, condition, dtype)

        def predict(prompt: jax.Array | int | None, skipped: jax.Array | None = None) -> jax.Array:
            apply = self.applying(begun["modulation"], rope, shape, attention, prompt, nag)
            carry = self.run_blocks(begun["carry"], apply, cache, condition, skipped)
            return self.end(carry, begun["embedding"], shape)

        return predict

    def __call__(self, *arguments: Any) -> jax.Array:
        """Returns the flow velocity of B videos, of which B / P consecutive ones are of each prompt.

        The arguments are those of ``predictor``.
        """
        return self.predictor(*arguments)(None)
