"""Media become the arrays that programs take: read, checked against the profile, and preprocessed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.errors import UsageError, field
from wanrun.media.images import ImageSource, described, file_digest, read_image
from wanrun.media.processors import clip_pixels, filled, greyscale, reference_canvas, resized, vace_size
from wanrun.media.read_video import VideoSource, read_video, video_digest
from wanrun.media.types import MEDIA_KINDS, MODES, Inputs, Media, check_media
from wanrun.media.windows import check_segments, padded_frames, reflected

MAX_BYTES = 8 * 2**30
"""Of Animate's videos, which are held in memory: at 1280x720 and 30 fps 80 s, or 39 s with mode replace."""

_STEP_BYTES = 2**26  # by which the pose video grows: above this malloc maps pages of their own


def load_media(manifest: Manifest, profile: Profile, media: Media) -> Inputs:
    """Reads, checks and preprocesses everything that is given.

    Args:
        manifest: the artifact's.
        profile: the static shape: size, frames (Animate: of a segment) and number of reference images.
        media: what is given.

    Raises:
        UsageError: for what ``check_media`` refuses, and for an image or video that cannot be read or does
            not fit the profile.
    """
    check_media(manifest, media)
    loader = _Loader(manifest, profile, media)
    load: Callable[[], Inputs] = {"vace": loader.vace, "animate": loader.animate}.get(
        manifest.model.task, loader.frames
    )
    return load()


def media_facts(manifest: Manifest, profile: Profile, media: Media) -> Mapping[str, Any] | None:
    """The ``facts`` of ``load_media``, where they can be told without decoding: files are digested alone.

    Whether the media can be used is not known then. Two that have the same facts are the same.

    Args:
        manifest, profile, media: as of ``load_media``.

    Returns:
        None for Animate, and for images in memory.

    Raises:
        UsageError: for what ``check_media`` refuses, and for a file that cannot be read.
    """
    check_media(manifest, media)
    if manifest.model.task == "animate":  # how many frames are used of a folder, the pose video decides
        return None
    digests: dict[str, list[str]] = {}
    for name, source in _given(media):
        if not isinstance(source, Path | str):
            return None
        option = field(name)
        if name in ("video", "mask"):
            digest = video_digest(source, option, profile.num_frames)
        else:
            digest = file_digest(source, option)
        digests.setdefault(name, []).append(digest)
    return _facts(manifest, media, digests)


class _Loader:
    """Loads the media of one generation."""

    def __init__(self, manifest: Manifest, profile: Profile, media: Media) -> None:
        self._model, self._profile, self._media = manifest.model, profile, media
        self._width, self._height = profile.width, profile.height
        self._manifest, self._digests = manifest, dict[str, list[str]]()

    def frames(self) -> Inputs:
        """Image to video: the first frame, and the last."""
        media, arrays = self._media, dict[str, np.ndarray]()
        images = {
            name: self._image(name, source)
            for name in ("image", "last_image")
            if (source := getattr(media, name)) is not None
        }
        for name, image in images.items():
            arrays[name] = resized(image, self._width, self._height)[None]
        arrays |= self._pixels(images)
        if images and self._model.inputs.get("last_image") == "optional":
            arrays["has_last_image"] = _flag("last_image" in images)
            arrays.setdefault("last_image", _constant(0, arrays["image"].shape))
        return Inputs(arrays, self._facts())

    def vace(self) -> Inputs:
        """VACE: a video, its mask, reference images, or none of them."""
        media, shape = self._media, (self._profile.num_frames, self._height, self._width, 3)
        arrays = {
            "video": _constant(0, shape),
            "mask": _constant(255, shape),
            "has_video": _flag(media.video is not None),
        }
        self._check_references(len(media.reference_image))
        if media.reference_image:
            arrays["references"] = np.stack(
                [
                    reference_canvas(
                        self._image("reference_image", source),
                        self._width,
                        self._height,
                        self._model.vae_spatial,
                        described(source, field("reference_image")),
                    )
                    for source in media.reference_image
                ]
            )
        if media.video is not None:
            arrays["video"] = self._whole_video("video", media.video, self._check_vace_size)
        if media.mask is not None:
            arrays["mask"] = self._whole_video("mask", media.mask)
        return Inputs(arrays, self._facts())

    def animate(self) -> Inputs:
        """Animate: a character, and the videos that say what it does."""
        media = self._media
        assert media.image is not None and media.pose_video is not None and media.face_video is not None
        replace = media.mode == "replace"
        image = self._image("image", media.image)
        arrays = {
            "image": filled(image, self._width, self._height, self._title("image"))[None],
            **self._pixels({"image": image}),
        }
        arrays["pose_video"], num_frames = self._poses(media.pose_video, replace)
        target = len(arrays["pose_video"])
        face = self._face
        arrays["face_video"] = self._padded("face_video", media.face_video, target, face, face)
        background, mask = media.background_video, media.mask_video
        if replace:
            assert background is not None and mask is not None
            size = self._width, self._height
            arrays["background_video"] = self._padded("background_video", background, target, *size)
            arrays["mask_video"] = self._padded("mask_video", mask, target, *size, greyscale)
        else:
            arrays["background_video"] = _constant(0, arrays["pose_video"].shape)
            arrays["mask_video"] = _constant(0, arrays["pose_video"].shape[:3])
        arrays["replace"] = _flag(replace)
        return Inputs(arrays, self._facts(), num_frames, media.segment_overlap)

    @property
    def _face(self) -> int:
        assert self._model.face_size is not None
        return self._model.face_size

    def _image(self, name: str, source: ImageSource) -> Image.Image:
        digest = hashlib.sha256()
        image = read_image(source, field(name), digest.update)
        self._digests.setdefault(name, []).append(digest.hexdigest())
        return image

    def _frames(self, name: str, source: VideoSource, max_frames: int) -> Iterator[Image.Image]:
        digest = hashlib.sha256()
        yield from read_video(source, field(name), max_frames, digest.update)
        self._digests[name] = [digest.hexdigest()]

    def _facts(self) -> dict[str, Any]:
        return _facts(self._manifest, self._media, self._digests)

    def _title(self, name: str) -> str:
        """The option and its file, for messages."""
        return described(getattr(self._media, name), field(name))

    def _pixels(self, images: Mapping[str, Image.Image]) -> dict[str, np.ndarray]:
        """What the image encoder takes, where there is one: images as they are read, by option."""
        settings = self._model.image_processor
        if not images or settings is None:
            return {}
        pixels = [clip_pixels([image], settings, self._title(name)) for name, image in images.items()]
        return {"pixels": np.concatenate(pixels)}

    def _check_references(self, found: int) -> None:
        if found != self._profile.num_references:
            raise UsageError(
                f"{field('reference_image')} does not fit the profile",
                expected=f"{self._profile.num_references} image(s)",
                found=found,
                remedy="the profile is chosen by their number, and a run has one profile",
            )

    def _check_vace_size(self, frame: Image.Image, name: str) -> None:
        """Raises UsageError unless frames of this size condition all of the video."""
        wanted = f"{self._width}x{self._height}"
        multiple, spatial = self._model.size_multiple, self._model.vae_spatial
        width, height = vace_size(*frame.size, self._width, self._height, multiple, spatial)
        if (width, height) != (self._width, self._height):
            # The reference goes on with this size, which programs of the profile's cannot take.
            other = f", or use a profile of {width}x{height}" if width and height else ""
            raise UsageError(
                f"the frames of {name} do not fit the profile",
                expected=f"{wanted}, or larger ones of its aspect ratio",
                found=f"{frame.width}x{frame.height}, which becomes {width}x{height}",
                remedy=f"scale or crop the video to {wanted}{other}",
            )

    def _whole_video(
        self, name: str, source: VideoSource, check: Callable[[Image.Image, str], None] | None = None
    ) -> np.ndarray:
        """uint8 (num_frames, H, W, 3) of a video that has to have the profile's number of frames."""
        expected, title = self._profile.num_frames, self._title(name)
        frames = np.empty((expected, self._height, self._width, 3), np.uint8)
        count = 0
        for count, frame in enumerate(self._frames(name, source, expected + 1), 1):
            if count == 1 and check is not None:
                check(frame, title)
            if count > expected:
                break
            frames[count - 1] = resized(frame, self._width, self._height)
        if count != expected:
            raise UsageError(
                f"{title} does not fit the profile",
                expected=f"{expected} frames",
                found=count if count < expected else f"more than {expected}",
                remedy="cut the video, or use a profile of its length",
            )
        return frames

    def _poses(self, source: VideoSource, replace: bool) -> tuple[np.ndarray, int]:
        """uint8 (target, H, W, 3): the pose video, padded to whole segments; and how many frames it has."""
        title, pixels = self._title("pose_video"), self._width * self._height
        frame_bytes = 3 * pixels + 3 * self._face**2 + (4 * pixels if replace else 0)
        limit, step = MAX_BYTES // frame_bytes, -(-_STEP_BYTES // (3 * pixels))
        shape = self._height, self._width, 3
        # Grown in place, for its length is known at its end alone, and two copies would be twice the memory:
        # of an array this large realloc moves the pages, not the bytes.
        frames, count = np.empty((0, *shape), np.uint8), 0
        for count, frame in enumerate(self._frames("pose_video", source, limit + 1), 1):
            if count > limit:
                raise UsageError(
                    f"{title} is too long for one run",
                    expected=f"at most {limit} frames at this size",
                    remedy="cut it, and make the parts one by one",
                )
            if count > len(frames):
                frames.resize((len(frames) + step, *shape), refcheck=False)
            frames[count - 1] = resized(frame, self._width, self._height)
        segments = count, self._profile.num_frames, self._media.segment_overlap
        check_segments(*segments, title)
        frames.resize((padded_frames(*segments), *shape), refcheck=False)
        _reflect(frames, count)
        return frames, count

    def _padded(
        self,
        name: str,
        source: VideoSource,
        target: int,
        width: int,
        height: int,
        process: Callable[[Image.Image, int, int], np.ndarray] = resized,
    ) -> np.ndarray:
        """uint8 (target, height, width[, 3]): a video cut to the segments, or padded by reflection."""
        colours = () if process is greyscale else (3,)
        frames, count = np.empty((target, height, width, *colours), np.uint8), 0
        for count, frame in enumerate(self._frames(name, source, target), 1):
            frames[count - 1] = process(frame, width, height)
        if count == 1 and target > 1:
            raise UsageError(
                f"{self._title(name)} is too short",
                expected="2 frames or more: one cannot be reflected",
                found=1,
            )
        _reflect(frames, count)
        return frames


def _reflect(frames: np.ndarray, count: int) -> None:
    """Fills what follows the first frames with reflections of them."""
    for index, source in enumerate(reflected(count, len(frames))):
        if index >= count:
            frames[index] = frames[source]


def _given(media: Media) -> Iterator[tuple[str, ImageSource | VideoSource]]:
    """The media that there are, by option."""
    for name in MEDIA_KINDS:
        source = getattr(media, name)
        if name == "reference_image":
            yield from ((name, image) for image in source)
        elif source is not None:
            yield name, source


def _facts(manifest: Manifest, media: Media, digests: Mapping[str, list[str]]) -> dict[str, Any]:
    """What the metadata records: names and digests of the media, lists of them for the reference images."""
    names: dict[str, list[str | None]] = {}
    for name, source in _given(media):
        names.setdefault(name, []).append(_name(source))
    facts: dict[str, Any] = {}
    for name in names:
        many = name == "reference_image"
        facts[name] = names[name] if many else names[name][0]
        facts[f"{name}_sha256"] = digests[name] if many else digests[name][0]
    if manifest.model.task == "animate":
        facts["mode"] = media.mode or MODES[0]
    return facts


def _name(source: ImageSource | VideoSource) -> str | None:
    """A file's name without its folder; None for what is in memory."""
    return Path(source).absolute().name if isinstance(source, Path | str) else None


def _flag(value: bool) -> np.ndarray:
    return np.array(value, np.int32)


def _constant(value: int, shape: tuple[int, ...]) -> np.ndarray:
    """A read-only uint8 array of one value, which takes one byte."""
    return np.broadcast_to(np.uint8(value), shape)
