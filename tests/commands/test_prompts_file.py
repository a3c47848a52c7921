"""Several videos in one process: every good line of a prompts file is made, whatever happens to others."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from helpers.fake_pipeline import SIZE, Fake, Run, run_here, write_lines
from helpers.manifests import with_profiles
from helpers.refusals import check_json
from helpers.terminal import complaints
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import ArtifactError, WanError
from wanrun.generation import load
from wanrun.media.write_video import read_metadata
from wanrun.request import generation

Call = Callable[..., Run]


@pytest.fixture
def wan(toy_artifact: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs wanrun here, with errors as JSON."""

    def call(*arguments: object, artifact: Path = toy_artifact) -> Run:
        return run_here(capsys, artifact, *arguments, "--json-errors")

    return call


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def as_options(line: Mapping[str, object]) -> list[object]:
    """What the command line gives for a line of a prompts file."""
    return [part for name, value in line.items() for part in (f"--{name.replace('_', '-')}", value)]


# The real pipeline.


@pytest.mark.thorough
def test_lines_of_several_profiles(wan: Call, two_experts_artifact: Path, tmp_path: Path) -> None:
    """With guidance and without, in both forms of the loop: read once, and what single runs make."""
    shared = {"steps": 4, "flow_shift": 3, "boundary": 0.8}
    lines: list[dict[str, Any]] = [
        {"prompt": "a red fox", "guidance_scale": 4, "loop": "step", **shared},
        {"prompt": "a wolf", "guidance_scale": 1, "loop": "scan", **shared},
        {"prompt": "a red fox", "guidance_scale": 3, "seed": 5, "loop": "scan", **shared},
    ]
    timing, file = tmp_path / "t.json", write_lines(tmp_path / "p.jsonl", *lines)
    arguments = ("--prompts", file, "--output", tmp_path / "o.npy", "--timing-json", timing)
    done = wan(*arguments, artifact=two_experts_artifact)
    assert (done.code, done.counts) == (0, (3, 0, 0))
    written = json.loads(timing.read_text())
    spans = [name for name, _, _ in written["spans"]]
    parts = ("text_encoder", "transformer", "transformer_2", "vae")
    assert sorted(name for name in spans if "restore" in name) == [f"restore {part}" for part in parts]
    steps = written["step_seconds"]  # of the scan form the mean of each expert's call
    assert len(steps) == 3 * 4 and len(set(steps)) == 4 + 2 + 2
    for index, line in enumerate(lines, 1):
        alone = tmp_path / f"alone-{index}.npy"
        assert wan(*as_options(line), "--output", alone, artifact=two_experts_artifact).code == 0
        assert np.array_equal(np.load(alone), np.load(tmp_path / f"o-{index}.npy"))


@pytest.mark.thorough
def test_lines_are_what_single_prompts_are(wan: Call, tmp_path: Path) -> None:
    """Per-line options through one loaded pipeline, against a run of wanrun for each."""
    lines: list[dict[str, Any]] = [
        {"prompt": "a red fox", "steps": 3},
        {
            "prompt": "a wolf",
            "seed": 5,
            "solver": "euler",
            "flow_shift": 7,
            "output": str(tmp_path / "w.npy"),
        },
        {"prompt": "a red fox", "negative_prompt": "snow", "guidance_scale": 2.5, "fps": 8},
    ]
    file = write_lines(tmp_path / "p.jsonl", *lines)
    shared = ("--steps", 2, "--seed", 9)
    timing = tmp_path / "t.json"
    done = wan("--prompts", file, *shared, "--output", tmp_path / "o.npy", "--timing-json", timing)
    assert (done.code, done.err) == (0, [])
    names = [tmp_path / name for name in ("o-1.npy", "w.npy", "o-3.npy")]
    *wrote, _ = done.out
    for index, (line, name, seed) in enumerate(zip(wrote, names, (9, 5, 9), strict=True), 1):
        assert line.startswith(f"[{index}/3] wrote {name} (seed {seed}, ") and line.endswith(" s)")
    assert done.counts == (3, 0, 0)
    seconds = json.loads(timing.read_text())
    assert len(seconds["step_seconds"]) == 3 + 2 + 2
    assert (seconds["cache_misses"], seconds["cache_hits"]) == (
        0,
        5,
    )  # each program once

    for index, (values, name) in enumerate(zip(lines, names, strict=True)):
        alone = tmp_path / f"alone-{index}.npy"
        options = as_options({"steps": 2, "seed": 9} | values | {"output": alone})
        assert wan(*options).code == 0
        assert name.read_bytes() == alone.read_bytes()
        assert read_metadata(name) == read_metadata(alone)


@pytest.mark.thorough
def test_text_from_standard_input_as_a_user_runs_it(toy_artifact: Path, tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("wanrun")),
        "--artifact",
        str(toy_artifact),
        "--prompts",
        "-",
    ]
    command += ["--steps", "1", "--memory", "low", "--warmup", "--output", "{index:03}-{slug}-{seed}.gif"]
    done = subprocess.run(
        command,
        input=b"\xef\xbb\xbfA fox!\r\n\r\n \xff\r\nA cat\r\n",
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = complaints(done.stderr.decode())
    assert line.startswith("error: standard input:3: ") and "UTF-8" in line and "0xff" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["001-a-fox-0.gif", "003-a-cat-0.gif"]
    assert re.findall(rb"\d+", done.stdout.splitlines()[-1]) == [b"2", b"0", b"1"]


@pytest.mark.thorough
def test_killed_in_the_middle_and_run_again(wan: Call, toy_artifact: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.txt", *(f"fox {index}" for index in range(4)))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    arguments: tuple[object, ...] = ("--prompts", file, "--steps", 200, "--save-latents")
    assert wan(*arguments, whole / "z-{index}.npy", "--output", whole / "o.npy").code == 0
    arguments = (*arguments, killed / "z-{index}.npy", "--output", killed / "o.npy")
    command = [str(Path(sys.executable).with_name("wanrun")), "--artifact", str(toy_artifact)]
    for how, expected in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        with subprocess.Popen(
            [*command, *map(str, arguments)],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            assert any("wrote" in line for line in iter(process.stdout.readline, ""))
            process.send_signal(how)
            rest, error = process.stdout.read(), process.stderr.read()
            assert process.wait(30) == expected, error
        if how == signal.SIGINT:
            assert complaints(error) == ["interrupted"]
            assert " made, " in rest and "not tried" in rest
    made = len(list(killed.glob("z-*.npy")))
    assert 2 <= made < 4  # at least one by each
    again = wan(*arguments)
    assert (again.code, again.err) == (0, [])
    assert again.counts == (4 - made, made, 0)
    # Nothing half, and nothing else but what SIGKILL may leave: a hidden file that was being written.
    assert {name: data for name, data in contents(killed).items() if name[:5] != ".wanr"} == contents(whole)


@pytest.mark.slow
def test_an_embedding_that_is_not_there_yet(wan: Call, tmp_path: Path) -> None:
    """The first prompt needs no text encoder any more, the second does; and the other way round."""
    shared = ("--steps", 1, "--output")
    assert wan("--prompt", "seen before", *shared, tmp_path / "a.npy").code == 0
    for name, lines in (("b", ("seen before", "new to it")), ("c", ("another one", "seen before"))):
        done = wan("--prompts", write_lines(tmp_path / name, *lines), *shared, tmp_path / f"{name}.npy")
        assert (done.code, done.err) == (0, [])
    assert np.array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b-1.npy"))
    assert np.array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "c-2.npy"))


# What goes wrong.


@pytest.mark.slow
def test_bad_lines_of_many_kinds_and_good_ones_between(wan: Call, fake: Fake, tmp_path: Path) -> None:
    folder = tmp_path / "folder.mp4"
    folder.mkdir()
    good = {"prompt": "good", "output": str(tmp_path / "good-{index}.png")}
    file, many = tmp_path / "p.jsonl", "x" * 300 + ".gif"
    foreign = [tmp_path / "foreign.npy", tmp_path / "foreign.gif"]
    for path in foreign:
        path.write_bytes(b"the only copy")
    bad: list[tuple[object, str, dict[str, object]]] = [
        ("no json", "unreadable", {"found": "no json"}),
        ({"seed": 3}, "missing_parameter", {"expected": "prompt"}),
        *(
            ({"prompt": "a", name: value}, "out_of_range", {"options": name, "found": found})
            for name, value, found in (
                ("seed", -2, -2),
                ("guidance_scale", 10**400, "1000"),
                ("fps", float("inf"), "inf"),
            )
        ),
        ({"prompt": "a", "seed": 2**64}, "out_of_range", {"found": 2**64}),
        ({"prompt": "a", "solver": "no-such"}, "invalid_value", {"options": "solver", "expected": "dpm++"}),
        (
            {"prompt": "a", "guidance_scale": 1, "guidance_end": 0.5},
            "no_effect",
            {"options": ("guidance_end", "guidance_scale")},
        ),
        (
            {"prompt": "a", "flow_shift": 1e30, "steps": 9},
            "out_of_range",
            {"message": ("9 unipc", "1e+30", "float32")},
        ),
        ({"prompt": "a", "size": "64x96"}, "not_built", {"remedy": ("wanbuild compile", "--size 64x96")}),
        *(
            ({"prompt": "a", "output": str(output)}, code, parts)
            for output, code, parts in (
                ("a.avi", "unsupported", {"found": ".avi", "expected": ".mp4"}),
                ("{name}.gif", "unknown_parameter", {"found": "{name}", "expected": "{slug}"}),
                ("missing/a.gif", "missing_file", {"remedy": "mkdir -p missing"}),
                (folder, "wrong_kind", {"message": folder}),
                (many, "unwritable", {"message": many, "found": os.strerror(errno.ENAMETOOLONG)}),
                (tmp_path / "good-01.png", "exists", {"message": f"{file}:1;", "remedy": "{index}"}),
                (tmp_path / "." / "t.npy", "exists", {"message": "t.npy.json", "remedy": "{index}"}),
                *((path, "exists", {"message": path, "remedy": "--overwrite"}) for path in foreign),
            )
        ),
    ]
    write_lines(file, *(item for line, _, _ in bad for item in (good, line)))
    done = wan("--prompts", file, "--timing-json", tmp_path / "t.npy.json", "--output", tmp_path / "out.mp4")
    assert done.code == 2, done.err
    assert len(done.err) == len(bad)
    for line, (_, code, parts), number in zip(done.err, bad, range(2, 99, 2), strict=False):
        error = check_json(line, code, **parts)
        assert error["message"].startswith(f"{file}:{number}: ")
    assert f"[{2 * len(bad) - 1}/{2 * len(bad)}] wrote" in done.out[-2]
    assert done.counts == (len(bad), 0, len(bad))
    assert len(list(tmp_path.glob("good-*.png"))) == len(bad)
    assert [path.read_bytes() for path in foreign] == [b"the only copy"] * 2
    assert (tmp_path / "t.npy.json").exists()
    assert len(fake.loads) == 1


def test_nothing_is_loaded_where_nothing_can_be_made(wan: Call, fake: Fake, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", "{}", "[]")
    done = wan("--prompts", file, "--timing", "--output", tmp_path / "out.mp4")
    assert done.code == 2 and len(done.err) == 2
    assert done.out[0].startswith("0 made") and done.out[1] == "TIMING SUMMARY"
    assert fake.loads == [] and sorted(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("error", "code", "said", "made"),
    [
        (WanError("not_finite", "the latents are not finite", found="NaN"), 1, "not_finite", (2, 0, 1)),
        (OSError(errno.ENOSPC, "No space"), 4, "no_space", (1, 0, 0, 2)),
        (ArtifactError("changed", "the weights changed"), 3, "changed", (1, 0, 0, 2)),
        (KeyboardInterrupt(), 130, "cancelled", (1, 0, 0, 2)),
    ],
)
def test_a_line_that_fails_late(
    wan: Call,
    fake: Fake,
    tmp_path: Path,
    error: BaseException,
    code: int,
    said: str,
    made: tuple[int, ...],
) -> None:
    """WanErrors are the line's, and the next is made; what concerns all ends the run. Nothing is lost."""

    def fail() -> None:
        raise error

    fake.happens["bad"] = fail
    file = write_lines(tmp_path / "p.txt", "one", "bad", "three")
    timing = tmp_path / "t.json"
    done = wan("--prompts", file, "--output", tmp_path / "o.npy", "--timing", "--timing-json", timing)
    assert done.code == code
    (line,) = done.err
    told = check_json(line, said)
    names = sorted(path.name for path in tmp_path.glob("o-*.npy"))
    assert np.load(tmp_path / "o-1.npy").shape == SIZE
    if code == 1:
        assert told["message"].startswith(f"{file}:2: ") and told["found"] == "NaN"
        assert names == ["o-1.npy", "o-3.npy"]
        assert any(text.startswith(f"{made[0]} made") for text in done.out) and "TIMING SUMMARY" in done.out
    else:
        assert names == ["o-1.npy"] and done.counts == made
    if code == 130:
        assert not timing.exists()
    else:
        assert json.loads(timing.read_text())["total_seconds"] > 0
    assert fake.asked[-1] == "closed"


def test_outputs_that_change_meanwhile(wan: Call, fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    file = write_lines(
        tmp_path / "p.jsonl",
        {"prompt": "one", "output": str(tmp_path / "sub" / "a.npy")},
        {"prompt": "two"},
        {"prompt": "three", "output": str(tmp_path / "sub" / "b.npy")},
        {"prompt": "four"},
    )
    appears = tmp_path / "o-2.npy"
    fake.happens["two"] = lambda: appears.write_bytes(b"someone else's")
    fake.happens["one"] = lambda: shutil.rmtree(tmp_path / "sub")
    done = wan("--prompts", file, "--output", tmp_path / "o-{index}.npy")
    assert done.code == 2
    first, second, third = done.err
    sub = tmp_path / "sub"
    check_json(first, "unwritable", message=(f"{file}:1: ", sub / "a.npy"), found=os.strerror(errno.ENOENT))
    new = check_json(second, "exists", message=(f"{file}:2: ", appears))["remedy"].rpartition(" ")[2]
    check_json(third, "missing_file", message=f"{file}:3: ", remedy=f"mkdir -p {sub}")
    assert "three" not in fake.asked  # known before the work
    assert appears.read_bytes() == b"someone else's"
    assert np.load(new).shape == np.load(tmp_path / "o-4.npy").shape == SIZE


# Run again.


@pytest.mark.thorough
def test_what_is_there_is_not_made_again(
    wan: Call, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines(tmp_path / "p.txt", "one", "two", "three")
    for suffix in (".mp4", ".webm", ".gif", ".webp", ".png", ".npy"):
        folder = tmp_path / suffix[1:]
        folder.mkdir()
        arguments = ("--prompts", file, "--output", folder / f"o{suffix}")
        assert wan(*arguments).counts == (3, 0, 0)
        before, loads = contents(folder), len(fake.loads)

        monkeypatch.setattr(generation, "__version__", "0.0.0")  # another version would make the same
        again = wan(*arguments)
        assert (again.code, again.err, len(fake.loads)) == (0, [], loads)
        for number, line in enumerate(again.out[:-1], 1):
            assert line.startswith(f"[{number}/3] {folder}/o-{number}{suffix} ")
        assert (len(again.out), again.counts) == (4, (0, 3, 0))
        monkeypatch.undo()
        monkeypatch.setattr(load, "load", fake.load)

        (folder / f"o-2{suffix}").unlink()
        assert wan(*arguments).counts == (1, 2, 0)
        assert contents(folder) == before

        file.write_text("one\ntwo\nTHREE\n")
        other = wan(*arguments)
        assert other.code == 2 and other.counts == (0, 2, 1)
        (line,) = other.err
        check_json(
            line,
            "exists",
            message=(f"{file}:3: ", folder / f"o-3{suffix}"),
            expected='prompt "THREE"',
            found='"three"',
            remedy="--overwrite",
        )
        assert contents(folder) == before

        assert wan(*arguments, "--overwrite").counts == (3, 0, 0)
        changed = contents(folder)
        assert {name for name in changed if changed[name] != before[name]} >= {f"o-3{suffix}"}
        assert changed[f"o-1{suffix}"] == before[f"o-1{suffix}"]
        file.write_text("one\ntwo\nthree\n")


@pytest.mark.slow
def test_whatever_differs_is_noticed(
    wan: Call, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("z.npy", np.random.default_rng(0).standard_normal((1, 16, 3, 8, 12), np.float32))
    arguments = ("--prompts", write_lines(tmp_path / "p.txt", "one"), "--output", "o.gif")
    assert wan(*arguments).code == 0
    assert wan(*arguments).counts == (0, 1, 0)
    for option, value, expected, found in (
        ("--seed", 1, "seed 1", "0"),
        ("--steps", 7, "num_steps 7", "50"),
        ("--guidance-scale", 6, "guidance_scale 6.0", "5.0"),
        ("--flow-shift", 4, "flow_shift 4.0", "3.0"),
        ("--solver", "euler", 'solver "euler"', '"unipc"'),
        ("--negative-prompt", "snow", 'negative_prompt "snow"', '""'),
        ("--fps", 24, "fps 24.0", "16.0"),
        ("--latents", "z.npy", 'latents "z.npy"', "none"),
    ):
        (line,) = wan(*arguments, option, value).err
        check_json(line, "exists", message=("p.txt:1: ", "o.gif"), expected=expected, found=found)


@pytest.mark.slow
def test_other_weights_or_noise_are_noticed(
    wan: Call, fake: Fake, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    np.save("z.npy", random.standard_normal((1, 16, 3, 8, 12), np.float32))
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "one", "seed": 3}, {"prompt": "two"})
    arguments = ("--prompts", file, "--latents", "z.npy", "--output", "{slug}-{seed}.gif")
    made = wan(*arguments)
    for line, name in zip(made.out[:-1], ("one-3.gif", "two-0.gif"), strict=True):
        assert f" {name} " in line and "z.npy" in line and "seed" not in line
    assert read_metadata(Path("one-3.gif"))["seed"] is None
    assert wan(*arguments).counts == (0, 2, 0)
    np.save("z.npy", random.standard_normal((1, 16, 3, 8, 12), np.float32))
    for line in wan(*arguments).err:
        check_json(line, "exists", expected="latents_sha256 ")
    assert wan(*arguments, "--overwrite").code == 0
    manifest = read_manifest(artifact)
    changed = manifest.changed(source={**manifest.source, "revision": "other", "files": {"x": "sha256:1"}})
    assert changed.content_digest != manifest.content_digest
    changed.write(artifact)
    for line in wan(*arguments, artifact=artifact).err:
        check_json(line, "exists", expected="content_digest ")


def test_several_videos_of_a_prompt(
    wan: Call, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line is finished when all of its files are there; else what is missing is written."""
    manifest = read_manifest(artifact)
    (profile,) = manifest.profiles.values()
    two = msgspec.structs.replace(profile, num_videos=2, index=profile.index + 1)
    with_profiles(manifest, [profile, two]).write(artifact)
    fake = Fake(num_videos=2)
    monkeypatch.setattr(load, "load", fake.load)
    folder = tmp_path / "out"
    folder.mkdir()
    arguments: tuple[object, ...] = (
        "--prompts",
        write_lines(tmp_path / "p.txt", "one", "two"),
        "--num-videos",
        2,
    )
    arguments += ("--output", folder / "o.npy", "--save-latents", folder / "z-{index}.npy")
    made = wan(*arguments, artifact=artifact)
    assert [line.partition(" (")[0] for line in made.out[:-1]] == [
        f"[{i}/2] wrote {folder}/o-{i}-{j}.npy" for i in (1, 2) for j in (0, 1)
    ]
    assert made.counts == (2, 0, 0)
    before = contents(folder)
    assert len(before) == 4 + 4 + 2
    assert wan(*arguments, artifact=artifact).counts == (0, 2, 0)
    for missing in (
        ["o-1-1.npy", "o-1-1.npy.json", "z-1.npy"],
        ["z-2.npy"],
        ["o-2-0.npy", "o-2-0.npy.json", "z-2.npy"],
    ):
        kept = {path.name: path.stat().st_ino for path in folder.iterdir() if path.name not in missing}
        for name in missing:
            (folder / name).unlink()
        again = wan(*arguments, artifact=artifact)
        assert (again.code, again.counts) == (0, (1, 1, 0))
        assert contents(folder) == before
        assert kept.items() <= {path.name: path.stat().st_ino for path in folder.iterdir()}.items()
    # Latents without all of their videos are not this line's: they come last.
    (folder / "o-1-0.npy").unlink()
    (line,) = wan(*arguments, artifact=artifact).err
    check_json(line, "exists", message=f"--save-latents {folder}/z-1.npy", remedy="--overwrite")


# Options.


@pytest.mark.parametrize(("memory", "prompts"), [("auto", ["one", ""]), ("low", ["one", "", "two", "snow"])])
def test_prompts_of_all_lines_are_encoded_first_where_the_encoder_goes(
    wan: Call, fake: Fake, tmp_path: Path, memory: str, prompts: list[str]
) -> None:
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "one"}, {"prompt": "two", "negative_prompt": "snow"})
    wan("--prompts", file, "--memory", memory, "--output", tmp_path / "o.gif")
    assert [load["prompts"] for load in fake.loads] == [prompts]
    assert fake.asked == ["one", "two", "closed"]


def test_timesteps_of_a_line(wan: Call, fake: Fake, tmp_path: Path) -> None:
    """They are a line's own number of steps, whatever the default suits."""
    lines = [
        {"prompt": "a", "timesteps": [1000, 757, 522], "solver": "lcm"},
        {"prompt": "b", "steps": 4},
        {"prompt": "c", "timesteps": [5, 6]},
        {"prompt": "d", "timesteps": [1000, 500], "steps": 3},
        {"prompt": "e", "timesteps": "1000,500"},
    ]
    done = wan("--prompts", write_lines(tmp_path / "p.jsonl", *lines), "--output", tmp_path / "o.npy")
    found = [(asked["num_steps"], asked.get("timesteps")) for asked in fake.generations]
    assert found == [(3, [1000.0, 757.0, 522.0]), (4, None)]
    cut, both, text = done.err
    check_json(cut, "invalid_value", message=f"{tmp_path / 'p.jsonl'}:3: ", expected=1000, found="5, 6")
    check_json(both, "conflict", options=("steps", "timesteps"), expected=2, found=3)
    check_json(text, "wrong_type", options="timesteps", found="1000,500")
