"""Each kind of file of a result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import wanrun
from wanrun.errors import UsageError
from wanrun.files import read_bounded
from wanrun.job.outputs import KINDS, LAST_FRAME, LATENTS, THUMBNAIL, VIDEO, Output, outputs_of


@pytest.fixture
def result() -> wanrun.Result:
    frames = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 1280, 3), dtype=np.uint8)
    return wanrun.Result(frames, np.zeros((2, 16, 1, 4, 160), np.float32), {}, wanrun.Timings())


def test_the_names_of_each_video() -> None:
    one = outputs_of(Path("a/v.mp4"), 1, (VIDEO, THUMBNAIL, LAST_FRAME))
    assert [str(output.path) for output in one] == ["a/v.mp4", "a/v.thumbnail.webp", "a/v.last.png"]
    two = outputs_of(Path("v.GIF"), 2)
    assert two == (Output(Path("v-0.GIF"), 0), Output(Path("v-1.GIF"), 1))
    assert outputs_of(Path("v.mp4"), 2, (LATENTS,)) == (Output(Path("v.latents.npy"), 0, LATENTS),)
    with pytest.raises(UsageError):
        outputs_of(Path("v.txt"), 1)


def test_each_kind_is_written(result: wanrun.Result, tmp_path: Path) -> None:
    written = {
        kind: Output(tmp_path / f"{kind}{row.ending or '.npy'}", 1, kind) for kind, row in KINDS.items()
    }
    for output in written.values():
        assert output.write(result, {"fps": 16}, overwrite=False) == output.path.stat().st_size > 0
    assert (np.load(written[VIDEO].path) == result.frames[1]).all()
    assert np.load(written[LATENTS].path).shape == result.latents.shape
    with Image.open(written[THUMBNAIL].path) as small:
        assert (small.format, small.size) == ("WEBP", (640, 16))
    with Image.open(written[LAST_FRAME].path) as last:
        assert (np.asarray(last) == result.frames[1, -1]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_written_is_told(result: wanrun.Result, tmp_path: Path, kind: str) -> None:
    output = Output(tmp_path / "gone" / f"x{KINDS[kind].ending or '.npy'}", 0, kind)
    with pytest.raises(UsageError) as caught:
        output.write(result, {"fps": 16}, overwrite=True)
    assert str(output.path) in caught.value.what


def test_the_bytes_of_a_folder_are_those_of_its_pictures(result: wanrun.Result, tmp_path: Path) -> None:
    output = Output(tmp_path / "v.frames")
    nbytes = output.write(result, {"fps": 16}, overwrite=False)
    assert nbytes == sum(len(read_bounded(file, 1 << 20)) for file in output.path.iterdir())
