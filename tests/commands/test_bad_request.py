"""A bad request: one clear line, exit code 2, found before jax is imported, and nothing written or lost."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import statistics
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
from wanrun.cli import wanrun
from wanrun.console import run

LATENTS = (1, 16, 3, 8, 12)

# Runs each list of arguments with wanrun, here, and tells what came out of it and whether jax was imported.
RUN_ALL = """
import contextlib, io, json, sys, time
from wanrun.cli import wanrun
from wanrun.console import run
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


def test_each_is_refused_before_jax_is_imported(
    toy_artifact: Path, artifact: Path, tmp_path: Path, read_only: Path
) -> None:
    noise = np.random.default_rng(7).standard_normal(LATENTS, np.float32)
    (tmp_path / "here.mp4").write_bytes(b"the only copy")
    (tmp_path / "folder.mp4").mkdir()
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
    broken = noise.copy()
    broken[0, 3, 1, 2, 5] = np.nan
    saved = {
        "shape": save(tmp_path / "shape.npy", noise[:, :, :2]),
        "dtype": save(tmp_path / "dtype.npy", noise.astype(np.float64)),
        "nan": save(tmp_path / "nan.npy", broken),
        "pickled": save(tmp_path / "pickled.npy", np.array([{"a": 1}]), allow_pickle=True),
        "good": save(tmp_path / "good.npy", noise),
    }
    np.savez(tmp_path / "many.npz", a=noise, b=noise)
    make_two_experts(artifact)
    two_experts = ["--artifact", artifact]
    out, missing = tmp_path / "out.mp4", tmp_path / "missing"
    in_folder = f"the output folder {missing} is not there; mkdir -p {missing}"
    latents_fit = "the initial latents do not fit the profile; expected float32 (1, 16, 3, 8, 12); found"
    cases: list[tuple[list[object], list[str]]] = [
        (["--size", "large"], ["--size", "'large'", "such as 832x480"]),
        (["--size", "0x64"], ["--size", "'0x64'"]),
        (["--frames", "many"], ["--frames", "'many'"]),
        (["--solver", "ddim"], ["--solver", "'ddim'", "'unipc', 'dpm++', 'euler', 'lcm'"]),
        (["--steps", "0"], ["--steps is out of range", "1 to 10000", "found 0"]),
        (["--steps", "-3"], ["--steps is out of range", "found -3"]),
        (["--steps", "10001"], ["--steps is out of range", "1 to 10000", "found 10001"]),
        (["--timesteps", "1000;5"], ["--timesteps", "numbers with commas between them", "'1000;5'"]),
        (["--timesteps", "5,0"], ["--timesteps is out of range", "positive numbers", "found [5.0, 0.0]"]),
        (
            ["--steps", "3", "--timesteps", "1000,500"],
            ["--steps and --timesteps contradict each other", "expected 2 steps", "leave --steps out"],
        ),
        (["--seed", "-1"], ["--seed is out of range", "at least 0", "found -1"]),
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
        (["--output", tmp_path / "out.avi"], ["no known video format", ".mp4, .gif, .webp, .png, .npy"]),
        (["--output", tmp_path / "out"], ["no known video format"]),
        (["--output", missing / "out.mp4"], [in_folder]),
        (["--output", read_only / "out.mp4"], [f"the output folder {read_only} is not writable"]),
        (["--output", tmp_path / "here.mp4"], [f"the output {tmp_path / 'here.mp4'} exists", "--overwrite"]),
        (["--output", tmp_path / "folder.mp4"], ["folder.mp4 is a folder"]),
        (["--output", tmp_path / "folder.mp4", "--overwrite"], ["folder.mp4 is a folder"]),
        (["--output", tmp_path / f"{'long' * 70}.mp4"], ["long.mp4 cannot be written", "too long"]),
        (["--save-latents", missing / "z.npy"], ["--save-latents", str(missing), "cannot be written"]),
        (["--save-latents", read_only / "z.npy"], ["--save-latents", str(read_only), "cannot be written"]),
        (["--save-latents", saved["good"]], [f"--save-latents {saved['good']} exists", "--overwrite"]),
        (["--timing-json", missing / "t.json"], ["--timing-json", str(missing), "cannot be written"]),
        (["--timing-json", tmp_path], ["--timing-json", str(tmp_path), "cannot be written"]),
        (["--timing-trace", missing / "t.json"], ["--timing-trace", str(missing), "cannot be written"]),
        (["--timing-trace", tmp_path], ["--timing-trace", str(tmp_path), "cannot be written"]),
        (["--timing-trace", out], [f"two outputs are the same file, {out}", "names of their own"]),
        (["--timing-json", out], [f"two outputs are the same file, {out}", "names of their own"]),
        (["--save-latents", tmp_path / "." / "out.mp4"], ["two outputs are the same file"]),
        (["--latents", saved["shape"]], [f"{latents_fit} float32 (1, 16, 2, 8, 12)", "(B, C, T, h, w)"]),
        (["--latents", saved["dtype"]], [f"{latents_fit} float64 (1, 16, 3, 8, 12)"]),
        (["--latents", saved["nan"]], ["the initial latents are not finite", "NaN or infinity"]),
        (["--latents", saved["pickled"]], [str(saved["pickled"]), "cannot be read", "float32 .npy"]),
        (["--latents", tmp_path / "huge.npy"], ["huge.npy cannot be read", "float32 .npy"]),
        (["--latents", tmp_path / "header.npy"], ["header.npy cannot be read", "float32 .npy"]),
        (["--latents", tmp_path / "deep.npy"], ["deep.npy cannot be read", "float32 .npy"]),
        (["--latents", tmp_path / "text.npy"], ["text.npy cannot be read", "float32 .npy"]),
        (["--latents", tmp_path / "many.npz"], ["many.npz are not one array", "float32 .npy"]),
        (["--latents", missing / "x.npy"], [str(missing / "x.npy"), "No such file"]),
        (["--latents", tmp_path], [f"the latents {tmp_path} cannot be read"]),
    ]
    base = ["--artifact", toy_artifact, "--prompt", "a fox", "--output", out]
    requests = [[str(item) for item in (*base, *options)] for options, _ in cases]
    requests.append(["--artifact", str(toy_artifact), "--output", str(out)])
    cases.append(([], ["no prompt was given; pass --prompt TEXT (an empty one is allowed)"]))
    requests.append(["--prompt", "a fox"])
    cases.append(([], ["--artifact", "wanrun --help"]))

    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "two.txt").write_text("a fox\na cat\n")
    two, trace = tmp_path / "two.txt", tmp_path / "here.mp4" / "trace"
    with_a_file: list[tuple[list[object], list[str]]] = [
        (
            ["--prompts", missing / "p.txt"],
            [f"the prompts file {missing / 'p.txt'} cannot be read", "No such file"],
        ),
        (["--prompts", tmp_path], [f"the prompts file {tmp_path} cannot be read", "Is a directory"]),
        (["--prompts", tmp_path / "here.mp4", "--seed", "-1"], ["--seed is out of range", "found -1"]),
        (["--prompts", tmp_path / "empty.txt"], ["empty.txt has no prompt", "write one prompt a line"]),
        (["--prompts", saved["good"], "--steps", "0"], ["--steps is out of range", "1 to 10000"]),
        (["--prompts", two, "--prompt", "a fox"], ["--prompt and --prompts exclude each other"]),
        (["--prompts", two, "--output", "{a}.mp4"], ["--output {a}.mp4 has an unknown field", "{slug}"]),
        (["--prompts", two, "--output", "{index}.avi"], ["1.avi has no known video format"]),
        (["--prompts", two, "--output", missing / "o.gif"], [in_folder]),
        (
            ["--prompts", two, "--output", read_only / "o.gif"],
            [f"the output folder {read_only} is not writable"],
        ),
        (["--prompts", two, "--save-latents", "{z}.npy"], ["--save-latents {z}", "unknown field"]),
        (["--prompts", two, "--save-latents", read_only / "z.npy"], ["--save-latents", "cannot be written"]),
        (["--prompts", two, "--latents", saved["shape"]], [f"{latents_fit} float32 (1, 16, 2, 8, 12)"]),
        (["--prompts", two, "--timing-json", two], [f"the output {two} is also that of --prompts"]),
        (["--prompts", two, "--timing-trace", two], [f"the output {two} is also that of --prompts"]),
        (
            ["--prompts", two, "--trace", trace],
            [f"--trace {trace} cannot be written", "here.mp4, which is no folder"],
        ),
        (["--prompts", two, "--trace", read_only / "a"], [f"{read_only}, which is not writable"]),
        (["--prompts", two, "--trace", toy_artifact / "t"], ["lies inside the artifact"]),
        (["--prompts", two, "--memory", "much"], ["--memory", "'auto', 'low'"]),
        (["--prompts", two, "--text-encoder", "tf"], ["--text-encoder", "'jax', 'torch'"]),
        (["--prompt", "a fox", "--output", tmp_path / "{x}.gif"], ["unknown field", "found {x}"]),
    ]
    requests += [["--artifact", str(toy_artifact), *map(str, options)] for options, _ in with_a_file]
    cases += with_a_file

    before = sorted(tmp_path.rglob("*"))
    for (options, parts), (code, err, printed, heavy, seconds) in zip(cases, run_all(requests), strict=True):
        assert code == 2, (options, err)
        assert err.startswith("error: ") and err.count("\n") == 1 and "internal error" not in err
        assert all(part in err for part in parts), (options, err)
        assert printed == "" and heavy == []
        assert seconds < 1.5  # it takes 0.2 s, most of it importing numpy and more
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
    command += ["--timing-trace", str(tmp_path / "trace.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        while not re.search(rb"[1-9]\d*/2000", shown):  # the progress bar has moved
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


# What answers at once.


def test_version_help_and_list(cli: Any, toy_artifact: Path) -> None:
    for program in ("wanrun", "wanbuild"):
        assert cli.succeeds(program, "--version").startswith(f"{program}, version ")
        text = cli.succeeds(program, "--help")
        assert text == cli.succeeds(program, "-h")
        assert text.startswith(f"Usage: {program} ")
    text = cli.succeeds("wanrun", "--help")
    for option in (
        "artifact",
        "prompt",
        "size",
        "seed",
        "guidance-scale-2",
        "boundary",
        "loop",
        "timing-json",
        "timing-trace",
    ):
        assert f"--{option} " in text
    first, second = cli.succeeds("wanrun", "--artifact", toy_artifact, "--list").splitlines()
    assert first.startswith("wan2.1-t2v  sha256:")
    assert second == "96x64x9-b1-cfg  targets: cpu"


LOADED = """
import sys
sys.argv = ["wanrun", *sys.argv[1:]]
import wanrun
{}
heavy = {{"jax", "numpy", "orbax", "tensorstore", "ml_dtypes", "PIL"}} & sys.modules.keys()
assert not heavy, heavy
"""


def _seconds(command: list[str], runs: int = 7) -> float:
    """Median wall time of a command."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("import", ""),
        ("help", "from wanrun.cli import wanrun\nfrom wanrun.console import run\nassert run(wanrun) == 0"),
        ("list", "from wanrun.cli import wanrun\nfrom wanrun.console import run\nassert run(wanrun) == 0"),
    ],
)
def test_light_commands_load_nothing_heavy(what: str, code: str, toy_artifact: Path) -> None:
    arguments = {"import": [], "help": ["--help"], "list": ["--artifact", str(toy_artifact), "--list"]}[what]
    command = [sys.executable, "-c", LOADED.format(code), *arguments]
    assert _seconds(command) - _seconds([sys.executable, "-c", "pass"]) < 0.25
