"""Bad requests: one line that leads on, an exit code, found before jax is imported, and nothing written."""

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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers import UNPRIVILEGED
from wancli.console import run
from wancli.run import wanrun
from wanrun.denoising.solvers import SOLVERS

pytestmark = pytest.mark.slow


class Mistake(NamedTuple):
    """A command line and what comes of it.

    Attributes:
        line: the words; ARTIFACT and CHECKPOINT are paths, other names are those of ``write_files``.
        code: the exit code.
        says: what the only line has in it, with the same names; parts have an ellipsis between them.
    """

    line: str
    code: int
    says: str


FOX = "wanrun ARTIFACT --prompt fox"
TWO = "wanrun ARTIFACT --prompts two.txt"
SHAPE = "wanbuild compile --size 96x64 --frames 9"
LATENTS = (1, 16, 3, 8, 12)
LATENTS_FIT = "the initial latents do not fit the profile; expected float32 (1, 16, 3, 8, 12); found"
LONG = "long" * 70

ARTIFACTS = [
    Mistake(
        "wanrun --prompt fox",
        2,
        "no artifact was given; name its folder: wanrun DIR, or --artifact DIR, or WANRUN_ARTIFACT=DIR",
    ),
    Mistake("wanrun", 2, "no artifact was given; name its folder: wanrun DIR"),
    Mistake("wanrun ARTIFACT", 2, "no prompt was given; pass --prompt TEXT (an empty one is allowed)"),
    Mistake("wanrun ARTIFACT --artifact ARTIFACT --prompt fox", 2, "the artifact is given twice"),
    Mistake("wanrun nowhere --prompt fox", 3, "found no such folder; make one with wanbuild convert"),
    Mistake(
        "wanrun Wan-AI/Wan2.1-T2V-1.3B-Diffusers --prompt fox",
        3,
        "it may be a hub id; convert it: wanbuild convert Wan-AI/Wan2.1-T2V-1.3B-Diffusers --artifact DIR",
    ),
    Mistake("wanrun Wan-AI/Wan2.1", 3, "convert it: wanbuild convert Wan-AI/Wan2.1 --artifact DIR"),
    Mistake(
        "wanrun CHECKPOINT --prompt fox",
        3,
        "a checkpoint; convert it: wanbuild convert CHECKPOINT --artifact",
    ),
    Mistake(
        "wanrun x.safetensors --prompt fox", 3, "a file of weights; convert the checkpoint that it belongs to"
    ),
    Mistake("wanrun a.toml --prompt fox", 3, "a recipe; build it: wanbuild build a.toml"),
    Mistake("wanrun animate ARTIFACT", 2, "wanrun has no command animate"),
]

NOT_BUILT = [
    Mistake(
        f"{FOX} --size 1280x720",
        3,
        "wanbuild compile --size 1280x720 --frames 9 --guidance --artifact ARTIFACT",
    ),
    Mistake(
        f"{FOX} --resolution 64x96",
        3,
        "wanbuild compile --size 64x96 --frames 9 --guidance --artifact ARTIFACT",
    ),
    Mistake(
        f"{FOX} --num_frames 81",
        3,
        "; pass --window-frames 9 for windows that are blended, or choose one of these, or have it built "
        "with --build, or add one with wanbuild compile --size 96x64 --frames 81 --guidance --artifact "
        "ARTIFACT",
    ),
    Mistake(f"{FOX} --num_videos_per_prompt 2", 3, f"{SHAPE} --guidance --num-videos 2 --artifact ARTIFACT"),
    Mistake(
        f"{FOX} --profile 96x64", 3, "no profile is named '96x64'; expected one of 96x64x9-b1-cfg; choose"
    ),
    Mistake(f"{FOX} --profile 96x64x9-b1-cfg --frames 81", 2, "leave out --frames or --profile"),
    Mistake(f"{FOX} --target tpu", 3, f"{SHAPE} --guidance --target v6e --artifact ARTIFACT"),
    Mistake(f"{FOX} --target h100", 3, f"{SHAPE} --guidance --target h100 --artifact ARTIFACT"),
]

# Each option once: tests/runtime/request has the values that it cannot have, test_other_tools the options
# that are none here, and test_expert_options those of two experts.
OPTIONS = [
    Mistake("wanrun ARTIFACT -p fox --length 10", 2, "or build one: use 9 or 13"),
    Mistake("wanrun ARTIFACT -p fox --size 60x30", 2, "or build one: use 64x32 or 48x32"),
    Mistake(f"{FOX} --size 96", 2, "--size … '96' … WIDTHxHEIGHT such as 832x480"),
    Mistake(f"{FOX} --size 0x64", 2, "--size … '0x64'"),
    Mistake(f"{FOX} --frames many", 2, "--frames … 'many'"),
    Mistake(f"{FOX} --num-inference-steps 0", 2, "--steps is out of range; expected 1 to 10000; found 0"),
    Mistake(f"{FOX} --steps many", 2, "Invalid value for '--steps'"),
    Mistake(f"{FOX} --seed -2", 2, "--seed is out of range; expected an integer, at least 0, or random"),
    Mistake(f"{FOX} --seed {2**64}", 2, f"the seed is out of range … found {2**64}"),
    Mistake(f"{FOX} --seed any", 2, "'any' is neither an integer nor random"),
    Mistake(f"{FOX} --sampler no-such", 2, "'no-such' … " + ", ".join(map(repr, SOLVERS))),
    Mistake(f"{FOX} --timesteps 999;500", 2, "numbers with commas between them … '999;500'"),
    Mistake(f"{FOX} --timesteps 5,0", 2, "--timesteps is out of range … positive numbers … found [5.0, 0.0]"),
    Mistake(
        f"{FOX} --steps 3 --timesteps 1000,500",
        2,
        "--steps and --timesteps contradict each other … expected 2 steps … leave --steps out",
    ),
    Mistake(f"{FOX} --guidance-scale nan", 2, "--guidance-scale is out of range … found nan"),
    Mistake(f"{FOX} --guidance_scale_2 3", 2, "this model has one transformer; leave it out"),
    Mistake(f"{FOX} --boundary 0.5", 2, "--boundary has no effect: this model has one transformer"),
    Mistake(f"{FOX} --boundary 1.01", 2, "--boundary is out of range … 0 to 1 … found 1.01"),
    Mistake(f"{FOX} --loop while", 2, "--loop … 'while' … 'step', 'scan'"),
    Mistake(f"{FOX} --flow-shift 0", 2, "--flow-shift is out of range … a positive number … found 0.0"),
    Mistake(f"{FOX} --flow-shift 1e9 --steps 50", 2, "not distinct in float32 … fewer steps"),
    Mistake(f"{FOX} --sampler uni_pc --fps 0", 2, "--fps is out of range; expected 0.1 to 240 … found 0.0"),
    Mistake(f"{FOX} --verify md5", 2, "--verify … 'md5' … 'fast', 'sha256'"),
    Mistake(f"{TWO} --memory much", 2, "--memory … 'auto', 'low'"),
    Mistake(f"{FOX} --image cat.mp4", 2, "--image cannot be used with wan2.1-t2v"),
    Mistake(f"{FOX} --text-encoder-device cuda", 2, "expected cpu, or nothing"),
    Mistake(f"{FOX} --weights /nowhere", 2, "/nowhere"),
    Mistake(f"{FOX} --colour red", 2, "--colour … wanrun --help"),
]

FILES = [
    Mistake(
        f"{FOX} --output cat.avi",
        2,
        "no known video format … expected a name that ends in .mp4, .mov, .webm, .gif, .webp, .png, .npy",
    ),
    Mistake(f"{FOX} --output out", 2, "no known video format"),
    Mistake(f"{FOX} --output missing/cat.mp4", 2, "the output folder missing is not there; mkdir -p missing"),
    Mistake(f"{FOX} --output read-only/cat.mp4", 2, "the output folder read-only is not writable"),
    Mistake(
        f"{FOX} --save_file cat.mp4",
        2,
        "the output cat.mp4 exists … pass --overwrite to replace it, or another --output",
    ),
    Mistake(f"{FOX} --output folder.mp4", 2, "folder.mp4 is a folder"),
    Mistake(f"{FOX} --output folder.mp4 --overwrite", 2, "folder.mp4 is a folder"),
    Mistake(f"{FOX} --output {LONG}.mp4", 2, "long.mp4 cannot be written … too long"),
    Mistake(f"{FOX} --output {{n}}.mp4", 2, "unknown field … found {n} … write {{ and }} for braces"),
    Mistake(f"{FOX} --save-latents missing/z.npy", 2, "--save-latents … missing … cannot be written"),
    Mistake(f"{FOX} --save-latents read-only/z.npy", 2, "--save-latents … read-only … cannot be written"),
    Mistake(f"{FOX} --save-latents good.npy", 2, "--save-latents good.npy exists … --overwrite"),
    Mistake(
        f"{FOX} --timing-json missing/t.json",
        2,
        "--timing-json … cannot be written … name a file in a writable folder",
    ),
    Mistake(f"{FOX} --timing-json .", 2, "--timing-json … cannot be written"),
    Mistake(f"{FOX} --output o.mp4 --timing-json o.mp4", 2, "o.mp4 is also that of … give each its own name"),
    Mistake(f"{FOX} --output o.mp4 --save-latents ./o.mp4", 2, "is also that of --save-latents"),
    Mistake(f"{FOX} --latents shape.npy", 2, f"{LATENTS_FIT} float32 (1, 16, 2, 8, 12) … (B, C, T, h, w)"),
    Mistake(f"{FOX} --latents dtype.npy", 2, f"{LATENTS_FIT} float64 (1, 16, 3, 8, 12)"),
    Mistake(f"{FOX} --latents nan.npy", 2, "the initial latents are not finite … NaN or infinity"),
    *(
        Mistake(f"{FOX} --latents {name}.npy", 2, f"{name}.npy cannot be read … float32 .npy")
        for name in ("pickled", "huge", "header", "deep", "text")
    ),
    Mistake(f"{FOX} --latents many.npz", 2, "many.npz are not one array … float32 .npy"),
    Mistake(f"{FOX} --latents missing/x.npy", 2, "missing/x.npy … No such file"),
    Mistake(f"{FOX} --latents .", 2, "the latents . cannot be read"),
    Mistake(f"{FOX} --latents cat.mp4", 2, "give a float32 .npy file"),
]

PROMPTS_FILES = [
    Mistake(
        "wanrun ARTIFACT --prompts nowhere.txt",
        2,
        "the prompts file nowhere.txt cannot be read; found No such file",
    ),
    Mistake("wanrun ARTIFACT --prompts .", 2, "the prompts file . cannot be read … Is a directory"),
    Mistake("wanrun ARTIFACT --prompts empty.txt", 2, "empty.txt has no prompt; write one prompt a line"),
    Mistake(f"{TWO} --prompt fox", 2, "--prompt and --prompts exclude each other; pass one of them"),
    # Options come before what is in a file, which is none of prompts here.
    Mistake("wanrun ARTIFACT --prompts cat.mp4 --seed -2", 2, "--seed is out of range … found -2"),
    Mistake("wanrun ARTIFACT --prompts good.npy --steps 0", 2, "--steps is out of range … 1 to 10000"),
    Mistake(f"{TWO} --output {{a}}.mp4", 2, "--output {a}.mp4 has an unknown field … {slug}"),
    Mistake(f"{TWO} --output {{index}}.avi", 2, "1.avi has no known video format"),
    Mistake(f"{TWO} --output missing/o.gif", 2, "the output folder missing is not there; mkdir -p missing"),
    Mistake(f"{TWO} --output read-only/o.gif", 2, "the output folder read-only is not writable"),
    Mistake(f"{TWO} --save-latents {{z}}.npy", 2, "--save-latents {z} … unknown field"),
    Mistake(f"{TWO} --save-latents read-only/z.npy", 2, "--save-latents … cannot be written"),
    Mistake(f"{TWO} --latents shape.npy", 2, f"{LATENTS_FIT} float32 (1, 16, 2, 8, 12)"),
    Mistake(f"{TWO} --timing-json two.txt", 2, "the output two.txt is also that of --prompts"),
    Mistake(f"{TWO} --timing-json ARTIFACT/t", 2, "lies inside the artifact"),
]

WANBUILD = [
    Mistake("wanbuild convert CHECKPOINT", 2, "no artifact was given; name its folder"),
    Mistake("wanbuild convert CHECKPOINT ARTIFACT", 2, "pass --force to replace it"),
    Mistake("wanbuild convert nowhere new", 4, "give the checkpoint's folder or its hub id, owner/name"),
    Mistake(
        "wanbuild convert x.safetensors new",
        4,
        "give it with the other parts: wanbuild convert --artifact DIR --transformer",
    ),
    Mistake(
        "wanbuild convert --artifact new --revision v1 --transformer x.safetensors",
        2,
        "leave --revision out",
    ),
    Mistake("wanbuild convert --artifact new", 2, "there is nothing to convert; expected SOURCE"),
    Mistake(
        "wanbuild convert --artifact new --transformer x.safetensors",
        2,
        "found no --vae, no --text-encoder, no --tokenizer; give the rest",
    ),
    Mistake(
        "wanbuild convert CHECKPOINT new --image-encoder x.safetensors",
        2,
        "CHECKPOINT has no such component: --image-encoder",
    ),
    Mistake("wanbuild convert cat.mp4 new", 4, "give the checkpoint's folder or its hub id"),
    Mistake(
        "wanbuild compile ARTIFACT --target tpu", 2, "name the chip: --target v4 or v5e or v5p or v6e or v7x"
    ),
    Mistake("wanbuild compile ARTIFACT --num-frames 80", 2, "use 77 or 81"),
    Mistake("wanbuild compile ARTIFACT --size 100x100", 2, "use 96x96 or 96x112"),
    Mistake("wanbuild inspect CHECKPOINT", 3, "convert it: wanbuild convert CHECKPOINT --artifact DIR"),
    Mistake("wanbuild inspect", 2, "name its folder: wanbuild inspect DIR"),
    Mistake("wanbuild verify ARTIFACT --record --source x", 2, "run verify twice"),
    Mistake("wanbuild build CHECKPOINT", 2, "wanbuild convert CHECKPOINT --artifact DIR"),
    Mistake("wanbuild build nowhere.toml", 2, "nowhere.toml cannot be read"),
    Mistake("wanbuild plan wan3-t2v --target v6e", 2, "wan2.1-t2v"),
]

# Runs each command line here, and prints what came out of it and what was imported.
RUN_ALL = """
import contextlib, io, json, sys
from wanbuild.cli import wanbuild
from wancli.run import wanrun
from wancli.console import run
commands = {"wanrun": wanrun, "wanbuild": wanbuild}
for program, *arguments in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        code = run(commands[program], arguments)
    heavy = sorted({"jax", "orbax", "tensorstore"} & sys.modules.keys())
    print(json.dumps([code, err.getvalue(), out.getvalue(), heavy]))
"""


def write_files(folder: Path) -> None:
    """What the bad requests name: results that are there, initial latents, and prompts."""
    (folder / "read-only").mkdir(mode=0o555)
    (folder / "folder.mp4").mkdir()
    for name, content in (
        ("cat.mp4", b"the only copy"),
        ("empty.txt", b"\n \n"),
        ("two.txt", b"a fox\na cat\n"),
        ("a.toml", b""),
        ("text.npy", b"no array"),
        ("deep.npy", b"\x93NUMPY\x01\x00\x29\x23" + b"-" * 9000 + b"1\n"),
    ):
        (folder / name).write_bytes(content)
    huge = b"\x93NUMPY\x01\x00v\x00" + (
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 99), }".ljust(117) + b"\n"
    )
    (folder / "huge.npy").write_bytes(huge)
    (folder / "header.npy").write_bytes(huge[:8] + bytes([huge[8] ^ 0x40]) + huge[9:])  # ends within its dict
    noise = np.random.default_rng(7).standard_normal(LATENTS, np.float32)
    np.save(folder / "good.npy", noise)
    np.save(folder / "shape.npy", noise[:, :, :2])
    np.save(folder / "dtype.npy", noise.astype(np.float64))
    np.save(folder / "pickled.npy", np.array([{"a": 1}]), allow_pickle=True)
    np.savez(folder / "many.npz", a=noise, b=noise)
    noise[0, 3, 1, 2, 5] = np.nan
    np.save(folder / "nan.npy", noise)
    save_file({"blocks.0.self_attn.q.weight": np.zeros(2, np.float32)}, folder / "x.safetensors")


@pytest.mark.parametrize(
    "mistakes",
    [ARTIFACTS, NOT_BUILT, OPTIONS, FILES, PROMPTS_FILES, WANBUILD],
    ids=["artifacts", "not built", "options", "files", "prompts files", "wanbuild"],
)
def test_a_mistake_ends_in_a_line_that_leads_on(
    mistakes: list[Mistake], toy_artifact: Path, toy_checkpoint: Path, tmp_path: Path
) -> None:
    """All of a kind in one process to which file permissions apply, for the price of one start."""
    write_files(tmp_path)
    paths = {"ARTIFACT": str(toy_artifact), "CHECKPOINT": str(toy_checkpoint)}

    def filled(text: str) -> str:
        return re.sub(r"\b(ARTIFACT|CHECKPOINT)\b", lambda match: paths[match[0]], text)

    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    done = subprocess.run(
        [sys.executable, UNPRIVILEGED, sys.executable, "-c", RUN_ALL],
        input=json.dumps([list(map(filled, mistake.line.split())) for mistake in mistakes]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for mistake, answer in zip(mistakes, done.stdout.splitlines(), strict=True):
        code, err, printed, heavy = json.loads(answer)
        assert (code, printed) == (mistake.code, ""), (mistake.line, err)
        assert heavy == [] or mistake.line.startswith("wanbuild "), mistake.line
        (line,) = err.splitlines()
        assert line.startswith("error: ") and "internal error" not in line, (mistake.line, line)
        for part in filled(mistake.says).split(" … "):
            assert part in line, mistake.line
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


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
