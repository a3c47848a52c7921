"""The origin of a copy's files: a small file in its folder, which makes the folder a copy."""

from __future__ import annotations

__all__ = ["read_origin"]

from pathlib import Path
from typing import Final

import msgspec

import wanrun
from wanhub.address import Address, parse_address
from wanhub.marker import MARKER, is_copy
from wanhub.signature import MANIFEST
from wanrun.errors import ArtifactError, OtherReleaseError

MAX_MARKER_BYTES: Final = 2**16


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The origin of a copy's files.

    ``address`` is for messages, of a repository at a commit; ``url`` is the URL with its query.
    """

    address: str
    url: str

    @property
    def place(self) -> Address:
        """The address that the store reads."""
        place = parse_address(self.address)
        return place if place.repository else parse_address(self.url)


def mark(folder: Path, origin: Origin) -> None:
    """Makes a folder a copy, or changes a copy's origin. Raises OSError if it cannot be written.

    What the URL has beyond the address may be a key: then only the user may read the file.
    """
    marker, data = folder / MARKER, msgspec.json.encode(origin)
    if not marker.exists() or wanrun.read_bounded(marker, MAX_MARKER_BYTES) != data:
        wanrun.replace_file(marker, data, 0o666 if origin.url in origin.address else 0o600)


def read_origin(folder: Path) -> Origin | None:
    """Returns the origin of a folder's files; None if the folder is not a copy, or its marker is damaged."""
    if not is_copy(folder):
        return None
    try:
        return msgspec.json.decode(wanrun.read_bounded(folder / MARKER, MAX_MARKER_BYTES), type=Origin)
    except (OSError, ValueError, RecursionError):
        return None


def read_copied(folder: Path, where: str, remedy: str, origin: str = "") -> wanrun.Artifact:
    """Reads the manifest of an artifact that comes from the address ``origin``.

    A message names ``where`` in place of the folder, and ``remedy``, because the user cannot build it again.
    Raises ArtifactError as ``wanrun.open_artifact``.
    """
    try:
        if not (folder / MANIFEST).exists():
            raise ArtifactError("wrong_kind", f"{folder} is not an artifact", found=f"no {MANIFEST}")
        return wanrun.open_artifact(folder, origin)
    except ArtifactError as error:
        what = error.what.replace(str(folder / MANIFEST), f"{MANIFEST} of {where}")
        what = what.replace(str(folder), where)
        other = "use the release that wrote it, or " if isinstance(error, OtherReleaseError) else ""
        raise type(error)(**{**error.parts, "what": what, "remedy": f"{other}{remedy}"}) from None
