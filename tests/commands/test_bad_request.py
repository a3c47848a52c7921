"""A bad request: one clear line, exit code 2, found before jax is imported, and nothing written or lost."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import UNPRIVILEGED
from helpers.fake_pipeline import make_two_experts
from wancli.console import run
from wancli.run import wanrun
from wanrun.denoising.solvers import SOLVERS

pytestmark = pytest.mark.slow

LATENTS = (1, 16, 3, 8, 12)

# Runs each list of arguments with wanrun, here, and tells what came out of it and whether jax was imported.
RUN_ALL = """
import contextlib, io, json, sys, time
from wancli.run import wanrun
from wancli.console import run
for arguments in json.load(sys.stdin):
    started = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        code = run(wanrun, arguments)
    heavy = sorted({"jax", "orbax", "tensorstore"} & sys.modules.keys())
    seconds = time.perf_counter() - started
    print(json.dumps([code, err.getvalue(), out.getvalue(), heavy, seconds]))
"""


def run_all(requests: list[list[str]]) -> list[tuple[int, str, str, list[str], float]]:
    """Runs many bad requests in one process of their own, for the price of one start."""
    script = [sys.executable, str(UNPRIVILEGED), sys.executable, "-c", RUN_ALL]
    done = subprocess.run(
        script, input=json.dumps(requests), capture_output=True, text=True, timeout=120, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def save(path: Path, value: np.ndarray, **options: Any) -> Path:
    np.save(path, value, **options)
    return path


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "read-only"
    folder.mkdir()
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)


Bad = tuple[list[object], list[str]]
"""Options, and what the line has to say of them."""

LATENTS_FIT = "the initial latents do not fit the profile; expected float32 (1, 16, 3, 8, 12); found"


def write_files(tmp_path: Path) -> None:
    """What the bad requests name: results that are there, initial latents, and prompts."""
    (tmp_path / "here.mp4").write_bytes(b"the only copy")
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "two.txt").write_text("a fox\na cat\n")
    noise = np.random.default_rng(7).standard_normal(LATENTS, np.float32)
    save(tmp_path / "good.npy", noise)
    save(tmp_path / "shape.npy", noise[:, :, :2])
    save(tmp_path / "dtype.npy", noise.astype(np.float64))
    save(tmp_path / "pickled.npy", np.array([{"a": 1}]), allow_pickle=True)
    np.savez(tmp_path / "many.npz", a=noise, b=noise)
    noise[0, 3, 1, 2, 5] = np.nan
    save(tmp_path / "nan.npy", noise)
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "huge.npy").write_bytes(
        b"\x93NUMPY\x01\x00v\x00"
        + b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 99), }".ljust(117)
        + b"\n"
    )
    damaged = bytearray((tmp_path / "huge.npy").read_bytes())
    damaged[8] ^= 0x40  # the header ends within its dict
    (tmp_path / "header.npy").write_bytes(damaged)
    (tmp_path / "deep.npy").write_bytes(b"\x93NUMPY\x01\x00\x29\x23" + b"-" * 9000 + b"1\n")


def bad_options(two_experts: list[object]) -> list[Bad]:
    """Of a generation, of one transformer or of ``two_experts``."""
    return [
        (["--size", "large"], ["--size", "'large'", "such as 832x480"]),
        (["--size", "0x64"], ["--size", "'0x64'"]),
        (["--frames", "many"], ["--frames", "'many'"]),
        (["--solver", "no-such"], ["--solver", "'no-such'", ", ".join(map(repr, SOLVERS))]),
        (["--steps", "0"], ["--steps is out of range", "1 to 10000", "found 0"]),
        (["--steps", "-3"], ["--steps is out of range", "found -3"]),
        (["--steps", "10001"], ["--steps is out of range", "1 to 10000", "found 10001"]),
        (["--timesteps", "1000;5"], ["--timesteps", "numbers with commas between them", "'1000;5'"]),
        (["--timesteps", "5,0"], ["--timesteps is out of range", "positive numbers", "found [5.0, 0.0]"]),
        (
            ["--steps", "3", "--timesteps", "1000,500"],
            ["--steps and --timesteps contradict each other", "expected 2 steps", "leave --steps out"],
        ),
        (["--seed", "-2"], ["--seed is out of range", "at least 0", "found -2"]),
        (["--seed", str(2**64)], ["the seed is out of range", f"found {2**64}"]),
        (["--seed", "x"], ["--seed", "'x'"]),
        (["--guidance-scale", "nan"], ["--guidance-scale is out of range", "found nan"]),
        (["--guidance-scale", "inf"], ["--guidance-scale is out of range", "found inf"]),
        (
            ["--guidance-scale-2", "3"],
            ["--guidance-scale-2 has no effect", "one transformer", "leave it out"],
        ),
        (["--boundary", "0.5"], ["--boundary has no effect: this model has one transformer"]),
        (["--boundary", "1.01"], ["--boundary is out of range", "0 to 1", "found 1.01"]),
        (["--loop", "while"], ["--loop", "'while'", "'step', 'scan'"]),
        ([*two_experts, "--boundary", "-0.5"], ["--boundary is out of range", "0 to 1", "found -0.5"]),
        ([*two_experts, "--boundary", "nan"], ["--boundary is out of range", "found nan"]),
        ([*two_experts, "--guidance-scale-2", "inf"], ["--guidance-scale-2 is out of range", "found inf"]),
        (
            [*two_experts, "--guidance-scale", "1", "--guidance-scale-2", "3"],
            ["--guidance-scale-2 has no effect: guidance is off", "--guidance-scale above 1"],
        ),
        ([*two_experts, "--loop", "scan", "--steps", "61"], ["at most 60", "found 61", "--max-steps"]),
        (["--flow-shift", "0"], ["--flow-shift is out of range", "a positive number", "found 0.0"]),
        (["--flow-shift", "nan"], ["--flow-shift is out of range", "found nan"]),
        (["--flow-shift", "1e9", "--steps", "50"], ["not distinct in float32", "fewer steps"]),
        (["--fps", "0"], ["--fps is out of range", "0.1 to 240", "found 0.0"]),
        (["--fps", "-16"], ["--fps is out of range", "found -16.0"]),
        (["--fps", "nan"], ["--fps is out of range", "found nan"]),
        (["--verify", "md5"], ["--verify", "'md5'", "'fast', 'sha256'"]),
        (["--colour", "red"], ["--colour", "wanrun --help"]),
    ]


def bad_outputs(tmp_path: Path, read_only: Path) -> list[Bad]:
    missing = tmp_path / "missing"
    return [
        (
            ["--output", tmp_path / "out.avi"],
            ["no known video format", ".mp4, .mov, .webm, .gif, .webp, .png, .npy"],
        ),
        (["--output", tmp_path / "out"], ["no known video format"]),
        (
            ["--output", missing / "out.mp4"],
            [f"the output folder {missing} is not there; mkdir -p {missing}"],
        ),
        (["--output", read_only / "out.mp4"], [f"the output folder {read_only} is not writable"]),
        (["--output", tmp_path / "here.mp4"], [f"the output {tmp_path / 'here.mp4'} exists", "--overwrite"]),
        (["--output", tmp_path / "folder.mp4"], ["folder.mp4 is a folder"]),
        (["--output", tmp_path / "folder.mp4", "--overwrite"], ["folder.mp4 is a folder"]),
        (["--output", tmp_path / f"{'long' * 70}.mp4"], ["long.mp4 cannot be written", "too long"]),
        (["--save-latents", missing / "z.npy"], ["--save-latents", str(missing), "cannot be written"]),
        (["--save-latents", read_only / "z.npy"], ["--save-latents", str(read_only), "cannot be written"]),
        (
            ["--save-latents", tmp_path / "good.npy"],
            [f"--save-latents {tmp_path / 'good.npy'} exists", "--overwrite"],
        ),
        (["--timing-json", missing / "t.json"], ["--timing-json", str(missing), "cannot be written"]),
        (["--timing-json", tmp_path], ["--timing-json", str(tmp_path), "cannot be written"]),
        (
            ["--timing-json", tmp_path / "out.mp4"],
            [f"the output {tmp_path / 'out.mp4'} is also that of", "give each its own name"],
        ),
        (
            ["--save-latents", tmp_path / "." / "out.mp4"],
            ["is also that of --save-latents"],
        ),
    ]


def bad_latents(tmp_path: Path) -> list[Bad]:
    return [
        (
            ["--latents", tmp_path / "shape.npy"],
            [f"{LATENTS_FIT} float32 (1, 16, 2, 8, 12)", "(B, C, T, h, w)"],
        ),
        (["--latents", tmp_path / "dtype.npy"], [f"{LATENTS_FIT} float64 (1, 16, 3, 8, 12)"]),
        (["--latents", tmp_path / "nan.npy"], ["the initial latents are not finite", "NaN or infinity"]),
        (
            ["--latents", tmp_path / "pickled.npy"],
            [str(tmp_path / "pickled.npy"), "cannot be read", "float32 .npy"],
        ),
        (["--latents", tmp_path / "huge.npy"], ["huge.npy cannot be read", "float32 .npy"]),
        (["--latents", tmp_path / "header.npy"], ["header.npy cannot be read", "float32 .npy"]),
        (["--latents", tmp_path / "deep.npy"], ["deep.npy cannot be read", "float32 .npy"]),
        (["--latents", tmp_path / "text.npy"], ["text.npy cannot be read", "float32 .npy"]),
        (["--latents", tmp_path / "many.npz"], ["many.npz are not one array", "float32 .npy"]),
        (
            ["--latents", tmp_path / "missing" / "x.npy"],
            [str(tmp_path / "missing" / "x.npy"), "No such file"],
        ),
        (["--latents", tmp_path], [f"the latents {tmp_path} cannot be read"]),
    ]


def bad_prompts_files(tmp_path: Path, read_only: Path, artifact: Path) -> list[Bad]:
    """Of runs that take their prompts from a file."""
    two, missing = tmp_path / "two.txt", tmp_path / "missing"
    return [
        (
            ["--prompts", missing / "p.txt"],
            [f"the prompts file {missing / 'p.txt'} cannot be read", "No such file"],
        ),
        (["--prompts", tmp_path], [f"the prompts file {tmp_path} cannot be read", "Is a directory"]),
        (["--prompts", tmp_path / "here.mp4", "--seed", "-2"], ["--seed is out of range", "found -2"]),
        (["--prompts", tmp_path / "empty.txt"], ["empty.txt has no prompt", "write one prompt a line"]),
        (["--prompts", tmp_path / "good.npy", "--steps", "0"], ["--steps is out of range", "1 to 10000"]),
        (["--prompts", two, "--prompt", "a fox"], ["--prompt and --prompts exclude each other"]),
        (["--prompts", two, "--output", "{a}.mp4"], ["--output {a}.mp4 has an unknown field", "{slug}"]),
        (["--prompts", two, "--output", "{index}.avi"], ["1.avi has no known video format"]),
        (
            ["--prompts", two, "--output", missing / "o.gif"],
            [f"the output folder {missing} is not there; mkdir -p {missing}"],
        ),
        (
            ["--prompts", two, "--output", read_only / "o.gif"],
            [f"the output folder {read_only} is not writable"],
        ),
        (["--prompts", two, "--save-latents", "{z}.npy"], ["--save-latents {z}", "unknown field"]),
        (["--prompts", two, "--save-latents", read_only / "z.npy"], ["--save-latents", "cannot be written"]),
        (
            ["--prompts", two, "--latents", tmp_path / "shape.npy"],
            [f"{LATENTS_FIT} float32 (1, 16, 2, 8, 12)"],
        ),
        (["--prompts", two, "--timing-json", two], [f"the output {two} is also that of --prompts"]),
        (["--prompts", two, "--timing-json", artifact / "t"], ["lies inside the artifact"]),
        (["--prompts", two, "--memory", "much"], ["--memory", "'auto', 'low'"]),
        (["--prompt", "a fox", "--output", tmp_path / "{x}.gif"], ["unknown field", "found {x}"]),
    ]


def complaints(parts: list[str], answer: tuple[int, str, str, list[str], float]) -> Iterator[str]:
    """What is wrong with the answer to a bad request."""
    code, err, printed, heavy, seconds = answer
    if code != 2:
        yield f"exit code {code}"
    if not err.startswith("error: ") or err.count("\n") != 1 or "internal error" in err:
        yield "not one line of an error"
    yield from (f"it does not say {part!r}" for part in parts if part not in err)
    if printed or heavy:
        yield f"it printed {printed!r} and imported {heavy}"
    if seconds >= 1.5:  # it takes 0.2 s, most of it importing numpy and more
        yield f"it took {seconds:.1f} s"


def test_each_is_refused_before_jax_is_imported(
    toy_artifact: Path, artifact: Path, tmp_path: Path, read_only: Path
) -> None:
    write_files(tmp_path)
    make_two_experts(artifact)
    toy: list[object] = ["--artifact", toy_artifact]
    base = [*toy, "--prompt", "a fox", "--output", tmp_path / "out.mp4"]
    bad = [*bad_options(["--artifact", artifact]), *bad_outputs(tmp_path, read_only), *bad_latents(tmp_path)]
    cases = [([*base, *options], parts) for options, parts in bad]
    files = bad_prompts_files(tmp_path, read_only, toy_artifact)
    cases += [([*toy, *options], parts) for options, parts in files]
    no_prompt = "no prompt was given; pass --prompt TEXT (an empty one is allowed)"
    cases += [([*toy, "--output", tmp_path / "out.mp4"], [no_prompt])]
    cases += [(["--prompt", "a fox"], ["--artifact", "wanrun --help"])]

    before = sorted(tmp_path.rglob("*"))
    answers = run_all([list(map(str, options)) for options, _ in cases])
    wrong = [
        f"{' '.join(map(str, options))}: {complaint}; found {answer[1]!r}"
        for (options, parts), answer in zip(cases, answers, strict=True)
        for complaint in complaints(parts, answer)
    ]
    assert not wrong, "\n".join(wrong)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "here.mp4").read_bytes() == b"the only copy"


def test_as_a_user_runs_it(cli: Any, toy_artifact: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.gif"
    output.write_bytes(b"the only copy")
    started = time.monotonic()
    line = cli.fails(2, "wanrun", "--artifact", toy_artifact, "--prompt", "a fox", "--output", output)
    assert time.monotonic() - started < 2
    assert f"the output {output} exists" in line
    assert output.read_bytes() == b"the only copy"
    assert list(tmp_path.iterdir()) == [output]


# Odd prompts are no errors.


@pytest.fixture
def makes(
    toy_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[list[str], np.ndarray]]:
    """Makes a video of a prompt; returns the lines on stderr and the frames."""

    def call(prompt: str) -> tuple[list[str], np.ndarray]:
        output = tmp_path / "out.npy"
        arguments = ["--artifact", toy_artifact, "--prompt", prompt, "--steps", 1, "--output", output]
        capsys.readouterr()
        assert run(wanrun, [str(a) for a in (*arguments, "--overwrite")]) == 0
        return capsys.readouterr().err.splitlines(), np.load(output)

    return call


def test_odd_prompts(makes: Callable[[str], tuple[list[str], np.ndarray]]) -> None:
    lines, empty = makes("")
    assert lines == []
    lines, long = makes("snow " * 511 + "fox at dawn")
    assert not np.array_equal(empty, long)
    (line,) = lines
    # 511 tokens and the end: what comes after them is named.
    assert line.startswith("warning: the prompt is longer than 512 tokens; this was cut: ")
    assert line.endswith("fox at dawn'")
    lines, cut = makes("snow " * 511 + "wolf")
    assert np.array_equal(long, cut)  # nothing of what was cut had an influence
    lines, _ = makes(
        "caf\udce9 <b>&amp;amp; \U0001f98a\u200d \x00"
    )  # \udce9 is a byte of argv that is no UTF-8
    assert lines == []


# Interruption.


def test_ctrl_c_leaves_nothing(toy_artifact: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle of denoising, as a terminal sends it."""
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    command = [str(Path(sys.executable).with_name("wanrun")), "--artifact", str(toy_artifact)]
    command += ["--prompt", "a fox", "--steps", "2000", "--output", str(tmp_path / "out.mp4")]
    command += ["--save-latents", str(tmp_path / "z.npy"), "--timing-json", str(tmp_path / "t.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        while not re.search(rb"[1-9]\d* of 2000 steps", shown):  # steps are counted
            assert select.select([controller], [], [], 60)[0], shown
            shown += os.read(controller, 65536)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.read() == b""
        assert process.wait(timeout=20) == 130
    while select.select([controller], [], [], 0.2)[0]:
        try:
            shown += os.read(controller, 65536)
        except OSError:  # the terminal is closed
            break
    os.close(controller)
    assert shown.decode().splitlines()[-1] == "interrupted"
    assert b"Traceback" not in shown
    assert list(tmp_path.iterdir()) == []
