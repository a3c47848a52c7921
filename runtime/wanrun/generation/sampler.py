"""Makes frames from noise and conditions: the whole video at once, or a long one window by window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.denoising.expert_loop import Denoising, ExpertLoop
from wanrun.denoising.noise import Noise
from wanrun.generation.conditioning import Conditioning
from wanrun.media.types import Inputs
from wanrun.media.windows import Window, windows
from wanrun.request.options import latents_shape, leading_latents
from wanrun.timing.timings import Timings
from wanrun.weights.programs import Programs


class Sampler:
    """Denoises and decodes.

    Args:
        programs: the profile's programs, with their weights.
        manifest: the artifact's manifest.
        profile: the profile.
        conditioning: encodes images and videos.
        expert_loop: the denoising loop.
    """

    def __init__(
        self,
        programs: Programs,
        manifest: Manifest,
        profile: Profile,
        conditioning: Conditioning,
        expert_loop: ExpertLoop,
    ) -> None:
        self._programs, self._profile, self._conditioning = programs, profile, conditioning
        self._expert_loop, self._shape = expert_loop, latents_shape(manifest, profile)
        self._leading, self._task = leading_latents(manifest, profile), manifest.model.task

    def decode(self, latents: np.ndarray, timings: Timings) -> tuple[np.ndarray, Mapping[str, Any]]:
        """Decodes latents, one video at a time.

        Args:
            latents: normalised, float32 (B, C, T, h, w), with the leading latent frames.
            timings: where the time is recorded.

        Returns:
            Frames, uint8 (B, F, H, W, 3), and all outputs of the programs for the last video, on the device.
        """
        programs = [self._programs.bound(name) for name in self._programs.with_role("decode")]
        with timings.phase("decode", f"{len(latents) * self._profile.num_frames} frames"):
            frames, made = [], dict[str, Any]()
            for one in latents[:, :, self._leading :]:
                made = {"latents": one}
                for program in programs:
                    made |= program(**made)
                frames.append(np.asarray(made["frames"]))
            return np.stack(frames), made

    def __call__(
        self,
        run: Denoising,
        options: Mapping[str, Any],
        inputs: Inputs | None = None,
        latents: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Makes a profile's videos.

        All noise comes from one random generator with the seed. Each window draws its initial noise, unless
        latents replace it, and then the noise of each step if the solver adds noise. The next window
        continues with the same generator. Each array of noise covers all videos of the batch, in their order.
        diffusers draws in the same order.

        Args:
            run: the parameters of the denoising loop.
            options: the generation's resolved options.
            inputs: images and videos; None for text alone.
            latents: initial noise of the first window, instead of the seed's.

        Returns:
            Frames, uint8 (B, F, H, W, 3), and the final latents, float32 (B, C, T, h, w); those of the last
            window if there are several.
        """
        noise, overlap = Noise(options["seed"]), 1 if inputs is None else inputs.segment_overlap
        parts: list[np.ndarray] = []
        final, carried = np.empty(0), dict[str, Any]()
        for window in self._windows(inputs, overlap):
            conditions = self._conditioning(
                inputs, timings=run.timings, window=window, carried=carried, options=options
            )
            start = latents if latents is not None and not parts else noise(self._shape)
            done, count = len(parts), 1 if window is None else window.count

            def on_step(step: int, steps: int, done: int = done, count: int = count) -> None:
                run.on_step(done * steps + step, count * steps)

            final = self._expert_loop(replace(run, on_step=on_step, draw=noise), start, conditions)
            frames, made = self.decode(final, run.timings)
            carried = self._carried(made)
            parts.append(frames[:, overlap if parts else 0 :])
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return whole[:, : None if inputs is None else inputs.num_frames], final

    def _carried(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the outputs of a window that the next one takes, by its inputs' names."""
        windowing = self._task.windows
        return {} if windowing is None else {key: made[name] for key, name in windowing.carried.items()}

    def _windows(self, inputs: Inputs | None, overlap: int) -> Sequence[Window | None]:
        """Returns the windows of a long video; one None if the profile makes the whole video at once."""
        windowing = self._task.windows
        if inputs is None or windowing is None:
            return [None]
        deciding = inputs.arrays[self._task.inputs[windowing.frames_of].array]
        return windows(len(deciding), self._profile.num_frames, overlap)
