"""Windows of a long video: how many there are, where each begins, and what is too short for any."""

from __future__ import annotations

import itertools
import re

import pytest

from helpers.refusals import refuses
from wanrun.artifact.model import Chunking
from wanrun.errors import UsageError
from wanrun.media.windows import (
    Window,
    check_chunks,
    check_segments,
    last_chunks,
    num_windows,
    padded_frames,
    reflected,
    windows,
)


def test_windows_share_frames() -> None:
    assert windows(33, 13, 3) == [Window(3, 0, 13), Window(3, 10, 23), Window(3, 20, 33)]
    assert windows(13, 13, 5) == [Window(1, 0, 13)]


@pytest.mark.parametrize("frames, found, nearest", [(12, "12", "1 13"), (14, "14", "13"), (22, "21", "13")])
def test_a_given_video_ends_with_a_chunk(frames: int, found: str, nearest: str) -> None:
    chunks = Chunking(first=1, each=3)
    check_chunks(13, 21, chunks, 4, "it")
    with pytest.raises(UsageError) as caught:
        check_chunks(frames, 21, chunks, 4, "it")
    assert str(caught.value.found).endswith(found)
    assert re.findall("[0-9]+", str(caught.value.remedy)) == nearest.split()
    assert re.findall("[0-9]+", str(caught.value.expected)) == ["1", "13"]


def test_of_a_video_to_continue_the_first_frame_and_the_last_chunks_are_kept() -> None:
    assert last_chunks(range(10), 3, 2, "it") == ([0, *range(4, 10)], 10)
    assert last_chunks(range(5), 3, 2, "it") == ([0, 2, 3, 4], 5)
    assert last_chunks(range(3), 3, 2, "it") == ([0, 0, 1, 2], 3)
    with pytest.raises(UsageError) as caught:
        last_chunks(range(2), 3, 2, "it")
    assert caught.value.found == 2 and "3" in str(caught.value.expected)


@pytest.mark.parametrize("overlap", [1, 5])
@pytest.mark.parametrize("frames", [6, 13, 14, 77, 200])
def test_windows_cover_a_padded_video_exactly(frames: int, overlap: int) -> None:
    total = padded_frames(frames, 13, overlap)
    found = windows(total, 13, overlap)
    assert found[0].start == 0 and found[-1].stop == total >= frames
    assert total - frames < 13 - overlap  # no window is of padding alone
    for one, following in itertools.pairwise(found):
        assert one.stop - following.start == overlap
    assert [(one.count, one.stop - one.start) for one in found] == [
        (len(found), 13) for _ in range(len(found))
    ]


@pytest.mark.parametrize("overlap", [1, 5])
@pytest.mark.parametrize("length", [13, 17, 77])
def test_segments_are_the_references(length: int, overlap: int) -> None:
    """The formulas of WanAnimatePipeline.__call__."""
    for frames in range(overlap + 1, 4 * length):
        rest = (frames - overlap) % (length - overlap)
        target = frames if rest == 0 else frames + (length - overlap) - rest
        assert padded_frames(frames, length, overlap) == target
        assert num_windows(frames, length, overlap) == target // (length - overlap)
        check_segments(frames, length, overlap)


@pytest.mark.parametrize(("length", "overlap"), [(1, 1), (5, 5), (9, 5), (2, 1)])
def test_segments_too_short_to_overlap_are_refused(length: int, overlap: int) -> None:
    with refuses("out_of_range", what=length, expected=f"more than {2 * overlap} frames"):
        check_segments(40, length, overlap)


def test_reflection() -> None:
    assert reflected(5, 10) == [0, 1, 2, 3, 4, 3, 2, 1, 0, 1]
    assert reflected(2, 5) == [0, 1, 0, 1, 0]
    assert reflected(7, 3) == [0, 1, 2]
    assert reflected(1, 1) == [0]


def test_a_video_of_shared_frames_alone_is_refused() -> None:
    with refuses("out_of_range", what="the face video", expected="more than 5", found=5):
        check_segments(5, 13, 5, "the face video")
