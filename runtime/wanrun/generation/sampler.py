"""How a video is made: images are encoded, each expert is prepared and runs its steps, latents are decoded.

A long video is made window by window, or clip by clip. ``wanrun.generation.session`` loads what this runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from wanrun.artifact.guiders import inputs_of
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile, decodes_any_length
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.latents import latents_shape, leading_latents
from wanrun.denoising.noise import Noise
from wanrun.denoising.state import State, check_finite, final_latents, start_state, with_noise
from wanrun.denoising.steps import Denoising, ExpertRange, calls
from wanrun.generation.chunks import Draw, in_chunks
from wanrun.generation.conditioning import Conditioning
from wanrun.generation.decoding import WindowTake
from wanrun.generation.futures import unfinished
from wanrun.generation.profile_programs import ProfilePrograms
from wanrun.generation.video_parts import VideoParts
from wanrun.generation.windowing import Windowing
from wanrun.media.inputs import Inputs
from wanrun.weights.bound_programs import Programs


class Sampler(ProfilePrograms):
    """Makes a profile's videos with its programs.

    ``latents_shape`` is the shape (B, C, T, h, w) of the latents, with ``leading`` frames in front. By input
    ``guiding`` has the shapes of what steps take for the guiders that they are built for.
    """

    def __init__(
        self, programs: Programs, manifest: Manifest, profile: Profile, conditioning: Conditioning
    ) -> None:
        super().__init__(programs, profile, manifest.model)
        self.conditioning, self.leading = conditioning, leading_latents(manifest, profile)
        self.latents_shape = latents_shape(manifest, profile)
        self.guiding = inputs_of(profile.options.guiders, manifest.skippable_layers(profile))

    def __call__(
        self,
        run: Denoising,
        options: Mapping[str, Any],
        inputs: Inputs | None = None,
        latents: np.ndarray | None = None,
        parts: VideoParts | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Makes the videos of one prompt: frames, uint8 (B, F, H, W, 3), and the last window's final latents.

        ``latents`` are the initial noise of the first window, instead of the seed's. ``parts`` gets frames as
        they are made; parts that are there are not made.
        """
        parts = VideoParts() if parts is None else parts
        parts.resume()
        if run.blending is not None:
            return self._blended(run, options, latents, parts)
        most = None if self.model.chunks is None else options["num_frames"]  # the last chunk may have more
        windowing = Windowing(self.model.task, self.profile, run, options, inputs, parts, most)
        for part in windowing:
            conditions = self.conditioning(
                part.inputs, timings=run.timings, window=part.window, carried=part.carried, options=options
            )
            first = latents
            if latents is None or parts.count:  # a chunk that is alone draws its own, before it is made
                first = None if self.alone else part.noise(self.latents_shape)
            final = self.denoise(part.run, first, conditions, part.noise)
            made = self.decode_to(part.take, final[:, :, self.leading :], run.timings, options.get("decoder"))
            windowing.end(made, final)
        return parts.joined(self.profile), parts.latents

    def _blended(
        self, run: Denoising, options: Mapping[str, Any], latents: np.ndarray | None, parts: VideoParts
    ) -> tuple[np.ndarray, np.ndarray]:
        """Makes the videos of only text in windows, which make each step together, and are then decoded."""
        windows, noise, decoder = run.blending, Noise(options["seed"]), options.get("decoder")
        assert windows is not None
        if not parts.count:
            shape = (*self.latents_shape[:2], windows.total, *self.latents_shape[3:])
            conditions = self.conditioning(None, timings=run.timings, options=options)
            first = noise(shape) if latents is None else latents
            parts.end(self.denoise(run, first, conditions, noise))
        # The first part has no frames: a run that is ended later goes on with the decoding.
        final, decoded = parts.latents, windows.decoded(self.model.vae_temporal)
        if decodes_any_length(self.programs, decoder):
            decoded = [(slice(None), 0)]
        for own, before in decoded[parts.count - 1 :]:
            take = WindowTake(parts, before, None, run.check)
            self.decode_to(take, final[:, :, own], run.timings, decoder)
            parts.end(final)
        return parts.joined(self.profile), final

    def denoise(
        self, run: Denoising, noise: np.ndarray | None, conditions: Conditions, draw: Noise
    ) -> np.ndarray:
        """Runs the experts' steps from ``noise``; returns the final latents, float32 (B, C, T, h, w).

        The initial noise is None where each chunk draws its own; ``draw`` also draws what the solver adds.
        """
        if run.form.chunked:
            final = in_chunks(self, run, noise, conditions, draw, self.latents_shape)
        else:
            assert noise is not None
            name = self.maker(run.form.makers[0])
            start = start_state(conditions.first_sample(noise, run.table), self.programs[name])
            final = final_latents(self.steps(run, start, conditions, draw))
        if run.last and run.window + 1 == run.windows:
            self.programs.release()
        return conditions.finish(final)

    def steps(
        self,
        run: Denoising,
        state: State,
        conditions: Conditions,
        draw: Draw,
        past: Mapping[str, Any] = MappingProxyType({}),
    ) -> State:
        """Runs the experts' steps from a state; ``past`` is what those of a chunk take of earlier chunks."""
        for index, steps in enumerate(run.ranges):
            later = [others.transformer for others in run.ranges[index + 1 :]]
            constant = {**self.prepare(run, conditions, steps), **past}
            state = self.expert_steps(run, steps, state, constant, draw, later)
            del constant  # each expert has its own
        return state

    def prepare(self, run: Denoising, conditions: Conditions, steps: ExpertRange) -> dict[str, Any]:
        """Returns the inputs that every step of an expert takes."""
        import jax

        # Zeros for the negative prompt, if the programs take it and no step does.
        lacking = self.profile.num_prompts - len(run.embeddings)
        embeddings = np.concatenate([run.embeddings, np.zeros_like(run.embeddings[:lacking])])
        given = {"embeddings": embeddings, **conditions.prepare}
        if run.form.streams:
            return {**given, **conditions.steps}
        constant: dict[str, Any] = {}
        names = self.programs.with_role("prepare")
        programs = [self.programs.of_expert(name, steps.transformer, run.loras) for name in names]
        with run.timings.phase("prepare"):
            for program in programs:
                constant |= program(**{**given, **constant})
            # Otherwise its seconds, 1 for a 1.3B model on two cores, would be those of the first step.
            jax.block_until_ready(constant)
        return {**constant, **conditions.steps}

    def expert_steps(
        self,
        run: Denoising,
        steps: ExpertRange,
        state: State,
        constant: Mapping[str, Any],
        draw: Draw,
        later: Sequence[str],
    ) -> State:
        """Runs one expert's steps. After it returns, nothing here refers to the expert's weights.

        Each call takes the state as donated buffers, which the program's outputs replace.
        """
        import jax

        makers = self.makers(run, steps, state, constant)
        constant = {} if run.form.streams else constant
        if run.form.looped or steps.last - steps.first == 1:
            self._load_behind(run, later)  # this expert may have no later call to hide the loading
        reached = run.reached(steps.first)
        with run.timings.phase("denoise", run.place, progress=lambda: reached, unit="step"):
            for call in calls(run, steps, self.profile, self.guiding, self.model.flow_map):
                started = time.perf_counter()
                state = makers[run.maker_of(call.first)](**constant, **state, **call.arguments)
                # Drawn while the device computes: 0.08 s for 81 frames of 832x480, 0.17 s for 1280x720.
                noise = None if call.noise is None else draw(state["latents"].shape)
                jax.block_until_ready(state)
                seconds = time.perf_counter() - started
                run.timings.steps(run.loop, call.last - call.first, seconds, together=run.form.looped)
                if call.first == 0:
                    when = "after the first step" if call.last == 1 else f"after {call.last} steps"
                    check_finite(state, when)
                if call.noise and noise is not None:
                    state = {**state, "latents": with_noise(state["latents"], call.noise, noise)}
                self._load_behind(run, later)
                reached = run.reached(call.last)
                run.on_step(*reached, state)
        return state

    def _load_behind(self, run: Denoising, later: Sequence[str]) -> None:
        """Starts to load what follows an expert's steps; raises the error of a load that has failed."""
        unfinished(self.programs.expect(later))
        run.behind()
