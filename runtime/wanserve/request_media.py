"""Images and videos that come with a request: as files, or as data: URLs; never by a path or a remote URL."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import string
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from starlette.datastructures import UploadFile

from wanrun.media.pillow import HEIC
from wanserve.catalog import ServedModel
from wanserve.refusal import RefusedError
from wanserve.video import Upload

_DATA = re.compile(r"data:([\w.+/-]*)(?:;[\w.+-]+=[^;,]*)*(;base64)?,", re.ASCII)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,20}:")
_BLOCK: Final = 1 << 20
"""Bytes that are written, or decoded, in one step: other threads run between two."""

_HEAD: Final = 2048
"""Characters of a data: URL in which its base64 begins."""

_BLANKS: Final = string.whitespace.encode()

# The first bytes of what wanrun reads, with the suffix of the stored file.
_BEGINNINGS: Mapping[bytes, str] = MappingProxyType(
    {
        b"\x89PNG": ".png",
        b"\xff\xd8\xff": ".jpg",
        b"GIF8": ".gif",
        b"BM": ".bmp",
        b"II*\0": ".tiff",
        b"MM\0*": ".tiff",
        b"\0\0\0\x0cjP": ".jp2",
        b"P6": ".ppm",
        b"P5": ".ppm",
        b"\x1aE\xdf\xa3": ".mkv",
    }
)
IMAGE_TYPES: Mapping[str, str] = MappingProxyType(
    {
        ".png": "image/png",
        ".jpg": "image/jpeg",
        ".gif": "image/gif",
        ".bmp": "image/bmp",
        ".webp": "image/webp",
        ".avif": "image/avif",
        ".heic": "image/heic",
        ".mp4": "video/mp4",
        ".mkv": "video/x-matroska",
    }
)
"""The types under which stored files are answered; those that browsers do not show are bytes."""


Source = UploadFile | bytes
"""A file of a form, or the bytes of a data: URL."""


def head_of(source: Source) -> bytes:
    """Returns the first bytes."""
    if isinstance(source, bytes):
        return source[:32]
    source.file.seek(0)
    return source.file.read(32)


def stored_upload(source: Source, option: str, name: str, folder: Path, number: int) -> Upload:
    """Writes an image or a video of an option into a folder, which is made for the first one.

    ``name`` is its name at the client; ``number`` its place among the files of the request.
    """
    suffix, kind = kind_of(head_of(source))
    file = f"{option}-{number}{suffix}"
    return Upload(option, file, name, kind, _write(source, folder / file))


def _write(source: Source, path: Path) -> str:
    """Writes the bytes, and returns their sha256."""
    digest = hashlib.sha256()
    file = io.BytesIO(source) if isinstance(source, bytes) else source.file
    file.seek(0)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with path.open("xb") as written:
        while block := file.read(_BLOCK):
            digest.update(block)
            written.write(block)
    return digest.hexdigest()


def kind_of(head: bytes) -> tuple[str, Literal["image", "video"]]:
    """Returns the suffix and the kind of a file by its first bytes; what is unknown is taken for a video."""
    if head[:4] == b"RIFF":
        return (".webp", "image") if head[8:12] == b"WEBP" else (".avi", "video")
    if head[4:8] == b"ftyp":
        if head[8:12] in (b"avif", b"avis"):
            return ".avif", "image"
        return (".heic", "image") if any(brand in head for brand in HEIC) else (".mp4", "video")
    for beginning, suffix in _BEGINNINGS.items():
        if head.startswith(beginning):
            return suffix, "video" if suffix == ".mkv" else "image"
    return ".bin", "video"


def safe_name(name: str | None) -> str:
    """Returns a client's file name without folders and control characters, for display."""
    last = re.split(r"[/\\]", name or "")[-1]
    return "".join(character for character in last if character.isprintable())[:100] or "file"


def check_file(file: UploadFile, param: str) -> None:
    """Raises RefusedError for an empty file of a form."""
    if not file.size:
        raise RefusedError(f"{param} is an empty file", param=param)


def decoded_text(value: Any, param: str) -> bytes:
    """Returns the bytes of an image or a video in a field: of a data: URL, or of an object with one.

    Raises RefusedError for a remote URL, a path, or anything that is not base64.
    """
    if isinstance(value, dict):
        return decoded_text(_inner(value, param), param)
    if not isinstance(value, str) or not value:
        raise RefusedError(
            f"{param} has the wrong type", param=param, code="wrong_type", expected="a file or a data: URL"
        )
    match = _DATA.match(value, 0, _HEAD)
    if match is None:
        if isinstance(value, str) and len(value) > 256 and not _URL.match(value):  # bare base64
            return _decoded(value, param)
        what = "a URL, and URLs are not fetched" if _URL.match(value) else "no file, and no path is read"
        remedy = "send the file itself, or a data: URL of it"
        raise RefusedError(f"{param} is {what}", param=param, remedy=remedy)
    if match[2] is None:
        raise RefusedError(f"{param} is a data: URL without base64", param=param, remedy="encode it")
    return _decoded(value[match.end() :], param)


def _decoded(text: str, param: str) -> bytes:
    """Returns the bytes of base64, whose blanks and line breaks do not count."""
    try:
        body = text.encode("ascii").translate(None, _BLANKS)
        if body.find(b"=", 0, -2) >= 0:
            raise ValueError("it goes on after its end")
        blocks = (body[start : start + _BLOCK] for start in range(0, len(body), _BLOCK))
        data = b"".join(base64.b64decode(block, validate=True) for block in blocks)
    except (binascii.Error, ValueError):
        raise RefusedError(f"{param} is not valid base64", param=param) from None
    if not data:
        raise RefusedError(f"{param} is an empty file", param=param)
    return data


def _inner(value: Mapping[str, Any], param: str) -> Any:
    """Returns the URL or the base64 of an object: ``image_url``, itself perhaps an object, and its like."""
    for key in ("image_url", "video_url", "url", "b64_json", "content", "data"):
        if key in value:
            inner = value[key]
            return inner.get("url") if isinstance(inner, dict) else inner
    if "file_id" in value:
        raise RefusedError(
            f"{param} names a stored file, and none is stored here", param=param, remedy="send the file"
        )
    raise RefusedError(f"{param} has no image_url", param=param)


def paths_of(model: ServedModel, media: list[Upload], folder: Path) -> dict[str, Any]:
    """Returns the paths of stored files by option; a list where an option takes several."""
    paths = dict[str, Any]()
    for one in media:
        path = str(folder / one.file)
        if model.options[one.option].many:
            paths.setdefault(one.option, []).append(path)
        else:
            paths[one.option] = path
    return paths
