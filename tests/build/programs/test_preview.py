"""The map from latents to colours, fitted to decoders that are known."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanbuild.programs import preview
from wanbuild.programs.preview import decoder_of, fitted, with_preview
from wanrun import load, open_artifact

GREY = np.array([100.0, 120.0, 140.0])


@pytest.mark.parametrize(("channels", "spatial"), [(16, 8), (48, 16)])
def test_the_fit_finds_a_linear_decoder(channels: int, spatial: int) -> None:
    """Of as many draws as it needs, of a frame of 192 pixels."""
    rows = np.random.default_rng(1).normal(0, 20, (channels, 3))
    decoded: list[np.ndarray] = []

    def decode(latents: np.ndarray) -> np.ndarray:
        assert latents.shape == (channels, 1, 192 // spatial, 192 // spatial)
        decoded.append(latents)
        noise = np.random.default_rng(len(decoded)).normal(0, 2, (*latents.shape[2:], 3))
        return np.asarray(np.moveaxis(latents[:, 0], 0, -1) @ rows + GREY + noise)

    *found, grey = np.array(fitted(decode, channels, spatial))
    np.testing.assert_allclose(found, rows, rtol=0.01, atol=0.3)
    np.testing.assert_allclose(grey, GREY, rtol=0, atol=0.3)
    assert (len(decoded) - 1) * 36 < 5 * (channels + 1) <= len(decoded) * 36


@pytest.mark.thorough
def test_the_decoder_is_that_of_videos(toy_artifact: Path) -> None:
    """What a video's first frame is in the mean; the map is the one that compile has written."""
    artifact = open_artifact(toy_artifact)
    assert with_preview(artifact, pytest.fail) is artifact
    with load(toy_artifact, embeddings="none") as pipeline:
        latents = np.random.default_rng(0).standard_normal(pipeline.latents_shape, np.float32)
        frame = pipeline.decode(latents)[0, 0]
    height, width = latents.shape[3:]
    expected = frame.reshape(height, 8, width, 8, 3).mean((1, 3))
    np.testing.assert_allclose(decoder_of(artifact)(latents[0, :, :1]), expected, rtol=0, atol=0.6)


def test_it_is_fitted_where_there_is_no_cpu(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of JAX_PLATFORMS=cuda: on the first device that JAX has."""
    own, used, devices = open_artifact(artifact), list[jax.Device](), jax.local_devices

    def local_devices(backend: str | None = None) -> list[jax.Device]:
        if backend == "cpu":
            raise RuntimeError
        return devices()[::-1]

    def fit(*_: object) -> tuple[tuple[float, ...], ...]:
        used.extend(jnp.zeros(1).devices())
        return own.manifest.preview

    monkeypatch.setattr(jax, "local_devices", local_devices)
    monkeypatch.setattr(preview, "fitted", fit)
    lines = list[str]()
    assert with_preview(own.changed(preview=()), lines.append).manifest.preview == own.manifest.preview
    assert used == devices()[-1:] and len(lines) == 1
