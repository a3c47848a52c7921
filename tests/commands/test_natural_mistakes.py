"""What people get wrong, one row each: the command, its exit code, and a line that leads on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import pytest
from safetensors.numpy import save_file

from wanbuild.cli import wanbuild
from wancli.console import run
from wancli.run import wanrun
from wanrun.denoising.solvers import SOLVERS

COMMANDS: Mapping[str, click.Command] = {"wanrun": wanrun, "wanbuild": wanbuild}


class Mistake(NamedTuple):
    """A command line and what comes of it.

    Attributes:
        line: the words; ARTIFACT, CHECKPOINT, VIDEO, EMPTY and WEIGHTS are paths.
        code: the exit code.
        says: what the only line has in it, with the same names.
    """

    line: str
    code: int
    says: str


FOX = "wanrun ARTIFACT --prompt fox"
SHAPE = "wanbuild compile --size 96x64 --frames 9"

MISTAKES = [
    # The artifact.
    Mistake(
        "wanrun --prompt fox",
        2,
        "no artifact was given; name its folder: wanrun DIR, or --artifact DIR, or WANRUN_ARTIFACT=DIR",
    ),
    Mistake("wanrun ARTIFACT", 2, "no prompt was given; pass --prompt TEXT"),
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
    Mistake("wanrun WEIGHTS --prompt fox", 3, "a file of weights; convert the checkpoint that it belongs to"),
    Mistake("wanrun RECIPE --prompt fox", 3, "a recipe; build it: wanbuild build RECIPE"),
    # Options of other tools: test_other_tools.py has those that are none here.
    Mistake("wanrun ARTIFACT -p fox --length 10", 2, "or build one: use 9 or 13"),
    Mistake("wanrun ARTIFACT -p fox --size 60x30", 2, "or build one: use 64x32 or 48x32"),
    Mistake("wanrun ARTIFACT -p fox -o cat.avi", 2, "expected a name that ends in .mp4"),
    # What is not built.
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
    # Values.
    Mistake(f"{FOX} --size 96", 2, "WIDTHxHEIGHT such as 832x480"),
    Mistake(f"{FOX} --num-inference-steps 0", 2, "--steps is out of range; expected 1 to 10000; found 0"),
    Mistake(f"{FOX} --steps many", 2, "Invalid value for '--steps'"),
    Mistake(f"{FOX} --seed -2", 2, "--seed is out of range; expected an integer, at least 0, or random"),
    Mistake(f"{FOX} --seed any", 2, "'any' is neither an integer nor random"),
    Mistake(f"{FOX} --sampler no-such", 2, ", ".join(map(repr, SOLVERS))),
    Mistake(f"{FOX} --sampler uni_pc --fps 0", 2, "--fps is out of range"),
    Mistake(f"{FOX} --timesteps 999;500", 2, "numbers with commas between them"),
    Mistake(f"{FOX} --fps 0", 2, "--fps is out of range; expected 0.1 to 240"),
    Mistake(f"{FOX} --verify md5", 2, "'fast', 'sha256'"),
    Mistake(f"{FOX} --guidance_scale_2 3", 2, "this model has one transformer; leave it out"),
    Mistake(f"{FOX} --image VIDEO", 2, "--image cannot be used with wan2.1-t2v"),
    Mistake(f"{FOX} --text-encoder-device cuda", 2, "expected cpu, or nothing"),
    Mistake(f"{FOX} --weights /nowhere", 2, "/nowhere"),
    # Files.
    Mistake(
        f"{FOX} --output cat.avi",
        2,
        "expected a name that ends in .mp4, .mov, .webm, .gif, .webp, .png, .npy",
    ),
    Mistake(f"{FOX} --output /nowhere/cat.mp4", 2, "mkdir -p /nowhere"),
    Mistake(f"{FOX} --save_file VIDEO", 2, "pass --overwrite to replace it, or another --output"),
    Mistake(f"{FOX} --output {{n}}.mp4", 2, "write {{ and }} for braces"),
    Mistake(f"{FOX} --prompts EMPTY", 2, "--prompt and --prompts exclude each other; pass one of them"),
    Mistake("wanrun ARTIFACT --prompts EMPTY", 2, "has no prompt; write one prompt a line"),
    Mistake("wanrun ARTIFACT --prompts nowhere.txt", 2, "nowhere.txt cannot be read; found No such file"),
    Mistake(f"{FOX} --latents VIDEO", 2, "give a float32 .npy file"),
    Mistake(f"{FOX} --timing-json /nowhere/t.json", 2, "name a file in a writable folder"),
    # wanbuild.
    Mistake("wanbuild convert CHECKPOINT", 2, "no artifact was given; name its folder"),
    Mistake("wanbuild convert CHECKPOINT ARTIFACT", 2, "pass --force to replace it"),
    Mistake("wanbuild convert nowhere new", 4, "give the checkpoint's folder or its hub id, owner/name"),
    Mistake(
        "wanbuild convert WEIGHTS new",
        4,
        "give it with the other parts: wanbuild convert --artifact DIR --transformer",
    ),
    Mistake("wanbuild convert --artifact new --revision v1 --transformer WEIGHTS", 2, "leave --revision out"),
    Mistake("wanbuild convert --artifact new", 2, "there is nothing to convert; expected SOURCE"),
    Mistake(
        "wanbuild convert --artifact new --transformer WEIGHTS",
        2,
        "found no --vae, no --text-encoder, no --tokenizer; give the rest",
    ),
    Mistake(
        "wanbuild convert CHECKPOINT new --image-encoder WEIGHTS",
        2,
        "CHECKPOINT has no such component: --image-encoder",
    ),
    Mistake("wanbuild convert VIDEO new", 4, "give the checkpoint's folder or its hub id"),
    Mistake(
        "wanbuild compile ARTIFACT --target tpu", 2, "name the chip: --target v4 or v5e or v5p or v6e or v7x"
    ),
    Mistake("wanbuild compile ARTIFACT --num-frames 80", 2, "use 77 or 81"),
    Mistake("wanbuild compile ARTIFACT --size 100x100", 2, "use 96x96 or 96x112"),
    Mistake("wanbuild inspect CHECKPOINT", 3, "convert it: wanbuild convert CHECKPOINT --artifact DIR"),
    Mistake("wanbuild inspect", 2, "name its folder: wanbuild inspect DIR"),
    Mistake("wanbuild verify ARTIFACT --record --source x", 2, "run verify twice"),
    Mistake("wanrun", 2, "no artifact was given; name its folder: wanrun DIR"),
    Mistake("wanrun animate ARTIFACT", 2, "wanrun has no command animate"),
    Mistake("wanbuild build CHECKPOINT", 2, "wanbuild convert CHECKPOINT --artifact DIR"),
    Mistake("wanbuild build nowhere.toml", 2, "nowhere.toml cannot be read"),
    Mistake("wanbuild plan wan3-t2v --target v6e", 2, "wan2.1-t2v"),
]


@pytest.fixture(scope="module")
def paths(
    toy_artifact: Path, toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("mistakes")
    for name, content in (
        ("cat.mp4", b"a video"),
        ("empty.txt", b"\n"),
        ("a.toml", b""),
    ):
        (folder / name).write_bytes(content)
    save_file({"blocks.0.self_attn.q.weight": np.zeros(2, np.float32)}, folder / "x.safetensors")
    return {
        "ARTIFACT": str(toy_artifact),
        "CHECKPOINT": str(toy_checkpoint),
        "VIDEO": str(folder / "cat.mp4"),
        "EMPTY": str(folder / "empty.txt"),
        "WEIGHTS": str(folder / "x.safetensors"),
        "RECIPE": str(folder / "a.toml"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.line)
def test_a_mistake_ends_in_a_line_that_leads_on(
    mistake: Mistake,
    paths: Mapping[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    def filled(text: str) -> str:
        return re.sub(r"\b[A-Z]{5,}\b", lambda match: paths.get(match[0], match[0]), text)

    program, *arguments = mistake.line.split()
    code = run(COMMANDS[program], list(map(filled, arguments)))
    (line,) = capsys.readouterr().err.splitlines()
    assert code == mistake.code, line
    assert line.startswith("error: ")
    assert filled(mistake.says) in line
    assert list(tmp_path.iterdir()) == []
