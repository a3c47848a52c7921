"""Encodes images and videos to the transformer's conditions: image tokens, latents, masks and scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from wanrun.artifact.guiders import NAG, nag_settings
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile, Program
from wanrun.artifact.roles import roles_when
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.past import Given, Latents
from wanrun.denoising.state import zeros
from wanrun.errors import ArtifactError
from wanrun.media.inputs import Inputs
from wanrun.media.windows import Window
from wanrun.timing.timings import Timings
from wanrun.weights.bound_programs import Programs


@dataclass(frozen=True)
class Encoded:
    """The outputs of the encoding programs, on the device, by name.

    Attributes:
        once: outputs that are the same for all windows.
        window: outputs for the first window only.
        start: outputs of a video that the steps begin with; none without one.
        given: what the video goes on after, on the host; None for nothing.
    """

    once: Mapping[str, Any]
    window: Mapping[str, Any]
    start: Mapping[str, Any] = field(default_factory=dict)
    given: Given | None = None


LastEncoded = WeakKeyDictionary[Inputs, Mapping[tuple[str, ...], Encoded]]
"""The encodings of the last inputs, for all profiles: by the object, and by the digests of the programs.

Its arrays may take gigabytes and belong to the caller: they are neither compared nor kept alive.
"""


class Conditioning:
    """Runs the programs that encode images and videos, as the model's task orders them.

    ``last`` keeps the encodings of the last inputs, for the next prompt. With ``low_memory`` the components
    that encode once per generation are released after that.
    """

    def __init__(
        self,
        programs: Programs,
        manifest: Manifest,
        profile: Profile,
        last: LastEncoded,
        low_memory: bool = False,
    ) -> None:
        self._programs, self._manifest, self._profile = programs, manifest, profile
        self._model, self._task = manifest.model, manifest.model.task
        self._last, self._low_memory = last, low_memory
        self._once, self._window = programs.with_role("once"), programs.with_role("window")
        self._start, self._past = programs.with_role("start"), programs.with_role("past")
        self._encoders = (*self._once, *self._window, *self._start, *self._past)
        self._digests = tuple(programs[name].sha256 for name in self._encoders)

    @property
    def needed(self) -> bool:
        """Whether every step needs a condition, even without images and videos."""
        return self._task.always_encodes

    @property
    def _steps(self) -> Mapping[str, Program]:
        """The inputs of the steps: by name, a program that takes it."""
        steps = [self._programs[name] for name in self._programs.with_role(*roles_when("steps"))]
        return {key: program for program in steps for key in program.inputs}

    def request_weights(self) -> list[Future[Any]]:
        """Starts to load the weights of the components that encode images and videos."""
        names = [name for program in self._encoders for name in self._programs.components(program)]
        return self._programs.request(components=names)

    def request_programs(self) -> list[Future[Any]]:
        """Starts to load the programs that encode images and videos."""
        return self._programs.request(programs=self._encoders)

    def blank(self) -> Conditions:
        """Runs all encoding programs with zeros, for a warm-up, and returns the conditions."""
        if not self._encoders:
            return self._without({})
        media = {item.array for item in self._task.inputs.values()}
        arrays: dict[str, np.ndarray] = {}
        for name in self._programs.with_role(*roles_when("media", "expert")):
            program = self._programs[name]
            for key in program.avals["inputs"]:  # without the weights
                if name in self._encoders or key in media:
                    dtype, shape = program.array(key)
                    arrays[key] = np.zeros(shape, dtype)
        self._run((*self._start, *self._past), arrays)  # of which a warm-up's steps take nothing
        if not self._window:
            return self._without({})
        once = self._encode_once(arrays)
        return self._conditions(arrays, Encoded(once, self._encode_window(arrays, once, {}, 1)), {})

    def __call__(
        self,
        inputs: Inputs | None,
        *,
        timings: Timings,
        window: Window | None = None,
        carried: Mapping[str, Any] = MappingProxyType({}),
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Conditions:
        """Encodes images and videos; without inputs, what a model of text needs in their place.

        ``window`` is None for the first. ``carried`` are the arrays from the window before, by program input.
        Of ``options`` a step takes those that it has an input for, and the model's defaults of others. Raises
        UsageError if the inputs were prepared for another profile.
        """
        if inputs is None or not inputs.arrays:
            return self._without(options)
        started, goes_on, conditioned = self._takers(inputs)
        arrays = self._of_window(inputs, window)
        first = window is None or not window.start
        encoded = known = self._last.get(inputs, {}).get(self._digests)
        if encoded is None or not first:
            with timings.phase("encode_media"):
                start = (self._run(started, arrays) if known is None else known.start) if started else {}
                given = self._encode_given(arrays) if goes_on else None
                once, of_window = dict[str, Any](), dict[str, Any]()
                if conditioned:
                    once = self._encode_once(arrays) if known is None else dict(known.once)
                    of_window = self._encode_window(arrays, once, carried, inputs.segment_overlap)
            encoded = Encoded(once, of_window, start, given)
            if first:
                self._last.clear()
                self._last[inputs] = {self._digests: encoded}
        found = self._conditions(arrays, encoded, options) if conditioned else self._without(options)
        begin = np.asarray(encoded.start["start"]) if started else None
        return replace(found, start=begin, given=encoded.given)

    def _takers(self, inputs: Inputs) -> tuple[Sequence[str], bool, bool]:
        """Returns programs of a video to begin with, and whether there are a past, and what steps take."""
        task = self._task
        begins = None if task.start is None else task.inputs[task.start].array
        given = begins in inputs.arrays
        past = {name for item in task.past.values() for name in (item.array, item.count)}
        goes_on = bool(inputs.arrays.keys() & past)
        conditioned = bool(inputs.arrays.keys() - {begins, *past})
        lacking = (given, self._start), (goes_on, self._past), (conditioned, self._window)
        if any(needed and not programs for needed, programs in lacking):
            raise ArtifactError(
                "not_built",
                f"profile {self._profile.name} has no program for images and videos",
                remedy="build it again with wanbuild compile",
            )
        return self._start if given else (), goes_on, conditioned

    def _of_window(self, inputs: Inputs, window: Window | None) -> dict[str, Any]:
        """Returns the arrays, of videos only the frames of a window."""
        arrays: dict[str, Any] = dict(inputs.arrays)
        if self._task.windows is None:
            return arrays
        frames = slice(self._profile.num_frames) if window is None else slice(window.start, window.stop)
        videos = [item.array for item in self._task.inputs.values() if item.kind == "video"]
        return {**arrays, **{name: arrays[name][frames] for name in videos if name in arrays}}

    def _run(self, names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
        """Runs programs in order, each with the outputs of those before; returns all, on the device."""
        import jax

        made: dict[str, Any] = {}
        for name in names:
            made |= self._programs.bound(name)(**{**given, **made})
        return jax.block_until_ready(made)  # type: ignore[no-any-return]

    def _encode_once(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the outputs that are the same for all windows."""
        made = self._run(self._once, arrays)
        if self._low_memory:
            for component in {
                component for name in self._once for component in self._programs.components(name)
            }:
                self._programs.weights.release(component)
        return made

    def _encode_given(self, arrays: Mapping[str, Any]) -> Given:
        """Returns the past of a video that continues another: its first frame and its chunks, a call each."""
        item = next(one for one in self._task.past.values() if one.array in arrays)
        frames, length = arrays[item.array], self._model.chunk_frames
        counted = item.count or ""  # the manifest's check says so
        count = int(arrays[counted])
        rest = np.repeat(frames, length, axis=0) if (still := count == 1) else frames[1:]

        def latents(part: np.ndarray) -> Latents:
            whole = np.resize(part, (length, *part.shape[1:]))  # repeated, where only the first one counts
            made = self._run(self._past, {item.array: whole, counted: np.int32(len(part))})
            times = slice((len(part) - 1) // self._model.vae_temporal + 1)
            return Latents(*(np.asarray(made[name])[None, :, times] for name in ("mean", "deviation")))

        chunks = [latents(part) for part in np.split(rest, len(rest) // length)]
        before = 0 if still else count // length - len(chunks)
        return Given(latents(frames[:1]), chunks, before, still, item.past)

    def _encode_window(
        self, arrays: Mapping[str, Any], once: Mapping[str, Any], carried: Mapping[str, Any], overlap: int
    ) -> dict[str, Any]:
        """Returns the outputs for one window."""
        given = {**arrays, **once, **carried}
        if self._task.windows is not None:
            given |= {"overlap": np.int32(overlap), "later": np.int32(bool(carried))}
            for program in (self._programs[name] for name in self._window):
                for key in self._task.windows.carried.keys() & set(program.inputs) - carried.keys():
                    dtype, shape = program.array(key)
                    given[key] = np.zeros(shape, dtype)
        return self._run(self._window, given)

    def _conditions(
        self, arrays: Mapping[str, Any], encoded: Encoded, options: Mapping[str, Any]
    ) -> Conditions:
        """Returns arrays and encodings, sorted by the programs that take them."""
        made, takes = {**encoded.once, **encoded.window}, self._steps
        before = self._programs.with_role(*roles_when("expert"))
        expert = {key for name in before for key in self._programs[name].inputs}
        prepare = {key: value for key, value in {**arrays, **made}.items() if key in expert}
        steps = {key: value for key, value in made.items() if key in takes}
        for name, default in self._model.options.items():
            if name in takes:
                dtype, shape = takes[name].array(name)
                steps[name] = np.full(shape, options.get(name, default), dtype)
        steps |= self._nag(options)
        held = None
        if (frame := self._task.held) is not None:
            held = np.asarray(made[frame.condition][frame.latents])[:, : self._held_frames(arrays)]
            if frame.mask:
                steps[frame.mask] = self._frame_mask(frame.mask, held=True)
        return Conditions(prepare, self._programs.weights.put(steps), held)

    def _held_frames(self, arrays: Mapping[str, Any]) -> int:
        """Returns the latent frames that are held: one, or those of the frames that are given."""
        counts = [int(arrays[item.count]) for item in self._task.inputs.values() if item.count is not None]
        return self._model.latent_frames(max(counts)) if counts else 1

    def _frame_mask(self, name: str, held: bool) -> np.ndarray:
        """Returns float32 (T,): zero for a held frame, else one."""
        dtype, shape = self._steps[name].array(name)
        mask = np.ones(shape, dtype)
        mask[:1] = not held
        return mask

    def _nag(self, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the input by which steps take a negative prompt without guidance, if these do."""
        return {NAG: nag_settings(options)} if NAG in self._steps else {}

    def _without(self, options: Mapping[str, Any]) -> Conditions:
        """Returns the conditions of only text, and a first frame that is not held."""
        steps: dict[str, Any] = self._nag(options)
        if (frame := self._task.held) is not None and frame.mask:
            steps[frame.condition] = zeros(self._steps[frame.condition].avals["inputs"][frame.condition])
            steps[frame.mask] = self._frame_mask(frame.mask, held=False)
        return Conditions(steps=self._programs.weights.put(steps)) if steps else Conditions()
