"""Keeps the frames of a video that cannot be written: the minutes that they took are not lost."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from wanrun.errors import UsageError
from wanrun.media.write_video import AppearedError


@contextmanager
def rescued(frames: np.ndarray, video: Path) -> Iterator[None]:
    """Writes frames as .npy where there is room for them if a block cannot write their video.

    Args:
        frames: uint8 (T, H, W, 3).
        video: the path that could not be written; its folder is tried first, then the system's temporary one.

    Raises:
        UsageError: that of the block, with the path of the frames if they could be kept.
    """
    try:
        yield
    except AppearedError:  # the video is there
        raise
    except UsageError as error:
        kept = _keep(frames, video)
        if kept is None:
            raise
        remedy = f"its frames are kept in {kept}" + (f"; {error.remedy}" if error.remedy else "")
        raise type(error)(error.what, expected=error.expected, found=error.found, remedy=remedy) from error


def _keep(frames: np.ndarray, video: Path) -> Path | None:
    """Returns the path of a file that has room for the frames; None if there is none."""
    for folder in (video.absolute().parent, Path(tempfile.gettempdir())):
        path = folder / f"{video.stem}-{secrets.token_hex(4)}.npy"
        try:
            with path.open("xb") as file:
                np.save(file, frames)
        except OSError:
            path.unlink(missing_ok=True)
        else:
            return path
    return None
