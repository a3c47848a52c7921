"""The windows or clips of a long video, and what each one takes of the one before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from wanrun.artifact.programs import Profile
from wanrun.artifact.task import Task
from wanrun.denoising.noise import Noise, clip_seed
from wanrun.denoising.steps import Denoising
from wanrun.generation.decoding import WindowTake
from wanrun.generation.video_parts import VideoParts
from wanrun.media.inputs import Inputs, beginning
from wanrun.media.windows import Window, joined_frames, windows
from wanrun.request.options import clip_prompts


class Part(NamedTuple):
    """A window or a clip that is to be made; of a video that is made at once, all of it.

    ``carried`` are the inputs that the part before has made. ``noise`` draws all noise of this part, and
    ``take`` gets its frames.
    """

    run: Denoising
    window: Window | None
    inputs: Inputs | None
    carried: Mapping[str, Any]
    noise: Noise
    take: WindowTake


class Windowing:
    """The parts of one video that are not there yet; ``end`` is called after each.

    All noise comes from one random generator with the seed. Each window draws its initial noise, unless
    latents replace it, and then the noise of each step if the solver adds noise. The next window continues
    with the same generator. Each array of noise covers all videos of the batch, in their order. diffusers
    draws in the same order. A clip has another generator, with the seed of ``clip_seed``.
    """

    def __init__(
        self,
        task: Task,
        profile: Profile,
        run: Denoising,
        options: Mapping[str, Any],
        inputs: Inputs | None,
        parts: VideoParts,
        frames: int | None = None,
    ) -> None:
        """``frames`` is the most that a part may have; None for those that the inputs decide."""
        self._task, self._profile, self._run, self._options = task, profile, run, options
        self._inputs, self._parts, self._frames = inputs, parts, frames
        self._clips, self._noise = options.get("clips", 1), Noise(options["seed"])
        self._overlap = 1 if inputs is None else inputs.segment_overlap
        self._carried = self._continued() if parts.count else {}
        self._windows = self._covering()

    def __iter__(self) -> Iterator[Part]:
        parts = self._parts
        for window in self._windows[parts.count :]:
            if self._carried and self._inputs is None:
                self._inputs = Inputs(self._carried)
            if self._clips > 1:
                self._noise = Noise(clip_seed(self._options["seed"], parts.count))
            texts = _of_clip(self._run.embeddings, parts.count, len(clip_prompts(self._options)))
            run = replace(self._run, embeddings=texts, window=parts.count, windows=len(self._windows))
            whole = None if self._inputs is None else self._inputs.num_frames
            left = None if whole is None else whole - parts.num_frames
            left = left if self._frames is None else self._frames
            take = WindowTake(parts, self._overlap if parts.count else 0, left, run.check)
            yield Part(run, window, self._inputs, self._carried, self._noise, take)

    def end(self, made: Mapping[str, Any], latents: np.ndarray) -> None:
        """Ends a part, of which these are the decoder's last outputs and the final latents."""
        windowing = self._task.windows
        if len(self._windows) == 1:
            self._carried = {}
        elif windowing is None:
            self._carried = self._continued()
        else:
            self._carried = {key: made[name] for key, name in windowing.carried.items()}
        self._parts.end(latents)

    def _continued(self) -> dict[str, Any]:
        """Returns the next clip's first image, which is the last frame, by its input."""
        assert self._task.chained is not None  # a request of clips is refused otherwise
        return beginning(self._task.chained, self._parts.last[0], self._profile.num_frames)

    def _covering(self) -> Sequence[Window | None]:
        """Returns the windows of a long video; one None if the profile makes the whole video at once."""
        windowing, length, inputs = self._task.windows, self._profile.num_frames, self._inputs
        if self._clips > 1:
            return windows(joined_frames(self._clips, length, self._overlap), length, self._overlap)
        if inputs is None or windowing is None:
            return [None]
        deciding = inputs.arrays[self._task.inputs[windowing.frames_of].array]
        return windows(len(deciding), length, self._overlap)


def _of_clip(embeddings: np.ndarray, clip: int, later: int) -> np.ndarray:
    """Returns the embeddings of a clip's prompt, of ``later`` + 1 prompts, and of the negative one."""
    own = min(clip, later)
    return np.concatenate([embeddings[own : own + 1], embeddings[later + 1 :]]) if later else embeddings
