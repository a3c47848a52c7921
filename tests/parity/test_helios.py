"""Helios' transformer and loops over chunks against diffusers', every parameter random."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import HeliosDMDScheduler, HeliosPipeline, HeliosPyramidPipeline, HeliosScheduler

from helpers.compiling import fast_jit
from helpers.reference_models import Transformers, relative_error
from wanbuild.models.attention import blocked_attention
from wanbuild.models.helios import PAST
from wanbuild.models.params import bind
from wanbuild.programs.denoiser import solver_step
from wanrun.denoising.noise import Noise
from wanrun.denoising.past import Given, Latents
from wanrun.denoising.pyramid import chunk_table, enlarged, halved
from wanrun.denoising.solvers import HISTORY, SolverTable

SIZE = (8, 16)  # of latents: 2 x 4 and 4 x 8 in the stages before
FRAMES, CHUNKS, SEED = 9, 2, 11
TOKENS = FRAMES * SIZE[0] * SIZE[1] // 4
FLOAT32 = 1e-5  # seen: 4e-7
GAMMA = 0.3  # at the published 1/3 the reference's factor of the noise is not defined on CPUs
PARTIAL = (6, 10)
"""Rows and columns of latents of which neither ``patch_mid`` nor ``patch_long`` makes whole patches."""


class Pair(Transformers):
    """With velocities from a first latent frame and a past."""

    def __init__(self, **changes: Any) -> None:
        super().__init__("helios", seed=7, **changes)
        self._run = fast_jit(self._with_past)

    def _with_past(self, params: Any, x: Any, t: Any, text: Any, first: Any, past: Any) -> Any:
        model = bind(self.module, params)
        kv, _ = model.prepare(text, x.shape[2:], jnp.float32)
        rope = model.tables(x.shape[2:], past.shape[3:])
        condition = {"first": first, "past": past}
        return model(x, t, kv, rope, condition, blocked_attention, jnp.float32)

    def forward(self, *given: Any) -> np.ndarray:
        """Our velocity."""
        return np.asarray(self._run(self.params, *given))

    def expected(self, x: Any, t: float, text: Any, first: Any, past: Any) -> np.ndarray:
        """The reference's velocity, given what its pipeline gives it."""
        ends = np.cumsum([1, 16, 2, 1, x.shape[2]])
        zero, long, mid, recent, chunk = np.split(np.arange(ends[-1]), ends[:-1])
        indices = {"hidden_states": chunk, "latents_history_short": np.concatenate([zero, recent])}
        indices |= {"latents_history_mid": mid, "latents_history_long": long}
        history = {
            "latents_history_short": np.concatenate([first, past[:, :, -1:]], axis=2),
            "latents_history_mid": past[:, :, -3:-1],
            "latents_history_long": past[:, :, :16],
        }
        at = {f"indices_{name}": numbers[None] for name, numbers in indices.items()}
        return self.theirs(x, float(t), text, **at, **history)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


def inputs(shape: tuple[int, int, int], size: tuple[int, int], filled: int, batch: int = 1) -> Any:
    """A chunk, a timestep, a prompt, and a past of which the last latent frames are filled."""
    rng = np.random.default_rng(filled)
    x, first, past = (
        rng.standard_normal((batch, 16, *wanted)).astype(np.float32)
        for wanted in (shape, (1, *size), (PAST, *size))
    )
    past[:, :, : PAST - filled] = 0
    embeddings = rng.standard_normal((batch, 512, 32)).astype(np.float32)
    return x, np.float32(333.25), embeddings, first * (filled > 0), past


@pytest.mark.parametrize("filled", [PAST, 9, 1, 0])
def test_the_published_config(pair: Pair, filled: int) -> None:
    """A full past, that behind one chunk, behind an image alone, and none."""
    given = inputs((9, *PARTIAL), PARTIAL, filled)
    expected = pair.expected(*given)
    assert relative_error(pair.forward(*given), expected) < FLOAT32


@pytest.mark.thorough
@pytest.mark.parametrize(("batch", "shape", "tokens"), [(1, (2, 4, 4), 128), (2, (3, 2, 6), 129)])
def test_a_smaller_chunk(pair: Pair, batch: int, shape: tuple[int, int, int], tokens: int) -> None:
    """As in a pyramid: the past keeps its size."""
    given = inputs(shape, (8, 24), PAST, batch)
    expected = pair.expected(*given)
    assert relative_error(pair.forward(*given), expected) < FLOAT32
    assert len(pair.module.tables(shape, (8, 24))["cos"]) == tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_history_timestep": False, "is_amplify_history": True},
        {"guidance_cross_attn": False, "is_amplify_history": True, "history_scale_mode": "scalar"},
    ],
)
def test_other_configs(pair: Pair, changes: Mapping[str, Any]) -> None:
    other, given = Pair(**changes), inputs((2, *PARTIAL), PARTIAL, 9)
    expected = other.expected(*given)
    assert relative_error(other.forward(*given), expected) < FLOAT32
    assert relative_error(pair.expected(*given), expected) > 1e-2


def test_what_is_remembered(pair: Pair) -> None:
    """The last latent frames of all, and the first one of the first chunk."""
    frames = jnp.arange(PAST + 18, dtype=jnp.float32)[None, None, :, None, None]
    cache = {"past": frames[:, :, :PAST], "first": -frames[:, :, :1]}
    for number in (1, 2):
        chunk = frames[:, :, PAST + 9 * (number - 1) :][:, :, :9]
        first = pair.module.remember(cache, {}, chunk, jnp.int32(0), blocked_attention, jnp.float32)["first"]
        assert first.ravel().tolist() == [PAST + 9 * (number - 1)]
        cache = pair.module.remember(cache, {}, chunk, jnp.int32(number), blocked_attention, jnp.float32)
    assert cache["past"].ravel().tolist() == list(range(18, PAST + 18)) and cache["first"].item() == 0


DEVIATION = 0.5


def mean_of(frames: torch.Tensor) -> torch.Tensor:
    """Stands for the encoder: the latents' mode of frames (B, 3, F, H, W)."""
    scales = torch.linspace(-1, 1, 16)[:, None, None, None]
    return frames[:, :1, ::4, ::8, ::8] * scales + frames[:, 1:2, ::4, 4::8, 4::8].flip(2)


class NoVAE(torch.nn.Module):
    """What the pipelines call: they decode each chunk, also for latents."""

    dtype, device = torch.float32, torch.device("cpu")
    config = SimpleNamespace(
        latents_mean=[0.0], latents_std=[1.0], z_dim=1, scale_factor_temporal=4, scale_factor_spatial=8
    )

    def encode(self, frames: torch.Tensor) -> Any:
        mean = mean_of(frames)

        def sample(generator: torch.Generator) -> torch.Tensor:
            return mean + DEVIATION * torch.randn(mean.shape, generator=generator)

        return SimpleNamespace(latent_dist=SimpleNamespace(sample=sample))

    def decode(self, latents: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        del return_dict
        return (torch.zeros(1, 3, 33, 1, 1),)


def embeddings() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((2, 512, 32)).astype(np.float32)


def expected(pair: Pair, pipeline: Any, scheduler: Any, settings: Mapping[str, Any]) -> np.ndarray:
    positive, negative = (torch.from_numpy(one)[None] for one in embeddings())
    made = {name: settings[name] for name in ("is_distilled", "is_cfg_zero_star") if name in settings}
    pipe = pipeline(None, None, NoVAE(), scheduler, pair.reference, **made)
    pipe.set_progress_bar_config(disable=True)
    latents = pipe(
        prompt_embeds=positive,
        negative_prompt_embeds=negative,
        height=8 * SIZE[0],
        width=8 * SIZE[1],
        num_frames=33 * CHUNKS,
        generator=torch.Generator().manual_seed(SEED),
        output_type="latent",
        **{name: value for name, value in settings.items() if name not in made},
    ).frames
    return latents.numpy()  # type: ignore[no-any-return]


class Chunks:
    """The loop over chunks, stages and steps, with our transformer, tables and draws."""

    def __init__(
        self, pair: Pair, guidance: float = 1.0, projected: bool = False, zero_steps: int = 0
    ) -> None:
        self.pair, self.draw = pair, Noise(SEED)
        self.guidance, self.projected, self.zero_steps = guidance, projected, zero_steps
        self.past = np.zeros((1, 16, PAST, *SIZE), np.float32)
        self.first: np.ndarray | None = None

    def begin(self, given: Given) -> None:
        past = given.past(self.draw)
        self.past, self.first = past.past, past.first

    def velocity(self, x: np.ndarray, t: np.float32) -> np.ndarray:
        def of(prompt: int) -> np.ndarray:
            text = embeddings()[prompt : prompt + 1]
            first = np.zeros_like(self.past[:, :, :1]) if self.first is None else self.first
            return np.asarray(self.pair.forward(x, t, text, first, self.past))

        if self.guidance == 1:
            return of(0)
        conditional, unconditional = of(0), of(1)
        if self.projected:
            unconditional = unconditional * (np.vdot(conditional, unconditional) / np.sum(unconditional**2))
        return unconditional + np.float32(self.guidance) * (conditional - unconditional)

    def steps(self, x: np.ndarray, table: SolverTable) -> np.ndarray:
        starts, history = {start.step: start for start in table.starts}, dict[str, Any]()
        for step, (t, row) in enumerate(zip(table.timesteps, table.coefficients, strict=True)):
            if step in starts:
                x = enlarged(x, starts[step], self.draw, GAMMA) if step else x
                history = dict.fromkeys(HISTORY, jnp.zeros(x.shape))
            velocity = np.zeros_like(x) if step < self.zero_steps else self.velocity(x, t)
            after, history = solver_step(jnp.asarray(x), jnp.asarray(velocity), history, row)
            x = np.asarray(after)
        return x

    def make(self, *chunks: SolverTable) -> np.ndarray:
        made = []
        for table in chunks:
            x = self.draw((1, 16, FRAMES, *SIZE))
            for _ in table.starts[1:]:
                x = halved(x)
            x = self.steps(x, table)
            self.first = x[:, :, :1] if self.first is None else self.first
            self.past = np.concatenate([self.past, x], axis=2)[:, :, -PAST:]
            made.append(x)
        return np.concatenate(made, axis=2)


@pytest.mark.parametrize("shift", [None, "exponential"])
def test_base(pair: Pair, shift: str | None) -> None:
    scheduler = HeliosScheduler(stages=1, use_dynamic_shifting=shift is not None)
    reference = expected(pair, HeliosPipeline, scheduler, {"num_inference_steps": 4, "guidance_scale": 2.0})
    stages = chunk_table("unipc", (4,), TOKENS, shift)
    assert relative_error(Chunks(pair, guidance=2.0).make(stages, stages), reference) < FLOAT32


@pytest.mark.thorough
def test_mid(pair: Pair) -> None:
    """Three resolutions with CFG-Zero*, whose first steps of a chunk have no velocity."""
    scheduler = HeliosScheduler(gamma=GAMMA, use_dynamic_shifting=True, time_shift_type="linear")
    settings = {
        "pyramid_num_inference_steps_list": [3, 2, 3],
        "guidance_scale": 2.0,
        "is_cfg_zero_star": True,
    }
    reference = expected(pair, HeliosPyramidPipeline, scheduler, settings)
    stages = chunk_table("unipc", (3, 2, 3), TOKENS, "linear", GAMMA)
    found = Chunks(pair, 2.0, projected=True, zero_steps=2).make(stages, stages)
    assert relative_error(found, reference) < FLOAT32


def test_distilled(pair: Pair) -> None:
    """The first chunk has twice the steps."""
    scheduler = HeliosDMDScheduler(gamma=GAMMA, use_dynamic_shifting=True)
    settings = {"pyramid_num_inference_steps_list": [2, 2, 2], "guidance_scale": 1.0, "is_distilled": True}
    settings |= {"is_amplify_first_chunk": True}
    reference = expected(pair, HeliosPyramidPipeline, scheduler, settings)
    first, later = (chunk_table("dmd", (steps,) * 3, TOKENS, "linear", GAMMA) for steps in (4, 2))
    assert relative_error(Chunks(pair).make(first, later), reference) < FLOAT32


def encoded(frames: np.ndarray) -> Latents:
    """What ``NoVAE`` makes of frames (F, H, W, 3)."""
    video = torch.from_numpy(frames).permute(3, 0, 1, 2)[None]
    mean = mean_of(2 * video - 1).numpy()
    return Latents(mean, np.full_like(mean, DEVIATION))


def test_from_an_image(pair: Pair) -> None:
    """The noise of the image, and the latents of a video that stands still, before the first chunk."""
    image = np.random.default_rng(8).random((1, 8 * SIZE[0], 8 * SIZE[1], 3), np.float32)
    settings = {
        "num_inference_steps": 2,
        "guidance_scale": 1.0,
        "image": torch.from_numpy(image).movedim(3, 1),
    }
    reference = expected(pair, HeliosPipeline, HeliosScheduler(stages=1), settings)
    chunks, stages = Chunks(pair), chunk_table("unipc", (2,), TOKENS)
    chunks.begin(Given(encoded(image), [encoded(image.repeat(33, axis=0))], 0, True, PAST))
    before = chunks.past[:, :, -1:]
    found = np.concatenate([before, chunks.make(stages, stages)], axis=2)
    assert relative_error(found, reference) < FLOAT32


@pytest.mark.parametrize("frames", [40, 140])
def test_from_a_video(pair: Pair, frames: int) -> None:
    """Of one and of four chunks, which leave out frames at its beginning: of four the last three count."""
    video = np.random.default_rng(9).random((frames, 8 * SIZE[0], 8 * SIZE[1], 3), np.float32)
    given = torch.from_numpy(video).movedim(3, 1)[None]
    settings = {"num_inference_steps": 2, "guidance_scale": 1.0, "video": given}
    reference = expected(pair, HeliosPipeline, HeliosScheduler(stages=1), settings)
    chunks, stages = Chunks(pair), chunk_table("unipc", (2,), TOKENS)
    whole = [encoded(part) for part in np.split(video[frames % 33 :], frames // 33)]
    chunks.begin(Given(encoded(video[:1]), whole[-3:], len(whole[:-3]), False, PAST))
    made = chunks.make(stages, stages)
    assert relative_error(made, reference[:, :, -made.shape[2] :]) < FLOAT32
