"""The windows of a long video, and where the chunks of a given one end.

Windows have one static shape, and each begins with the end of the one before. diffusers calls one a segment.
The arithmetic is that of ``WanAnimatePipeline.__call__``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from wanrun.artifact.model import Chunking
from wanrun.errors import UsageError

Frame = TypeVar("Frame")


def num_windows(num_frames: int, length: int, overlap: int) -> int:
    """Returns the number of windows of ``length`` frames that cover a video of more than ``overlap`` frames.

    Each window shares ``overlap`` frames with the one before, and is more than twice as long.
    """
    return -(-(num_frames - overlap) // (length - overlap))


def padded_frames(num_frames: int, length: int, overlap: int) -> int:
    """Returns the frames that these windows have together; shared frames count once."""
    return joined_frames(num_windows(num_frames, length, overlap), length, overlap)


def joined_frames(count: int, length: int, overlap: int) -> int:
    """Returns the frames of so many windows; shared frames count once."""
    return count * (length - overlap) + overlap


def check_segments(num_frames: int, length: int, overlap: int, video: str = "the video") -> None:
    """Checks that a video can be made in windows; arguments as of ``num_windows``.

    ``video`` names the video in messages. Raises UsageError if it or the windows are too short, where the
    reference fails with an assertion.
    """
    if length <= 2 * overlap:
        shorter = "a smaller segment overlap, or " if overlap > 1 else ""
        raise UsageError(
            "out_of_range",
            f"windows of {length} frames are too short to share {overlap}",
            expected=f"more than {2 * overlap} frames",
            remedy=f"use {shorter}a profile of more frames",
        )
    if num_frames <= overlap:
        raise UsageError(
            "out_of_range",
            f"{video} is too short",
            expected=f"more than {overlap} frame(s)",
            found=num_frames,
        )


def check_chunks(num_frames: int, most: int, chunks: Chunking, temporal: int, video: str) -> None:
    """Checks that the frames that a video begins with end where a chunk ends.

    ``most`` are the profile's frames, ``temporal`` the frames of a latent frame; ``video`` names the video in
    messages. Raises UsageError for a video that ends in a chunk, or that is longer than the profile.
    """
    ends = range(1 + temporal * (chunks.first - 1), most + 1, temporal * chunks.each)
    if num_frames not in ends:
        nearest = [
            [end for end in ends if end < num_frames][-1:],
            [end for end in ends if end > num_frames][:1],
        ]
        raise UsageError(
            "unsupported",
            f"{video} does not end where a chunk ends, so it cannot be continued",
            expected=f"{', '.join(map(str, ends))} frames",
            found=num_frames if num_frames <= most else f"more than {most}",
            remedy=f"give {' or '.join(str(end) for one in nearest for end in one)} frames",
        )


def last_chunks(frames: Iterable[Frame], length: int, most: int, video: str) -> tuple[Sequence[Frame], int]:
    """Returns the first of a video's frames, those of its last whole chunks, and how many all frames are.

    Few of ``frames`` are kept at a time. ``length`` are the frames of a chunk, ``most`` the chunks that are
    returned; ``video`` names the video in messages. Raises UsageError for a video without a whole chunk.
    """
    first, last, count = list[Frame](), deque[Frame](maxlen=most * length), 0
    for frame in frames:
        first, count = first or [frame], count + 1
        last.append(frame)
    if count < length:
        raise UsageError(
            "out_of_range",
            f"{video} is too short to be continued",
            expected=f"a chunk, {length} frames, or more",
            found=count,
            remedy="give a longer video, or an image",
        )
    return [*first, *islice(last, len(last) % length, None)], count


def reflected(num_frames: int, target: int) -> list[int]:
    """Returns the indices of ``target`` frames of a video: ``WanAnimatePipeline.pad_video_frames``.

    A longer video is cut. A shorter one, of two frames or more, continues backwards, then forwards again:
    0 1 2 1 0 1 2 ...
    """
    last = num_frames - 1
    period = max(2 * last, 1)
    return [last - abs(index % period - last) for index in range(target)]


@dataclass(frozen=True)
class Window:
    """The video frames that are made at once, of ``count`` windows; ``stop`` is one past the last frame."""

    count: int
    start: int
    stop: int


def windows(total: int, length: int, overlap: int) -> list[Window]:
    """Returns the windows that exactly cover a video, whose ``total`` frames are padded to whole windows."""
    stride = length - overlap
    count = num_windows(total, length, overlap)
    return [Window(count, i * stride, i * stride + length) for i in range(count)]
