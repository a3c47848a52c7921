"""Wan's transformer made causal, as Self-Forcing's: it makes a block of latent frames after those before it.

Blocks are what a batch is made of, so diffusers' own transformer runs as it is, with a timestep for every
block; only its attention knows which of them belong together. A block sees the first one of the video (the
sink), those just before it, and itself: ``WINDOW`` at most. Rotary positions count latent frames from the
beginning of what it sees. They are the frames' numbers in the video as long as it sees all, and never grow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from tinywan.endless import BLOCK
from tinywan.learning.text import PADDED_TOKENS, TOKENS, heads

WINDOW = 4
"""Blocks that a block sees, with the sink and itself: 12 latent frames."""

SINK = 1
"""Blocks at the beginning of the video that stay in the window."""

CONFIG: Mapping[str, int] = MappingProxyType(
    {"num_frames_per_block": BLOCK, "local_attn_size": WINDOW * BLOCK, "sink_size": SINK * BLOCK}
)
"""The fields that the config of a causal transformer adds to the base's, in latent frames."""

LEVELS = (1.0, 15 / 16, 5 / 6, 5 / 8)
"""Sigmas of the four steps: 1000, 750, 500 and 250 of 1000, shifted by 5."""


def seen(block: int) -> list[int]:
    """Returns the numbers of the blocks that a block sees before it, from 0."""
    if block < WINDOW:
        return list(range(block))
    return [*range(SINK), *range(block - (WINDOW - 1 - SINK), block)]


@dataclass
class Layout:
    """What attention is to know of N blocks.

    Args:
        cos, sin: float32 (WINDOW * S, width of a head), the rotary tables of a window of S tokens a block.
        turns: int (N,), the text of every block.
        blocks: of a video in training, K: its K - 1 clean blocks come first, then its K noisy ones.
    """

    cos: Tensor
    sin: Tensor
    turns: Tensor
    blocks: int = 0

    def rotate(self, tokens: Tensor, first: int) -> Tensor:
        """Turns tokens (..., n * S, width) by their positions, which begin with those of block ``first``."""
        tokens_of_block = len(self.cos) // WINDOW
        places = slice(first * tokens_of_block, first * tokens_of_block + tokens.shape[-2])
        x, y = tokens.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.cos[places, 0::2], self.sin[places, 1::2]
        return torch.stack([x * cos - y * sin, x * sin + y * cos], -1).flatten(-2)


def layout(model: WanTransformer3DModel, height: int, width: int, blocks: int = 0) -> Layout:
    """Returns the layout for latents of this height and width."""
    tables = model.rope(torch.zeros(1, 1, WINDOW * BLOCK, height, width))
    cos, sin = (table[0, :, 0].float() for table in tables)
    return Layout(cos, sin, torch.zeros(1, dtype=torch.long), blocks)


class BlockText(WanAttnProcessor):  # type: ignore[misc]
    """Cross-attention of every block to its own text, as ``ShortText`` in other respects.

    Args:
        layout: says which text.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout

    def __call__(
        self, attn: WanAttention, hidden_states: Tensor, encoder_hidden_states: Tensor, *_: Any
    ) -> Tensor:
        """Returns (N, S, D)."""
        text, turns = encoder_hidden_states, self._layout.turns
        query = heads(attn, attn.norm_q(attn.to_q(hidden_states)))
        key, value = heads(attn, attn.norm_k(attn.to_k(text))), heads(attn, attn.to_v(text))
        bias = text.new_zeros(TOKENS)
        bias[-1] = math.log(PADDED_TOKENS - TOKENS + 1)
        out = scaled_dot_product_attention(
            query,
            key.index_select(0, turns),
            value.index_select(0, turns),
            attn_mask=bias.expand(query.shape[2], TOKENS),
        )
        return torch.as_tensor(attn.to_out[0](out.transpose(1, 2).flatten(2)))


class TeacherForced(WanAttnProcessor):  # type: ignore[misc]
    """Self-attention in training: clean and noisy blocks of whole videos see the clean ones before them.

    Args:
        layout: of the batch.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout

    def __call__(self, attn: WanAttention, hidden_states: Tensor, *_: Any) -> Tensor:
        """Returns (N, S, D)."""
        count = self._layout.blocks
        query = heads(attn, attn.norm_q(attn.to_q(hidden_states)))
        key, value = heads(attn, attn.norm_k(attn.to_k(hidden_states))), heads(attn, attn.to_v(hidden_states))
        query, key = self._layout.rotate(query, WINDOW - 1), key
        before = self._layout.rotate(self._before(key), 0)
        keys = torch.cat([_twice(before), self._layout.rotate(key, WINDOW - 1)], 2)
        values = torch.cat([_twice(self._before(value)), value], 2)
        absent = _absent(count, query.shape[2]).to(query)
        videos = len(query) // (2 * count - 1)
        bias = torch.cat([absent[:-1], absent]).repeat(videos, 1)[:, None, None]
        out = scaled_dot_product_attention(query, keys, values, attn_mask=bias)
        return torch.as_tensor(attn.to_out[0](out.transpose(1, 2).flatten(2)))

    def _before(self, tokens: Tensor) -> Tensor:
        """Returns what each of a video's blocks sees before it, (videos, K, heads, (WINDOW - 1) * S, width).

        The window is full: a place that is not there yet holds anything.
        """
        count = self._layout.blocks
        clean = tokens.unflatten(0, (-1, 2 * count - 1))[:, : count - 1]
        sink = [clean[:, i : i + 1].expand(-1, count, -1, -1, -1) for i in range(SINK)]
        shifted = [pad(clean, (0, 0) * 3 + (back, 0))[:, :count] for back in range(WINDOW - 1 - SINK, 0, -1)]
        return torch.cat([*sink, *shifted], 3)


def _twice(before: Tensor) -> Tensor:
    """Returns what the clean blocks see, which are one fewer, and the same for the noisy ones: (N, ...)."""
    return torch.cat([before[:, :-1], before], 1).flatten(0, 1)


def _absent(count: int, tokens: int) -> Tensor:
    """Returns the bias of every key of every block, (count, WINDOW * tokens): -inf where nothing is yet."""
    missing = torch.zeros(count, WINDOW)
    for block in range(min(count, WINDOW - 1)):
        missing[block, : WINDOW - 1 - block] = -math.inf
    return missing.repeat_interleave(tokens, 1)


class Cached(WanAttnProcessor):  # type: ignore[misc]
    """Self-attention of one block to the keys and values of those before it, which are kept unrotated.

    Args:
        layout: of the window.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.writes: int | None = None

    def __call__(self, attn: WanAttention, hidden_states: Tensor, *_: Any) -> Tensor:
        """Returns (N, S, D); keeps the block's keys and values if ``writes`` is its number."""
        query = heads(attn, attn.norm_q(attn.to_q(hidden_states)))
        key, value = heads(attn, attn.norm_k(attn.to_k(hidden_states))), heads(attn, attn.to_v(hidden_states))
        keys, values = (
            torch.cat([*some], 2) for some in zip(*self._kept.values(), (key, value), strict=True)
        )
        query, keys = self._layout.rotate(query, len(self._kept)), self._layout.rotate(keys, 0)
        if self.writes is not None:
            self._kept[self.writes] = key, value
            self._kept = {block: self._kept[block] for block in seen(self.writes + 1)}
        out = scaled_dot_product_attention(query, keys, values)
        return torch.as_tensor(attn.to_out[0](out.transpose(1, 2).flatten(2)))


class Forced(nn.Module):
    """The transformer in training: all blocks of whole videos in one pass.

    Args:
        model: is given the attention of blocks.
        blocks: of a video, K.
        height, width: of latents.
    """

    def __init__(self, model: WanTransformer3DModel, blocks: int, height: int, width: int) -> None:
        super().__init__()
        self.model, self._layout = model, layout(model, height, width, blocks)
        for block in model.blocks:
            block.attn1.set_processor(TeacherForced(self._layout))
            block.attn2.set_processor(BlockText(self._layout))

    def forward(self, clean: Tensor, noisy: Tensor, sigmas: Tensor, texts: Tensor, turns: Tensor) -> Tensor:
        """Returns the velocities of noisy blocks.

        Args:
            clean: float32 (B, K - 1, 16, BLOCK, H, W), what the next blocks see.
            noisy: float32 (B, K, 16, BLOCK, H, W).
            sigmas: float32 (B, K), of the noisy ones.
            texts: float32 (B, C, TOKENS, width).
            turns: int (B, K), which of its video's texts a block has.
        """
        both = torch.cat([clean, noisy], 1)
        turns = turns + torch.arange(len(texts))[:, None] * texts.shape[1]
        self._layout.turns = torch.cat([turns[:, :-1], turns], 1).flatten()
        times = torch.cat([torch.zeros_like(sigmas[:, :-1]), 1000 * sigmas], 1)
        made = self.model(both.flatten(0, 1), times.flatten(), texts.flatten(0, 1), return_dict=False)[0]
        return made.unflatten(0, both.shape[:2])[:, clean.shape[1] :]


class Sampler:
    """Makes videos block after block, with the keys and values of finished blocks.

    Args:
        model: is given the attention of one block.
        shape: of a block of the batch, (B, 16, BLOCK, H, W).
        seed: of the noise.
    """

    def __init__(self, model: WanTransformer3DModel, shape: Sequence[int], seed: int) -> None:
        self._model, self._shape, self._made = model, shape, 0
        self._random = torch.Generator().manual_seed(seed)
        self._layout = layout(model, *shape[-2:])
        self._layout.turns = torch.arange(shape[0])
        self._caches = [Cached(self._layout) for _ in model.blocks]
        for block, cache in zip(model.blocks, self._caches, strict=True):
            block.attn1.set_processor(cache)
            block.attn2.set_processor(BlockText(self._layout))

    @torch.no_grad()
    def block(self, texts: Tensor) -> Tensor:
        """Makes the next block and remembers it.

        Args:
            texts: float32 (B, TOKENS, width), of every video.

        Returns:
            float32 (B, 16, BLOCK, H, W).
        """
        clean = torch.zeros(self._shape)
        for sigma in LEVELS:
            given = (1 - sigma) * clean + sigma * torch.randn(self._shape, generator=self._random)
            clean = given - sigma * self.velocity(given, sigma, texts)
        self.remember(clean, texts)
        return clean

    @torch.no_grad()
    def velocity(self, given: Tensor, sigma: float, texts: Tensor) -> Tensor:
        """Returns the velocity of the next block."""
        times = torch.full(self._shape[:1], 1000 * sigma)
        return torch.as_tensor(self._model(given, times, texts, return_dict=False)[0])

    def remember(self, clean: Tensor, texts: Tensor) -> None:
        """Writes the keys and values of a finished block."""
        for cache in self._caches:
            cache.writes = self._made
        self.velocity(clean, 0.0, texts)
        for cache in self._caches:
            cache.writes = None
        self._made += 1
