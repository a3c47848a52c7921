"""How a video is made: images are encoded, each expert is prepared and runs its steps, latents are decoded.

A long video is made window by window, or clip by clip. ``wanrun.generation.session`` loads what this runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from wanrun.artifact.guiders import inputs_of
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.model import Chunking
from wanrun.artifact.programs import Profile, decodes_any_length
from wanrun.artifact.roles import RoleName
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.latents import latents_shape, leading_latents
from wanrun.denoising.noise import Noise, clip_seed
from wanrun.denoising.state import State, check_finite, final_latents, start_state, with_noise
from wanrun.denoising.steps import Denoising, ExpertRange, scan_calls, step_calls
from wanrun.generation.chunks import ChunkLoop, Draw, Starts
from wanrun.generation.conditioning import Conditioning
from wanrun.generation.decoding import Clips, Decoder, Part, Take
from wanrun.generation.parts import Parts
from wanrun.generation.streamed import StreamedStep
from wanrun.media.types import Inputs, beginning
from wanrun.media.windows import Window, joined_frames, windows
from wanrun.request.options import clip_prompts
from wanrun.timing.timings import Timings
from wanrun.weights.futures import unfinished
from wanrun.weights.programs import Programs


class Sampler:
    """Makes a profile's videos.

    Args:
        programs: the profile's programs, with their weights.
        manifest: the artifact's manifest.
        profile: the profile.
        conditioning: encodes images and videos.

    Attributes:
        programs, profile, conditioning: the arguments.
        latents_shape: shape (B, C, T, h, w) of the latents, with the leading frames.
        leading: how many frames those are.
        guiding: the shapes of what steps take for the guiders that they are built for, by input.
    """

    def __init__(
        self, programs: Programs, manifest: Manifest, profile: Profile, conditioning: Conditioning
    ) -> None:
        self.programs, self.profile, self.conditioning = programs, profile, conditioning
        self.latents_shape = latents_shape(manifest, profile)
        self._temporal = manifest.model.vae_temporal
        self.leading, self._task = leading_latents(manifest, profile), manifest.model.task
        self._flow_map, self._chunks = manifest.model.flow_map, manifest.model.chunks
        self.guiding = inputs_of(profile.options.guiders, manifest.skippable_layers(profile))

    def __call__(
        self,
        run: Denoising,
        options: Mapping[str, Any],
        inputs: Inputs | None = None,
        latents: np.ndarray | None = None,
        parts: Parts | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Makes the videos of one prompt.

        All noise comes from one random generator with the seed. Each window draws its initial noise, unless
        latents replace it, and then the noise of each step if the solver adds noise. The next window
        continues with the same generator. Each array of noise covers all videos of the batch, in their order.
        diffusers draws in the same order. A clip has a generator of its own, with the seed of ``clip_seed``.

        Args:
            run: the parameters of the denoising loop.
            options: the generation's resolved options.
            inputs: images and videos; None for text alone.
            latents: initial noise of the first window, instead of the seed's.
            parts: gets the frames as they are made; parts that are there are not made. None for memory.

        Returns:
            Frames, uint8 (B, F, H, W, 3), and the final latents, float32 (B, C, T, h, w); those of the last
            window if there are several.
        """
        parts, clips = Parts() if parts is None else parts, options.get("clips", 1)
        if run.blending is not None:
            return self._blended(run, options, latents, parts)
        noise, overlap = Noise(options["seed"]), 1 if inputs is None else inputs.segment_overlap
        parts.resume()
        carried = self._continued(parts.last) if parts.count else {}
        for window in self._windows(inputs, overlap, clips)[parts.count :]:
            if carried and inputs is None:
                inputs = Inputs(carried)
            conditions = self.conditioning(
                inputs, timings=run.timings, window=window, carried=carried, options=options
            )
            if clips > 1:
                noise = Noise(clip_seed(options["seed"], parts.count))
            start = latents if latents is not None and not parts.count else self._drawn(noise)
            count = 1 if window is None else window.count
            texts = _of_clip(run.embeddings, parts.count, len(clip_prompts(options)))
            part = replace(run, embeddings=texts, window=parts.count, windows=count)
            final = self.denoise(part, start, conditions, noise)
            whole = None if inputs is None else inputs.num_frames
            left = None if whole is None else whole - parts.num_frames
            if self._chunks is not None:  # the last one may have more
                left = options["num_frames"]
            take = Part(parts, overlap if parts.count else 0, left, run.check)
            made = self.decode_to(take, final[:, :, self.leading :], run.timings, options.get("decoder"))
            carried = self._carried(made, parts) if count > 1 else {}
            parts.end(final)
        return parts.joined(self.profile), parts.latents

    def _blended(
        self, run: Denoising, options: Mapping[str, Any], latents: np.ndarray | None, parts: Parts
    ) -> tuple[np.ndarray, np.ndarray]:
        """Makes the videos of text alone in windows, which make each step together, and are then decoded."""
        windows, noise = run.blending, Noise(options["seed"])
        assert windows is not None
        parts.resume()
        if not parts.count:
            shape = (*self.latents_shape[:2], windows.total, *self.latents_shape[3:])
            start = noise(shape) if latents is None else latents
            conditions = self.conditioning(None, timings=run.timings, options=options)
            parts.end(self.denoise(run, start, conditions, noise))
        # The first part has no frames: a run that is ended later goes on with the decoding.
        final, decoder = parts.latents, options.get("decoder")
        # Of a later window's frames those are left out that the one before it has.
        decoded = [
            (windows.of(start), first) for start, first in zip(windows.starts, windows.firsts, strict=True)
        ]
        if decodes_any_length(self.programs, decoder):
            decoded = [(slice(None), 0)]
        for own, first in decoded[parts.count - 1 :]:
            part = Part(parts, 1 + (first - 1) * self._temporal if first else 0, None, run.check)
            self.decode_to(part, final[:, :, own], run.timings, decoder)
            parts.end(final)
        return parts.joined(self.profile), final

    def denoise(
        self, run: Denoising, noise: np.ndarray | None, conditions: Conditions, draw: Noise
    ) -> np.ndarray:
        """Runs the experts' steps, one expert after the other.

        Args:
            run: the generation's parameters.
            noise: initial noise, float32 (B, C, T, h, w); only read. None where each chunk draws its own.
            conditions: inputs from images and videos.
            draw: the noise of the video, for what is given and what the solver adds between steps.

        Returns:
            The final latents, float32 (B, C, T, h, w).

        Raises:
            ArtifactError: if a program or weights cannot be loaded.
            WanError: if the latents are not finite.
        """
        if run.form.chunked:
            final = self._in_chunks(run, noise, conditions, draw)
        else:
            assert noise is not None
            name = self.maker(run.form.makers[0])
            start = start_state(conditions.first_sample(noise, run.table), self.programs[name])
            final = final_latents(self.steps(run, start, conditions, draw))
        if run.last and run.window + 1 == run.windows:
            self.programs.release()
        return conditions.finish(final)

    def _drawn(self, draw: Draw) -> np.ndarray | None:
        """Returns the initial noise of a video; None if each chunk draws its own, before it is made."""
        return None if self._alone else draw(self.latents_shape)

    @property
    def _alone(self) -> bool:
        """Whether chunks are decoded one by one, as if each were a video."""
        return self._chunks is not None and self._chunks.alone

    def _in_chunks(
        self, run: Denoising, noise: np.ndarray | None, conditions: Conditions, draw: Noise
    ) -> np.ndarray:
        """Returns the final latents of a video that is made chunk by chunk."""
        loop, starts = ChunkLoop(self, conditions, draw), Starts(noise, self.latents_shape, draw)
        lengths = run.chunks or self.chunks.lengths(self.latents_shape[2])
        given = 0 if conditions.held is None else self.chunks.within(conditions.held.shape[1])
        made = [
            loop(replace(run, window=max(number, 0), windows=len(lengths) - given), starts(length))
            for number, length in enumerate(lengths, -given)
        ]
        return np.concatenate(made, axis=2)

    @property
    def of_any_length(self) -> bool:
        """Whether the profile's programs make and decode videos of any length."""
        return self._chunks is not None and not self._alone

    @property
    def chunks(self) -> Chunking:
        """How the model cuts a video into chunks."""
        assert self._chunks is not None
        return self._chunks

    def maker(self, role: RoleName, shape: Sequence[int] = ()) -> str:
        """Returns the program of a role that makes steps: of several, that of latents of this shape."""
        names = self.programs.with_role(role)
        shapes = {name: self.programs[name].array("latents")[1] for name in names if len(names) > 1}
        return next((name for name, own in shapes.items() if tuple(own) == tuple(shape)), names[0])

    def steps(
        self,
        run: Denoising,
        state: State,
        conditions: Conditions,
        draw: Draw,
        past: Mapping[str, Any] = MappingProxyType({}),
    ) -> State:
        """Runs the experts' steps from a state, which may hold a solver's history; returns the state after.

        Other arguments, and errors, are those of ``denoise``; ``past`` is what the steps of a chunk take of
        those before it.
        """
        for index, steps in enumerate(run.ranges):
            later = [others.transformer for others in run.ranges[index + 1 :]]
            constant = {**self.prepare(run, conditions, steps), **past}
            state = self.expert_steps(run, steps, state, constant, draw, later)
            del constant  # each expert has its own
        return state

    def prepare(self, run: Denoising, conditions: Conditions, steps: ExpertRange) -> dict[str, Any]:
        """Returns the inputs that every step of an expert takes."""
        import jax

        given = {"embeddings": self._of_all_prompts(run.embeddings), **conditions.prepare}
        if run.form.streams:
            return {**given, **conditions.steps}
        names = self.programs.with_role("prepare")
        programs = [self.programs.of_expert(name, steps.transformer, run.loras) for name in names]
        constant: dict[str, Any] = {}
        with run.timings.phase("prepare"):
            for program in programs:
                constant |= program(**{**given, **constant})
            # Otherwise its seconds, 1 for a 1.3B model on two cores, would be those of the first step.
            jax.block_until_ready(constant)
        return {**constant, **conditions.steps}

    def _of_all_prompts(self, embeddings: np.ndarray) -> np.ndarray:
        """Returns embeddings with zeros for the negative prompt, if the programs take it and no step does."""
        lacking = self.profile.num_prompts - len(embeddings)
        return np.concatenate([embeddings, np.zeros_like(embeddings[:lacking])])

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

        Args:
            run: the generation's parameters.
            steps: the expert's.
            state: the state before them.
            constant: what every step takes.
            draw: returns the noise that the solver adds between steps.
            later: the experts that follow.

        Returns:
            The state after them.
        """
        import jax

        makers: dict[RoleName, Callable[..., State]] = {}
        for role in dict.fromkeys(map(run.maker_of, range(steps.first, steps.last))):
            if run.form.streams:
                makers[role] = StreamedStep(self.programs, steps.transformer, constant, run.loras)
            else:
                name = self.maker(role, state["latents"].shape)
                makers[role] = self.programs.of_expert(name, steps.transformer, run.loras)
        if run.blending is not None:
            makers = {role: run.blending.blended(maker, tuple(state)) for role, maker in makers.items()}
        constant = {} if run.form.streams else constant
        table, options, guidance = run.table, self.profile.options, self.profile.guidance
        guiding, flow_map = self.guiding, self._flow_map
        if run.form.looped:
            single = run.blending is not None
            calls = scan_calls(table, steps, options.max_steps, guidance, guiding, flow_map, single)
        else:
            calls = step_calls(table, steps, guidance, guiding, flow_map)
        if run.form.looped or steps.last - steps.first == 1:
            self._load_behind(run, later)  # this expert may have no later call to hide the loading
        reached = run.reached(steps.first)
        with run.timings.phase("denoise", run.place, progress=lambda: reached, unit="step"):
            for call in calls:
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

    def decode(
        self, latents: np.ndarray, timings: Timings, decoder: str | None = None
    ) -> tuple[np.ndarray, Mapping[str, Any]]:
        """Decodes latents to frames, uint8 (B, F, H, W, 3); for arguments and outputs see ``decode_to``."""
        made = self.decode_to(clips := Clips(), latents, timings, decoder)
        return clips.joined(latents, self.profile), made

    def decode_to(
        self, take: Take, latents: np.ndarray, timings: Timings, decoder: str | None = None
    ) -> Mapping[str, Any]:
        """Decodes latents, one video at a time, and gives the frames away while later ones are decoded.

        Args:
            take: gets the frames of each piece. What it raises ends the decoding.
            latents: normalised, float32 (B, C, T, h, w), without the leading latent frames. T is the
                profile's; or any, where the decoder makes a video piece by piece.
            timings: where the time is recorded.
            decoder: one of ``DECODERS``; None for the VAE's.

        Returns:
            All outputs of the last call of a program, on the device.
        """
        decode, times = Decoder(self.programs, decoder), latents.shape[2]
        count = 1 if self._chunks is None else self._chunks.videos(times)
        each = count + (times - count) * self._temporal  # each of them begins with one frame
        with timings.phase("decode", f"{len(latents) * each} frames"):
            for video, one in enumerate(latents):
                for part in np.split(one, count, axis=1):
                    for frames in decode(part):
                        take(video, frames)
        return decode.made

    def _carried(self, made: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
        """Returns the outputs of a window that the next one takes, by its inputs' names."""
        windowing = self._task.windows
        if windowing is None:
            return self._continued(parts.last)
        return {key: made[name] for key, name in windowing.carried.items()}

    def _continued(self, last: np.ndarray) -> dict[str, Any]:
        """Returns what the next clip takes of a last frame (1, 1, H, W, 3): its first image, by its input."""
        assert self._task.chained is not None  # a request of clips is refused otherwise
        return beginning(self._task.chained, last[0], self.profile.num_frames)

    def _windows(self, inputs: Inputs | None, overlap: int, clips: int) -> Sequence[Window | None]:
        """Returns the windows of a long video; one None if the profile makes the whole video at once."""
        windowing, length = self._task.windows, self.profile.num_frames
        if clips > 1:
            return windows(joined_frames(clips, length, overlap), length, overlap)
        if inputs is None or windowing is None:
            return [None]
        deciding = inputs.arrays[self._task.inputs[windowing.frames_of].array]
        return windows(len(deciding), self.profile.num_frames, overlap)


def _of_clip(embeddings: np.ndarray, clip: int, later: int) -> np.ndarray:
    """Returns those of a clip's prompt, of the first and so many later ones, and of the negative one."""
    own = min(clip, later)
    return np.concatenate([embeddings[own : own + 1], embeddings[later + 1 :]]) if later else embeddings
