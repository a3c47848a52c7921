"""Starts the processes that decode images and videos, limits their time and memory, and takes frames."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

from PIL import Image, UnidentifiedImageError

import wanrun
from wanrun.errors import UsageError
from wanrun.media.ffmpeg import how_it_ended
from wanrun.media.pillow import check_size, strip_rows, too_large
from wanrun.opened.cancel import CancelToken
from wanrun.undo import begun

SECONDS, FRAME_SECONDS = 30, 2
"""Of CPU time that a decoder has for its first frame, and for each one more. 7000x7000 takes at most 1 s."""

BYTES, PIXEL_BYTES = 2**28, 24
"""Of memory that a decoder has, and for each pixel of the largest frame that is read. Pillow takes 20 for a
JPEG 2000, ffmpeg 20 to 34 for H.264 of 8K, by its reference frames."""


class DecoderProcess:
    """A process that writes frames to its standard output, and messages to ``log``; ``cancel`` ends it."""

    def __init__(
        self, process: subprocess.Popen[bytes], log: IO[bytes], cancel: CancelToken | None = None
    ) -> None:
        self._process, self._log, self._cancel = process, log, cancel
        self._seconds = SECONDS
        self._limit(resource.RLIMIT_CORE, 0)
        self._limit(resource.RLIMIT_DATA, memory_limit())
        self._limit(resource.RLIMIT_CPU, self._seconds)

    def _limit(self, what: int, most: int) -> None:
        """Sets a limit of the process, not above that of this one."""
        given = [limit for limit in resource.getrlimit(what) if limit != resource.RLIM_INFINITY]
        with contextlib.suppress(ProcessLookupError):  # it has ended
            hard = resource.prlimit(self._process.pid, what)[1]
            resource.prlimit(self._process.pid, what, (min([most, *given]), hard))

    def ask(self, request: dict[str, object]) -> None:
        """Sends a request. A process that has ended does not take it, which shows when its answer is read."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def line(self) -> bytes:
        """Returns the next line: a frame's first one, another one, or nothing after the end."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def frame(self, name: str) -> Image.Image | None:
        """Returns the frame after its first line ``P6``; None if it is cut off.

        Raises UsageError for one above Pillow's limit of pixels.
        """
        assert self._process.stdout is not None
        image = read_ppm(self._process.stdout, name)
        self._seconds += FRAME_SECONDS
        self._limit(resource.RLIMIT_CPU, self._seconds)
        return image

    def ended(self, name: str) -> tuple[int, list[str]]:
        """Waits for the end of the process, and returns its exit code and the lines of its messages.

        Raises CancelledError if its token is cancelled; UsageError if it has reached its limit of time.
        """
        assert self._process.stdout is not None
        self._process.stdout.close()
        used, code = self._used(), self._process.wait()
        if self._cancel is not None:
            self._cancel.check()
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", errors="replace").splitlines()
        if code == -signal.SIGXCPU or (code and used > self._seconds - 0.5):  # ffmpeg catches the signal
            raise UsageError(
                "out_of_range",
                f"{name} takes too long to decode",
                expected=f"at most {self._seconds} s of CPU time",
                remedy="save it again, or make it smaller",
            )
        return code, lines

    def _used(self) -> float:
        """Waits for the end of the process, and returns its seconds of CPU time; 0 if they are not known."""
        with contextlib.suppress(OSError):  # another thread has seen its end
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0


def memory_limit() -> int:
    """Returns the bytes that a decoder may take; of an unlimited size, those of Pillow's usual limit."""
    return BYTES + PIXEL_BYTES * (Image.MAX_IMAGE_PIXELS or 2**27)


def read_ppm(stream: IO[bytes], name: str) -> Image.Image | None:
    """Reads a binary PPM after its first line, in mode RGB; None if it is cut off.

    Its comment has entries of ``info``. Raises UsageError for one above Pillow's limit of pixels.
    """
    line = stream.readline()
    info = ast.literal_eval(line[1:].decode()) if line.startswith(b"#") else {}
    width, height = map(int, (stream.readline() if info else line).split())
    if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
        raise too_large(name)
    check_size((width, height), name)
    stream.readline()  # the largest value, 255
    image = Image.new("RGB", (width, height))
    image.info.update(info)
    rows = strip_rows(width)
    for top in range(0, height, rows):
        size = width, min(rows, height - top)
        strip = stream.read(3 * size[0] * size[1])
        if len(strip) < 3 * size[0] * size[1]:
            return None
        image.paste(Image.frombytes("RGB", size, strip), (0, top))
    return image


@contextmanager
def decoder(
    command: Sequence[str],
    name: str,
    cancel: CancelToken | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[DecoderProcess]:
    """Starts a decoder, which ends with the context, with this process, or as soon as a token is cancelled.

    Its ``ended`` raises CancelledError then. ``name`` is what it reads, in messages. ``environment`` are the
    variables of the process; None for those of this one. Raises UsageError if the program does not start.
    """
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as stack:

        def start() -> subprocess.Popen[bytes]:
            pipe = subprocess.PIPE
            # In another session, so that Ctrl-C does not reach it: this process ends it.
            return subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, env=environment, start_new_session=True
            )

        try:
            process = stack.enter_context(begun(start, subprocess.Popen.kill))
        except OSError as error:
            what = f"{name} cannot be read: {command[0]} does not start"
            raise UsageError("unreadable", what, found=error.strerror) from None
        stack.callback(_close, process)
        with cancel.ending(process.kill) if cancel is not None else contextlib.nullcontext():
            yield DecoderProcess(process, log, cancel)


def _close(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was not taken of a request
            pipe.close()
    process.wait()


def images(
    name: str, cancel: CancelToken | None = None, mask: bool = False
) -> AbstractContextManager[DecoderProcess]:
    """Starts a decoder of images, or of the frames of masks; as ``decoder``."""
    if not sys.executable:
        raise UsageError("not_installed", f"{name} cannot be read: sys.executable does not name this Python")
    # This package may have been found by a path that only this process has.
    paths = [str(Path(wanrun.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    kind = "mask" if mask else "rgb"
    command = [sys.executable, "-P", "-m", "wanrun.media.pillow", str(Image.MAX_IMAGE_PIXELS or 0), kind]
    return decoder(command, name, cancel, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


def first_frame(images: DecoderProcess, path: Path, name: str) -> Image.Image:
    """Returns an image, in mode RGB and upright; raises UsageError if it cannot be decoded.

    ``images`` is a decoder of the function ``images``; ``name`` is for messages.
    """
    images.ask({"path": os.fspath(path), "name": name, "wanted": "first"})
    frame = _next(images, name)
    assert frame is not None
    return frame


def image_size(images: DecoderProcess, path: Path, name: str) -> tuple[int, int]:
    """Returns width and height of an image, upright, without decoding it; arguments as of ``first_frame``.

    Raises UsageError for a header that cannot be read, or an image that could not be used.
    """
    images.ask({"path": os.fspath(path), "name": name, "wanted": "size"})
    if line := images.line():
        told = json.loads(line)
        if "what" in told:
            raise UsageError(**told)
        return told["width"], told["height"]
    raise _cannot_decode(images, name)


def all_frames(images: DecoderProcess, path: Path, name: str) -> Iterator[Image.Image]:
    """Yields the frames of an animation, in mode RGB; arguments as of ``first_frame``.

    Raises Pillow's UnidentifiedImageError if the file is not an image.
    """
    images.ask({"path": os.fspath(path), "name": name, "wanted": "all"})
    while (frame := _next(images, name)) is not None:
        yield frame


def _next(images: DecoderProcess, name: str) -> Image.Image | None:
    """Returns the next frame of an answer; None after the last one."""
    line = images.line()
    if line == b"P6\n":
        if (frame := images.frame(name)) is not None:
            return frame
    elif line == b"\n":
        return None
    elif line:
        problem = json.loads(line)
        raise UsageError(**problem) if problem else UnidentifiedImageError(name)
    raise _cannot_decode(images, name)


def _cannot_decode(images: DecoderProcess, name: str) -> UsageError:
    """Returns the error of a decoder that has ended without an answer."""
    code, lines = images.ended(name)
    return UsageError(
        "unreadable", f"{name} cannot be decoded", found=lines[-1] if lines else how_it_ended(code)
    )
