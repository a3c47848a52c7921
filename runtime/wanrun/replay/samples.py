"""Random images and videos for testing an artifact: never constant or square, and fixed by a seed."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.media.inputs import MEDIA_KINDS, Media

if TYPE_CHECKING:
    from PIL import Image

_CELL = 16  # pixels of a blob: an encoder mostly drops finer detail


def sample_image(width: int, height: int, seed: int) -> Image.Image:
    """Returns an RGB image of coloured blobs."""
    return sample_video(width, height, 1, seed)[0]


def sample_video(width: int, height: int, frames: int, seed: int) -> list[Image.Image]:
    """Returns RGB frames of coloured blobs that change; no two frames or seeds are alike."""
    from PIL import Image

    rng = np.random.default_rng((seed, width, height))
    shape = (height // _CELL + 2, width // _CELL + 2, 3)
    first, second = (rng.integers(0, 256, shape).astype(np.float64) for _ in range(2))
    pictures = []
    for turn in np.linspace(0, np.pi, frames, endpoint=False):
        blend = first * np.cos(turn) ** 2 + second * np.sin(turn) ** 2
        picture = Image.fromarray(blend.astype(np.uint8))
        pictures.append(picture.resize((width, height), Image.Resampling.BICUBIC))
    return pictures


def sample_mask(width: int, height: int, frames: int) -> list[Image.Image]:
    """Returns RGB frames of a white box that moves over black: part of each frame is on, no pixel always."""
    from PIL import Image

    masks = []
    for frame in range(frames):
        mask = np.zeros((height, width, 3), np.uint8)
        left = (width // 2) * frame // max(frames, 1)
        mask[height // 4 : height // 4 + height // 2, left : left + width // 3] = 255
        masks.append(Image.fromarray(mask))
    return masks


def sample_media(
    manifest: Manifest,
    profile: Profile,
    *,
    mode: str | None = None,
    without: Collection[str] = (),
    seed: int = 0,
) -> Media | None:
    """Returns all inputs of a model besides the prompt; None if there are none, or all are left out.

    Images have another size than the profile; a video for VACE has the profile's. ``mode`` is Animate's, None
    its default; there is one window, whose last frames are padded. ``without`` names optional inputs to leave
    out.
    """
    inputs = manifest.model.task.inputs
    start = None if profile.options.video_to_video else manifest.model.task.start
    taken = {
        name: item.array
        for name, item in inputs.items()
        if item.mode in (None, mode) and (item.required or name not in (*without, start))
    }
    wanted = {array: name for name, array in reversed(taken.items())}.values()  # of one array the first one
    if not wanted:
        return None
    frames = profile.num_frames
    if manifest.model.task.windows is not None:
        frames = max(1, frames - 2)
    if manifest.model.task.past:
        frames = max(frames, manifest.model.chunk_frames)
    size = profile.width, profile.height
    face = inputs["face_video"].size if "face_video" in inputs else None
    given = samples(wanted, size, frames, profile.num_references, face or 0, seed)
    return Media(**given, mode=mode)


def samples(
    names: Collection[str], size: tuple[int, int], frames: int, references: int, face: int, seed: int
) -> dict[str, Any]:
    """Returns media by option, in the order of ``MEDIA_KINDS``."""
    other = (size[0] * 5 // 4 + 3, size[1] + 5)
    given: dict[str, Any] = {}
    for number, name in enumerate(MEDIA_KINDS):
        own = seed * len(MEDIA_KINDS) + number
        if name not in names:
            continue
        if name == "reference_image":
            given[name] = tuple(sample_image(*other, own + 100 * index) for index in range(references))
        elif name in ("mask", "mask_video"):
            given[name] = sample_mask(*size, frames)
        elif name == "face_video":
            given[name] = sample_video(face + 8, face + 4, frames, own)
        elif MEDIA_KINDS[name] == "an image":
            given[name] = sample_image(*other, own)
        else:
            given[name] = sample_video(*size, frames, own)
    return given
