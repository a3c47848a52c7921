"""A VAE that is stored and computed in bfloat16, against diffusers in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan

import wanrun
from wanrun.artifact.manifest import read_manifest
from wanrun.denoising.noise import initial_noise


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
