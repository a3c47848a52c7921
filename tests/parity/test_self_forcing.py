"""Self-Forcing against diffusers' WanTransformer3DModel without a cache: a chunk sees its window alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from helpers.artifacts import build_artifact
from helpers.checkpoint_files import save_file
from helpers.compiling import fast_jit
from helpers.reference_models import Transformers, relative_error
from helpers.single_files import original_transformer
from helpers.whole_path import LATENTS, PROMPT
from wanbuild.check.reference_pipeline import Reference
from wanbuild.models.attention import blocked_attention
from wanbuild.models.params import bind
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.model import Chunking

pytestmark = pytest.mark.thorough

FRAMES, ROWS, COLUMNS = 3, 4, 6
LATENT_FRAMES, WINDOW = 12, 9
TIMESTEPS = (1000.0, 937.5, 2500 / 3, 625.0)


class Windows(WanAttnProcessor):  # type: ignore[misc]
    """The self-attention of a whole video: every chunk's to the frames of its window and its own.

    Args:
        window: frames that a chunk sees, with its own.
        sink: the first ones, which all see. Without any, positions are the frames' numbers in the video.
        tokens: of a frame.
    """

    def __init__(self, window: int, sink: int, tokens: int) -> None:
        super().__init__()
        self.window, self.sink, self.tokens = window, sink, tokens

    def __call__(self, attn: Any, x: Any, _: Any, __: Any, rope: Any) -> Any:
        heads = []
        for first in range(0, x.shape[1] // self.tokens, FRAMES):
            newest = range(max(first + FRAMES - (self.window - self.sink), 0), first + FRAMES)
            seen = [*range(min(self.sink, newest[0])), *newest]
            tables = tuple(table[:, self._of(range(len(seen)) if self.sink else seen)] for table in rope)
            made = super().__call__(attn, x[:, self._of(seen)], None, None, tables)
            heads.append(made[:, -FRAMES * self.tokens :])
        return torch.cat(heads, 1)

    def _of(self, frames: Iterable[int]) -> list[int]:
        return [frame * self.tokens + token for frame in frames for token in range(self.tokens)]


def judged(model: Any, chunks: Sequence[Any], t: float, text: Any) -> Any:
    """The judge's velocity of the last chunk, of which the others are clean."""
    *_, rows, columns = chunks[-1].shape
    times = torch.zeros(len(chunks), FRAMES * rows * columns // 4)
    times[-1] = t
    with torch.no_grad():
        return model(torch.cat(list(chunks), 2), times.reshape(1, -1), text).sample[:, :, -FRAMES:]


class Made:
    """Our chunks, whose clean latents are given, and the judge's."""

    def __init__(self, window: int, sink: int) -> None:
        pair = Transformers("self-forcing", seed=3, own={"local_attn_size": window, "sink_size": sink})
        for block in pair.reference.blocks:
            block.attn1.set_processor(Windows(window, sink, ROWS * COLUMNS // 4))
        self.reference, self.params = pair.reference, pair.params
        self.module = module = pair.module
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

    def expected(self, chunks: Sequence[np.ndarray], t: float) -> np.ndarray:
        tensors = [torch.from_numpy(chunk) for chunk in chunks]
        return judged(self.reference, tensors, t, torch.from_numpy(self.embeddings)).numpy()  # type: ignore[no-any-return]

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


def test_single_files_of_it_are_made_chunk_by_chunk(
    toy_checkpoint: Path, commands: Any, tmp_path: Path
) -> None:
    """Published weights have Wan's own names behind a prefix, and nothing says what they are or see."""
    file, artifact = tmp_path / "self_forcing_dmd.safetensors", tmp_path / "artifact"
    save_file(original_transformer(toy_checkpoint / "transformer", "generator_ema.model."), file)
    config = json.loads((toy_checkpoint / "transformer" / "config.json").read_text())
    changed = {"_class_name": "CausalWanTransformer3DModel", "local_attn_size": WINDOW}
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    own: Mapping[str, Any] = {
        "files": {"transformer": file},
        "configs": {"transformer": tmp_path / "config.json"},
        "variant": "self-forcing-wan2.1",
    }
    frames = 4 * LATENT_FRAMES - 3
    build_artifact(toy_checkpoint, artifact, guidance=(False,), num_frames=frames, **own)
    manifest = read_manifest(artifact)
    model, defaults = manifest.model, manifest.model.defaults
    assert model.variant == own["variant"] and model.chunks == Chunking(first=FRAMES, each=FRAMES)
    assert (defaults.solver, defaults.num_steps, defaults.flow_shift) == ("self-forcing", 4, 5.0)
    latents = tmp_path / "latents.npy"
    commands.succeeds(
        *("wanrun", "--artifact", artifact, "--prompt", PROMPT, "--seed", 3),
        *("--save-latents", latents, "--output", tmp_path / "video.npy"),
    )
    pipe = Reference(toy_checkpoint, "wan2.1-t2v").pipe
    for block in pipe.transformer.blocks:
        block.attn1.set_processor(Windows(WINDOW, 0, 8 * 12 // 4))
    text, _ = pipe.encode_prompt(PROMPT, do_classifier_free_guidance=False, max_sequence_length=512)
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(3))
    made: list[Any] = []
    for x in draw((1, 16, LATENT_FRAMES, 8, 12)).split(FRAMES, 2):
        for t, following in pairwise((*TIMESTEPS, 0)):
            clean = x - t / 1000 * judged(pipe.transformer, [*made, x], t, text)
            x = (1 - following / 1000) * clean + following / 1000 * draw(x.shape) if following else clean
        made.append(x)
    assert relative_error(np.load(latents), torch.cat(made, 2)) < LATENTS
    assert np.load(tmp_path / "video.npy").shape == (frames, 64, 96, 3)
