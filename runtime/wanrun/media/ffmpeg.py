"""Finds imageio's ffmpeg, checks that it writes H.264 or VP9, and runs it.

diffusers reads videos with this binary too, so both get the same frames.
"""

from __future__ import annotations

__all__ = ["check_encodes"]

import contextlib
import errno
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, Final

import numpy as np

from wanrun.errors import UsageError, errno_in
from wanrun.undo import begun

STALLED_SECONDS: Final = 600
"""After so long without taking a byte, giving one or ending, ffmpeg is taken for hung."""

_VARIABLE = "IMAGEIO_FFMPEG_EXE"
_REMEDY = f"pip install imageio-ffmpeg, or let {_VARIABLE} name an ffmpeg"


def find_ffmpeg() -> str:
    """Returns the path of ffmpeg: $IMAGEIO_FFMPEG_EXE, else imageio's own binary, else the system's.

    Raises UsageError if there is no ffmpeg.
    """
    named = os.environ.get(_VARIABLE)
    if named:
        path = shutil.which(named)
        if path is None:
            raise UsageError(
                "not_installed",
                "there is no ffmpeg",
                found=f"{_VARIABLE}={named}, which is no program",
                remedy=_REMEDY,
            )
        return path
    own = _own_binary()
    if own is not None:
        return own
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        raise UsageError("not_installed", "there is no ffmpeg", found=error, remedy=_REMEDY) from None


def _own_binary() -> str | None:
    """Returns the binary in imageio's package. ``get_ffmpeg_exe`` would start it as a test, for 30 ms."""
    try:
        folder = Path(str(resources.files("imageio_ffmpeg.binaries")))
    except ImportError:
        return None
    return next((str(path) for path in folder.glob("ffmpeg-*") if os.access(path, os.X_OK)), None)


def check_encodes(suffix: str, codec: str) -> None:
    """Checks before the first step that there is an ffmpeg that writes the videos of a suffix.

    imageio's own binary has every codec and is not started. Another ffmpeg encodes one frame as a test.

    Raises:
        UsageError: if there is no such ffmpeg.
    """
    remedy = f"{_REMEDY}, or choose an --output that ends in .webp or .png"
    try:
        program = find_ffmpeg()
        if program == _own_binary():
            return
        source = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", "16x16", "-i", "pipe:0")
        run_ffmpeg(
            [*source, "-c:v", codec, "-pix_fmt", "yuv420p", "-f", "null", "-"],
            [np.zeros((16, 16, 3), np.uint8)],
        )
    except UsageError as error:
        raise UsageError(
            "not_installed", f"{suffix[1:]} cannot be written: {error.what}", found=error.found, remedy=remedy
        ) from None
    except OSError as error:
        raise UsageError(
            "unwritable",
            f"{suffix[1:]} cannot be written: {program} does not encode with {codec}",
            found=error.strerror or error,
            remedy=remedy,
        ) from None


class FfmpegError(OSError):
    """ffmpeg does not start, or it has failed: the last line of its messages, and the number of its error."""


@dataclass(frozen=True)
class Ffmpeg:
    """A running process of ffmpeg, with pipes; ``log`` has what it prints to standard error."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def ready(self, waiting: select.poll) -> list[tuple[int, int]]:
        """Waits for its pipes, and returns the events. Raises FfmpegError if it hangs."""
        if not (events := waiting.poll(STALLED_SECONDS * 1000)):
            raise self._stalled()
        return events

    def output(self) -> bytes:
        """Ends its input, and returns its output up to its end. Raises FfmpegError if it hangs."""
        try:
            return self.process.communicate(timeout=STALLED_SECONDS)[0]
        except subprocess.TimeoutExpired:
            raise self._stalled() from None

    def _stalled(self) -> FfmpegError:
        return FfmpegError(errno.ETIMEDOUT, f"ffmpeg: it has done nothing for {STALLED_SECONDS:g} s")

    def failure(self) -> FfmpegError:
        """Waits for its end, and returns why it failed."""
        try:
            code = self.process.wait(STALLED_SECONDS)
        except subprocess.TimeoutExpired:
            return self._stalled()
        self.log.seek(0)
        lines = self.log.read().decode("utf-8", errors="replace").strip().splitlines()
        reason = lines[-1] if lines else how_it_ended(code)
        return FfmpegError(errno_in("\n".join(lines)), f"ffmpeg: {reason}")


@contextlib.contextmanager
def started_ffmpeg(arguments: Sequence[str]) -> Iterator[Ffmpeg]:
    """Starts ffmpeg. It ends with the context, within which all of its output is read.

    imageio_ffmpeg's own writer ignores ffmpeg's exit status, so a full disk would go unnoticed. Only the
    binary is used. ``arguments`` are ffmpeg's, from the input on. Raises UsageError if there is no ffmpeg,
    and FfmpegError if it does not start, or has failed at the context's end.
    """
    command = [find_ffmpeg(), "-nostdin", "-y", "-v", "error", *arguments]

    def start() -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        try:
            return subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=log,
                start_new_session=True,  # so that Ctrl-C does not reach it: this process ends it
                restore_signals=False,  # SIGXFSZ, at ulimit -f, would end it before it can say why
            )
        except OSError as error:
            raise FfmpegError(error.errno, error.strerror) from error

    # In memory, and no pipe: nobody reads one while frames are written.
    with open(os.memfd_create("ffmpeg"), "w+b") as log:  # noqa: PTH123 - no path
        with begun(start, _end) as process, process:
            running = Ffmpeg(process, log)
            try:
                yield running
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise running.failure()


def run_ffmpeg(arguments: Sequence[str], frames: Iterable[np.ndarray] = ()) -> bytes:
    """Runs ffmpeg, feeding it frames as they come, and returns its output; raises as ``started_ffmpeg``.

    ``frames`` are contiguous arrays of bytes. What they raise ends ffmpeg.
    """
    with started_ffmpeg(arguments) as running:
        _feed(running, frames)
        return running.output()


def _feed(running: Ffmpeg, frames: Iterable[np.ndarray]) -> None:
    """Writes frames, without a copy, to ffmpeg, as long as it reads them."""
    assert running.process.stdin is not None
    descriptor, waiting = running.process.stdin.fileno(), select.poll()
    os.set_blocking(descriptor, False)
    waiting.register(descriptor, select.POLLOUT)
    for piece in frames:
        rest = piece.data.cast("B")
        while rest:
            running.ready(waiting)
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BrokenPipeError:  # its exit code says why
                return


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends ffmpeg before this process ends: it would go on writing its file."""
    process.kill()
    process.wait(1)


def how_it_ended(code: int) -> str:
    """Returns the reason why ffmpeg failed, from its return code, if it printed none."""
    if code < 0:
        reason = signal.strsignal(-code) or "unknown"
        return f"ended by signal {-code} ({reason}), no message"
    return f"exit code {code}, no message"
