"""Videos that are there already are those that would be made, or the run is refused by what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.refusals import check_refusal
from wancli.jobs.existing import missing_videos
from wanrun.errors import UsageError
from wanrun.media.write_video import metadata_sidecar, write_video

FRAMES = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
METADATA = {"prompt": "a fox", "seed": 7, "guidance_scale": 5.0, "wanrun": "1.0", "boundary": None}


def write(path: Path, **changes: Any) -> Path:
    write_video(FRAMES, path, 8, {**METADATA, "video": 0, **changes})
    return path


def refusal(*videos: Path, **changes: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        missing_videos(videos, {**METADATA, **changes})
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("suffix", [".png", ".npy"])
def test_those_that_are_there_are_not_missing(tmp_path: Path, suffix: str) -> None:
    videos = [tmp_path / f"{index}{suffix}" for index in range(3)]
    assert missing_videos(videos, METADATA) == (0, 1, 2)
    write(videos[1], video=1)
    assert missing_videos(videos, METADATA) == (0, 2)
    # Another version may have made it, which said less or more.
    write(videos[0], wanrun="0.9", merged_loras=[])
    write(videos[2], video=2)
    assert missing_videos(videos, METADATA) == ()


def test_another_video_is_refused_by_what_differs(tmp_path: Path) -> None:
    path = write(tmp_path / "a.png")
    error = refusal(path, seed=8)
    check_refusal(error, "exists", what=path, expected="seed 8", found=7, remedy="--overwrite")
    check_refusal(refusal(path, prompt="a cat"), "exists", expected='prompt "a cat"', found='"a fox"')
    check_refusal(refusal(path, size="96x64"), "exists", expected='size "96x64"', found="none")
    check_refusal(refusal(path, prompt="x" * 99), "exists", expected='prompt "' + "x" * 59 + "...")
    check_refusal(refusal(tmp_path / "none.png", path), "exists", expected="video 1", found=0)


def test_chosen_loras_are_part_of_what_it_is(tmp_path: Path) -> None:
    """Their strengths and their digests."""
    lora = {"name": "style", "strengths": {"transformer": 0.5}, "sha256": "0f" * 32}
    path = write(tmp_path / "a.png", lora=[lora])
    assert missing_videos([path], {**METADATA, "lora": [lora]}) == ()
    check_refusal(refusal(path), "exists", expected="lora none")
    stronger = refusal(path, lora=[lora | {"strengths": {"transformer": 1.0}}])
    check_refusal(stronger, "exists", expected="1.0}", found="0.5}")
    check_refusal(refusal(path, lora=[lora | {"sha256": "1f" * 32}]), "exists", expected="lora")


def test_what_a_file_has_besides_is_a_difference(tmp_path: Path) -> None:
    path = write(tmp_path / "a.png", latents="noise.npy")
    check_refusal(refusal(path), "exists", expected="latents none", found='"noise.npy"')


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, FRAMES)
    check_refusal(refusal(path), "exists", what=path, expected=None, remedy="--overwrite")
    (tmp_path / "b.gif").write_bytes(b"no video")
    check_refusal(refusal(tmp_path / "b.gif"), "exists", what="b.gif")
    (tmp_path / "c.png").mkdir()
    check_refusal(refusal(tmp_path / "c.png"), "wrong_kind", what="c.png")


def test_a_sidecar_of_a_killed_run_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    sidecar = metadata_sidecar(path)
    sidecar.write_text(json.dumps({**METADATA, "video": 0}))
    assert missing_videos([path], METADATA) == (0,)
    for text in (json.dumps({**METADATA, "video": 0, "seed": 8}), "[]", "no json", "[" * 100_000):
        sidecar.write_text(text)
        check_refusal(refusal(path), "exists", what=f"{sidecar} ")
