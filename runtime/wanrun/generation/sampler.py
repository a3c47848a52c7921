"""From noise and conditions to frames: at once, or for a long video one window after the other."""

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
from wanrun.generation.options import latents_shape, leading_latents
from wanrun.loading.programs import Programs
from wanrun.media.types import Inputs
from wanrun.media.windows import Window, windows
from wanrun.timing import Timings


class Sampler:
    """Denoises and decodes.

    Args:
        programs: the profile's, with their weights.
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
        self._leading = leading_latents(manifest, profile)

    def decode(self, latents: np.ndarray, timings: Timings) -> tuple[np.ndarray, Any]:
        """Decodes latents, one video at a time.

        Args:
            latents: normalised, (B, C, T, h, w), with the frames in front of the video's own.
            timings: where the time is recorded.

        Returns:
            Frames, uint8 (B, F, H, W, 3), and where a later window may need them the last ones of the only
            video, float32 (5, H, W, 3) in [-1, 1], on the device; else None.
        """
        decode_video = self._programs.bound("decode_video")
        with timings.phase("decode"):
            frames, last = [], None
            for one in latents[:, :, self._leading :]:
                video = decode_video(latents=one)
                frames.append(np.asarray(video["frames"]))
                last = video.get("last_frames")
            return np.stack(frames), last

    def __call__(
        self,
        run: Denoising,
        options: Mapping[str, Any],
        inputs: Inputs | None = None,
        latents: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Makes a video.

        All noise comes from one generator of the seed. A window takes its initial noise, unless latents are
        given in its place, then the noise of each of its steps, where the solver adds any. The next window
        goes on from there. Several videos share each array of noise, in their order. diffusers draws alike.

        Args:
            run: what to ask of the denoising loop.
            options: of the generation, resolved.
            inputs: images and videos; None for text alone.
            latents: initial noise of the first window, instead of the seed's.

        Returns:
            Frames, uint8 (B, F, H, W, 3), and the final latents, of the last window where there are several.
        """
        noise, overlap = Noise(options["seed"]), 1 if inputs is None else inputs.segment_overlap
        parts: list[np.ndarray] = []
        final, previous = np.empty(0), None
        for window in self._windows(inputs, overlap):
            conditions = self._conditioning(
                inputs,
                timings=run.timings,
                window=window,
                previous=previous,
                scale=options.get("conditioning_scale", 1.0),
            )
            start = latents if latents is not None and not parts else noise(self._shape)
            done, count = len(parts), 1 if window is None else window.count

            def on_step(step: int, steps: int, done: int = done, count: int = count) -> None:
                run.on_step(done * steps + step, count * steps)

            final = self._expert_loop(replace(run, on_step=on_step, draw=noise), start, conditions)
            frames, previous = self.decode(final, run.timings)
            parts.append(frames[:, overlap if parts else 0 :])
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return whole[:, : None if inputs is None else inputs.num_frames], final

    def _windows(self, inputs: Inputs | None, overlap: int) -> Sequence[Window | None]:
        """The windows of a long video; one that is none where the profile makes all of it."""
        if inputs is None or "pose_video" not in inputs.arrays:
            return [None]
        return windows(len(inputs.arrays["pose_video"]), self._profile.num_frames, overlap)
