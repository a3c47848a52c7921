"""Writes a video that plays while it is made: a fragment of MP4 for each chunk of frames.

One ffmpeg encodes all chunks, each of which is out before the next one comes. ffmpeg's own MP4 would end a
fragment with the first frame after it. So it gives single encoded frames, as FLV, and their boxes are made
here. It takes frames as IVF, which has their times: where one is left out, a chunk begins.
"""

from __future__ import annotations

__all__ = ["LiveVideo", "Sink", "live_file", "live_video", "one_behind", "write_all"]

import contextlib
import functools
import os
import select
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import numpy as np

from wanrun.errors import UsageError, unwritable
from wanrun.files import fsync_directory
from wanrun.media.boxes import fragment, init_segment
from wanrun.media.ffmpeg import Ffmpeg, FfmpegError, started_ffmpeg
from wanrun.media.write_video import YUV, comment_of, frame_rate

Item = TypeVar("Item")

Sink = Callable[[bytes], object]
"""Takes the init segment, and then a fragment for each chunk. It may wait; what it raises ends the video."""

_IVF_HEADER, _IVF_FRAME = struct.Struct("<4sHHIHHIIII"), struct.Struct("<IQ")
_RGB24 = int.from_bytes(b"RGB\x18", "little")
_TICKS = 1000  # a second, as in FLV; each frame takes one, each chunk one more, so that 2**32 last for years
_FLV_HEADER, _TAG_HEADER = 9, 15  # a tag begins with the size of the one before
_VIDEO, _CONFIG, _FIELDS = 9, 0, 5
_READ_BYTES = 2**20

# A key frame is made where more ticks were left out than before the last key frame. zerolatency leaves out
# what looks at later frames, such as B-frames: 20 gives the PSNR that other videos have with 17 (from 0.2 dB
# below to 0.4 above) in 1.2 to 7 times their bytes.
# fmt: off
_ENCODE = (
    "-f", "ivf", "-probesize", "32", "-analyzeduration", "0", "-c:v", "rawvideo", "-i", "pipe:0",
    *YUV, "-fps_mode", "passthrough",
    "-c:v", "libx264", "-preset", "veryfast", "-crf", "20", "-tune", "zerolatency",
    "-g", str(2**30), "-sc_threshold", "0",
    "-forced-idr", "1", "-force_key_frames",
    f"expr:not(n)+gt(t*{_TICKS}-n,prev_forced_t*{_TICKS}-prev_forced_n+0.5)",
)
_TO_FLV = ("-flush_packets", "1", "-flvflags", "no_duration_filesize", "-f", "flv", "pipe:1")
# fmt: on


@contextlib.contextmanager
def live_video(
    sink: Sink, size: tuple[int, int], fps: float, metadata: Mapping[str, object]
) -> Iterator[LiveVideo]:
    """Begins a video, which ends with the context. The same chunks and metadata give the same bytes.

    Args:
        sink: takes its bytes; see ``Sink``.
        size: width and height of its frames, both even.
        fps: frames per second.
        metadata: written as JSON into the container's comment.

    Raises:
        UsageError: if there is no ffmpeg, or it cannot encode.
    """
    rate = frame_rate(fps)
    try:
        with started_ffmpeg([*_ENCODE, "-x264-params", f"fps={rate}", *_TO_FLV]) as ffmpeg:
            yield LiveVideo(_Encoder(ffmpeg, size), sink, rate, comment_of(metadata))
            ffmpeg.output()
    except FfmpegError as error:
        raise UsageError("unsupported", "the video cannot be encoded", found=error.strerror) from error


@contextlib.contextmanager
def live_file(path: Path, overwrite: bool = True) -> Iterator[Sink]:
    """Yields a sink that writes a file, there with the first chunk; it plays whatever ends the process.

    Args:
        path: the file.
        overwrite: whether an existing file is replaced.

    Raises:
        UsageError: if it cannot be written, or has appeared meanwhile; NoSpaceError if the disk is full.
    """
    with contextlib.ExitStack() as opened:

        def keep(*error: object) -> None:
            with contextlib.suppress(*[UsageError] if any(error) else []):  # the first error is raised
                _keep(path, descriptor())

        @functools.cache
        def descriptor() -> int:
            if overwrite:
                path.unlink(missing_ok=True)
            made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            opened.callback(os.close, made)
            opened.push(keep)
            return made

        def write(data: bytes) -> None:
            with _writing(path):
                write_all(descriptor(), data)

        yield write


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(str(path), error, "choose another --output") from error


def _keep(path: Path, descriptor: int) -> None:
    """Makes a file that was written durable."""
    with _writing(path):
        os.fsync(descriptor)
        fsync_directory(path.absolute().parent)


def write_all(descriptor: int, data: bytes) -> None:
    """Writes to an open file or a pipe, however slowly it takes them. Raises OSError if it cannot."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


class LiveVideo:
    """A video that goes on. ``live_video`` begins it.

    Args:
        encoder: encodes its frames.
        sink: takes its bytes.
        rate: frames per second.
        comment: of the container.
    """

    def __init__(self, encoder: _Encoder, sink: Sink, rate: Fraction, comment: str) -> None:
        self._encoder, self._sink, self._rate, self._comment = encoder, sink, rate, comment
        self._chunks = 0

    def write(self, frames: np.ndarray) -> None:
        """Adds a chunk, and returns once the sink has taken its fragment.

        Args:
            frames: uint8 (F, H, W, 3), sRGB. The first one becomes a key frame.

        Raises:
            UsageError: if ffmpeg fails.
            ValueError: if frames is not such an array.
        """
        (width, height), before = self._encoder.size, self._encoder.count
        if frames.dtype != np.uint8 or frames.shape[1:] != (height, width, 3) or not len(frames):
            expected = f"uint8 (F, {height}, {width}, 3)"
            raise ValueError(f"frames must be {expected}, not {frames.dtype} {frames.shape}")
        encoded = self._encoder.encoded(np.ascontiguousarray(frames))
        if not self._chunks:
            self._sink(init_segment(self._encoder.config, width, height, self._rate, self._comment))
        self._chunks += 1
        self._sink(fragment(self._chunks, before * self._rate.denominator, encoded))


class _Encoder:
    """The conversation with ffmpeg; ``count`` frames of ``size`` (width, height) were encoded.

    ``config`` is the AVCDecoderConfigurationRecord, known with the first frame.
    """

    def __init__(self, ffmpeg: Ffmpeg, size: tuple[int, int]) -> None:
        self.size, self.count, self.config = size, 0, b""
        self._ffmpeg, self._tags, self._tick = ffmpeg, _Tags(), 0
        process = ffmpeg.process
        assert process.stdin is not None and process.stdout is not None
        self._frames, self._flv = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._frames, False)

    def encoded(self, frames: np.ndarray) -> list[bytes]:
        """Returns each frame of a chunk as encoded. Raises FfmpegError if ffmpeg ends."""
        parts, encoded = self._parts(frames), list[bytes]()
        waiting = select.poll()
        waiting.register(self._flv, select.POLLIN)
        waiting.register(self._frames, select.POLLOUT)
        part = memoryview(b"")
        while len(encoded) < len(frames):
            for descriptor, _ in self._ffmpeg.ready(waiting):
                if descriptor == self._flv:
                    encoded += self._read()
                elif part or (part := next(parts, part)):
                    part = part[self._write(part) :]
                else:
                    waiting.unregister(self._frames)
        self.count += len(frames)
        return encoded

    def _parts(self, frames: np.ndarray) -> Iterator[memoryview]:
        """Yields a chunk as IVF, without a copy."""
        if not self.count:
            width, height = self.size
            fields = (b"DKIF", 0, _IVF_HEADER.size, _RGB24, width, height, _TICKS, 1, 0, 0)
            yield memoryview(_IVF_HEADER.pack(*fields))
        self._tick += 1
        for frame in frames:
            yield memoryview(_IVF_FRAME.pack(frame.nbytes, self._tick))
            yield frame.data.cast("B")
            self._tick += 1

    def _write(self, part: memoryview) -> int:
        """Writes as much as ffmpeg takes now, and returns how many bytes."""
        try:
            return os.write(self._frames, part)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            raise self._ffmpeg.failure() from None

    def _read(self) -> list[bytes]:
        """Returns the frames whose encoding has come."""
        data = os.read(self._flv, _READ_BYTES)
        if not data:
            raise self._ffmpeg.failure()
        frames = []
        for body in self._tags.taken(data):
            if body[1] == _CONFIG:
                self.config = body[_FIELDS:]
            else:
                frames.append(body[_FIELDS:])
        return frames


class _Tags:
    """The parts of an FLV, as they come."""

    def __init__(self) -> None:
        self._data, self._next = bytearray(), _FLV_HEADER

    def taken(self, data: bytes) -> Iterator[bytes]:
        """Takes bytes, and yields the bodies of the video's tags that are whole with them."""
        self._data += data
        body = self._next + _TAG_HEADER
        while body <= len(self._data):
            kind, size = self._data[self._next + 4], self._data[self._next + 5 : self._next + 8]
            if (end := body + int.from_bytes(size)) > len(self._data):
                break
            if kind == _VIDEO:
                yield bytes(self._data[body:end])
            self._next, body = end, end + _TAG_HEADER
        gone = min(self._next, len(self._data))
        del self._data[:gone]
        self._next -= gone


@contextlib.contextmanager
def one_behind(write: Callable[[Item], object]) -> Iterator[Callable[[Item], None]]:
    """Yields a function that writes chunks on another thread, while the next one is made.

    Args:
        write: writes one. What it raises is raised as the next one is given, or at the end.
    """
    last: Future[object] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="wanrun live") as threads:

        def put(item: Item) -> None:
            nonlocal last
            if last is not None:
                last.result()
            last = threads.submit(write, item)

        yield put
        if last is not None:
            last.result()
