"""Images and videos that a task does not take, or that cannot be used: one clear line before any weight."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.damage import Refused
from helpers.fake_pipeline import Fake, Run, run_here, write_lines
from helpers.media_files import frames, image, make_task
from helpers.refusals import check_json, json_error
from wanrun.media import prepare

pytestmark = pytest.mark.usefixtures("no_weights_are_read")

Check = Callable[..., None]


@pytest.fixture
def check(refused: Refused, artifact: Path, tmp_path: Path) -> Check:
    """Runs wanrun with each of the options, which have to be refused with these words, all else untouched."""

    def call(task: str, *cases: tuple[list[object], list[str]], code: int = 2, **shape: Any) -> None:
        make_task(artifact, task, **shape)
        before = contents(tmp_path)
        for options, words in cases:
            line = refused(artifact, *options, code=code)
            assert all(word in line for word in words), (options, line)
        assert contents(tmp_path) == before

    return call


def contents(folder: Path) -> dict[Path, bytes | None]:
    """What is in a folder, but for the one of outputs, which has to be empty."""
    found = (path for path in folder.rglob("*") if path != folder / "output")
    return {path: path.read_bytes() if path.is_file() else None for path in found}


# What a task takes, from the manifest: nothing is read to know it.


def test_a_task_without_media(check: Check, tmp_path: Path) -> None:
    missing = tmp_path / "missing.png"  # would be another error, if it were looked for
    check(
        "t2v",
        (["--image", missing], ["--image cannot be used with wan2.1-t2v", "a prompt alone"]),
        (["--video", missing], ["--video cannot be used with wan2.1-t2v"]),
        (["--reference-image", missing], ["--reference-image cannot be used with wan2.1-t2v"]),
        (["--mode", "replace"], ["--mode cannot be used with wan2.1-t2v"]),
        (["--conditioning-scale", 1], ["--conditioning-scale has no effect: this is no VACE model"]),
        (["--segment-overlap", 1], ["--segment-overlap has no effect: this is no Animate model"]),
    )


@pytest.mark.slow
def test_media_that_are_missing_or_not_taken(check: Check, tmp_path: Path) -> None:
    missing = tmp_path / "missing.png"
    both = ["--image", missing, "--last-image", missing]
    check(
        "i2v",
        ([], ["--image is missing: wan2.2-i2v needs it"]),
        (["--last-image", missing], ["--image is missing: wan2.2-i2v needs it"]),
        (["--image", missing, "--video", missing], ["--video cannot be used with wan2.2-i2v"]),
        (["--image", missing, "--reference-image", missing], ["--reference-image cannot be used"]),
        (["--image", missing, "--mode", "animate"], ["--mode cannot be used with wan2.2-i2v"]),
        (["--image", missing, "--conditioning-scale", 0.5], ["--conditioning-scale has no effect"]),
        (["--image", missing, "--segment-overlap", 5], ["--segment-overlap has no effect"]),
    )
    check("i2v21", (both, ["--last-image cannot be used with wan2.1-i2v", "expected --image;"]))
    check(
        "flf2v",
        ([], ["--image is missing: wan2.1-flf2v needs it", "--last-image is missing"]),
        (["--image", missing], ["--last-image is missing: wan2.1-flf2v needs it"]),
    )
    check("ti2v", (both, ["--last-image cannot be used with wan2.2-ti2v"]))
    check(
        "vace",
        (["--mask", missing], ["--mask has no effect without --video"]),
        (["--image", missing], ["--image cannot be used with wan2.1-vace"]),
        (["--mode", "replace"], ["--mode cannot be used with wan2.1-vace"]),
        (["--segment-overlap", 1], ["--segment-overlap has no effect"]),
        (["--conditioning-scale", "nan"], ["--conditioning-scale is out of range", "a number; found nan"]),
        (["--conditioning-scale", "-inf"], ["--conditioning-scale is out of range", "found -inf"]),
        (["--conditioning-scale", "x"], ["--conditioning-scale", "'x'"]),
    )
    animate = ["--image", missing, "--pose-video", missing, "--face-video", missing]
    background = ["--background-video", missing]
    check(
        "animate",
        ([], ["--image is missing", "--pose-video is missing", "--face-video is missing"]),
        (animate[:4], ["error: --face-video is missing: wan2.2-animate needs it"]),
        ([*animate, "--mode", "replace"], ["--background-video is missing", "--mask-video is missing"]),
        ([*animate, "--mode", "replace", *background], ["error: --mask-video is missing"]),
        ([*animate, *background], ["--background-video only has an effect with --mode replace"]),
        ([*animate, "--mode", "swap"], ["--mode", "'animate', 'replace'"]),
        ([*animate, "--conditioning-scale", 1], ["--conditioning-scale has no effect"]),
        ([*animate, "--segment-overlap", 3], ["--segment-overlap is out of range", "1 or 5; found 3"]),
        ([*animate, "--segment-overlap", "x"], ["--segment-overlap", "'x'"]),
    )


def test_the_number_of_reference_images_chooses_the_profile(check: Check, tmp_path: Path) -> None:
    one = ["--reference-image", tmp_path / "missing.png"]
    built = "expected one of 96x64x9-b1-cfg, 96x64x9-b1-cfg-r2; choose"
    add = "add one with wanbuild compile --size 96x64 --frames 9 --guidance --reference-images"
    check(
        "vace",
        (one, ["no profile is built for any size", "guidance on, 1 reference image(s); ", built, f"{add} 1"]),
        (one * 3, ["guidance on, 3 reference image(s); ", built, f"{add} 3"]),
        code=3,
        references=(0, 2),
    )
    none = ["guidance on, 0 reference image(s); expected one of 96x64x9-b1-cfg-r2;"]
    check("vace", ([], none), code=3, references=(2,))
    check("vace", (one * 2, ["missing.png cannot be read"]), references=(0, 2))
    # What the task does not take is wrong with every profile.
    mask = [*one, "--mask", tmp_path / "missing.png"]
    check("vace", (mask, ["--mask has no effect without --video"]), references=(0, 2))


# What is read.


@pytest.mark.slow
def test_images_that_cannot_be_used(check: Check, tmp_path: Path) -> None:
    good, whole = image(tmp_path / "good.png"), (tmp_path / "good.png").read_bytes()
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no image at all")
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "folder.png").mkdir()
    cases: list[tuple[list[object], list[str]]] = [
        (["--image", tmp_path / name], [f"--image {tmp_path / name} ", *words])
        for name, *words in (
            ("missing.png", "cannot be read", "no such file"),
            ("empty.png", "cannot be read", "an empty file"),
            ("text.png", "is not an image"),
            ("cut.png", "is damaged"),
            ("folder.png", "expected an image; found a folder"),
        )
    ]
    cases.append((["--image", ""], ['--image is no file name; found ""']))
    check("i2v", *cases)
    both: list[object] = ["--image", good, "--last-image", tmp_path / "cut.png"]
    check("flf2v", (both, [f"--last-image {tmp_path / 'cut.png'} is damaged"]))
    check("ti2v", (["--image", tmp_path / "empty.png"], ["an empty file"]))
    references = ["--reference-image", good, "--reference-image", tmp_path / "text.png"]
    check("vace", (references, [f"--reference-image {tmp_path / 'text.png'} is not an"]), references=(2,))


@pytest.mark.thorough
def test_videos_that_cannot_be_used(check: Check, tmp_path: Path) -> None:
    good, short = frames(tmp_path / "good", 9), frames(tmp_path / "short", 5)
    long, one = frames(tmp_path / "long", 10), frames(tmp_path / "one", 1)
    tall = frames(tmp_path / "tall", 9, width=48)
    (tmp_path / "empty").touch()
    (tmp_path / "nothing").mkdir()
    check(
        "vace",
        (["--video", short], [f"--video {short} does not fit the profile; expected 9 frames; found 5"]),
        (["--video", long], ["expected 9 frames; found more than 9"]),
        (["--video", good, "--mask", short], [f"--mask {short} does not fit", "9 frames; found 5"]),
        (["--video", tall], [f"--video {tall} do", "96x64", "found 48x64"]),
        (["--video", tmp_path / "empty"], ["cannot be read", "an empty file"]),
        (["--video", tmp_path / "nothing"], ["has no frames"]),
    )
    character = ["--image", image(tmp_path / "i.png")]
    check(
        "animate",
        ([*character, "--pose-video", one, "--face-video", good], [f"--pose-video {one} is too short"]),
        ([*character, "--pose-video", good, "--face-video", one], [f"--face-video {one} is too short"]),
        (
            [*character, "--pose-video", good, "--face-video", good, "--segment-overlap", 5],
            ["windows of 9 frames are too short to share 5"],
        ),
    )


def test_latents_of_a_segment_and_of_references(check: Check, tmp_path: Path) -> None:
    """They count what stands in front of the video: refused with the shape that is right."""
    path, video = tmp_path / "z.npy", frames(tmp_path / "video", 9)
    np.save(path, np.random.default_rng(0).standard_normal((1, 16, 3, 8, 12), np.float32))
    media = ["--image", image(tmp_path / "i.png"), "--pose-video", video, "--face-video", video]
    words = "the initial latents do not fit the profile; expected float32 (1, 16, {}, 8, 12); found float32"
    check("animate", ([*media, "--latents", path], [words.format(4)]))
    two = ["--reference-image", tmp_path / "i.png"] * 2
    check("vace", ([*two, "--latents", path], [words.format(5)]), references=(2,))


def test_what_costs_nothing_is_checked_before_anything_is_decoded(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "load_media", None)
    (tmp_path / "there.npy").touch()
    media = ["--image", image(tmp_path / "i.png")]
    missing, there = tmp_path / "missing", tmp_path / "there.npy"
    check(
        "i2v",
        ([*media, "--output", tmp_path / "o.avi"], ["has no known video format"]),
        ([*media, "--output", missing / "o.gif"], ["the output folder", "is not there"]),
        ([*media, "--output", there], ["there.npy exists"]),
        ([*media, "--save-latents", there], ["--save-latents", "there.npy exists"]),
        ([*media, "--timing-json", missing / "t.json"], ["--timing-json", "cannot be written"]),
        ([*media, "--fps", 0], ["--fps is out of range"]),
    )


def test_an_output_must_not_be_what_is_read(check: Check, tmp_path: Path) -> None:
    source, video = image(tmp_path / "a.png"), frames(tmp_path / "video", 9)
    (tmp_path / "link.png").symlink_to(source)
    read = f"the output {source} is also that of --image, which is read"
    check(
        "i2v",
        (["--image", source, "--output", source, "--overwrite"], [read]),
        (["--image", source, "--output", tmp_path / "link.png", "--overwrite"], ["is also that of --image"]),
        (["--image", tmp_path / "link.png", "--output", source, "--overwrite"], [read]),
        (["--image", source, "--save-latents", source, "--overwrite"], [read]),
        (["--image", source, "--timing-json", source], [read]),
    )
    check(
        "vace",
        (
            ["--video", video, "--output", video / "new.png"],
            [f"the output {video / 'new.png'} lies inside the folder of --video, which is read"],
        ),
        (["--video", video, "--output", video / "0.png", "--overwrite"], ["lies inside the folder of"]),
        (["--reference-image", source, "--output", source], ["is also that of --reference-image"]),
        references=(0, 1),
    )


# Lines of a prompts file.


Call = Callable[..., Run]


@pytest.fixture
def wan(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs wanrun here with a prompts file of these lines."""

    def call(lines: list[dict[str, Any]], *arguments: object) -> Run:
        texts = [{"prompt": "a fox", **{key: _plain(value) for key, value in line.items()}} for line in lines]
        file = write_lines(tmp_path / "p.jsonl", *texts)
        arguments = ("--prompts", file, "--output", tmp_path / "o.gif", *arguments, "--json-errors")
        return run_here(capsys, artifact, *arguments)

    return call


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _lines(lines: list[str], file: Path) -> dict[int, dict[str, Any]]:
    """The error of each line."""
    errors = map(json_error, lines)
    return {int(error["message"].removeprefix(f"{file}:").partition(":")[0]): error for error in errors}


def test_lines_with_wrong_media(wan: Call, fake: Fake, artifact: Path, tmp_path: Path) -> None:
    make_task(artifact, "i2v")
    good = image(tmp_path / "good.png")
    (tmp_path / "empty.png").touch()
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, "missing_parameter", ": image "),
        ({"image": tmp_path / "missing.png"}, "missing_file", f": image {tmp_path / 'missing.png'} "),
        ({"image": tmp_path / "empty.png"}, "unreadable", f": image {tmp_path / 'empty.png'} "),
        ({"image": tmp_path / "empty.png", "seed": 1}, "unreadable", f": image {tmp_path / 'empty.png'} "),
        ({"image": ""}, "invalid_value", ": image "),
        ({"image": 3}, "wrong_type", ": image "),
        ({"image": good, "video": good}, "unsupported", ": video "),
        ({"image": good, "mode": "replace"}, "unsupported", ": mode "),
        ({"image": good, "conditioning_scale": 2}, "no_effect", ": conditioning_scale "),
        ({"image": good, "segment_overlap": 1}, "no_effect", ": segment_overlap "),
        ({"image": good, "output": good}, "exists", f" {tmp_path}/p.jsonl:1 (image)"),
    ]
    right = {"image": good, "output": tmp_path / "g-{index}.png"}
    mixed = [line for case, _, _ in cases for line in (right, case)]
    before = good.read_bytes()
    done = wan(mixed, "--overwrite")
    assert done.code == 2 and re.findall(r"\d+", done.out[-1]) == [str(len(cases)), "0", str(len(cases))]
    found = _lines(done.err, tmp_path / "p.jsonl")
    assert sorted(found) == list(range(2, 2 * len(cases) + 1, 2))
    for (line, code, words), error in zip(cases, found.values(), strict=True):
        assert error["code"] == code and words in error["message"], (line, error)
    assert good.read_bytes() == before
    assert len(list(tmp_path.glob("g-*.png"))) == len(cases) and len(fake.loads) == 1


def test_an_output_must_not_be_what_a_later_line_reads(
    wan: Call, fake: Fake, artifact: Path, tmp_path: Path
) -> None:
    make_task(artifact, "i2v")
    one, two = image(tmp_path / "1.png", 1), image(tmp_path / "2.png", 2)
    done = wan([{"image": one, "output": two}, {"image": two}], "--overwrite")
    assert re.findall(r"\d+", done.out[-1]) == ["1", "0", "1"]  # made, skipped and failed
    file = tmp_path / "p.jsonl"
    (line,) = done.err
    check_json(line, "exists", message=(f"{file}:1: ", f" {two} ", f" {file}:2 (image)"), remedy="another")


@pytest.mark.slow
def test_what_all_lines_have_is_said_once(wan: Call, fake: Fake, artifact: Path, tmp_path: Path) -> None:
    make_task(artifact, "i2v")
    (tmp_path / "empty.png").touch()
    empty = ["--image", tmp_path / "empty.png"]
    for arguments, code in (([], "missing_parameter"), (empty, "unreadable")):
        done = wan([{}, {"seed": 1}, {"prompt": "b"}], *arguments)
        assert done.code == 2 and len(done.err) == 1 and done.out == []
        assert check_json(done.err[0], code)["message"].startswith("--image ")
        # Where one line has its own, it is what is wrong with the others.
        done = wan([{}, {"seed": 1}, {"image": image(tmp_path / "good.png")}], *arguments)
        assert len(done.err) == 2 and re.findall(r"\d+", done.out[-1]) == ["1", "0", "2"]
        assert sorted(_lines(done.err, tmp_path / "p.jsonl")) == [1, 2]
        (tmp_path / "o-3.gif").unlink()
    # Of lines that cannot be read nothing is known, and of media there is nothing to say.
    done = wan([{"seed": "x"}])
    (line,) = done.err
    check_json(line, "wrong_type", message=f"{tmp_path / 'p.jsonl'}:1: seed ", found='"x"')


@pytest.mark.thorough
def test_lines_with_another_number_of_reference_images(
    wan: Call, fake: Fake, artifact: Path, tmp_path: Path
) -> None:
    make_task(artifact, "vace", references=(0, 1, 2))
    paths = [str(image(tmp_path / f"{index}.png", index)) for index in range(3)]
    lines: list[dict[str, Any]] = [
        {},
        {"reference_image": paths[:2]},
        {"reference_image": paths},
        {"reference_image": paths[0]},
        {"reference_image": paths[1:]},
    ]
    # Each line has the profile of its own number; three images have none.
    for order, options, numbers in (
        (lines, [], [0, 2, 1, 2]),
        (lines[::-1], ["--reference-image", paths[0]], [2, 1, 2, 1]),
    ):
        fake.generations.clear()
        done = wan(order, *options, "--overwrite")
        assert _lines(done.err, tmp_path / "p.jsonl").keys() == {3}
        check_json(done.err[0], "not_built", message="3 reference image(s)")
        shapes = [made["inputs"].arrays.get("references", np.empty(0)).shape for made in fake.generations]
        assert [shape[0] for shape in shapes] == numbers
        assert fake.loads[-1]["profile"].endswith(f"-r{numbers[0]}") == (numbers[0] > 0)
    done = wan([{}, {"reference_image": []}], "--overwrite")
    assert done.code == 0 and "-r" not in fake.loads[-1]["profile"]
