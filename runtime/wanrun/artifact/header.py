"""The header of a manifest: whether a file is one, of which format, and which release wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from wanrun import __version__
from wanrun.artifact.formats import FORMAT_VERSION, is_read
from wanrun.errors import ArtifactError, OtherReleaseError

FORMAT: Final = "wan-artifact"


class Header(msgspec.Struct):
    """The fields that show whether a file is a manifest, of which format, and which release wrote it."""

    format: Any = None
    format_version: Any = None
    tool: Any = None

    @property
    def version(self) -> str:
        """The version of the release that wrote it; empty if it does not say so."""
        return str(self.tool.get("version", ""))[:40] if isinstance(self.tool, dict) else ""


def header_of(data: bytes, path: Path) -> Header:
    """Returns the header of a manifest's bytes; raises ArtifactError, naming ``path``, if they are none."""
    if not data:
        raise ArtifactError("damaged", f"{path} is empty", remedy="build the artifact again")
    try:
        header = msgspec.json.decode(data, type=Header)
    except msgspec.ValidationError:  # JSON, but no object
        header = Header("no JSON object")
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            "unreadable", f"{path} cannot be read: {error}", remedy="build the artifact again"
        ) from None
    if header.format != FORMAT:
        raise ArtifactError(
            "wrong_kind",
            f"{path} is not a Wan artifact",
            expected=f"format {FORMAT}",
            found=header.format or "no format",
            remedy="build the artifact again, or give another folder",
        )
    return header


def of_another_format(header: Header, path: Path) -> OtherReleaseError:
    """Returns the error of a manifest whose format is not read here, with what makes it one that is."""
    if is_read(header.format_version, again=True):
        remedy = f"run wanbuild compile {path.parent} --again"
    else:
        remedy = "use the release that wrote it, or convert and compile it again"
    return OtherReleaseError(
        "other_release",
        f"{path.parent} has another format",
        expected=f"format {FORMAT_VERSION} (release {__version__})",
        found=f"format {repr(header.format_version)[:20]} (release {header.version or 'unknown'})",
        remedy=remedy,
    )


def undecodable(header: Header, path: Path, error: Exception) -> ArtifactError:
    """Returns the error of a manifest of a known format with other records: damage, or a newer release's."""
    if header.version in ("", __version__):
        return ArtifactError("damaged", f"{path} is damaged: {error}", remedy="build the artifact again")
    return OtherReleaseError(
        "other_release",
        f"{path} is damaged, or of another release: {error}",
        expected=f"one of release {__version__}",
        found=f"one of release {header.version}",
        remedy="use the release that wrote it, or build the artifact again",
    )
