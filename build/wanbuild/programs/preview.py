"""Fits the linear map from latents to colours that shows a preview of a video that is not yet decoded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import structs

from wanbuild.components import KINDS
from wanbuild.models.params import bind
from wanrun import Artifact
from wanrun.machine.environment import usable_cores
from wanrun.weights.restore import Restore

Colours = tuple[tuple[float, float, float], ...]
"""A map: ``wanrun.artifact.manifest.Manifest.preview``."""

Decode = Callable[[np.ndarray], np.ndarray]
"""Takes latents of a frame, float32 (C, 1, h, w), to the mean colours of their cells, 0 to 255 (h, w, 3)."""

ENCODES = ("encoder", "quant_conv")
"""The parts of a VAE that its decoder does not use."""

SQUARE_PIXELS = 32
"""Pixels of a side of the drawn squares. Of a trained VAE's map that is fitted to squares of 8, 16 and 32
pixels, that of 32 is nearest to made videos: docs/notes/runtime.md, "Previews"."""

FRAME_PIXELS = 192
"""Pixels of a side of the frame that they fill."""

SQUARES = 5
"""Squares for each unknown of the map."""

SHRINK = 1e-3
"""Share of the squares that is added to the diagonal, so that no colour depends on only a few of them."""


def with_preview(artifact: Artifact, report: Callable[[str], None]) -> Artifact:
    """Returns the artifact with the map of its VAE, fitted if there is none; its manifest is not written.

    A decoder is compiled for this machine's CPU, whatever the targets are, or for the first device that
    JAX_PLATFORMS leaves; only its weights are read. An artifact whose weights are elsewhere stays as it is.
    ``report`` gets a line if a map is fitted. Raises ArtifactError if the weights are damaged.
    """
    vae = artifact.folder / artifact.manifest.components["vae"].folder
    if artifact.manifest.preview or not vae.is_dir():
        return artifact
    began = time.perf_counter()
    model = artifact.manifest.model
    with jax.default_device(_device()):
        preview = fitted(decoder_of(artifact), model.latent_channels, model.vae_spatial)
    report(f"the map of previews, from latents to colours, fitted in {time.perf_counter() - began:.1f} s")
    return artifact.changed(preview=preview)


def _device() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names only an accelerator
        return jax.local_devices()[0]


def fitted(decode: Decode, channels: int, spatial: int) -> Colours:
    """Returns the least squares fit of latents to the colours that they decode to.

    Latents of so many channels are drawn in squares from the normal distribution, one frame at a time; a side
    of a cell of latents has ``spatial`` pixels.
    """
    cells, side = SQUARE_PIXELS // spatial, FRAME_PIXELS // SQUARE_PIXELS
    generator = np.random.default_rng(0)
    latents, colours = list[np.ndarray](), list[np.ndarray]()
    for _ in range(math.ceil(SQUARES * (channels + 1) / side**2)):
        squares = generator.standard_normal((channels, 1, side, side), np.float32)
        drawn = squares.repeat(cells, 2).repeat(cells, 3)
        latents.append(drawn.reshape(channels, -1).T)
        colours.append(decode(drawn).reshape(-1, 3))
    inputs = np.pad(np.concatenate(latents).astype(np.float64), ((0, 0), (0, 1)), constant_values=1)
    penalty = SHRINK * len(inputs) * np.diag([1.0] * channels + [0.0])
    found = np.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ np.concatenate(colours))
    return tuple((round(red, 3), round(green, 3), round(blue, 3)) for red, green, blue in found.tolist())


def decoder_of(artifact: Artifact) -> Decode:
    """Returns the artifact's VAE decoder for single frames, in float32; nothing else of the VAE is read."""
    manifest, kind = artifact.manifest, KINDS["vae"]
    config = kind.parse(manifest.configs["vae"], "config of vae")
    module = kind.module(config, manifest.dtypes["vae"])
    component = manifest.components["vae"]
    parts = {
        path: parameter
        for path, parameter in component.parameters.items()
        if path.partition("/")[0] not in ENCODES
    }
    with ThreadPoolExecutor(usable_cores()) as pool:
        restore = Restore(artifact.folder, "vae", structs.replace(component, parameters=parts), pool)
        weights = restore.result()
    deviation, mean = (
        jnp.asarray(statistic, jnp.float32)[:, None, None, None]
        for statistic in (config.latents_std, config.latents_mean)
    )

    @jax.jit
    def decode(vae: Mapping[str, Any], latents: jax.Array) -> jax.Array:
        bound = bind(module, vae, without=ENCODES)
        (frame,) = bound.decode((latents * deviation + mean)[None], 1, algorithm="winograd")[0]
        height, width = latents.shape[2:]
        cells = frame.reshape(height, config.spatial, width, config.spatial, 3)
        return (cells.mean((1, 3)) + 1) * 127.5

    return lambda latents: np.asarray(decode(weights, latents))
