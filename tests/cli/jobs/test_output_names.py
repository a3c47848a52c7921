"""Names of results: fields, suffixes, and what is in the way; videos that are there already."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.refusals import check_refusal, refuses
from wancli.jobs.existing import missing_videos
from wancli.jobs.output_names import check_folder, expand, numbered, slug, write_timings
from wanrun.codes import ErrorCode
from wanrun.errors import UsageError
from wanrun.media.video_paths import SUFFIXES, video_paths
from wanrun.media.write_video import check_free, metadata_sidecar, write_video
from wanrun.timing.timings import Timings


def fill(pattern: str, index: int = 3, total: int = 12) -> str:
    return expand(pattern, "--output", index=index, total=total, seed=7, prompt="A red fox!")


@pytest.mark.parametrize(
    ("pattern", "given", "name"),
    [
        ("out.mp4", {}, "out.mp4"),
        ("out-{index}.mp4", {}, "out-03.mp4"),
        ("{index:04}/{index:01}.mp4", {}, "0003/3.mp4"),
        ("{seed}-{seed:03}.mp4", {}, "7-007.mp4"),
        ("{slug}.mp4", {}, "a-red-fox.mp4"),
        ("{{index}}-{{{index}}}.mp4", {}, "{index}-{03}.mp4"),
        ("%d-{ab.mp4", {}, "%d-{ab.mp4"),
        ("ab}.mp4", {}, "ab}.mp4"),
        *(  # as wide as the number of prompts
            ("{index}", {"index": 1, "total": total}, name)
            for total, name in ((1, "1"), (9, "1"), (10, "01"), (1000, "0001"))
        ),
        ("{index:02}", {"index": 123, "total": 200}, "123"),
    ],
)
def test_fields(pattern: str, given: dict[str, int], name: str) -> None:
    assert fill(pattern, **given) == name


@pytest.mark.parametrize(
    "field",
    [
        "",
        "Index",
        "prompt",
        "index:4",
        "index:0",
        "index:04d",
        "index:0004",
        "index!r",
        "slug:04",
        "0",
        " seed",
        "seed.real",
        "seed[0]",
        "index:0100",
    ],
)
def test_an_unknown_field_is_refused(field: str) -> None:
    pattern = "a-{" + field + "}.mp4"
    with refuses("unknown_parameter", what=pattern, expected="{index}, ", found="{" + field + "}"):
        fill(pattern)


def test_names_are_numbered_where_they_have_no_field() -> None:
    assert numbered("a/out.mp4") == "a/out-{index}.mp4"
    assert numbered("a.b/out") == "a.b/out-{index}"
    assert numbered("a/{{x}}.mp4") == "a/{{x}}-{index}.mp4"
    assert numbered("a/{seed}.mp4") == "a/{seed}.mp4"


def test_slugs() -> None:
    prompt = "A cat's  walk, at 5 p.m. -- _slowly_"
    assert slug(prompt) == "a-cat-s-walk-at-5-p-m-slowly"
    assert slug("../../etc/passwd") == "etc-passwd"
    assert slug("") == slug("?!") == slug("\udce9\x00") == "video"
    assert slug("猫が歩く") == "猫が歩く"
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    assert slug(" ".join(words)) == "-".join(words[:8])
    assert slug("x" * 99) == "x" * 40


@given(st.text())
def test_a_slug_is_a_safe_part_of_a_name(prompt: str) -> None:
    text = slug(prompt)
    assert text and len(text) <= 40 and len(os.fsencode(text)) <= 160
    assert all(character.isalnum() or character == "-" for character in text)
    assert text[0] != "-" != text[-1]


def checked(path: Path, overwrite: bool = False, count: int = 1) -> list[Path]:
    """The paths of videos, checked as before the first step."""
    videos = video_paths(path, count)
    check_folder(path.parent)
    check_free(videos, overwrite)
    return videos


def test_output_names(tmp_path: Path) -> None:
    path = tmp_path / "my.clip.mp4"
    assert checked(path) == [path]
    assert [p.name for p in checked(path, count=3)] == [
        "my.clip-0.mp4",
        "my.clip-1.mp4",
        "my.clip-2.mp4",
    ]
    assert checked(tmp_path / "A.MP4") == [tmp_path / "A.MP4"]
    assert list(tmp_path.iterdir()) == []


def test_output_refusals(tmp_path: Path) -> None:
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").write_bytes(b"")
    for name in ("old.mp4", "old-1.gif", "new.npy.json"):
        (tmp_path / name).write_bytes(b"old")

    (tmp_path / "link.mp4").symlink_to("nowhere")
    (tmp_path / "old.frames").write_bytes(b"")

    def refused(code: ErrorCode, name: str, overwrite: bool = False, count: int = 1, **parts: str) -> None:
        with refuses(code, **parts):
            checked(tmp_path / name, overwrite, count)

    refused("unsupported", "a.avi", expected=", ".join(SUFFIXES), found="'.avi'")
    refused("unsupported", "mp4", expected=", ".join(SUFFIXES), found="''")
    for name in ("missing/a.mp4", "file/a.mp4"):
        refused("missing_file", name, what=f"{(tmp_path / name).parent} ", remedy="mkdir -p")
    for name in ("old.mp4", "link.mp4"):
        refused("exists", name, what=name, remedy="--overwrite")
    refused("exists", "old.gif", count=2, what="old-1.gif ")
    refused("exists", "new.npy", what="new.npy.json ")
    refused("exists", "old.frames", overwrite=True, what="old.frames ", remedy="--output")
    refused("wrong_kind", "folder.mp4", overwrite=True, what="folder.mp4 ", remedy="--output")
    assert checked(tmp_path / "old.mp4", overwrite=True) == [tmp_path / "old.mp4"]
    assert checked(tmp_path / "new.npy", overwrite=True) == [tmp_path / "new.npy"]


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, who may write anywhere: answer for the system.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with refuses("unwritable", what=tmp_path, remedy="--output"):
        checked(tmp_path / "a.mp4")


@pytest.mark.slow
def test_names_are_checked_without_what_writes_them() -> None:
    code = "import sys, wancli.jobs.worklist, wanrun.media.write_video; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"PIL", "imageio_ffmpeg", "tokenizers", "ftfy", "jax"} & set(loaded.split())


def test_a_file_of_timings_that_cannot_be_written(tmp_path: Path) -> None:
    write_timings(Timings(), None)
    with refuses("unwritable", found=os.strerror(errno.ENOENT), remedy="--timing-json"):
        write_timings(Timings(), tmp_path / "missing" / "t.json")


# What is there already.


FRAMES = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
METADATA = {"prompt": "a fox", "seed": 7, "guidance_scale": 5.0, "wanrun": "1.0", "boundary": None}


def write(path: Path, **changes: Any) -> Path:
    write_video(FRAMES, path, 8, {**METADATA, "video": 0, **changes})
    return path


def differs(*videos: Path, **changes: Any) -> UsageError:
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


LORA = {"name": "style", "strengths": {"transformer": 0.5}, "sha256": "0f" * 32}


@pytest.mark.parametrize(
    ("there", "changes", "expected", "found"),
    [
        ({}, {"seed": 8}, "seed 8", "7"),
        ({}, {"prompt": "a cat"}, 'prompt "a cat"', '"a fox"'),
        ({}, {"size": "96x64"}, 'size "96x64"', "none"),
        ({}, {"prompt": "x" * 99}, 'prompt "' + "x" * 59 + "...", ""),
        ({"latents": "noise.npy"}, {}, "latents none", '"noise.npy"'),
        ({"lora": [LORA]}, {}, "lora none", ""),
        ({"lora": [LORA]}, {"lora": [LORA | {"strengths": {"transformer": 1.0}}]}, "1.0}", "0.5}"),
        ({"lora": [LORA]}, {"lora": [LORA | {"sha256": "1f" * 32}]}, "lora", ""),
    ],
)
def test_another_video_is_refused_by_what_differs(
    tmp_path: Path, there: dict[str, Any], changes: dict[str, Any], expected: str, found: str
) -> None:
    path = write(tmp_path / "a.png", **there)
    error = differs(path, **changes)
    check_refusal(error, "exists", what=path, expected=expected, found=found, remedy="--overwrite")
    assert missing_videos([path], {**METADATA, **there}) == ()
    check_refusal(differs(tmp_path / "none.png", path, **there), "exists", expected="video 1", found=0)


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, FRAMES)
    check_refusal(differs(path), "exists", what=path, expected=None, remedy="--overwrite")
    (tmp_path / "b.gif").write_bytes(b"no video")
    check_refusal(differs(tmp_path / "b.gif"), "exists", what="b.gif")
    (tmp_path / "c.png").mkdir()
    check_refusal(differs(tmp_path / "c.png"), "wrong_kind", what="c.png")


def test_a_sidecar_of_a_killed_run_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    sidecar = metadata_sidecar(path)
    sidecar.write_text(json.dumps({**METADATA, "video": 0}))
    assert missing_videos([path], METADATA) == (0,)
    for text in (json.dumps({**METADATA, "video": 0, "seed": 8}), "[]", "no json", "[" * 100_000):
        sidecar.write_text(text)
        check_refusal(differs(path), "exists", what=f"{sidecar} ")
