"""``wanrun --check``: every file that the manifest lists is read, without JAX and without the build extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.damage import flip
from helpers.refusals import refuses
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import ArtifactError
from wanrun.intact import check_intact

pytestmark = pytest.mark.slow

COMMAND = """
import sys
sys.modules |= {"wanbuild": None, "orbax": None, "flax": None, "torch": None}
from wancli.run import wanrun
from wancli.console import run
code = run(wanrun, [sys.argv[1], "--check"])
sys.exit(code or 9 * ("jax" in sys.modules))
"""


def test_a_whole_artifact(toy_artifact: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(toy_artifact)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    assert last.startswith(f"{toy_artifact} ")
    assert last.endswith(read_manifest(toy_artifact).content_digest)
    assert [line.split()[0] for line in lines[:3]] == ["text_encoder", "transformer", "vae"]
    assert lines[-1].startswith("target cpu: ")


@pytest.mark.parametrize(
    "of", ["weights/vae", "programs", "executables/cpu", "tokenizer", "requirements.txt"]
)
def test_one_bit(artifact_copy: Path, of: str) -> None:
    place = artifact_copy / of
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    path = max(files, key=lambda one: one.stat().st_size)
    flip(path, path.stat().st_size // 2)
    with refuses("damaged", ArtifactError, what=path, remedy="copy"):
        check_intact(open_artifact(artifact_copy), lambda line: None)
