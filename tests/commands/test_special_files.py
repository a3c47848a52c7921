"""FIFOs, devices and endless files where an artifact's files should be: one line and exit code 3, at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.damage import executable, program
from wanrun.artifact.manifest import MANIFEST


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


KINDS: dict[str, Callable[[Path], None]] = {"a pipe": os.mkfifo, "a device": _device, "a terabyte": _endless}

PLACES: dict[str, Callable[[Path], Path]] = {
    "manifest": lambda artifact: artifact / MANIFEST,
    "tokenizer": lambda artifact: artifact / "tokenizer" / "tokenizer.json",
    "program": lambda artifact: program(artifact, "denoise_step"),
    "executable": lambda artifact: executable(artifact, "denoise_step"),
    "chunk": lambda artifact: next(
        path
        for path in sorted((artifact / "weights" / "transformer").rglob("*"))
        if path.is_file() and path.name != "zarr.json" and path.parent.name != "transformer"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_run_refuses_it(place: str, kind: str, artifact_copy: Path, tmp_path: Path) -> None:
    path = PLACES[place](artifact_copy)
    path.unlink()
    KINDS[kind](path)
    output = tmp_path / "video.npy"
    command = [sys.executable, "-m", "wanrun", "--artifact", artifact_copy, "--prompt", "a", "--steps", "1"]
    done = subprocess.run(
        [*command, "--output", output, "--no-embedding-cache"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.startswith("error: "), output.exists()) == (3, True, False), line
    assert path.name in line
