"""The files that a command reads and writes: the one check of its outputs, before it does anything.

No output lies in an artifact, is read by the same command, or is written twice; and a file that is there is
replaced if it shows that the same option has written it, or if the user says so.
"""

from __future__ import annotations

__all__ = [
    "ARTIFACT",
    "FOLDER",
    "NAMES",
    "REPORT",
    "TIMINGS",
    "Claims",
    "Place",
    "check_file",
    "usable_names",
]

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wanrun.errors import UsageError
from wanrun.files import open_regular, read_bounded, user_copies

MAX_MARKED_BYTES = 2**26
"""So much of a file that is there is searched for a mark."""

MAX_DEPTH = 500
"""Folders around an output; Python makes those that are missing one inside the other's call, up to 1000."""


@dataclass(frozen=True)
class Place:
    """The file or folder that an option names.

    Attributes:
        kind: a ``file``; a ``folder``; the folder of an ``artifact``; or ``names`` of several files with
            fields, whose owner checks each of them when it knows them.
        mark: how each such file begins. By this a file of an earlier run is known, and replaced. Without a
            mark, none is.
    """

    kind: Literal["file", "folder", "artifact", "names"] = "file"
    mark: re.Pattern[bytes] | None = None

    def made(self, path: Path) -> bool:
        """Whether a file that is there is empty, or is one that such an option has written."""
        if self.mark is None:
            return False
        try:
            with open_regular(path) as file:
                data = file.read(MAX_MARKED_BYTES)
        except OSError:
            return False
        return not data or self.mark.match(data) is not None


FOLDER = Place("folder")
ARTIFACT = Place("artifact")
NAMES = Place("names")
REPORT = Place(mark=re.compile(rb'<!doctype html>(?s:.*?)<p class="mark">wanrun</p>'))
TIMINGS = Place(mark=re.compile(rb'\{\n  "import_seconds": (?s:.*?)\n  "process_to_ready_seconds": '))


class Claims:
    """Notes the files that are read and written.

    Args:
        artifact: the folder of the command's artifact; in no other one may an output lie either.
        origin: the address that it comes from; empty for none.
    """

    def __init__(self, artifact: Path | None = None, origin: str = "") -> None:
        self._artifact = None if artifact is None else Path(os.path.realpath(artifact))
        self._address = origin
        self._written: dict[str, str] = {}
        self._read: dict[str, str] = {}
        self._trees: dict[str, str] = {}
        self._artifacts: dict[Path, bool] = {Path(os.path.realpath(user_copies())): True}

    def read(self, path: Path, owner: str, tree: bool = False) -> None:
        """Notes that a file or a folder, which may lie anywhere, is read for ``owner``.

        Of a folder of frames the files are read, of a ``tree`` all that is below it.
        """
        (self._trees if tree else self._read).setdefault(os.path.realpath(path), owner)

    def write(self, paths: Sequence[Path | None], owner: str, artifact: bool = False) -> None:
        """Notes that these files are written for ``owner``; None means no file.

        ``artifact`` says that they may be artifacts themselves.

        Raises:
            UsageError: if a file is already one of the written files, is read, or lies inside an artifact or
                too deep.
        """
        names: dict[str, Path] = {}
        for path in paths:
            if path is None:
                continue
            name = os.path.realpath(path)
            if name.count(os.sep) > MAX_DEPTH:
                raise UsageError(
                    "out_of_range",
                    f"the output {str(path)[:80]}... lies too deep",
                    expected=f"at most {MAX_DEPTH} folders",
                    found=name.count(os.sep),
                    remedy="choose another place",
                )
            if os.path.islink(name):  # noqa: PTH114 - what is left of a loop
                raise UsageError(
                    "wrong_kind", f"the output {path} is a link to itself", remedy="choose another place"
                )
            self._check_not_read(path, name)
            other = owner if name in names else self._written.get(name)
            if other is not None:
                fields = "" if owner.startswith("--") else ", for example with {index}"
                raise UsageError(
                    "exists",
                    f"the output {path} is also that of {other or 'this prompt'}",
                    remedy=f"give each its own name{fields}",
                )
            # By its own name too: the weights of a copy are links to a folder that copies share.
            spelled = (name, os.path.abspath(path))  # noqa: PTH100 - a link stays
            places = (os.path.dirname(one) if artifact else one for one in spelled)  # noqa: PTH120
            around = next(filter(None, map(self._artifact_around, places)), None)
            if around is not None:
                raise UsageError(
                    "exists",
                    f"the output {path} lies inside the artifact {around}",
                    remedy="write the results elsewhere",
                )
            names[name] = path
        self._written |= dict.fromkeys(names, owner)

    def write_to(self, place: Place, value: str, option: str, overwrite: bool) -> None:
        """Notes that an option's value is written, and checks the file or folder that exists.

        Raises:
            UsageError: as ``write``; or if it cannot be written, or is a file that must not be replaced.
        """
        if "://" in value and not value.startswith("file://"):
            self._check_address(value, option)
            return
        path = Path(value.removeprefix("file://"))
        with usable_names():
            self.write([path], option, artifact=place.kind == "artifact")
            if place.kind == "file":
                check_file(path, option, overwrite, place)
            elif place.kind != "names" and path.exists() and not path.is_dir():
                raise UsageError("wrong_kind", f"{option} {path} is not a folder", remedy="name another one")

    def _check_address(self, url: str, option: str) -> None:
        """Raises UsageError for a URL below that of the artifact."""
        address = re.split("[@?]", self._address)[0].rstrip("/")
        if address and f"{url}/".startswith(f"{address}/"):
            raise UsageError(
                "exists",
                f"{option} {url} lies inside the artifact {address}",
                remedy="write the results elsewhere",
            )

    def _artifact_around(self, name: str) -> Path | None:
        """Returns the artifact, or the folder of copies, that is at this path or around it; None for none."""
        for folder in (Path(name), *Path(name).parents):
            if folder not in self._artifacts:
                self._artifacts[folder] = folder == self._artifact or is_artifact(folder)
            if self._artifacts[folder]:
                return folder
        return None

    def _check_not_read(self, path: Path, name: str) -> None:
        """Raises UsageError if a file of this real name is read, or lies in a folder that is."""
        read = {**self._trees, **self._read}
        if name in read:
            raise UsageError(
                "exists",
                f"the output {path} is also that of {read[name]}, which is read",
                remedy="choose another output",
            )
        folder = os.path.dirname(name)  # noqa: PTH120 - a real path
        found = self._read.get(folder) or next(
            (owner for tree, owner in self._trees.items() if Path(name).is_relative_to(tree)), None
        )
        if found is not None:
            raise UsageError(
                "exists",
                f"the output {path} lies inside the folder of {found}, which is read",
                remedy="write the results elsewhere",
            )


def is_artifact(folder: Path) -> bool:
    """Whether a folder is an artifact, whole or damaged."""
    from wanrun.artifact.manifest import FORMAT, MANIFEST, MAX_BYTES

    manifest = folder / MANIFEST
    try:
        # Other programs have files of this name.
        return os.path.isfile(manifest) and f'"{FORMAT}"'.encode() in read_bounded(manifest, MAX_BYTES)  # noqa: PTH113
    except OSError:
        return False


@contextmanager
def usable_names() -> Iterator[None]:
    """Turns the file system's error about a name, for example a too long one, into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            "unwritable",
            f"{error.filename} cannot be written",
            found=error.strerror,
            remedy="choose another name",
        ) from None


def check_file(path: Path | None, option: str, overwrite: bool, place: Place = NAMES) -> None:
    """Raises UsageError if a file other than a video cannot be written; None means no such file."""
    if path is None:
        return
    usable = path.is_file() or not path.exists()
    if not usable or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(
            "unwritable", f"{option} {path} cannot be written", remedy="name a file in a writable folder"
        )
    if os.path.lexists(path) and not overwrite and not place.made(path):  # also a link that leads nowhere
        foreign = f", and is no file that {option} wrote" if place.mark else ""
        raise UsageError(
            "exists", f"{option} {path} exists{foreign}", remedy="pass --overwrite to replace it"
        )
