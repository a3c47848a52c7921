"""Runs single parts of an artifact's path to a video, for a comparison with another implementation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wanbuild.components import KINDS
from wanbuild.models.params import bind
from wanrun.denoising.noise import Noise
from wanrun.denoising.steps import Denoising, ExpertRange, velocity_table
from wanrun.generation.pipeline import Pipeline
from wanrun.media.inputs import Inputs
from wanrun.timing.timings import Timings


def image_tokens(pipeline: Pipeline, inputs: Inputs) -> np.ndarray:
    """Returns the image encoder's tokens, (N, tokens, image_dim) in the compute dtype."""
    conditions = pipeline.session(pipeline.profile).conditioning(inputs, timings=Timings())
    return np.asarray(conditions.prepare["image_tokens"])


def start_latents(pipeline: Pipeline, video: np.ndarray) -> np.ndarray:
    """Returns the normalised latents (1, C, T, h, w) of a start video, uint8 (F, H, W, 3)."""
    conditions = pipeline.session(pipeline.profile).conditioning(
        Inputs({"start_video": video}), timings=Timings()
    )
    assert conditions.start is not None
    return np.array(conditions.start)[None]


def mean_latents(pipeline: Pipeline, video: np.ndarray) -> np.ndarray:
    """Returns the VAE's mean latents of a video, float32 (1, 3, F, H, W) in -1 to 1, from the definition."""
    import jax

    manifest, kind = pipeline.manifest, KINDS["vae"]
    module = kind.module(kind.parse(manifest.configs["vae"], "vae"), manifest.dtypes["vae"])
    encode = jax.jit(lambda weights, x: bind(module, weights).encode(x, 1)[0])
    return np.asarray(encode(pipeline.component_weights("vae"), np.moveaxis(video, 1, -1)))


def velocity(
    pipeline: Pipeline,
    latents: np.ndarray,
    prompts: Sequence[str],
    timestep: float,
    steps: ExpertRange,
    inputs: Inputs | None = None,
) -> np.ndarray:
    """Returns the model's guided velocity, float32 of the shape of ``latents``; a held frame has no velocity.

    It is as exact as the profile's dtype of latents.

    Args:
        pipeline: has the profile loaded, and no other thread uses it.
        latents: float32 (B, C, T, h, w).
        prompts: the positive prompt, and with guidance the negative one after it.
        timestep: in training timesteps, 0 to 1000.
        steps: one step of the expert, with its guidance scale.
        inputs: images and videos, for one window.
    """
    session, embeddings = pipeline.session(pipeline.profile), pipeline.encode_prompts(prompts)
    run = Denoising(velocity_table(timestep), [steps], embeddings, session.loop, Timings())
    conditions = session.conditioning(inputs, timings=Timings())
    return latents - session.denoise(run, latents, conditions, Noise(0))
