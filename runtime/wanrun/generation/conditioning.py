"""What images and videos give the transformer: their tokens and latents, and what goes with them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile, Program
from wanrun.denoising.conditions import Conditions
from wanrun.denoising.steps import LOOP_PROGRAMS
from wanrun.errors import ArtifactError, UsageError
from wanrun.generation.last_encoded import LastEncoded
from wanrun.generation.options import latents_shape
from wanrun.loading.programs import Programs
from wanrun.media.types import Inputs, Media, check_media
from wanrun.media.windows import Window
from wanrun.timing import Timings

WINDOWED = ("pose_video", "face_video", "background_video", "mask_video")
"""Videos of any length, of which a window is taken."""


class Conditioning:
    """Runs ``encode_image`` and ``encode_video``.

    Args:
        programs: the profile's, with their weights.
        manifest: the artifact's manifest.
        profile: the profile.
        last: keeps what the last inputs gave, for the next prompt.
        low_memory: whether the image encoder is let go of when it has run.
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
        self._last, self._low_memory = last, low_memory
        self._encoders = [name for name in ("encode_image", "encode_video") if name in programs]
        self._digests = tuple(programs[name].sha256 for name in self._encoders)

    @property
    def needed(self) -> bool:
        """Whether every step needs a condition. Only TI2V can run without one."""
        return "condition" in self._step.inputs and "frame_mask" not in self._step.inputs

    @property
    def _step(self) -> Program:
        return next(self._programs[name] for name in LOOP_PROGRAMS.values() if name in self._programs)

    @property
    def _prepare(self) -> Program:
        return self._programs["prepare"]

    def request_weights(self) -> list[Future[Any]]:
        """Starts to read what encodes images and videos."""
        names = [name for program in self._encoders for name in self._programs.components(program)]
        return self._programs.request(components=names)

    def request_programs(self) -> list[Future[Any]]:
        """Starts to load the programs that encode images and videos."""
        return self._programs.request(programs=self._encoders)

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

    def blank(self) -> Conditions:
        """Conditions of black images, by running all programs: for a warm-up."""
        if not self._encoders:
            return self._without()
        arrays: dict[str, np.ndarray] = {}
        for name in self._encoders:
            program = self._programs[name]
            for key in program.avals["inputs"]:  # which leaves out the weights
                dtype, shape = program.array(key)
                arrays[key] = np.zeros(shape, dtype)
        if "face_video" in self._prepare.inputs:
            dtype, shape = self._prepare.array("face_video")
            arrays["face_video"] = np.zeros(shape, dtype)
        return self._conditions(arrays, self._encode(arrays, {}, None, overlap=1), scale=1.0)

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
        if "encode_video" not in self._encoders:
            raise ArtifactError(
                f"profile {self._profile.name} has no program for images and videos",
                remedy="build it again with wanbuild compile",
            )
        arrays: dict[str, Any] = dict(inputs.arrays)
        start, stop = (0, self._profile.num_frames) if window is None else (window.start, window.stop)
        arrays |= {name: arrays[name][start:stop] for name in WINDOWED if name in arrays}
        self._check(arrays)
        known = self._last.find(inputs, self._digests)
        if known is not None and not start:
            return self._conditions(arrays, known, scale)
        tokens = {} if known is None else {key: known[key] for key in known if key != "condition"}
        with timings.phase("encode_media"):
            encoded = self._encode(arrays, tokens, previous, inputs.segment_overlap)
        if not start:
            self._last.keep(inputs, self._digests, encoded)
        return self._conditions(arrays, encoded, scale)

    def _check(self, arrays: Mapping[str, Any]) -> None:
        """Raises UsageError for arrays of another shape than the programs take."""
        for name in self._encoders:
            program = self._programs[name]
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
        video = self._programs["encode_video"]
        if previous is None and "previous" in video.inputs:
            dtype, shape = video.array("previous")
            previous = np.zeros(shape, dtype)
        encoded = dict(tokens)
        if not tokens and "encode_image" in self._encoders:
            encoded |= self._programs.bound("encode_image")(pixels=arrays["pixels"])
            jax.block_until_ready(encoded)
            if self._low_memory:
                self._programs.release("image_encoder")
        encode_video = self._programs.bound("encode_video")
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
        return Conditions(prepare, self._programs.put(steps), held)

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
        return Conditions(steps=self._programs.put(steps))
