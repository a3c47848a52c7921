"""A long video is made in segments of one static shape, each begun with the end of the one before.

The arithmetic is that of ``WanAnimatePipeline.__call__``.
"""

from __future__ import annotations

from dataclasses import dataclass

from wanrun.errors import UsageError


def num_segments(num_frames: int, length: int, overlap: int) -> int:
    """How many segments cover a video.

    Args:
        num_frames: frames of the video, more than ``overlap``.
        length: frames of a segment, more than twice ``overlap``.
        overlap: frames that a segment begins with of the one before.
    """
    return -(-(num_frames - overlap) // (length - overlap))


def padded_frames(num_frames: int, length: int, overlap: int) -> int:
    """Frames that these segments have together, the shared ones counted once."""
    return num_segments(num_frames, length, overlap) * (length - overlap) + overlap


def check_segments(num_frames: int, length: int, overlap: int, video: str = "the video") -> None:
    """Checks that a video can be made in segments.

    Args:
        num_frames, length, overlap: as of ``num_segments``.
        video: what messages call the video whose frames decide.

    Raises:
        UsageError: if the video or the segments are too short; the reference stops there with an assertion.
    """
    if length <= 2 * overlap:
        shorter = "a smaller segment overlap, or " if overlap > 1 else ""
        raise UsageError(
            f"segments of {length} frames are too short to share {overlap}",
            expected=f"more than {2 * overlap} frames",
            remedy=f"use {shorter}a profile of more frames",
        )
    if num_frames <= overlap:
        raise UsageError(f"{video} is too short", expected=f"more than {overlap} frame(s)", found=num_frames)


def reflected(num_frames: int, target: int) -> list[int]:
    """Which frames make a video of another length: ``WanAnimatePipeline.pad_video_frames``.

    A longer video is cut. A shorter one goes on backwards, and forwards again at its start: 0 1 2 1 0 1 2 ...

    Args:
        num_frames: frames there are; more than one, unless no more are needed.
        target: frames that are needed.

    Returns:
        Indices of frames, ``target`` of them.
    """
    last = num_frames - 1
    period = max(2 * last, 1)
    return [last - abs(index % period - last) for index in range(target)]


@dataclass(frozen=True)
class Window:
    """A run of video frames that are made at once.

    Attributes:
        index: which window it is.
        count: how many there are.
        start: its first frame.
        stop: one past its last.
    """

    index: int
    count: int
    start: int
    stop: int


def windows(total: int, length: int, overlap: int) -> list[Window]:
    """The windows of a video whose frames they cover exactly.

    Args:
        total: frames of the video, padded to whole windows.
        length: frames of a window.
        overlap: frames that a window has in common with the one before.
    """
    stride = length - overlap
    count = num_segments(total, length, overlap)
    return [Window(i, count, i * stride, i * stride + length) for i in range(count)]
