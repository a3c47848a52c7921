"""Videos of a job that are written while their later frames are made."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from wanrun.job.outputs import VIDEO, Output

if TYPE_CHECKING:
    import numpy as np

    from wanrun.generation.decoding import Frames

AHEAD: Final = 4
"""Pieces of a video that may wait for its encoder. A decoder that is faster then waits for it, and so does
the device: otherwise a slow disk would bring the whole video into the host's memory."""


class _AbandonedError(Exception):
    """The frames that are lacking will not come."""


class Pieces:
    """Frames on their way to the thread where ``write`` writes the file of all pieces."""

    def __init__(self, write: Callable[[Iterator[np.ndarray]], object], threads: ThreadPoolExecutor) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[np.ndarray] = deque()
        self._over, self._abandoned = False, False
        self._written: Future[object] = threads.submit(write, self._taken())
        self._written.add_done_callback(lambda written: self._tell())

    def put(self, frames: np.ndarray) -> None:
        """Hands over the next frames, (N, H, W, 3), once there is room; raises what befell the file."""
        with self._changed:
            self._changed.wait_for(lambda: self._written.done() or len(self._waiting) < AHEAD)
            if not self._written.done():
                self._waiting.append(frames)
                self._changed.notify_all()
                return
        self._written.result()

    def finish(self) -> None:
        """Says that no more frames come, and waits until the file is there; raises what went wrong."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._written.result()

    def abandon(self) -> None:
        """Lets what is written of the file be removed, unless it is there already."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _taken(self) -> Iterator[np.ndarray]:
        """Yields the frames as they come."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._over or self._abandoned)
                if self._abandoned:
                    raise _AbandonedError
                if not self._waiting:
                    return
                frames = self._waiting.popleft()
                self._changed.notify_all()
            yield frames


class Writing:
    """A writer of a job's videos while they are made; it is an ``OnFrames``, and a context.

    A file is complete once ``finish`` is called for it, after the last frame of all; the others leave nothing
    behind. ``facts`` are entries of the metadata besides the generation's own.
    """

    def __init__(self, outputs: Sequence[Output], facts: Mapping[str, Any], overwrite: bool) -> None:
        self._outputs = {output.video: output for output in outputs if output.kind == VIDEO}
        self._facts, self._overwrite = facts, overwrite
        self._threads = ThreadPoolExecutor(max(1, len(self._outputs)), thread_name_prefix="wanrun video")
        self._files = dict[int, Pieces]()
        self._ends: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, made: Frames) -> None:
        first = made.frames[:1].copy() if made.first == 0 else self._ends[made.video][0]
        last = made.first + len(made.frames) == made.total
        self._ends[made.video] = first, made.frames[-1:].copy() if last else first
        if made.first == 0 and (output := self._outputs.get(made.video)) is not None:
            self._files[made.video] = Pieces(self._writer(output, made), self._threads)
        if made.video in self._files:
            self._files[made.video].put(made.frames)

    def _writer(self, output: Output, made: Frames) -> Callable[[Iterator[np.ndarray]], None]:
        """Returns the function that writes the file of a video."""
        from wanrun.media.write_video import write_pieces

        metadata = {**made.options, **self._facts, "video": output.video}
        shape = made.total, *made.frames.shape[1:]

        def write(pieces: Iterator[np.ndarray]) -> None:
            write_pieces(pieces, shape, output.path, float(metadata["fps"]), metadata, self._overwrite)

        return write

    def finish(self, output: Output) -> bool:
        """Completes the file of an output, and returns whether it was written of frames as they came."""
        if output.kind != VIDEO or output.video not in self._files:
            return False
        self._files[output.video].finish()
        return True

    def ends(self) -> np.ndarray | None:
        """Returns the first and the last frame of each video, uint8 (B, 2, H, W, 3); None if none came."""
        import numpy as np

        return (
            np.stack([np.concatenate(self._ends[video]) for video in sorted(self._ends)])
            if self._ends
            else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.abandon()
        self._threads.shutdown()
