"""Captions as the transformer gets them, and its attention to few tokens as to 512."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

TOKENS = 32
"""Of a caption in training; the longest has 30, and the last must be padding."""

PADDED_TOKENS = 512
"""Of a prompt in Wan, of which those after its end are zeros."""


class Captions(nn.Module):
    """Embeds captions as Wan's pipelines do, padded with zeros to ``TOKENS``.

    Args:
        tokenizer: a folder with its files.
        encoder: UMT5.
    """

    def __init__(self, tokenizer: Path, encoder: nn.Module) -> None:
        super().__init__()
        self._tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self.encoder = encoder

    def forward(self, captions: list[str]) -> Tensor:
        """Returns float32 (B, TOKENS, width).

        Raises:
            ValueError: if a caption has more tokens.
        """
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(captions)]
        if max(map(len, ids)) >= TOKENS:
            raise ValueError(f"a caption has {max(map(len, ids))} tokens; expected fewer than {TOKENS}")
        padded = torch.tensor([one + [0] * (TOKENS - len(one)) for one in ids])
        mask = torch.arange(TOKENS) < torch.tensor([[len(one)] for one in ids])
        embedded = self.encoder(padded, attention_mask=mask.long()).last_hidden_state
        return embedded * mask[..., None]


class ShortText(WanAttnProcessor):  # type: ignore[misc]
    """Cross-attention to ``TOKENS`` tokens that equals attention to ``PADDED_TOKENS``.

    Padding is all alike: the last token stands for all that are left out, with their number as its weight.
    """

    def __call__(
        self, attn: WanAttention, hidden_states: Tensor, encoder_hidden_states: Tensor, *_: Any
    ) -> Tensor:
        """Returns (B, S, D). Tokens of an image, if there are any, come before those of the text."""
        image, text = encoder_hidden_states[:, :-TOKENS], encoder_hidden_states[:, -TOKENS:]
        query = heads(attn, attn.norm_q(attn.to_q(hidden_states)))
        key, value = heads(attn, attn.norm_k(attn.to_k(text))), heads(attn, attn.to_v(text))
        bias = text.new_zeros(TOKENS)
        bias[-1] = math.log(PADDED_TOKENS - TOKENS + 1)
        out = scaled_dot_product_attention(query, key, value, attn_mask=bias.expand(query.shape[2], TOKENS))
        if attn.add_k_proj is not None:
            key = heads(attn, attn.norm_added_k(attn.add_k_proj(image)))
            out = out + scaled_dot_product_attention(query, key, heads(attn, attn.add_v_proj(image)))
        return torch.as_tensor(attn.to_out[0](out.transpose(1, 2).flatten(2)))


def heads(attn: WanAttention, tokens: Tensor) -> Tensor:
    """Returns tokens (N, S, D) as those of every head, (N, heads, S, width)."""
    return tokens.unflatten(2, (attn.heads, -1)).transpose(1, 2)


def shorten(model: WanTransformer3DModel) -> None:
    """Lets a transformer attend to ``TOKENS`` tokens of text as it would to all."""
    for block in model.blocks:
        block.attn2.set_processor(ShortText())
