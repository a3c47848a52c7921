"""Reads images and videos, checks them against the profile, and makes the arrays that programs take.

The manifest says which media a model takes and how each is prepared: nothing here is about a single model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.media import FITS, MASKS, ImageSource, MediaOption, VideoSource
from wanrun.artifact.programs import Profile
from wanrun.artifact.task import Input
from wanrun.errors import UsageError, field
from wanrun.media.facts import facts_of, given_media
from wanrun.media.images import described, left_out, probe_image, read_image
from wanrun.media.inputs import (
    MEDIA_KINDS,
    Inputs,
    Media,
    beginning,
    check_media,
    chosen_mode,
    chosen_overlap,
    is_given,
    without_arrays,
)
from wanrun.media.preparations import PREPARATIONS, Canvas
from wanrun.media.processors import clip_pixels, clip_size
from wanrun.media.read_video import read_video
from wanrun.media.windows import check_chunks, check_segments, last_chunks, padded_frames, reflected
from wanrun.opened.cancel import CancelToken

MAX_BYTES = 8 * 2**30
"""The largest size of the prepared videos of a model with windows, which are held in memory: 80 s at 1280x720
and 30 fps, or 39 s with a background video and its mask."""

_BLACK = 127
"""The largest value of a mask that counts as black, of 255."""

_STEP_BYTES = 2**26  # growth of a video of unknown length; malloc maps separate pages for sizes above this


def load_media(
    manifest: Manifest,
    profile: Profile,
    media: Media,
    *,
    cancel: CancelToken | None = None,
) -> Inputs:
    """Reads, checks and prepares the given media.

    The profile gives size, frames (of one window, if there are windows) and number of reference images.
    Raises CancelledError once ``cancel`` is cancelled; UsageError as ``check_media``, and for an image or
    video that cannot be read or does not fit the profile.
    """
    media = without_arrays(media)
    check_media(manifest, media)
    return _Loader(manifest, profile, media, cancel).load()


def probe_media(
    manifest: Manifest, profile: Profile, media: Media, *, cancel: CancelToken | None = None
) -> None:
    """Checks the given media by the headers of images and the first frame of each video.

    What it does not see, ``load_media`` refuses: damage after these, and a number of frames that does not
    fit. Raises as ``load_media``.
    """
    media = without_arrays(media)
    check_media(manifest, media)
    for name, source in given_media(manifest, media):
        item, title = manifest.model.task.inputs[name], described(source, field(name))
        if item.kind == "images":
            _check_count(profile, name, len(getattr(media, name)))
        size = _probed_size(item, source, field(name), cancel)
        PREPARATIONS[item.prepare].check(size, _canvas(manifest, profile, item, media.fit, title))
        if item.encoded:
            assert manifest.model.image_processor is not None  # the manifest's check says so
            clip_size(size, manifest.model.image_processor, title)


def _probed_size(item: Input, source: Any, option: str, cancel: CancelToken | None) -> tuple[int, int]:
    """Returns width and height of an image, or of a video's first frame."""
    if item.kind != "video":
        return probe_image(source, option, cancel)
    (frame,) = read_video(source, option, 1, cancel=cancel)
    return frame.size


class _Loader:
    """Loads the media of one generation."""

    def __init__(
        self, manifest: Manifest, profile: Profile, media: Media, cancel: CancelToken | None
    ) -> None:
        self._manifest, self._profile, self._media, self._cancel = manifest, profile, media, cancel
        self._model, self._task = manifest.model, manifest.model.task
        self._overlap = chosen_overlap(manifest, media)
        self._digests = dict[str, list[str]]()
        self._warnings: list[str] = []
        self._pixels: list[np.ndarray] = []  # input of the image encoder
        self._total = profile.num_frames  # frames of each video's array
        self._num_frames: int | None = None  # frames of the result, if the media decide their number
        self._given: int | None = None  # frames of a video that the result goes on after

    def load(self) -> Inputs:
        """Returns the arrays that the programs take, and the facts about the media."""
        arrays: dict[str, np.ndarray] = {}
        for name in self._order():
            item, source = self._task.inputs[name], getattr(self._media, name)
            given = is_given(self._media, name)
            if item.kind == "images":
                _check_count(self._profile, name, len(source))
            if given:
                prepared = self._prepared(name, item, source)
                arrays |= beginning(item, prepared, self._total, self._given)
                if name in MASKS and arrays[item.array].max(initial=0) <= _BLACK:
                    self._warnings.append(_no_white(name, source))
            elif item.default is not None:
                arrays[item.array] = self._constant(item, item.default)
            if item.flag is not None and item.array in arrays:
                arrays[item.flag] = np.array(given, np.int32)
        if self._pixels:
            arrays["pixels"] = np.concatenate(self._pixels)
        if (modes := self._task.modes) is not None:
            mode = chosen_mode(self._manifest, self._media)
            arrays[modes.array] = np.array(modes.names.index(mode), np.int32)
        facts = facts_of(self._manifest, self._media, self._digests)
        warnings = tuple(dict.fromkeys(self._warnings))
        return Inputs(arrays, facts, self._num_frames, self._overlap, warnings)

    def _order(self) -> list[MediaOption]:
        """Returns the model's inputs: images, then the video that decides the length, then other videos."""
        inputs, windows = self._task.inputs, self._task.windows
        first = None if windows is None else windows.frames_of
        there = [name for name in MEDIA_KINDS if name in inputs]
        return sorted(there, key=lambda name: (inputs[name].kind == "video", name != first))

    def _prepared(self, name: MediaOption, item: Input, source: Any) -> np.ndarray:
        windows = self._task.windows
        if item.kind == "image":
            return self._image(name, item, source)[None]
        if item.kind == "images":
            return np.stack([self._image(name, item, image) for image in source])
        if item.past:
            return self._last_chunks(name, item, source)
        if item.count is not None:
            return self._first_chunks(name, item, source)
        if windows is None:
            return self._whole_video(name, item, source)
        if name == windows.frames_of:
            return self._deciding_video(name, item, source)
        return self._padded_video(name, item, source)

    def _canvas(self, item: Input, title: str = "") -> Canvas:
        return _canvas(self._manifest, self._profile, item, self._media.fit, title)

    def _constant(self, item: Input, value: int) -> np.ndarray:
        """Returns a read-only array of one repeated value, which takes the memory of one value."""
        prepared = PREPARATIONS[item.prepare]
        count = 1 if item.kind == "image" else self._total
        return np.broadcast_to(prepared.dtype(value), (count, *prepared.shape(self._canvas(item))))

    def _image(self, name: MediaOption, item: Input, source: ImageSource) -> np.ndarray:
        """Returns an image (H, W, ...), and keeps the image encoder's pixels if the model encodes it."""
        digest, title = hashlib.sha256(), described(source, field(name))
        image = read_image(source, field(name), digest.update, cancel=self._cancel)
        self._digests.setdefault(name, []).append(digest.hexdigest())
        canvas = self._canvas(item, title)
        prepared = PREPARATIONS[item.prepare].process(image, canvas)
        self._warnings += [f"{described(source, name)}: {note}" for note in left_out(image)]
        self._warn_if_squeezed(name, item, source, image, canvas)
        if item.encoded:
            assert self._model.image_processor is not None  # the manifest's check says so
            self._pixels.append(clip_pixels([image], self._model.image_processor, title))
        return prepared

    def _warn_if_squeezed(
        self,
        name: MediaOption,
        item: Input,
        source: ImageSource | VideoSource,
        image: Image.Image,
        canvas: Canvas,
    ) -> None:
        """Notes that an image, or the frames of a video, get another shape."""
        if item.fits and canvas.squeezes(*image.size):
            sizes = f"{image.width}x{image.height} is stretched to {canvas.width}x{canvas.height}"
            self._warnings.append(
                f"{described(source, name)}: {sizes}; the option fit keeps the shape: crop or pad"
            )

    def _frames(
        self, name: MediaOption, item: Input, source: VideoSource, canvas: Canvas, most: int | None
    ) -> Iterator[np.ndarray]:
        """Yields a video's prepared frames, up to ``most``; after the last one its digest is known."""
        digest, prepared = hashlib.sha256(), PREPARATIONS[item.prepare]
        frames = read_video(source, field(name), most, digest.update, self._cancel, name in MASKS)
        for number, frame in enumerate(frames):
            if not number:
                self._warn_if_squeezed(name, item, source, frame, canvas)
            yield prepared.process(frame, canvas)
        self._digests[name] = [digest.hexdigest()]

    def _first_frames(
        self, name: MediaOption, item: Input, source: VideoSource, canvas: Canvas, most: int
    ) -> tuple[np.ndarray, int]:
        """Returns (total, H, W, ...) that begins with a video's frames, and their number, up to ``most``."""
        frames, count = PREPARATIONS[item.prepare].empty(self._total, canvas), 0
        for count, frame in enumerate(self._frames(name, item, source, canvas, most), 1):
            if count <= self._total:
                frames[count - 1] = frame
            del frame  # before the next one is there
        return frames, count

    def _whole_video(self, name: MediaOption, item: Input, source: VideoSource) -> np.ndarray:
        """Returns (F, H, W, ...) of the profile's frames; steps begin with the first ones of more."""
        expected, canvas = self._total, self._canvas(item, described(source, field(name)))
        begins = name == self._task.start
        folder = begins and isinstance(source, Path | str) and Path(source).is_dir()
        # A folder's digest is of the frames that are read.
        frames, count = self._first_frames(name, item, source, canvas, expected + (not folder))
        if begins and count > expected:
            self._warnings.append(f"{described(source, name)}: the first {expected} frames are taken")
        elif count != expected:
            raise UsageError(
                "mismatch",
                f"{canvas.title} does not fit the profile",
                expected=f"{expected} frames" + (" or more" if begins else ""),
                found=count if count < expected else f"more than {expected}",
                remedy=f"{'give a longer' if begins else 'cut the'} video, or use a profile of its length",
            )
        return frames

    def _first_chunks(self, name: MediaOption, item: Input, source: VideoSource) -> np.ndarray:
        """Returns (n, H, W, ...) of the whole chunks that a video begins with."""
        canvas, chunks = self._canvas(item, described(source, field(name))), self._model.chunks
        assert chunks is not None  # the manifest's check says so
        frames, count = self._first_frames(name, item, source, canvas, self._total + 1)
        check_chunks(count, self._total, chunks, self._model.vae_temporal, canvas.title)
        return frames[:count]

    def _last_chunks(self, name: MediaOption, item: Input, source: VideoSource) -> np.ndarray:
        """Returns (1 + n, H, W, ...) of a video's first frame, and of the last whole chunks that count."""
        canvas, chunks = self._canvas(item, described(source, field(name))), self._model.chunks
        assert chunks is not None  # the manifest's check says so
        frames, most = self._frames(name, item, source, canvas, None), -(-item.past // chunks.each)
        kept, self._given = last_chunks(frames, self._model.chunk_frames, most, canvas.title)
        return np.stack(kept)

    def _deciding_video(self, name: MediaOption, item: Input, source: VideoSource) -> np.ndarray:
        """Returns (total, H, W, ...) of the video that decides the length, padded to whole windows."""
        prepared, canvas = PREPARATIONS[item.prepare], self._canvas(item, described(source, field(name)))
        limit, step = MAX_BYTES // self._frame_bytes(), -(-_STEP_BYTES // _bytes(item, canvas))
        shape = prepared.shape(canvas)
        # The array grows in place: the length is known only at the video's end, and two copies would take
        # twice the memory. realloc moves the pages of an array this large, not its bytes.
        frames, count = prepared.empty(0, canvas), 0
        for count, frame in enumerate(self._frames(name, item, source, canvas, limit + 1), 1):
            if count > limit:
                raise UsageError(
                    "out_of_range",
                    f"{canvas.title} is too long for one run",
                    expected=f"at most {limit} frames at this size",
                    remedy="cut it, and make the parts one by one",
                )
            if count > len(frames):
                frames.resize((len(frames) + step, *shape), refcheck=False)
            frames[count - 1] = frame
        segments = count, self._profile.num_frames, self._overlap
        check_segments(*segments, canvas.title)
        self._num_frames, self._total = count, padded_frames(*segments)
        frames.resize((self._total, *shape), refcheck=False)
        _reflect(frames, count)
        return frames

    def _frame_bytes(self) -> int:
        """Returns the prepared bytes of one frame of every given video together."""
        return sum(
            _bytes(item, self._canvas(item))
            for name, item in self._task.inputs.items()
            if item.kind == "video" and getattr(self._media, name) is not None
        )

    def _padded_video(self, name: MediaOption, item: Input, source: VideoSource) -> np.ndarray:
        """Returns (total, H, W, ...) of a video that is cut to the windows, or padded by reflection."""
        canvas = self._canvas(item, described(source, field(name)))
        frames, count = self._first_frames(name, item, source, canvas, self._total)
        if count == 1 and self._total > 1:
            raise UsageError(
                "out_of_range",
                f"{canvas.title} is too short",
                expected="2 frames or more: one cannot be reflected",
                found=1,
            )
        _reflect(frames, count)
        return frames


def _canvas(manifest: Manifest, profile: Profile, item: Input, fit: str | None, title: str) -> Canvas:
    """Returns the size that an input is brought to, and its name in messages."""
    model, width, height = manifest.model, item.size or profile.width, item.size or profile.height
    shape = fit if fit is not None and item.fits else FITS[0]
    return Canvas(width, height, model.vae_spatial, model.size_multiple, title, shape)


def _check_count(profile: Profile, name: str, found: int) -> None:
    """Raises UsageError for another number of reference images than the profile has."""
    if found != profile.num_references:
        raise UsageError(
            "mismatch",
            f"{field(name)} does not fit the profile",
            expected=f"{profile.num_references} image(s)",
            found=found,
            remedy="give as many, or use a profile with this number of reference images",
        )


def _no_white(name: MediaOption, source: VideoSource) -> str:
    what = described(source, f"the {name.replace('_', ' ')}")
    return f"{what} has no white in any frame, so that nothing new is put anywhere; white is where it goes"


def _bytes(item: Input, canvas: Canvas) -> int:
    """Returns the bytes of a prepared frame."""
    prepared = PREPARATIONS[item.prepare]
    return math.prod(prepared.shape(canvas)) * np.dtype(prepared.dtype).itemsize


def _reflect(frames: np.ndarray, count: int) -> None:
    """Fills the frames after the first ``count`` with reflections of those."""
    for index, source in enumerate(reflected(count, len(frames))):
        if index >= count:
            frames[index] = frames[source]
