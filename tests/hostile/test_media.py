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
from hostile.refusal import check_named, everything
from wanrun.media import prepare

pytestmark = pytest.mark.usefixtures("no_weights_are_read")

Check = Callable[..., None]


@pytest.fixture
def check(refused: Refused, artifact: Path, tmp_path: Path) -> Check:
    """Runs wanrun with the options of each row, which have to be refused by its code, all else untouched.

    The first of the values begins the sentence if it is an option: nothing else is wrong.
    """

    def call(
        task: str, *rows: tuple[list[object], str, *tuple[object, ...]], code: int = 2, **shape: Any
    ) -> None:
        make_task(artifact, task, **shape)
        (tmp_path / "output").mkdir(exist_ok=True)
        before = everything(tmp_path)
        for given, told, *values in rows:
            error = json_error(refused(artifact, *given, "--json-errors", code=code))
            check_named(error, told, values)
            if told != "invalid_value" and str(values[0]).startswith("--"):
                assert error["message"].startswith(f"{values[0]} "), error
        assert everything(tmp_path) == before

    return call


# What a task takes, from the manifest: nothing is read to know it.


def test_a_task_without_media(check: Check, tmp_path: Path) -> None:
    missing = tmp_path / "missing.png"  # would be another error, if it were looked for
    check(
        "t2v",
        *(
            ([option, value], "unsupported", option, "wan2.1-t2v")
            for option, value in (
                *(("--image", missing), ("--video", missing), ("--reference-image", missing)),
                ("--mode", "replace"),
            )
        ),
        (["--conditioning-scale", 1], "no_effect", "--conditioning-scale", "VACE"),
        (["--segment-overlap", 1], "no_effect", "--segment-overlap", "Animate"),
    )


@pytest.mark.slow
def test_media_that_are_missing_or_not_taken(check: Check, tmp_path: Path) -> None:
    missing = tmp_path / "missing.png"
    one: list[object] = ["--image", missing]
    both = [*one, "--last-image", missing]
    check(
        "i2v",
        ([], "missing_parameter", "--image", "wan2.2-i2v"),
        (["--last-image", missing], "missing_parameter", "--image", "wan2.2-i2v"),
        ([*one, "--video", missing], "unsupported", "--video", "wan2.2-i2v"),
        ([*one, "--reference-image", missing], "unsupported", "--reference-image"),
        ([*one, "--mode", "animate"], "unsupported", "--mode", "wan2.2-i2v"),
        ([*one, "--conditioning-scale", 0.5], "no_effect", "--conditioning-scale"),
        ([*one, "--segment-overlap", 5], "no_effect", "--segment-overlap"),
    )
    check("i2v21", (both, "unsupported", "--last-image", "wan2.1-i2v", "expected --image;"))
    check(
        "flf2v",
        ([], "missing_parameter", "--image", "wan2.1-flf2v", "--last-image"),
        (one, "missing_parameter", "--last-image", "wan2.1-flf2v"),
    )
    check("ti2v", (both, "unsupported", "--last-image", "wan2.2-ti2v"))
    check(
        "vace",
        (["--mask", missing], "no_effect", "--mask", "--video"),
        (one, "unsupported", "--image", "wan2.1-vace"),
        (["--mode", "replace"], "unsupported", "--mode", "wan2.1-vace"),
        (["--segment-overlap", 1], "no_effect", "--segment-overlap"),
        (["--conditioning-scale", "nan"], "out_of_range", "--conditioning-scale", "nan"),
        (["--conditioning-scale", "-inf"], "out_of_range", "--conditioning-scale", "-inf"),
        (["--conditioning-scale", "x"], "invalid_value", "--conditioning-scale", "'x'"),
    )
    animate = [*one, "--pose-video", missing, "--face-video", missing]
    background = ["--background-video", missing]
    check(
        "animate",
        ([], "missing_parameter", "--image", "--pose-video", "--face-video"),
        (animate[:4], "missing_parameter", "--face-video", "wan2.2-animate"),
        ([*animate, "--mode", "replace"], "missing_parameter", "--background-video", "--mask-video"),
        ([*animate, "--mode", "replace", *background], "missing_parameter", "--mask-video"),
        ([*animate, *background], "no_effect", "--background-video", "--mode replace"),
        ([*animate, "--mode", "swap"], "invalid_value", "--mode", "'animate', 'replace'"),
        ([*animate, "--conditioning-scale", 1], "no_effect", "--conditioning-scale"),
        ([*animate, "--segment-overlap", 3], "out_of_range", "--segment-overlap", "1 or 5", 3),
        ([*animate, "--segment-overlap", "x"], "invalid_value", "--segment-overlap", "'x'"),
    )


def test_the_number_of_reference_images_chooses_the_profile(check: Check, tmp_path: Path) -> None:
    one: list[object] = ["--reference-image", tmp_path / "missing.png"]
    built = "96x64x9-b1-cfg, 96x64x9-b1-cfg-r2;"
    add = "wanbuild compile --size 96x64 --frames 9 --guidance --reference-images"
    check(
        "vace",
        *((one * count, "not_built", f"{count} reference", built, f"{add} {count}") for count in (1, 3)),
        code=3,
        references=(0, 2),
    )
    check("vace", ([], "not_built", "0 reference", "96x64x9-b1-cfg-r2;"), code=3, references=(2,))
    check("vace", (one * 2, "missing_file", "--reference-image", "missing.png"), references=(0, 2))
    # What the task does not take is wrong with every profile.
    mask = [*one, "--mask", tmp_path / "missing.png"]
    check("vace", (mask, "no_effect", "--mask", "--video"), references=(0, 2))


# What is read.


@pytest.mark.slow
def test_images_that_cannot_be_used(check: Check, tmp_path: Path) -> None:
    good, whole = image(tmp_path / "good.png"), (tmp_path / "good.png").read_bytes()
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no image at all")
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "folder.png").mkdir()
    codes = {"missing": "missing_file", "empty": "unreadable", "cut": "damaged"}
    files = {name: tmp_path / f"{name}.png" for name in ("missing", "empty", "text", "cut", "folder")}
    check(
        "i2v",
        *(
            (["--image", file], codes.get(name, "wrong_kind"), "--image", file)
            for name, file in files.items()
        ),
        (["--image", ""], "invalid_value", "--image", '""'),
    )
    last = ["--image", good, "--last-image", files["cut"]]
    check("flf2v", (last, "damaged", "--last-image", files["cut"]))
    check("ti2v", (["--image", files["empty"]], "unreadable", "--image"))
    two = ["--reference-image", good, "--reference-image", files["text"]]
    check("vace", (two, "wrong_kind", "--reference-image", files["text"]), references=(2,))


@pytest.mark.thorough
def test_videos_that_cannot_be_used(check: Check, tmp_path: Path) -> None:
    good, short = frames(tmp_path / "good", 9), frames(tmp_path / "short", 5)
    long, one = frames(tmp_path / "long", 10), frames(tmp_path / "one", 1)
    tall = frames(tmp_path / "tall", 9, width=48)
    (tmp_path / "empty").touch()
    (tmp_path / "nothing").mkdir()
    check(
        "vace",
        (["--video", short], "mismatch", "--video", short, "9 frames", 5),
        (["--video", long], "mismatch", "--video", "9 frames", "more than 9"),
        (["--video", good, "--mask", short], "mismatch", "--mask", short, "9 frames", 5),
        (["--video", tall], "mismatch", tall, "96x64", "48x64"),
        (["--video", tmp_path / "empty"], "unreadable", "--video", "an empty file"),
        (["--video", tmp_path / "nothing"], "damaged", "--video", tmp_path / "nothing"),
    )
    pose: list[object] = ["--image", image(tmp_path / "i.png"), "--pose-video"]
    check(
        "animate",
        ([*pose, one, "--face-video", good], "out_of_range", "--pose-video", one),
        ([*pose, good, "--face-video", one], "out_of_range", "--face-video", one),
        ([*pose, good, "--face-video", good, "--segment-overlap", 5], "out_of_range", "9 frames", 5, 10),
    )


def test_latents_of_a_segment_and_of_references(check: Check, tmp_path: Path) -> None:
    """They count what stands in front of the video: refused with the shape that is right."""
    path, video = tmp_path / "z.npy", frames(tmp_path / "video", 9)
    np.save(path, np.random.default_rng(0).standard_normal((1, 16, 3, 8, 12), np.float32))
    media = ["--image", image(tmp_path / "i.png"), "--pose-video", video, "--face-video", video]
    found = "(1, 16, 3, 8, 12)"
    check("animate", ([*media, "--latents", path], "mismatch", "float32 (1, 16, 4, 8, 12)", found))
    two: list[object] = ["--reference-image", tmp_path / "i.png"] * 2
    right = "float32 (1, 16, 5, 8, 12)"
    check("vace", ([*two, "--latents", path], "mismatch", right, found), references=(2,))


def test_what_costs_nothing_is_checked_before_anything_is_decoded(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "load_media", None)
    (tmp_path / "there.npy").touch()
    media: list[object] = ["--image", image(tmp_path / "i.png")]
    missing, there = tmp_path / "missing", tmp_path / "there.npy"
    check(
        "i2v",
        ([*media, "--output", tmp_path / "o.avi"], "unsupported", "o.avi", "'.avi'"),
        ([*media, "--output", missing / "o.gif"], "missing_file", missing),
        ([*media, "--output", there], "exists", there),
        ([*media, "--save-latents", there], "exists", "--save-latents", there),
        ([*media, "--timing-json", missing / "t.json"], "unwritable", "--timing-json"),
        ([*media, "--fps", 0], "out_of_range", "--fps"),
    )


def test_an_output_must_not_be_what_is_read(check: Check, tmp_path: Path) -> None:
    source, video = image(tmp_path / "a.png"), frames(tmp_path / "video", 9)
    link = tmp_path / "link.png"
    link.symlink_to(source)
    check(
        "i2v",
        *(
            (["--image", read, *written], "exists", named, "--image")
            for read, named, *written in (
                (source, source, "--output", source, "--overwrite"),
                (source, link, "--output", link, "--overwrite"),
                (link, source, "--output", source, "--overwrite"),
                (source, source, "--save-latents", source, "--overwrite"),
                (source, source, "--timing-json", source),
            )
        ),
    )
    new, old = video / "new.png", video / "0.png"
    check(
        "vace",
        (["--video", video, "--output", new], "exists", new, "--video"),
        (["--video", video, "--output", old, "--overwrite"], "exists", old, "--video"),
        (["--reference-image", source, "--output", source], "exists", source, "--reference-image"),
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
