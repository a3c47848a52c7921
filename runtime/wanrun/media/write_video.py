"""Writes videos atomically, with the same bytes for the same frames and metadata.

The suffix chooses the format:

| suffix | content | metadata |
|---|---|---|
| .mp4, .mov | H.264, yuv420p, BT.709 | the container's comment |
| .webm | VP9, yuv420p, BT.709 | the container's comment |
| .gif  | 256 colours a frame | comment extension |
| .webp | animation, lossy | EXIF UserComment |
| .png  | APNG, lossless; a plain PNG for one frame | tEXt chunk "Comment" |
| .npy  | uint8 (T, H, W, 3), lossless | ``<name>.npy.json`` beside it |
| .frames | a folder of PNG, lossless: 0001.png and so on | ``<name>.frames.json`` beside it |

The animated formats join equal neighbouring frames into one frame that is shown longer. Only the formats that
need Pillow or imageio_ffmpeg import them, so a start does not wait for these imports.
"""

from __future__ import annotations

__all__ = ["MAX_METADATA_BYTES", "check_free", "files_of", "metadata_sidecar", "read_metadata", "write_video"]

import contextlib
import io
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from wanrun.errors import UsageError, unwritable
from wanrun.files import fsync_directory, read_bounded, replace_file
from wanrun.media.ffmpeg import run_ffmpeg
from wanrun.media.video_paths import CODECS, FOLDER
from wanrun.temporary import temporary_path

if TYPE_CHECKING:
    from PIL import Image

_MAX_EMBEDDED_BYTES = (
    100_000  # Linux limits one command line argument to 128 KiB; longer metadata goes beside the video
)
MAX_METADATA_BYTES = 64 * 2**20
"""The largest sidecar, in bytes: more than twice a prompt that fills a prompts file."""

_EXIF_IFD, _USER_COMMENT = 0x8769, 0x9286
_ASCII = b"ASCII\0\0\0"  # EXIF's name for the encoding of a UserComment

# sRGB becomes BT.709 in limited range, and the file is tagged so: players guess from the size without tags.
# veryfast takes 60 % of medium's time and gave the same PSNR (within 0.5 dB) and size at this quality.
# x264's output depends on its number of threads, whose default depends on the machine: so it is fixed.
# fmt: off
YUV = (
    # The encoder takes primaries and transfer from its frames, not from the options of the same names below.
    "-vf", "scale=out_color_matrix=bt709:out_range=tv:flags=accurate_rnd+full_chroma_int,"
    "setparams=color_primaries=bt709:color_trc=bt709",
    "-pix_fmt", "yuv420p", "-threads", "4",
    "-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv",
    "-map_metadata", "-1", "-fflags", "+bitexact", "-flags:v", "+bitexact",
)
# fmt: on
_QUALITY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "libx264": ("-preset", "veryfast", "-crf", "17", "-movflags", "+faststart"),
        "libvpx-vp9": ("-crf", "24", "-b:v", "0", "-cpu-used", "4"),
    }
)


BESIDE = (".npy", FOLDER)
"""Formats that cannot hold metadata."""


def metadata_sidecar(path: Path) -> Path:
    """Returns the path for metadata that a video's file cannot hold."""
    return path.with_name(path.name + ".json")


def files_of(path: Path) -> list[Path]:
    """Returns the files of a video: itself, or the pictures in its folder."""
    return sorted(path.iterdir()) if path.is_dir() else [path]


def check_free(
    videos: Sequence[Path],
    overwrite: bool,
    sidecars: bool = True,
    ways: tuple[str, str] = ("pass --overwrite", "another --output"),
) -> None:
    """Checks that nothing is in the way of these videos.

    Args:
        overwrite: whether files that exist may be replaced; a folder of pictures replaces nothing.
        sidecars: whether the files count that are written beside videos.
        ways: what to do, for messages.

    Raises:
        UsageError: for a folder, a pipe or a device, or without overwrite for a file or a link.
    """
    for video in videos:
        suffix = video.suffix.lower()
        for file in (video, metadata_sidecar(video)) if sidecars and suffix in BESIDE else (video,):
            if not os.path.lexists(file):
                continue
            if file.exists() and not file.is_file():
                kind = "a folder, which is not replaced" if file.is_dir() else "not a file"
                raise UsageError("wrong_kind", f"the output {file} is {kind}", remedy=f"choose {ways[1]}")
            if file == video and suffix == FOLDER:
                raise UsageError("exists", f"the output {file} exists", remedy=f"choose {ways[1]}")
            if not overwrite:
                raise UsageError(
                    "exists", f"the output {file} exists", remedy=f"{ways[0]} to replace it, or {ways[1]}"
                )


def write_video(
    frames: np.ndarray, path: Path, fps: float, metadata: Mapping[str, object], overwrite: bool = True
) -> None:
    """Writes one video: ``write_pieces`` of one piece.

    Args:
        frames: uint8 (T, H, W, 3), sRGB.
        path, fps, metadata, overwrite: as of ``write_pieces``.

    Raises:
        UsageError: as ``write_pieces``.
        ValueError: if frames is not such an array.
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise ValueError(f"frames must be uint8 (T, H, W, 3), not {frames.dtype} {frames.shape}")
    write_pieces([frames], frames.shape, path, fps, metadata, overwrite)


def write_pieces(
    pieces: Iterable[np.ndarray],
    shape: tuple[int, ...],
    path: Path,
    fps: float,
    metadata: Mapping[str, object],
    overwrite: bool = True,
) -> None:
    """Writes one video atomically: the new file is complete, or the path still has its old file or none.

    Args:
        pieces: its frames in order, uint8 (N, H, W, 3), sRGB. What they raise leaves no file.
        shape: of all frames together, (T, H, W, 3).
        path: the file, with a suffix of the table above. A folder of pictures replaces nothing.
        metadata: written as JSON into the file, or beside it. A value that JSON cannot hold becomes its
            ``str``, so that no video is lost over its metadata.

    Raises UsageError if the file cannot be written, or its format cannot hold such frames; NoSpaceError if
    the disk is full.
    """
    frame_rate(fps)
    encode = _ENCODERS[path.suffix.lower()]
    comment = comment_of(metadata)
    beside = path.suffix.lower() in BESIDE or len(comment) > _MAX_EMBEDDED_BYTES
    sidecar = None
    if beside:
        text = json.dumps(json.loads(comment), sort_keys=True, indent=2, ensure_ascii=False) + "\n"
        # A lone surrogate, from a byte of argv that is not UTF-8, becomes its JSON escape.
        sidecar = text.encode("utf-8", errors="backslashreplace")
    try:
        with _replacing(path, overwrite, sidecar) as temporary:
            contiguous = map(np.ascontiguousarray, pieces)
            encode(contiguous, shape, temporary, fps, "" if beside else comment)
    except OSError as error:
        raise unwritable(str(path), error, "choose another --output") from error


def frame_rate(fps: float) -> Fraction:
    """Returns frames per second as a fraction for containers; raises UsageError if it is out of range."""
    if not (math.isfinite(fps) and 0 < fps <= 1000):
        raise UsageError(
            "out_of_range", "the frame rate is out of range", expected="0 < fps <= 1000", found=fps
        )
    return Fraction(fps).limit_denominator(1001)


def comment_of(metadata: Mapping[str, object]) -> str:
    """Returns metadata as JSON in ASCII with escapes: the containers disagree on other encodings.

    A value that JSON cannot hold becomes its ``str``.
    """
    return json.dumps(dict(metadata), sort_keys=True, default=str)


def read_metadata(path: Path) -> dict[str, Any]:
    """Returns the metadata that ``write_video`` wrote into a file, or beside it; empty if there is none.

    Raises:
        UsageError: if the file cannot be read, or if its metadata is not a JSON object.
    """
    try:
        read = _READERS.get(path.suffix.lower())
        comment = read(path) if read else ""
        if not comment and metadata_sidecar(path).exists():
            comment = read_bounded(metadata_sidecar(path), MAX_METADATA_BYTES).decode("utf-8")
        data = json.loads(comment or "{}")
    except Exception as error:  # there is no ffmpeg, or what Pillow and JSON raise for a damaged file
        raise UsageError("unreadable", f"the metadata of {path} cannot be read", found=error) from error
    if not isinstance(data, dict):
        raise UsageError("unreadable", f"the metadata of {path} is not an object", found=type(data).__name__)
    return data


@contextlib.contextmanager
def _replacing(path: Path, overwrite: bool, sidecar: bytes | None) -> Iterator[Path]:
    """Yields a temporary file's path in the same folder; the file becomes `path`, durably, or is removed."""
    # The sidecar of a new video is written before the video, so that no video lacks its metadata, whatever
    # ends the process. The sidecar of a video that replaces another is written after it, so that the old
    # video never has the new one's metadata.
    with temporary_path(path, path.suffix.lower()) as temporary:
        yield temporary
        for written in files_of(temporary):
            with written.open("rb+") as file:
                os.fsync(file.fileno())
        replaces = path.exists()
        if replaces and not overwrite:
            spare = path.with_name(f"{path.stem}-{secrets.token_hex(4)}{path.suffix}")
            temporary.rename(spare)
            raise UsageError(
                "exists", f"{path} appeared while the video was made", remedy=f"the new video is {spare}"
            )
        if sidecar is not None and not replaces:
            replace_file(metadata_sidecar(path), sidecar)
        temporary.replace(path)
        if sidecar is not None and replaces:
            replace_file(metadata_sidecar(path), sidecar)
    fsync_directory(path.absolute().parent)


def _write_by_ffmpeg(
    pieces: Iterable[np.ndarray], shape: tuple[int, ...], path: Path, fps: float, comment: str
) -> None:
    height, width = shape[1:3]
    if height % 2 or width % 2:
        raise UsageError(
            "out_of_range",
            f"{path.suffix[1:]} needs an even width and height",
            found=f"{width}x{height}",
            remedy="choose an --output that ends in .webp or .png",
        )
    rate = str(frame_rate(fps))
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", rate, "-i", "pipe:0"]
    metadata = ["-metadata", f"comment={comment}"] if comment else []
    suffix = path.suffix.lower()
    encoder = [*YUV, "-c:v", CODECS[suffix], *_QUALITY[CODECS[suffix]], "-f", suffix[1:]]
    run_ffmpeg([*source, *encoder, *metadata, f"file:{path}"], pieces)


def _read_by_ffmpeg(path: Path) -> str:
    listing = run_ffmpeg(["-i", f"file:{path.absolute()}", "-f", "ffmetadata", "pipe:1"]).decode("utf-8")
    found = re.search(r"^comment=(.*)$", listing, flags=re.MULTILINE | re.IGNORECASE)
    # ffmetadata puts a backslash before = ; # \ and a newline; the comment is ASCII without newlines.
    return re.sub(r"\\(.)", r"\1", found[1]) if found else ""


def _save_animation(
    pieces: Iterable[np.ndarray], path: Path, fps: float, unit_ms: int, **options: Any
) -> None:
    """Saves an endless animation with options of Pillow's format; one frame of PNG is a plain picture."""
    # Durations are in whole units whose sum does not drift: a frame at 16 fps takes 62.5 ms.
    first, *rest = _images(pieces)
    times = [round(i * 1000 / fps / unit_ms) * unit_ms for i in range(len(rest) + 2)]
    durations = [end - start for start, end in pairwise(times)]
    first.save(path, save_all=True, append_images=rest, duration=durations, loop=0, **options)


def _images(pieces: Iterable[np.ndarray]) -> Iterator[Image.Image]:
    from PIL import Image

    return (Image.fromarray(frame) for piece in pieces for frame in piece)


def _write_gif(
    pieces: Iterable[np.ndarray], shape: tuple[int, ...], path: Path, fps: float, comment: str
) -> None:
    text = {"comment": comment.encode("ascii")} if comment else {}
    _save_animation(pieces, path, fps, 10, format="GIF", **text)


def _write_webp(
    pieces: Iterable[np.ndarray], shape: tuple[int, ...], path: Path, fps: float, comment: str
) -> None:
    from PIL import Image

    exif = Image.Exif()
    if comment:
        exif.get_ifd(_EXIF_IFD)[_USER_COMMENT] = _ASCII + comment.encode("ascii")
    data = exif.tobytes() if comment else b""
    _save_animation(pieces, path, fps, 1, format="WEBP", quality=90, method=4, exif=data)


def _write_png(
    pieces: Iterable[np.ndarray], shape: tuple[int, ...], path: Path, fps: float, comment: str
) -> None:
    from PIL import PngImagePlugin

    text = PngImagePlugin.PngInfo()
    if comment:
        text.add_text("Comment", comment)
    _save_animation(pieces, path, fps, 1, format="PNG", pnginfo=text)


def _write_frames(
    pieces: Iterable[np.ndarray], shape: tuple[int, ...], path: Path, fps: float, comment: str
) -> None:
    path.mkdir()
    for number, image in enumerate(_images(pieces), 1):
        image.save(path / f"{number:04}.png")


def _write_npy(
    pieces: Iterable[np.ndarray], shape: tuple[int, ...], path: Path, fps: float, comment: str
) -> None:
    header = io.BytesIO()
    facts = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, facts)
    # As numpy.save, which writes by C's fwrite and so does not know why that failed: a full disk.
    with path.open("wb") as file:
        file.write(header.getvalue())
        for piece in pieces:
            file.write(piece.data)


def _read_image_comment(path: Path) -> str:
    from PIL import Image

    with Image.open(path) as image:
        if image.format == "GIF":
            return image.info.get("comment", b"").decode("ascii")  # type: ignore[no-any-return]
        if image.format == "PNG":
            return str(image.info.get("Comment", ""))
        field = image.getexif().get_ifd(_EXIF_IFD).get(_USER_COMMENT)
        return field.removeprefix(_ASCII).decode("ascii") if isinstance(field, bytes) else ""


_Encoder = Callable[[Iterable[np.ndarray], tuple[int, ...], Path, float, str], None]

_ENCODERS: Mapping[str, _Encoder] = MappingProxyType(
    {
        **dict.fromkeys(CODECS, _write_by_ffmpeg),
        ".gif": _write_gif,
        ".webp": _write_webp,
        ".png": _write_png,
        ".npy": _write_npy,
        FOLDER: _write_frames,
    }
)

_READERS: Mapping[str, Callable[[Path], str]] = MappingProxyType(
    {
        **dict.fromkeys(CODECS, _read_by_ffmpeg),
        **dict.fromkeys((".gif", ".webp", ".png"), _read_image_comment),
    }
)
