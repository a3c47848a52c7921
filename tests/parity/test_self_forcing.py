"""Self-Forcing against diffusers' WanTransformer3DModel without a cache: a chunk sees its window alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from helpers.fast_compile import fast_jit
from helpers.naive import load_params
from helpers.reference_models import randomise, relative_error
from helpers.whole_path import LATENTS
from wanbuild.mapping.transformer import TRANSFORMER_RULES
from wanbuild.models.attention import blocked_attention
from wanbuild.models.params import bind
from wanbuild.models.self_forcing import SelfForcingConfig, SelfForcingTransformer

FRAMES, ROWS, COLUMNS = 3, 4, 6
TIMESTEPS = (1000.0, 937.5, 2500 / 3, 625.0)
TOKENS = ROWS * COLUMNS // 4
FIELDS: Mapping[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 20,
    "ffn_dim": 56,
    "num_layers": 30,
    "text_dim": 32,
    "freq_dim": 64,
}


class Windows(WanAttnProcessor):  # type: ignore[misc]
    """The self-attention of a whole video: every chunk's to the frames of its window and its own.

    Args:
        window: frames that a chunk sees, with its own.
        sink: the first ones, which all see. Without any, positions are the frames' numbers in the video.
    """

    def __init__(self, window: int, sink: int) -> None:
        super().__init__()
        self.window, self.sink = window, sink

    def __call__(self, attn: Any, x: Any, _: Any, __: Any, rope: Any) -> Any:
        heads = []
        for first in range(0, x.shape[1] // TOKENS, FRAMES):
            newest = range(max(first + FRAMES - (self.window - self.sink), 0), first + FRAMES)
            seen = [*range(min(self.sink, newest[0])), *newest]
            places = range(len(seen)) if self.sink else seen
            tables = tuple(table[:, tokens(places)] for table in rope)
            heads.append(
                super().__call__(attn, x[:, tokens(seen)], None, None, tables)[:, -FRAMES * TOKENS :]
            )
        return torch.cat(heads, 1)


def tokens(frames: Any) -> list[int]:
    return [frame * TOKENS + token for frame in frames for token in range(TOKENS)]


class Made:
    """Our chunks, whose clean latents are given, and the judge's."""

    def __init__(self, window: int, sink: int) -> None:
        reference = WanTransformer3DModel(**FIELDS).eval()
        config = SelfForcingConfig(**FIELDS, local_attn_size=window, sink_size=sink)
        self.module = module = SelfForcingTransformer(config, jnp.float32)
        self.params = load_params(randomise(reference, seed=3), TRANSFORMER_RULES, module)
        for block in reference.blocks:
            block.attn1.set_processor(Windows(window, sink))
        self.reference = reference
        self.rng = np.random.default_rng(4)
        self.embeddings = self.rng.standard_normal((1, 512, 32)).astype(np.float32)
        shape = (FRAMES, ROWS, COLUMNS)
        prepare = fast_jit(lambda params, text: bind(module, params).prepare(text, shape, jnp.float32)[0])
        self.kv = prepare(self.params, self.embeddings)
        self.velocity = fast_jit(self._velocity)
        self.keep = fast_jit(self._keep, donate_argnums=2)
        abstract = module.cache((window, ROWS, COLUMNS), jnp.float32)
        self.cache: Any = {name: jnp.zeros(one.shape, one.dtype) for name, one in abstract.items()}

    def _velocity(self, params: Any, kv: Any, cache: Any, chunk: Any, x: Any, t: Any) -> Any:
        model = bind(self.module, params)
        past, rope = model.beside(cache, chunk, x.shape[2:])
        kv = {"blocks": {**kv["blocks"], **past}}
        return model(x, t, kv, rope, {}, blocked_attention, jnp.float32)

    def _keep(self, params: Any, kv: Any, cache: Any, chunk: Any, x: Any) -> Any:
        return bind(self.module, params).remember(cache, kv, x, chunk, blocked_attention, jnp.float32)

    def expected(self, chunks: list[np.ndarray], t: float) -> np.ndarray:
        """The velocity of the last one, of which the others are clean."""
        times = torch.zeros(1, len(chunks) * FRAMES * TOKENS)
        times[:, -FRAMES * TOKENS :] = t
        with torch.no_grad():
            video, text = torch.from_numpy(np.concatenate(chunks, 2)), torch.from_numpy(self.embeddings)
            return self.reference(video, times, text).sample[:, :, -FRAMES:].numpy()  # type: ignore[no-any-return]

    def drawn(self) -> np.ndarray:
        return self.rng.standard_normal((1, 16, FRAMES, ROWS, COLUMNS)).astype(np.float32)


@pytest.mark.parametrize(("window", "sink", "last"), [(11, 0, 199), (12, 3, 7)], ids=["ring", "sink"])
def test_chunks_of_the_transformer(window: int, sink: int, last: int) -> None:
    """Chunks until the window has rolled over, and the two hundredth, whose positions are as small."""
    made, chunks = Made(window, sink), list[np.ndarray]()
    for number in range(last + 1):
        if number < 7 or number == last:
            noisy, t = made.drawn(), TIMESTEPS[number % 4]
            found = made.velocity(made.params, made.kv, made.cache, number, noisy, np.float32(t))
            assert relative_error(found, made.expected([*chunks, noisy], t)) < LATENTS
        chunks.append(made.drawn())
        if number < last:
            made.cache = made.keep(made.params, made.kv, made.cache, number, chunks[-1])

    def numbered(number: int) -> Any:
        return made.velocity(made.params, made.kv, made.cache, number, noisy, np.float32(t))

    assert np.array_equal(found, numbered(last + 8))  # the buffer begins in the same slot
    assert relative_error(found, numbered(last + 1)) > 100 * LATENTS
