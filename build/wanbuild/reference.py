"""Compares an artifact with diffusers on the checkpoint it was made from, component by component.

The artifact's side runs its own executables, as ``wanrun`` does; only the VAE encoder, which a
text-to-video artifact holds but has no program for, is run from the model definition. The reference
runs in float32 on the CPU. Needs the test extra (torch, diffusers, transformers).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from wanbuild.components import KINDS, DtypePolicy
from wanbuild.embed import open_profile
from wanbuild.hub import locate_source
from wanbuild.models.params import bind
from wanbuild.source import open_source
from wanrun.errors import UsageError, VerificationError
from wanrun.experts import boundary_between, schedule, transformers
from wanrun.manifest import Manifest, read_manifest
from wanrun.noise import initial_noise
from wanrun.pipeline import Pipeline
from wanrun.prompt import clean_prompt
from wanrun.select import select_profile

PROMPT = "A red fox runs through fresh snow at dawn, 4K &amp; slow motion"
NEGATIVE_PROMPT = "blurry, static"
SEED = 7
GUIDANCE_SCALE, GUIDANCE_SCALE_2 = 5.0, 3.0
"""They differ, so that experts that are given each other's are noticed."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Args:
        name: what was compared.
        error: relative error ‖a−b‖/‖b‖; for frames in float32 the share of uint8 values off by more than
            one level, and in bfloat16 the root mean square error over the range of 255.
        limit: the largest that passes.
        note: more figures.
    """

    name: str
    error: float
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.error <= self.limit)


LIMITS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        # float32 sums in another order are worth 1e-6; 1e-5 on the final latents is the aim and 2e-4 a
        # different computation. Frames may differ where a value lies between two levels.
        "float32": {"component": 1e-4, "latents": 1e-5, "frames": 1e-3},
        # bfloat16 has 8 bits: 4e-3 a rounding, about 1e-2 after a transformer, 2e-2 with guidance; another
        # computation is off by 1e-1 and more. Its frames are bounded by their RMS error (5e-2 is 26 dB).
        "bfloat16": {"component": 5e-2, "latents": 1e-1, "frames": 5e-2},
    }
)


def relative_error(value: np.ndarray, reference: np.ndarray) -> float:
    """‖value − reference‖ / ‖reference‖ in float64."""
    reference = np.asarray(reference, np.float64)
    return float(np.linalg.norm(np.asarray(value, np.float64) - reference) / np.linalg.norm(reference))


def _load_reference(source: Path) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import torch
        from diffusers import WanPipeline
    except ImportError as error:
        raise UsageError(
            f"the reference is not installed: {error}", remedy="pip install 'wanrun[test]'"
        ) from None
    pipe = WanPipeline.from_pretrained(str(source), dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class _Comparison:
    """One artifact profile against one reference pipeline."""

    def __init__(self, pipeline: Pipeline, pipe: Any) -> None:
        self._ours, self._pipe = pipeline, pipe
        self._profile = pipeline.profile
        self._transformers = transformers(pipeline.manifest)
        self._text_dtype = self._coarser(["dtype"], ["text_encoder"])
        self._dtype = self._coarser(["dtype", "scheduler_dtype"], ["text_encoder", *self._transformers])
        self._vae_dtype = self._coarser(["vae_dtype"], ["vae"])
        self._video_dtype = "float32" if self._dtype == self._vae_dtype == "float32" else "bfloat16"
        self._limits, self._vae_limits = LIMITS[self._dtype], LIMITS[self._vae_dtype]
        self._prompts = [PROMPT, NEGATIVE_PROMPT] if self._profile.guidance else [PROMPT]

    def _coarser(self, options: Sequence[str], components: Sequence[str]) -> str:
        """bfloat16 if these components are stored in it, or one of the build options says it."""
        stored = [self._ours.manifest.dtypes[name]["weights"] for name in components]
        chosen = [self._profile.options[name] for name in options]
        return "bfloat16" if "bfloat16" in [*stored, *chosen] else "float32"

    def text(self) -> Check:
        """Embeddings of the prompts."""
        import torch

        with torch.no_grad():
            prompts = [clean_prompt(prompt) for prompt in self._prompts]
            reference = self._pipe._get_t5_prompt_embeds(prompts, max_sequence_length=512)
        error = relative_error(self._ours.encode_prompts(self._prompts), reference.numpy())
        return Check("text_encoder", error, LIMITS[self._text_dtype]["component"])

    def experts(self) -> list[Check]:
        """Every expert's velocity at the first noise and a middle timestep, guidance included."""
        import torch

        with torch.no_grad():
            embeds = self._pipe._get_t5_prompt_embeds(self._prompts, max_sequence_length=512)
        return [self._transformer(name, embeds) for name in self._transformers]

    def _transformer(self, name: str, embeds: Any) -> Check:
        import torch

        noise, timestep = initial_noise(SEED, self._ours.latents_shape), 500.0
        model = getattr(self._pipe, name)
        with torch.no_grad():
            x, times = torch.from_numpy(noise), self._reference_timesteps(model, noise.shape, timestep)
            outputs = [
                model(x, times, e[None].expand(len(noise), -1, -1), return_dict=False)[0] for e in embeds
            ]
        guided = outputs[0]
        if len(outputs) == 2:
            guided = outputs[1] + GUIDANCE_SCALE * (outputs[0] - outputs[1])
        velocity = self._ours.velocity(noise, self._prompts, timestep, GUIDANCE_SCALE, transformer=name)
        return Check(name, relative_error(velocity, guided.numpy()), self._limits["component"])

    def _reference_timesteps(self, model: Any, shape: Sequence[int], timestep: float) -> Any:
        """For the reference's transformer: integers (B,), or float32 (B, tokens) where it expands them."""
        import torch

        if not self._pipe.config.expand_timesteps:
            return torch.full((shape[0],), int(timestep))
        grid = [size // patch for size, patch in zip(shape[2:], model.config.patch_size, strict=True)]
        return torch.full((shape[0], math.prod(grid)), timestep)

    def _latents_to_vae(self, latents: np.ndarray) -> Any:
        import torch

        config = self._pipe.vae.config
        mean = torch.tensor(config.latents_mean).view(1, -1, 1, 1, 1)
        std = 1.0 / torch.tensor(config.latents_std).view(1, -1, 1, 1, 1)
        return torch.from_numpy(latents) / std + mean

    def decode(self) -> Check:
        """uint8 frames of random latents."""
        import torch

        latents = initial_noise(SEED + 1, self._ours.latents_shape)
        with torch.no_grad():
            video = self._pipe.vae.decode(self._latents_to_vae(latents), return_dict=False)[0]
        frames = self._pipe.video_processor.postprocess_video(video, output_type="np")
        return self._frames("vae decode", self._ours.decode(latents), frames, self._vae_dtype)

    def encode(self) -> Check:
        """Moments of a random video, from the model definition with the artifact's weights."""
        import jax
        import torch

        manifest, dtypes = self._ours.manifest, self._ours.manifest.dtypes["vae"]
        kind = KINDS["vae"]
        config = kind.parse(manifest.configs["vae"], "vae")
        module = kind.module(config, DtypePolicy(dtypes["weights"], dtypes["norms"]))
        frames = min(self._profile.num_frames, 9)
        shape = (1, 3, frames, self._profile.height, self._profile.width)
        video = np.tanh(initial_noise(SEED + 2, shape))
        with torch.no_grad():
            reference = self._pipe.vae.encode(torch.from_numpy(video)).latent_dist.mode().numpy()
        encode = jax.jit(lambda weights, x: bind(module, weights).encode(x, 1)[0])
        mean = encode(self._ours.component_weights("vae"), np.moveaxis(video, 1, -1))
        return Check("vae encode", relative_error(np.asarray(mean), reference), self._vae_limits["component"])

    def _frames(self, name: str, frames: np.ndarray, reference: np.ndarray, dtype: str) -> Check:
        expected = np.round(reference * 255)
        difference = np.abs(frames.astype(np.float64) - expected)
        mean_square = float(np.mean(np.square(difference)))
        psnr = 10 * np.log10(255**2 / mean_square) if mean_square else float("inf")
        error = float(np.mean(difference > 1)) if dtype == "float32" else np.sqrt(mean_square) / 255
        note = f"PSNR {psnr:.1f} dB, largest difference {difference.max():.0f}"
        return Check(name, float(error), LIMITS[dtype]["frames"], note)

    def video(self, steps: int) -> list[Check]:
        """The whole path from prompt to frames, from the same seed."""
        import torch

        options, note = self._expert_options(steps)
        guidance = GUIDANCE_SCALE if self._profile.guidance else 1.0
        arguments = {
            "prompt": PROMPT,
            "negative_prompt": NEGATIVE_PROMPT,
            "height": self._profile.height,
            "width": self._profile.width,
            "num_frames": self._profile.num_frames,
            "num_inference_steps": steps,
            "num_videos_per_prompt": self._profile.num_videos,
            "guidance_scale": guidance,
            "guidance_scale_2": options.get("guidance_scale_2"),
            "generator": torch.Generator("cpu").manual_seed(SEED),
        }
        if "boundary" in options:
            self._pipe.register_to_config(boundary_ratio=options["boundary"])
        latents = self._pipe(**arguments, output_type="latent").frames
        with torch.no_grad():
            decoded = self._pipe.vae.decode(self._latents_to_vae(latents.numpy()), return_dict=False)[0]
        frames = self._pipe.video_processor.postprocess_video(decoded, output_type="np")
        ours = self._ours.generate(
            PROMPT, NEGATIVE_PROMPT, seed=SEED, num_steps=steps, guidance_scale=guidance, **options
        )
        error = relative_error(ours.latents, latents.numpy())
        return [
            Check("final latents", error, self._limits["latents"], note),
            self._frames("video", ours.frames, frames, self._video_dtype),
        ]

    def _expert_options(self, steps: int) -> tuple[dict[str, Any], str]:
        """Options of a generation in which every expert takes steps, if there are as many; and a note.

        The boundary is the checkpoint's where both experts run with it, else in the middle of the steps.
        """
        manifest = self._ours.manifest
        if (boundary := boundary_between(manifest, steps)) is None:
            return {}, f"{steps} steps"
        options = {
            "boundary": boundary,
            "guidance_scale_2": GUIDANCE_SCALE_2 if self._profile.guidance else 1.0,
        }
        _, parts = schedule({**manifest.model["defaults"], "num_steps": steps, **options}, manifest)
        counts = [f"{part.last - part.first} of {part.transformer}" for part in parts]
        return options, f"{steps} steps, {' and '.join(counts)}, boundary {boundary:g}"


def _readable_source(manifest: Manifest, source: str) -> Path:
    """The folder of a source that the reference can load, and that says all of what is in the artifact."""
    if manifest.loras:
        raise UsageError(
            "the artifact has LoRAs merged, and the reference would have none",
            remedy="compare an artifact of the same checkpoint without them",
        )
    located = locate_source(source, None if Path(source).exists() else manifest.source["revision"])
    with open_source(located.path) as opened:  # says what is wrong with a folder that is no checkpoint
        if any(component.stored for component in opened.components.values()):
            raise UsageError(
                f"{source} has weights in the original naming, which the reference cannot load",
                remedy="give the same checkpoint in the diffusers layout",
            )
    return located.path


def compare_with_reference(artifact: Path, source: str, steps: int, report: Report) -> dict[str, Any]:
    """Compares the first built profile with diffusers and reports a table of errors.

    Args:
        artifact: the artifact's folder.
        source: the checkpoint folder or hub id it was made from.
        steps: denoising steps of the whole video.
        report: told one line per check.

    Returns:
        Every check by name.

    Raises:
        UsageError: if the reference is not installed, or cannot load what the artifact was made from.
        VerificationError: naming the checks that failed.
    """
    manifest = read_manifest(artifact)
    profile = min(manifest.profiles.values(), key=lambda p: p.index, default=None)
    if profile is None:
        select_profile(manifest, artifact)  # raises, saying what to do
    assert profile is not None
    pipe = _load_reference(_readable_source(manifest, source))
    with open_profile(artifact, profile) as pipeline:
        comparison = _Comparison(pipeline, pipe)
        report(f"{profile.name}, {profile.options['dtype']} against diffusers in float32")
        report(f"{'component':<14} {'error':>10} {'limit':>10}")
        checks = [comparison.text(), *comparison.experts(), comparison.encode(), comparison.decode()]
        checks += comparison.video(steps)
    for check in checks:
        verdict = "ok" if check.passed else "FAILED"
        report(f"{check.name:<14} {check.error:>10.2e} {check.limit:>10.0e}  {verdict:<6} {check.note}")
    failed = [check for check in checks if not check.passed]
    if failed:
        raise VerificationError(
            "the artifact differs from the reference: "
            + ", ".join(f"{check.name} {check.error:.1e} (limit {check.limit:.0e})" for check in failed),
            remedy="check that --source is the checkpoint the artifact was made from",
        )
    return {check.name: asdict(check) for check in checks}
