"""Options for two experts and for the form of the loop: checked before the work, passed on, recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fake_pipeline import Fake, Run, make_two_experts, run_here, write_lines
from helpers.manifests import with_profiles
from helpers.refusals import check_json
from wanrun.artifact.manifest import read_manifest
from wanrun.media.write_video import read_metadata

Call = Callable[..., Run]


@pytest.fixture
def two(artifact: Path, fake: Fake, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs wanrun here, with errors as JSON, on an artifact of two experts and both forms of the loop."""
    make_two_experts(artifact)
    return lambda *arguments: run_here(capsys, artifact, *arguments, "--json-errors")


def test_bad_options_of_two_experts(
    two: Call, fake: Fake, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    off = ["--guidance-scale", 1, "--guidance-scale-2", 1.5]
    cases: list[tuple[list[object], str, dict[str, object]]] = [
        *(
            ([option, value], "out_of_range", {"options": option, "found": value, "expected": expected})
            for option, value, expected in (
                ("--boundary", -0.1, "0 to 1"),
                ("--guidance-scale-2", "inf", "number"),
            )
        ),
        (off, "no_effect", {"options": ("'--guidance-scale-2'", "'--guidance-scale'"), "found": 1.5}),
        (
            ["--loop", "scan", "--steps", 61],
            "out_of_range",
            {"expected": 60, "found": 61, "remedy": ("--loop step", "wanbuild compile")},
        ),
    ]
    for source in (["--prompt", "a fox"], ["--prompts", write_lines(tmp_path / "p.txt", "one", "two")]):
        for options, error, parts in cases:
            done = two(*source, *options, "--output", tmp_path / "o.gif")
            (line,) = done.err
            assert check_json(line, error, **parts)["exit_code"] == done.code == 2

    # A profile without guidance is not even needed to say that the scale has no effect.
    manifest = read_manifest(artifact)
    with_profiles(manifest, [p for p in manifest.profiles.values() if p.guidance]).write(artifact)
    assert two("--prompt", "a", *off, "--output", tmp_path / "o.gif").code == 2

    make_two_experts(artifact, loop="step")
    for source in (["--prompt", "a"], ["--prompts", tmp_path / "p.txt"]):
        done = two(*source, "--loop", "scan", "--output", tmp_path / "o.gif")
        (line,) = done.err
        error = check_json(line, "not_built", options="--loop", found="step", remedy="wanbuild compile")
        assert done.code == 3 and error["message"].startswith("profile 96x64x9")
    make_two_experts(artifact, loop="scan", max_steps=9)
    done = two("--prompt", "a", "--steps", 10, "--output", tmp_path / "o.gif")
    assert done.code == 2
    check_json(done.err[0], "out_of_range", expected=9, found=10, remedy="wanbuild compile")
    assert fake.loads == [] and list(tmp_path.glob("*.gif")) == []


def test_one_transformer(
    fake: Fake, toy_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``test_bad_request`` has what is given on the command line."""
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "a", "boundary": 0.5}, {"prompt": "b"})
    output = tmp_path / "o.gif"
    done = run_here(capsys, toy_artifact, "--prompts", file, "--output", output, "--json-errors")
    assert done.code == 2 and done.counts == (1, 0, 1)
    assert check_json(done.err[0], "no_effect", message=f"{file}:1: ")["options"] == ["boundary"]
    (made,), (load,) = fake.generations, fake.loads
    assert made["loop"] == load["loop"] == "step" and load["first_expert"] == "transformer"
    assert not {"guidance_scale_2", "boundary"} & made.keys()
    metadata = read_metadata(tmp_path / "o-2.gif")
    assert metadata["loop"] == "step" and not {"guidance_scale_2", "boundary"} & metadata.keys()


@pytest.mark.slow
def test_the_artifact_s_defaults_and_what_is_given(two: Call, fake: Fake, tmp_path: Path) -> None:
    names = ("guidance_scale", "guidance_scale_2", "boundary", "loop")
    expected: list[tuple[list[object], tuple[object, ...]]] = [
        ([], (4.0, 3.0, 0.875, "step")),
        (["--guidance-scale", 6], (6.0, 6.0, 0.875, "step")),
        (["--guidance-scale-2", 2], (4.0, 2.0, 0.875, "step")),
        (["--guidance-scale", 6, "--guidance-scale-2", 0.5, "--boundary", 0], (6.0, 0.5, 0.0, "step")),
        (["--guidance-scale", 1, "--boundary", 1, "--loop", "scan"], (1.0, 1.0, 1.0, "scan")),
    ]
    for number, (options, values) in enumerate(expected):
        path = tmp_path / f"{number}.gif"
        done = two("--prompt", "a fox", *options, "--output", path)
        assert (done.code, done.err) == (0, [])
        assert tuple(fake.generations[-1][name] for name in names) == values
        assert tuple(read_metadata(path)[name] for name in names) == values
        assert fake.loads[-1]["loop"] == values[-1]
        assert fake.loads[-1]["profile"].endswith("-nocfg") == (values[0] == 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expert"),
    [
        ([], "transformer"),
        (["--boundary", 0], "transformer"),
        (["--boundary", 1], "transformer_2"),  # UniPC begins at 999
        (["--boundary", 1, "--solver", "euler"], "transformer"),  # and Euler at 1000
        (["--boundary", 0.95, "--steps", 1, "--flow-shift", 1], "transformer"),
        (
            ["--boundary", 0.995, "--steps", 4, "--flow-shift", 0.1, "--solver", "dpm++"],
            "transformer_2",
        ),  # 990
    ],
)
def test_the_expert_that_comes_first_is_told(
    two: Call, fake: Fake, tmp_path: Path, options: list[object], expert: str
) -> None:
    """Of the first line that is to be made, not of the command line."""
    lines = [{"prompt": "bad", "seed": -2}, {"prompt": "a", "output": str(tmp_path / "first.gif")}]
    lines += [{"prompt": "b", "boundary": 0.0 if expert == "transformer_2" else 1.0}]
    file = write_lines(tmp_path / "p.jsonl", *lines)
    two("--prompts", file, *options, "--output", tmp_path / "o.gif")
    assert [load["first_expert"] for load in fake.loads] == [expert]


@pytest.mark.slow
def test_lines_have_their_own(two: Call, fake: Fake, tmp_path: Path) -> None:
    lines: list[tuple[dict[str, Any], tuple[float, float, float] | dict[str, object]]] = [
        ({}, (4.0, 2.0, 0.5)),
        ({"guidance_scale": 6}, (6.0, 2.0, 0.5)),
        ({"guidance_scale_2": 1, "boundary": 1}, (4.0, 1.0, 1.0)),
        ({"boundary": 1.5}, {"options": "boundary", "found": 1.5}),
        ({"guidance_scale_2": float("-inf")}, {"options": "guidance_scale_2", "found": "-inf"}),
        ({"guidance_scale": 1, "guidance_scale_2": 3}, {"options": "guidance_scale_2", "found": 3.0}),
        ({"loop": "step"}, (4.0, 2.0, 0.5)),
        ({"steps": 61}, {"message": "96x64x9-b1-cfg", "expected": 60, "found": 61, "options": "loop"}),
    ]
    file = write_lines(tmp_path / "p.jsonl", *({"prompt": "a", **line} for line, _ in lines))
    shared = ("--guidance-scale-2", 2, "--boundary", 0.5, "--loop", "scan")
    done = two("--prompts", file, *shared, "--output", tmp_path / "o.gif")
    assert done.code == 2 and done.counts == (4, 0, 4)
    good = [values for _, values in lines if isinstance(values, tuple)]
    names = ("guidance_scale", "guidance_scale_2", "boundary")
    assert [tuple(made[name] for name in names) for made in fake.generations] == good
    assert [made["loop"] for made in fake.generations] == ["scan", "scan", "scan", "step"]
    bad = [(number, parts) for number, (_, parts) in enumerate(lines, 1) if isinstance(parts, dict)]
    for line, (number, parts) in zip(done.err, bad, strict=True):
        error = check_json(line, "no_effect" if number == 6 else "out_of_range", **parts)
        assert error["message"].startswith(f"{file}:{number}: ")
    # Without guidance a line can no more ask for it by its second scale alone.
    done = two("--prompts", file, "--guidance-scale", 1, "--overwrite", "--output", tmp_path / "n.gif")
    assert done.counts == (5, 0, 3)
    (line,) = (line for line in done.err if f"{file}:6: " in line)
    check_json(line, "no_effect", options=("'guidance_scale_2'", "'guidance_scale'"))


def test_a_default_that_is_too_many_steps_is_the_matter_of_its_line(
    two: Call, fake: Fake, artifact: Path, tmp_path: Path
) -> None:
    make_two_experts(artifact, max_steps=20)  # and 50 is what the artifact has by default
    arguments = ("--loop", "scan", "--output", tmp_path / "o.gif", "--prompts")
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "a", "steps": 20}, {"prompt": "b"}, {"prompt": "c"})
    done = two(*arguments, file)
    assert (done.code, done.counts) == (2, (1, 0, 2))
    for number, line in enumerate(done.err, 2):
        check_json(line, "out_of_range", message=f"{file}:{number}: ", expected=20, found=50, options="loop")
    # Where it is everybody's it is said once.
    done = two(*arguments, write_lines(tmp_path / "q.txt", "a", "b", "c"))
    (line,) = done.err
    error = check_json(line, "out_of_range", expected=20, found=50, options="--loop")
    assert done.code == 2 and "q.txt" not in error["message"]
    assert len(fake.loads) == 1


@pytest.mark.slow
def test_whatever_differs_is_noticed(two: Call, tmp_path: Path) -> None:
    arguments = ("--prompts", write_lines(tmp_path / "p.txt", "one"), "--output", tmp_path / "o.gif")
    assert two(*arguments).code == 0
    assert two(*arguments).counts == (0, 1, 0)
    for option, value, expected, found in (
        ("--guidance-scale-2", 2.5, "guidance_scale_2 2.5", "3.0"),
        ("--boundary", 0.5, "boundary 0.5", "0.875"),
        ("--loop", "scan", 'loop "scan"', '"step"'),
    ):
        (line,) = two(*arguments, option, value).err
        check_json(line, "exists", message="o.gif", expected=expected, found=found)


def test_what_load_reports_is_a_line_on_stderr(two: Call, fake: Fake, tmp_path: Path) -> None:
    fake.happens["one"] = lambda: fake.loads[0]["report"]("both experts fit")
    done = two("--prompt", "one", "--output", tmp_path / "o.gif")
    assert (done.code, done.err) == (0, ["both experts fit"])
    assert len(done.out) == 1


@pytest.mark.slow
def test_both_forms_of_the_loop_as_a_user_runs_them(
    toy_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latents, seconds, printed = [], [], []
    for loop in ("step", "scan"):
        files = [tmp_path / f"{loop}{suffix}" for suffix in (".npy", ".z.npy", ".json")]
        arguments = ("--prompt", "a fox", "--steps", 5, "--seed", 3, "--loop", loop, "--timing")
        names = ("--output", files[0], "--save-latents", files[1], "--timing-json", files[2])
        done = run_here(capsys, toy_artifact, *arguments, *names)
        assert (done.code, done.err) == (0, [])
        assert read_metadata(files[0])["loop"] == loop
        latents.append(np.load(files[1]))
        seconds.append(json.loads(files[2].read_text()))
        printed.append("\n".join(done.out))
    # The same operations in float32, which the compiler may fuse otherwise: roundings of values near 1.
    assert np.abs(latents[0] - latents[1]).max() <= 1e-5
    assert [timing["loop"] for timing in seconds] == ["step", "scan"]
    assert [len(timing["step_seconds"]) for timing in seconds] == [5, 5]
    assert len(set(seconds[1]["step_seconds"])) == 1 < len(set(seconds[0]["step_seconds"]))
    assert [timing["cache_misses"] for timing in seconds] == [0, 0]
    assert ["mean step" in text for text in printed] == [False, True]
