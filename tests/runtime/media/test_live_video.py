"""A video that is written while it is made plays up to its last chunk, whatever ends it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import imageio_ffmpeg
import numpy as np
import pytest

from helpers.pictures import pixels
from helpers.started import Started
from wanrun.errors import UsageError
from wanrun.media import ffmpeg
from wanrun.media import live_video as module
from wanrun.media.boxes import fragment, mime_type
from wanrun.media.live_video import live_file, live_video, write_all
from wanrun.media.write_video import read_metadata

# --- live video ---


SIZE, FPS = (48, 32), 23.976
LENGTHS = (1, 4, 3)
METADATA = {"prompt": 'a"cat; = 猫', "seed": 3}
DECODE = (imageio_ffmpeg.get_ffmpeg_exe(), "-v", "fatal", "-copyts", "-i", "pipe:0")


def chunks() -> list[np.ndarray]:
    frames = np.stack([np.roll(pixels(*SIZE), shift, 1) for shift in range(sum(LENGTHS))])
    return np.split(frames, np.cumsum(LENGTHS)[:-1])


def decoded(data: bytes, *options: str) -> bytes:
    return subprocess.run([*DECODE, *options, "pipe:1"], input=data, capture_output=True, check=True).stdout


def listed(data: bytes) -> list[bytes]:
    """A line for each frame: its time, its duration and its pixels' hash, after the units of time."""
    lines = decoded(data, "-fps_mode", "passthrough", "-enc_time_base", "demux", "-f", "framemd5")
    return [line for line in lines.splitlines() if not line.startswith(b"#") or line.startswith(b"#tb")]


class Written(NamedTuple):
    """What the sink got, and how much of it after each chunk."""

    parts: list[bytes]
    counts: list[int]
    lines: list[bytes]


@pytest.fixture(scope="module")
def written() -> Written:
    parts, counts = list[bytes](), list[int]()
    with live_video(parts.append, SIZE, FPS, METADATA) as video:
        for chunk in chunks():
            video.write(chunk)
            counts.append(len(parts))
    return Written(parts, counts, listed(b"".join(parts)))


def test_each_chunk_leaves_before_the_next_one_is_there(written: Written) -> None:
    assert written.counts == [2, 3, 4] and len(written.parts) == 4
    unit, *frames = written.lines
    assert unit.endswith(b": 1/2997")
    assert [int(line.split(b",")[2]) for line in frames] == [125 * place for place in range(sum(LENGTHS))]


def test_a_file_that_ends_anywhere_plays_up_to_its_last_chunk(written: Written) -> None:
    init, *fragments = written.parts
    cut = b"".join((init, *fragments[:2], fragments[2][: len(fragments[2]) // 2]))
    assert listed(cut)[: sum(LENGTHS[:2]) + 1] == written.lines[: sum(LENGTHS[:2]) + 1]


def test_who_comes_late_begins_with_the_newest_fragment(written: Written) -> None:
    assert listed(written.parts[0] + written.parts[-1])[1:] == written.lines[-LENGTHS[-1] :]
    assert mime_type(written.parts[0]).endswith('"avc1.64000a"')


def test_the_colours_are_the_frames(written: Written) -> None:
    raw = decoded(b"".join(written.parts), "-f", "rawvideo", "-pix_fmt", "rgb24")
    frames = np.frombuffer(raw, np.uint8).reshape(-1, *SIZE[::-1], 3).astype(float)
    error = np.mean((frames - np.concatenate(chunks())) ** 2, (0, 1, 2))
    assert np.all(10 * np.log10(255**2 / error) > 20)


def test_a_file_has_the_same_bytes_and_the_metadata(written: Written, tmp_path: Path) -> None:
    path = tmp_path / "live.mp4"
    path.write_text("another")
    with live_file(path) as sink, live_video(sink, SIZE, FPS, METADATA) as video:
        assert path.read_text() == "another"
        for chunk in chunks():
            video.write(chunk)
    assert path.read_bytes() == b"".join(written.parts)
    assert read_metadata(path) == METADATA
    with pytest.raises(UsageError, match="File exists"), live_file(path, overwrite=False) as sink:
        sink(b"")


def test_a_reader_that_has_gone_ends_the_video(started: Started) -> None:
    reading, writing = os.pipe()
    with pytest.raises(BrokenPipeError), live_video(partial(write_all, writing), SIZE, FPS, {}) as video:
        for chunk in chunks():
            video.write(chunk)
            assert os.read(reading, 8)[4:] == b"ftyp"
            os.close(reading)
    os.close(writing)
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGKILL, "encoded.*Killed"), (signal.SIGSTOP, "nothing for")]
)
def test_an_encoder_that_ends_or_hangs_is_an_error(
    number: signal.Signals, why: str, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ffmpeg, "STALLED_SECONDS", 0.1 if number == signal.SIGSTOP else 60)
    with pytest.raises(UsageError, match=why), live_video(id, SIZE, FPS, {}) as video:
        started[0].send_signal(number)
        video.write(chunks()[0])
    assert started[0].returncode == -signal.SIGKILL


def test_the_first_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "fsync", lambda descriptor: os.read(-1, 1))
    with pytest.raises(KeyError), live_file(tmp_path / "o.mp4") as sink:
        sink(b"")
        raise KeyError
    with pytest.raises(UsageError, match="descriptor"), live_file(tmp_path / "o.mp4") as sink:
        sink(b"")


def test_frames_of_another_size() -> None:
    with (
        pytest.raises(ValueError, match=r"uint8.*48"),
        live_video(id, SIZE, FPS, {}) as video,
    ):
        video.write(np.zeros((2, 32, 32, 3), np.uint8))


KILLED = """
import os, sys
import numpy as np
from pathlib import Path
from wanrun.media.live_video import live_file, live_video

with live_file(Path(sys.argv[1])) as sink, live_video(sink, (32, 32), 16, {}) as video:
    for value in range(3):
        video.write(np.full((2, 32, 32, 3), value * 80, np.uint8))
    print(Path("/proc/thread-self/children").read_text(), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_a_process_that_is_killed_leaves_all_chunks_and_no_encoder(tmp_path: Path) -> None:
    path = tmp_path / "live.mp4"
    ended = subprocess.run([sys.executable, "-c", KILLED, path], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(listed(path.read_bytes())) == 1 + 3 * 2
    with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(int(ended.stdout))) as encoder:
        assert select.select([encoder], [], [], 5)[0]


# --- boxes ---


def test_a_fragment_says_where_its_frames_are_and_when() -> None:
    data = fragment(7, 2**33, [b"abc", b"de"])
    moof, where = data.index(b"moof") - 4, data.index(b"trun") + 8
    count, offset = struct.unpack_from(">Ii", data, where)
    assert data[moof + offset :] == b"abcde" and count == 2
    assert struct.unpack_from(">II", data, where + 12) == (3, 2)
    assert struct.unpack_from(">Q", data, data.index(b"tfdt") + 8) == (2**33,)
    assert struct.unpack_from(">I", data, data.index(b"mfhd") + 8) == (7,)
