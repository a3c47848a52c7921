"""The files of a server: the database, and a folder for each video with its uploads and results."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import wanrun
from wanrun.errors import UsageError
from wanrun.generation.video_parts import spool_of
from wanrun.temporary import remove_tree
from wanserve.live_files import FOLDER, LiveFiles
from wanserve.video import Upload, Video

KINDS: Final = ("video", "thumbnail", "last_frame")
"""What is made of each video: kinds of outputs of ``wanrun``."""

if TYPE_CHECKING:
    from wanrun import Output

_ID = re.compile(r"video_[0-9a-f]{32}")
_REQUEST = re.compile(r"request_[0-9a-f]{32}")


class Folders:
    """The folder of a server's data, which one server has at a time; it is made if it is missing.

    Raises UsageError if it cannot be used, or another server has it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._videos, self._incoming = root / "videos", root / "incoming"
        try:
            for folder in (root, self._videos, self._incoming):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                "busy",
                f"another server uses the folder {root}",
                remedy="end it, or give --data another folder",
            ) from None
        except OSError as error:
            raise UsageError(
                "unwritable",
                f"the folder {root} cannot be used",
                found=error.strerror,
                remedy="give --data another one",
            ) from None

    @property
    def database(self) -> Path:
        """The file of the videos."""
        return self.root / "jobs.sqlite3"

    @property
    def requests(self) -> str:
        """The folder of what comes with requests."""
        return str(self._incoming)

    def clean(self, known: Collection[str], removed: Collection[str]) -> list[Path]:
        """Removes folders, left by a sudden end, of requests that became no videos and of removed videos.

        ``known`` and ``removed`` are ids of videos. Folders with other names are not the server's, and stay.
        So do those of unknown videos with results: the database may have been lost. Returns these.
        """
        unknown = list[Path]()
        for folder in self._incoming.iterdir():
            if _REQUEST.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
        for folder in self._videos.iterdir():
            if not _ID.fullmatch(folder.name) or folder.name in known:
                continue
            if folder.name in removed or not (folder / "out").exists():
                shutil.rmtree(folder, ignore_errors=True)
            else:
                unknown.append(folder)
        return unknown

    @contextlib.asynccontextmanager
    async def incoming(self) -> AsyncIterator[Path]:
        """Gives the path of a folder for a request's files, which the first of them makes.

        At the end it is removed, unless it was moved.
        """
        folder = self._incoming / f"request_{secrets.token_hex(16)}"
        try:
            yield folder
        finally:
            if folder.exists():
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def keep(self, folder: Path, id: str, more: bool = False) -> None:
        """Makes the folder of a request that of a video, if any files came; if more have them, by links."""
        if folder.exists() and more:
            shutil.copytree(folder, self.of(id), copy_function=_link)
        elif folder.exists():
            folder.rename(self.of(id))

    def of(self, id: str) -> Path:
        """The folder of a video."""
        return self._videos / id

    def upload(self, video: Video, upload: Upload) -> Path:
        """The stored file of an upload."""
        return self.of(video.id) / upload.file

    @staticmethod
    def names(folder: Path, uploads: Iterable[Upload]) -> dict[str, str]:
        """Returns the clients' names for paths in the folder of a request or a video."""
        return {str(folder / one.file): one.name for one in uploads} | {f"{folder}/": ""}

    def out(self, video: Video) -> Path:
        """Makes a folder for a video's results; of those of an attempt before only finished clips stay."""
        folder = self._out(video.id)
        folder.mkdir(parents=True, exist_ok=True)
        self.clear(video, but=spool_of(self.outputs(video)[0].path))
        return folder

    def clear(self, video: Video, but: Path | None = None) -> None:
        """Removes what attempts have left of a video's results, ``but`` one of them."""
        with contextlib.suppress(FileNotFoundError):  # it was never begun
            for there in self._out(video.id).iterdir():
                if there != but:
                    remove_tree(there)

    def _out(self, id: str) -> Path:
        return self.of(id) / "out"

    def outputs(self, video: Video) -> tuple[Output, ...]:
        """The files that are made of a video."""
        path = self._out(video.id) / f"video.{video.format}"
        return wanrun.outputs_of(path, video.shape["num_videos"], KINDS)

    def result(self, video: Video, index: int, kind: str) -> Path:
        """The path of a kind of file that is made of a video."""
        return next(one.path for one in self.outputs(video) if (one.video, one.kind) == (index, kind))

    def live(self, video: Video) -> LiveFiles:
        """The files of a live video."""
        return LiveFiles(self.result(video, 0, "video"))

    def with_fragments(self) -> list[str]:
        """Returns the ids of live videos whose fragments are separate files."""
        return [folder.parent.parent.name for folder in self._videos.glob(f"*/out/{FOLDER}")]

    def size(self, id: str) -> int:
        """The bytes of a video's files, without fragments, which are one file too."""
        total = 0
        with contextlib.suppress(OSError):
            files = (file for file in self.of(id).rglob("*") if file.parent.name != FOLDER and file.is_file())
            total = sum(file.stat().st_size for file in files)
        return total

    def remove(self, id: str) -> None:
        """Removes a video's files."""
        shutil.rmtree(self.of(id), ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Gives a file another name; copies it where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
