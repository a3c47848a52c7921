"""What images and videos give the transformer: their tokens and latents, and what goes with them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from wanrun.artifact.manifest import Manifest, Profile
from wanrun.artifact.programs import Program
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.steps import LOOP_PROGRAMS
from wanrun.errors import ArtifactError, UsageError
from wanrun.generation.options import latents_shape
from wanrun.loading.weights import Loader
from wanrun.media.types import Inputs, Media, check_media
from wanrun.media.windows import Window
from wanrun.timing import Timings

PREVIOUS_FRAMES = 5
"""Frames of the window before that ``encode_video`` takes, of which the last may be used."""

WINDOWED = ("pose_video", "face_video", "background_video", "mask_video")
"""Videos of any length, of which a window is taken."""


class Conditioning:
    """Runs ``encode_image`` and ``encode_video``; keeps what the last inputs gave, for the next prompt.

    Args:
        loader: brings weights and programs to the device.
        manifest: the artifact's manifest.
        profile: the chosen profile.
        low_memory: whether the image encoder is let go of when it has run.
    """

    def __init__(
        self, loader: Loader, manifest: Manifest, profile: Profile, low_memory: bool = False
    ) -> None:
        self._loader, self._manifest, self._profile = loader, manifest, profile
        self._low_memory = low_memory
        self._last: tuple[weakref.ref[Inputs], dict[str, Any]] | None = None

    @property
    def needed(self) -> bool:
        """Whether nothing is made without a condition, be it of nothing: only TI2V's steps can go without."""
        return "condition" in self._step.inputs and "frame_mask" not in self._step.inputs

    @property
    def _step(self) -> Program:
        programs = self._loader.programs
        return next(programs[name] for name in LOOP_PROGRAMS.values() if name in programs)

    @property
    def _prepare(self) -> Program:
        return self._loader.programs["prepare"]

    @property
    def _programs(self) -> list[str]:
        return [name for name in ("encode_image", "encode_video") if name in self._loader.programs]

    def request_weights(self) -> list[Future[Any]]:
        """Starts to read what encodes images and videos."""
        names = [name for program in self._programs for name in self._loader.programs[program].inputs]
        return self._loader.request(components=[name for name in names if name in self._manifest.components])

    def request_programs(self) -> list[Future[Any]]:
        """Starts to load the programs that encode images and videos."""
        return self._loader.request(programs=self._programs)

    def read(
        self, media: Media | None, inputs: Inputs | None, overlap: int | None, timings: Timings
    ) -> Inputs | None:
        """What a generation is given of images and videos, read if it is not yet; None for text alone.

        Args:
            media: as files or in memory; None where there are none.
            inputs: the same read already, instead.
            overlap: frames that segments share; the media's or inputs' own where None.
            timings: where the time is recorded.

        Raises:
            UsageError: if both are given, they contradict the overlap, or the media are missing, not taken by
                this model, or cannot be used.
        """
        if inputs is not None:
            if media is not None:
                raise UsageError("media and inputs exclude each other", remedy="pass one of them")
            if overlap not in (None, inputs.segment_overlap):
                raise UsageError(
                    "segment_overlap is not that of the inputs",
                    expected=inputs.segment_overlap,
                    found=overlap,
                    remedy="give it to the Media that they are loaded from",
                )
            return inputs
        given = media or Media()
        if overlap is not None:
            given = replace(given, segment_overlap=overlap)
        check_media(self._manifest, given)
        if media is None and not self.needed:
            return None
        from wanrun.media.prepare import load_media  # imports Pillow

        with timings.phase("read_media"):
            inputs = load_media(self._manifest, self._profile, given)
        return inputs if inputs.arrays else None

    def blank(self, timings: Timings) -> Conditions:
        """Conditions of black images, by running all programs: for a warm-up."""
        arrays: dict[str, np.ndarray] = {}
        for name in self._programs:
            program = self._loader.programs[name]
            for key in program.avals["inputs"]:  # which leaves out the weights
                dtype, shape = program.array(key)
                arrays[key] = np.zeros(shape, dtype)
        if "face_video" in self._prepare.inputs:
            dtype, shape = self._prepare.array("face_video")
            arrays["face_video"] = np.zeros(shape, dtype)
        last, inputs = self._last, Inputs(arrays) if self._programs else None
        try:
            return self(inputs, timings=timings)
        finally:
            self._last = last

    def __call__(
        self,
        inputs: Inputs | None,
        *,
        timings: Timings,
        window: Window | None = None,
        previous: Any = None,
        scale: float = 1.0,
    ) -> Conditions:
        """Encodes images and videos.

        Args:
            inputs: what was read of them; None for text alone.
            timings: where the time is recorded.
            window: which part of the videos, for a model that makes long ones in parts; the first where None.
            previous: the frames before the window, float32 (5, H, W, 3) in [-1, 1]; None for the first.
            scale: of the control blocks, for a model that has them.

        Raises:
            ArtifactError: if a program or weights cannot be loaded, or the profile has no such program.
            UsageError: if the inputs are of another profile.
        """
        if inputs is None or not inputs.arrays:
            return self._without()
        if "encode_video" not in self._programs:
            raise ArtifactError(
                f"profile {self._profile.name} has no program for images and videos",
                remedy="build it again with wanbuild compile",
            )
        arrays: dict[str, Any] = dict(inputs.arrays)
        start, stop = (0, self._profile.num_frames) if window is None else (window.start, window.stop)
        arrays |= {name: arrays[name][start:stop] for name in WINDOWED if name in arrays}
        self._check(arrays)
        known = self._remembered(inputs)
        if known is not None and not start:
            return self._conditions(arrays, known, scale)
        tokens = {} if known is None else {key: known[key] for key in known if key != "condition"}
        with timings.phase("encode_media"):
            encoded = self._encode(arrays, tokens, previous, inputs.segment_overlap)
        if not start:
            self._last = weakref.ref(inputs), encoded  # the arrays may be gigabytes, and are the caller's
        return self._conditions(arrays, encoded, scale)

    def forget(self) -> None:
        """Lets go of what the last inputs gave."""
        self._last = None

    def _remembered(self, inputs: Inputs) -> dict[str, Any] | None:
        """What the first window of the same inputs gave, where they were the last ones."""
        last = self._last
        return last[1] if last is not None and last[0]() is inputs else None

    def _check(self, arrays: Mapping[str, Any]) -> None:
        """Raises UsageError for arrays of another shape than the programs take."""
        for name in self._programs:
            program = self._loader.programs[name]
            for key in program.inputs:
                if key not in arrays:
                    continue
                _, shape = program.array(key)
                if arrays[key].shape != shape:
                    raise UsageError(
                        f"the inputs do not fit profile {self._profile.name}",
                        expected=f"{key} of shape {shape}",
                        found=arrays[key].shape,
                        remedy="load them with this pipeline's manifest and profile",
                    )

    def _encode(
        self, arrays: Mapping[str, Any], tokens: Mapping[str, Any], previous: Any, overlap: int
    ) -> dict[str, Any]:
        """What the encoding programs return, on the device; the image tokens may be known already."""
        import jax

        flags = {"overlap": np.int32(overlap), "later": np.int32(previous is not None)}
        video = self._loader.programs["encode_video"]
        if previous is None and "previous" in video.inputs:
            dtype, shape = video.array("previous")
            previous = np.zeros(shape, dtype)
        encoded = dict(tokens)
        if not tokens and "encode_image" in self._programs:
            encoded |= self._loader.bound("encode_image")(pixels=arrays["pixels"])
            jax.block_until_ready(encoded)
            if self._low_memory:
                self._loader.release("image_encoder")
        encode_video = self._loader.bound("encode_video")
        encoded |= encode_video(**{**arrays, **flags, "previous": previous})
        return jax.block_until_ready(encoded)  # type: ignore[no-any-return]

    def _conditions(self, arrays: Mapping[str, Any], encoded: Mapping[str, Any], scale: float) -> Conditions:
        prepare = {name: value for name, value in encoded.items() if name != "condition"}
        if "face_video" in self._prepare.inputs:
            prepare["face_video"] = arrays["face_video"]
        steps = {"condition": encoded["condition"]}
        if "conditioning_scale" in self._step.inputs:
            dtype, shape = self._step.array("conditioning_scale")
            steps["conditioning_scale"] = np.full(shape, scale, dtype)
        held = None
        if "frame_mask" in self._step.inputs:
            held = np.asarray(encoded["condition"]["first_frame"])
            steps["frame_mask"] = self._frame_mask(held=True)
        return Conditions(prepare, self._loader.put(steps), held)

    def _frame_mask(self, held: bool) -> np.ndarray:
        """Zero for a frame that is held, float32 (T,)."""
        dtype, shape = self._step.array("frame_mask")
        mask = np.ones(shape, dtype)
        mask[:1] = not held
        return mask

    def _without(self) -> Conditions:
        """Text alone: none, or a frame that is not held."""
        if "frame_mask" not in self._step.inputs:
            return Conditions()
        _, channels, _, h, w = latents_shape(self._manifest, self._profile)
        nothing = {"first_frame": np.zeros((channels, 1, h, w), np.float32)}
        steps = {"condition": nothing, "frame_mask": self._frame_mask(held=False)}
        return Conditions(steps=self._loader.put(steps))
