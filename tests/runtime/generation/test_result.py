"""A result says what it is in a line, and writes its videos as the command does."""

from __future__ import annotations

import base64
import pickle
import re
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest

import wanrun
from helpers.refusals import refuses
from wanrun.errors import UsageError
from wanrun.media.write_video import read_metadata
from wanrun.timing.timings import Timings


@pytest.fixture
def result() -> wanrun.Result:
    frames = np.random.default_rng(0).integers(0, 256, (2, 5, 32, 48, 3), dtype=np.uint8)
    latents = np.zeros((2, 16, 2, 4, 6), np.float32)
    return wanrun.Result(frames, latents, {"prompt": "a fox " * 9, "seed": 7, "fps": 16.0}, Timings())


def test_what_it_is_in_a_line(result: wanrun.Result) -> None:
    line = repr(result)
    assert line.startswith("<Result 'a fox a fox ") and "...'" in line and line.endswith("48x32>")
    assert re.findall(r"\b\d+\b", line) == ["7", "2", "5"]


def test_it_comes_from_another_process(result: wanrun.Result) -> None:
    with result.timings.phase("denoise"):
        result.timings.begin("decode", progress=lambda: (1, 2))  # which goes on
        again = pickle.loads(pickle.dumps(result))
    result.timings.add("text", 1.0, 2.0)
    assert again.options == result.options and np.array_equal(again.frames, result.frames)
    assert again.timings.spans == {} and again.timings.running == []
    again.timings.add("text", 1.0, 2.0)
    assert again.timings.spans == {"text": [(1.0, 2.0)]}
    assert re.fullmatch(r"<Timings: \d+\.\d s in all, 0 steps>", repr(again.timings))


def test_a_notebook_shows_the_videos(result: wanrun.Result, tmp_path: Path) -> None:
    shown = result._repr_html_()
    videos = re.findall(r'src="data:video/mp4;base64,([^"]+)"', shown)
    assert len(videos) == 2 and "&lt;Result &#x27;a fox" in shown
    (tmp_path / "video.mp4").write_bytes(base64.b64decode(videos[1]))
    assert read_metadata(tmp_path / "video.mp4") == {**result.options, "video": 1}


@pytest.mark.parametrize("suffix", [".npy", ".png", ".gif"])
def test_saved_videos_have_their_metadata(result: wanrun.Result, tmp_path: Path, suffix: str) -> None:
    saved = result.save(tmp_path / f"cat{suffix}")
    assert saved == [tmp_path / f"cat-{index}{suffix}" for index in range(2)]
    for index, path in enumerate(saved):
        found = read_metadata(path)
        assert found == {**result.options, "video": index}
    if suffix == ".npy":
        assert np.array_equal(np.load(saved[1]), result.frames[1])
    if suffix == ".png":
        assert np.array_equal(iio.imread(saved[1], index=None), result.frames[1])


def test_a_file_that_is_there_stays(result: wanrun.Result, tmp_path: Path) -> None:
    (tmp_path / "cat-1.npy").write_bytes(b"mine")
    with refuses("exists", what=tmp_path / "cat-1.npy", remedy="overwrite=True"):
        result.save(str(tmp_path / "cat.npy"))
    (tmp_path / "dog-0.npy.json").write_bytes(b"mine")
    with refuses("exists", what=tmp_path / "dog-0.npy.json"):
        result.save(tmp_path / "dog.npy")
    assert (tmp_path / "cat-1.npy").read_bytes() == b"mine" and not (tmp_path / "cat-0.npy").exists()
    for path, said in (
        (None, "the wrong type"),
        ("a\0.npy", "path is no path"),
        ("a" * 300 + ".npy", "long"),
    ):
        with pytest.raises(UsageError, match=said):
            result.save(path)  # type: ignore[arg-type]
    assert result.save(tmp_path / "cat.npy", fps=30, overwrite=True)
    assert read_metadata(tmp_path / "cat-1.npy")["fps"] == 30
