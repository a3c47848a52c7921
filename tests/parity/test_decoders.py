"""Decoders that are not diffusers' VAE in float32: the tiny one, and the VAE in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from tinywan.learning.tiny_decoder import TinyDecoder
from torch.nn import functional

import wanrun
from helpers.compiling import fast_jit
from helpers.naive import load_params
from helpers.tiny_decoder import tiny_state
from wanbuild.config import ConfigError
from wanbuild.mapping.vae_rules import TINY_VAE_RULES
from wanbuild.models.params import bind
from wanbuild.models.tiny_vae import TinyVAE
from wanbuild.models.vae_config import TinyVAEConfig
from wanrun.artifact.manifest import read_manifest
from wanrun.denoising.noise import initial_noise

WIDTHS = (24, 20, 16, 18)
STRIDES = (1, 2, 2)

Memory = dict[int, torch.Tensor]
"""By a block's number, the frame before those that it is given."""


class Judge:
    """The published layers by their numbers; frames are (T, C, H, W)."""

    def __init__(self, state: Mapping[str, np.ndarray], patch: int) -> None:
        self._state, self._patch = {name: torch.from_numpy(one) for name, one in state.items()}, patch

    def _conv(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._state[f"decoder.{name}.weight"], self._state.get(f"decoder.{name}.bias")
        return functional.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)

    def _block(self, x: torch.Tensor, number: int, memory: Memory) -> torch.Tensor:
        past = torch.cat([memory.get(number, torch.zeros_like(x[:1])), x[:-1]])
        memory[number] = x[-1:]
        y = torch.cat([x, past], 1)
        for layer in (0, 2, 4):
            y = self._conv(functional.relu(y) if layer else y, f"{number}.conv.{layer}")
        return functional.relu(y + x)

    def _some(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        x = functional.relu(self._conv(3 * torch.tanh(x / 3), "1"))
        for level, stride in enumerate(STRIDES):
            first = 3 + 6 * level
            for number in range(first, first + 3):
                x = self._block(x, number, memory)
            x = functional.interpolate(x, scale_factor=2, mode="nearest")
            grown = self._conv(x, f"{first + 4}.conv")[:, -stride * x.shape[1] :]
            x = self._conv(grown.reshape(-1, *x.shape[1:]), str(first + 5))
        return functional.pixel_shuffle(self._conv(functional.relu(x), "22"), self._patch).clamp(0, 1)

    def __call__(self, latents: np.ndarray, at_once: bool) -> np.ndarray:
        """Latents (C, T, h, w) to frames (F, H, W, 3) in [0, 1]."""
        x, memory = torch.from_numpy(latents).transpose(0, 1), Memory()
        pieces = [x] if at_once else list(x.split(1))
        video = torch.cat([self._some(piece, memory) for piece in pieces])
        return video[3:].permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize(
    ("channels", "patch", "stored", "chunk"), [(16, 1, (1, 2, 2), 1), (48, 2, (2, 2, 2), 2)]
)
def test_frames_match_torch(channels: int, patch: int, stored: tuple[int, ...], chunk: int) -> None:
    """taew2_1's form and taew2_2's; some files have weights of a level for more frames than it makes."""
    state = tiny_state(channels, patch, WIDTHS, stored)
    module = TinyVAE(TinyVAEConfig(channels, WIDTHS, stored, patch))
    latents = 2 * np.random.default_rng(0).standard_normal((channels, 3, 3, 5), np.float32)
    at_once, one_by_one = (Judge(state, patch)(latents, form) for form in (True, False))
    assert at_once.std() > 0.05 and np.mean((at_once == 0) | (at_once == 1)) < 0.1
    assert np.abs(at_once - one_by_one).max() < 1e-5
    if patch == 1:
        trained = TinyDecoder(WIDTHS, videos=1)
        trained.load_state_dict(
            {name: torch.from_numpy(one) for name, one in state.items() if name[0] == "d"}
        )
        with torch.no_grad():
            (video,) = (trained(torch.from_numpy(latents[None])) + 1) / 2
        assert np.abs(video.clamp(0, 1).permute(1, 2, 3, 0).numpy() - at_once).max() < 1e-5
    params = load_params(state, TINY_VAE_RULES, module)
    decode = fast_jit(lambda params, latents: bind(module, params).decode(latents[None], chunk)[0])
    found = np.asarray(decode(params, latents))
    assert found.shape == (9, 24 * patch, 40 * patch, 3)
    assert np.abs(found - at_once).max() < 1e-5


def test_other_levels_are_none() -> None:
    for changed in ({"widths": (8, 8)}, {"stored_frames": (1, 2)}, {"stored_frames": (1, 1, 2)}):
        with pytest.raises(ConfigError, match="not fit"):
            TinyVAEConfig(16, **changed)


def test_a_bfloat16_vae_decodes(bfloat16_vae_artifact: Path, toy_checkpoint: Path) -> None:
    parameters = read_manifest(bfloat16_vae_artifact).components["vae"].parameters
    convolutions = {p.layout.dtype for path, p in parameters.items() if "conv" in path}
    assert convolutions == {"bfloat16"}
    latents = initial_noise(3, (1, 16, 1, 2, 4))
    with wanrun.load(bfloat16_vae_artifact, embeddings="none", lazy=True) as pipeline:
        frames = pipeline.decode(latents)
    assert frames.shape == (1, 1, 16, 32, 3) and frames.dtype == np.uint8
    error = frames[0] / 127.5 - 1 - decoded_by_reference(toy_checkpoint, latents)
    levels = np.sqrt(np.mean(np.square(error))) * 127.5
    print(f"{levels:.2f} levels")
    # Seen 0.49, of which rounding to uint8 is 0.29; the rest is 0.3 % of the range's half, 127 levels.
    assert 0.3 < levels < 1


def decoded_by_reference(checkpoint: Path, latents: np.ndarray) -> np.ndarray:
    """Frames (T, H, W, 3) in [-1, 1] of latents (1, C, T, h, w), by diffusers in float32."""
    vae = AutoencoderKLWan.from_pretrained(str(checkpoint / "vae"), local_files_only=True).eval()
    mean, std = (
        torch.tensor(values).reshape(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    with torch.no_grad():
        video = vae.decode(torch.from_numpy(latents) * std + mean, return_dict=False)[0]
    return video[0].permute(1, 2, 3, 0).clamp(-1, 1).numpy()
