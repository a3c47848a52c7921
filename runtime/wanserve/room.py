"""Whether there is room: on the disk of the videos, and for open files; and what clients get if not."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Final

from wanrun.errors import lacks_space
from wanserve.log import LOG
from wanserve.refusal import RefusedError
from wanserve.video import Video

RESERVE: Final = 16 << 20
"""Bytes of the disk that no request and no video is to take: the states of videos are stored there."""

NO_SPACE: Final = "the disk of the server is full"
NO_FILES: Final = "the server can open no more files"
_NO_FILES: Final = (errno.EMFILE, errno.ENFILE)


class Room:
    """The room for videos in their folder.

    ``comes_back`` says whether ended videos are removed after a while, which makes room.
    """

    def __init__(self, folder: Path, comes_back: bool = False) -> None:
        self._folder, self._comes_back = folder, comes_back
        self._logged: str | None = None

    def lack(self, nbytes: int = 0) -> str | None:
        """Returns what is too scarce for so many bytes more, in words; None for nothing."""
        try:
            os.close(os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC))
            return NO_SPACE if self.left() < nbytes else None
        except OSError as error:
            return NO_FILES if error.errno in _NO_FILES else "the folder of the jobs cannot be read"

    def lack_logged(self) -> str | None:
        """Returns what is too scarce for any video, in words; None for nothing. A change is logged."""
        problem = self.lack()
        if problem != self._logged:
            LOG.warning("%s", problem or "there is room again")
        self._logged = problem
        return problem

    def left(self) -> int:
        """Returns the free bytes beyond the reserve, negative if there are fewer; raises OSError."""
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize - RESERVE

    def check(self, nbytes: int = 0) -> None:
        """Raises RefusedError if there is too little room for so many bytes more."""
        if (problem := self.lack(nbytes)) is not None:
            raise self._out_of_room(problem)

    def refusal(self, error: BaseException) -> RefusedError | None:
        """Returns the refusal for an error that means want of room; None for another error."""
        code = getattr(error, "sqlite_errorcode", None)
        if lacks_space(error) or code == sqlite3.SQLITE_FULL:
            return self._out_of_room(NO_SPACE)
        if code == sqlite3.SQLITE_CANTOPEN or (isinstance(error, OSError) and error.errno in _NO_FILES):
            return self._out_of_room(NO_FILES)
        problem = None if code is None else self.lack()  # SQLite has many names for it
        return None if problem is None else self._out_of_room(problem)

    def _out_of_room(self, problem: str) -> RefusedError:
        if problem == NO_FILES:  # connections that are slow are closed
            headers = {"Retry-After": "5"}
            return RefusedError(
                problem, 503, code="too_many_files", headers=headers, remedy="try again later"
            )
        if problem == NO_SPACE:
            headers = {"Retry-After": "30"} if self._comes_back else {}
            remedy = "try again later" if self._comes_back else "delete videos that nobody needs"
            return RefusedError(problem, 507, code="no_space", headers=headers, remedy=remedy)
        return RefusedError(problem, 503, code="unavailable")


def frames_bytes(video: Video) -> int:
    """Returns the bytes of a video's frames, more than the files of its videos take.

    Of a live video, which is encoded at once, those of its fragments, and of the file that they become.
    """
    width, height = map(int, video.shape["size"].split("x"))
    if video.live is not None:
        return 2 * min(video.live.bytes, int(video.live.seconds * video.shape["fps"]) * width * height * 3)
    frames = max(int(video.options.get("num_frames") or 0), video.shape["num_frames"])
    return width * height * 3 * frames * int(video.shape["num_videos"])
