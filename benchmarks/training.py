"""Trains a toy's transformers for a minute, by flow matching on smooth latents that depend on the prompt.

With random weights, the velocity is unrelated to the noise in a latent; a trained network's velocity removes
the noise. This is the smallest network of the second kind. It models nothing, but its velocity is mostly
predicted, changes with the prompt, and leads a sampler to smooth latents.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file

from wanbuild.components import KINDS
from wanbuild.mapping.engine import assign
from wanbuild.models.params import bind

TEXT = 16
"""The largest number of tokens of a training prompt."""


def smooth_noise(rng: np.random.Generator, shape: Sequence[int], cutoff: float = 0.08) -> np.ndarray:
    """Returns noise (..., T, h, w) without high frequencies, float32, with mean 0 and deviation 1 overall.

    Args:
        rng: the random generator.
        shape: shape of the array.
        cutoff: deviation of the Gaussian low-pass in cycles per cell, over time and space.
    """
    axes = tuple(range(-3, 0))
    squares = [np.fft.fftfreq(shape[axis]) ** 2 for axis in axes]
    distance = squares[0][:, None, None] + squares[1][:, None] + squares[2]
    spectrum = np.fft.fftn(rng.standard_normal(shape), axes=axes) * np.exp(-distance / (2 * cutoff**2))
    spectrum[..., 0, 0, 0] = 0  # otherwise each channel of a video would be almost constant
    values = np.fft.ifftn(spectrum, axes=axes).real
    return (values / values.std()).astype(np.float32)


def smooth_latents(shape: Sequence[int], seed: int) -> np.ndarray:
    """Returns latents (B, C, T, h, w) to decode: each video is half a still picture and half motion."""
    rng = np.random.default_rng(seed)
    still = smooth_noise(rng, (*shape[:2], 1, *shape[3:]))
    moving = smooth_noise(rng, shape)
    return ((still + moving) / math.sqrt(2)).astype(np.float32)


def train(
    source: Path, target: Path, latents_shape: Sequence[int], embeddings: np.ndarray, steps: int
) -> dict[str, float]:
    """Copies a checkpoint and trains its transformers, two experts on their own noise levels.

    A latent is a picture that belongs to the prompt plus one that is new each time, both smooth.

    Args:
        source: the checkpoint, a toy.
        target: the folder to create.
        latents_shape: (B, C, T, h, w) of the training latents.
        embeddings: float32 (P + 1, 512, text_dim) of P prompts, and of a negative one, which may mean any.
        steps: Adam steps per transformer.

    Returns:
        By transformer, the share of the velocity's variance that is not predicted at the end.
    """
    staging = target.with_name(f"{target.name}.new")
    shutil.copytree(source, staging, dirs_exist_ok=True)
    boundary = json.loads((source / "model_index.json").read_text()).get("boundary_ratio")
    levels = {"transformer": (boundary or 0.0, 1.0)}
    if boundary:
        levels["transformer_2"] = (0.0, boundary)
    shape = tuple(latents_shape[1:])
    prompts = len(embeddings) - 1
    pictures = smooth_latents((prompts, *shape), seed=1)
    text = np.float32(embeddings[:, : TEXT + 1])
    assert not embeddings[:, TEXT:].any(), "a prompt is too long"
    videos = max(2, 288 // math.prod(shape[1:]))  # of each prompt in a step
    left = {}
    for name, (low, high) in levels.items():
        (file,) = (staging / name).glob("*.safetensors")
        weights = _start(load_file(file))
        rng = np.random.default_rng(2)
        config = json.loads((staging / name / "config.json").read_text())
        update, state = _update(config, weights, shape, steps, embeddings.shape[1] - TEXT)
        shares = []
        for _ in range(steps):
            # The pictures for the negative prompt are drawn at random.
            which = np.append(np.repeat(np.arange(prompts), videos), rng.integers(prompts, size=videos))
            drawn = smooth_latents((len(which), *shape), int(rng.integers(2**31)))
            clean, noise = 0.8 * pictures[which] + 0.6 * drawn, rng.standard_normal(drawn.shape)
            sigma = np.float32(rng.uniform(low, high, (len(which), 1, 1, 1, 1)))
            noisy = np.float32((1 - sigma) * clean + sigma * noise)
            weights, state, share = update(weights, state, text, noisy, sigma, np.float32(noise - clean))
            shares.append(float(share))
        save_file({key: np.asarray(value) for key, value in weights.items()}, file, metadata={"format": "pt"})
        left[name] = float(np.mean(shares[-50:]))
    staging.rename(target)
    return left


def _start(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns weights with small residual branches and a head that inverts the patch embedding.

    Learning that inverse would take the whole minute.
    """
    patch = weights["patch_embedding.weight"]
    inverse = np.linalg.pinv(patch.reshape(len(patch), -1)).reshape(*patch.shape[1:], -1)
    weights["proj_out.weight"] = np.ascontiguousarray(
        np.moveaxis(inverse, 0, -2).reshape(-1, len(patch)), np.float32
    )
    for key in weights:
        if key.endswith(("to_out.0.weight", "net.2.weight")):
            weights[key] = weights[key] / 4
    return weights


def _update(
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    shape: Sequence[int],
    steps: int,
    padding: int,
) -> tuple[Any, Any]:
    """Returns an Adam step on a transformer's tensors by checkpoint name, and the optimizer's initial state.

    The step takes the text up to ``TEXT`` tokens and one padding token.
    """
    kind = KINDS["transformer"]
    parsed = kind.parse(config, "config.json")
    module = kind.module(parsed, kind.policy("float32"))
    assignments, problems = assign(
        kind.rules, {key: x.shape for key, x in weights.items()}, module, "transformer"
    )
    assert not problems, problems

    def parameters(weights: Mapping[str, Any]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for one in assignments:
            rows = [weights[fill.key].reshape(one.fill_shape) for fill in one.fills]  # no transform permutes
            *folders, leaf = one.path.split("/")
            node = tree
            for folder in folders:
                node = node.setdefault(folder, {})
            node[leaf] = jnp.stack(rows) if one.stacked else rows[0]
        return tree

    def attention(q: Any, k: Any, v: Any) -> Any:
        # Embeddings after a prompt are zero, so their keys are one key, repeated: four times as fast.
        bias = jnp.zeros(k.shape[1]).at[-1].set(math.log(padding)) if k.shape[1] == TEXT + 1 else None
        return jax.nn.dot_product_attention(q, k, v, bias)

    def loss(weights: Any, text: Any, noisy: Any, sigma: Any, velocity: Any) -> Any:
        model = bind(module, parameters(weights))
        kv, rope = model.prepare(text, shape[1:], jnp.float32)
        found = model(noisy, 1000 * sigma.reshape(-1), kv, rope, attention, jnp.float32)
        return jnp.mean(jnp.square(found - velocity)) / jnp.mean(jnp.square(velocity))

    rate = optax.cosine_onecycle_schedule(steps, 1 / parsed.dim, 0.1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    @jax.jit
    def update(weights: Any, state: Any, *example: Any) -> tuple[Any, Any, Any]:
        share, gradient = jax.value_and_grad(loss)(weights, *example)
        changes, state = optimizer.update(gradient, state)
        return optax.apply_updates(weights, changes), state, share

    return update, optimizer.init(weights)
