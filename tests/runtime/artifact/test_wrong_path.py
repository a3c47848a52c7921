"""What is taken for an artifact and is none: one line says what it is, and the command that leads on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from wanrun.artifact.manifest import MANIFEST, read_manifest
from wanrun.artifact.wrong_path import wrong_path
from wanrun.errors import ArtifactError


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@pytest.mark.parametrize(
    ("name", "make", "found", "remedy"),
    [
        ("a", lambda path: None, "no such folder", "make one with wanbuild convert"),
        ("a", Path.mkdir, f"no {MANIFEST} in it", "make one with wanbuild convert"),
        (
            "a",
            lambda path: touch(path / "model_index.json"),
            "a checkpoint",
            "convert it: wanbuild convert a --artifact DIR",
        ),
        (
            "a",
            lambda path: touch(path / "x.safetensors"),
            "a folder of weights",
            "convert the checkpoint that it belongs to: wanbuild convert CHECKPOINT --artifact DIR",
        ),
        (
            "x.safetensors",
            touch,
            "a file of weights",
            "convert the checkpoint that it belongs to: wanbuild convert CHECKPOINT --artifact DIR",
        ),
        ("a.toml", touch, "a recipe", "build it: wanbuild build a.toml"),
        ("a.mp4", touch, "a file", "make one with wanbuild convert"),
        (
            "Wan-AI/Wan2.1",
            lambda path: None,
            "no such folder; it may be a hub id",
            "convert it: wanbuild convert Wan-AI/Wan2.1 --artifact DIR; "
            "if it is an artifact already: hf://Wan-AI/Wan2.1",
        ),
    ],
)
def test_what_it_is_and_what_to_do(
    name: str,
    make: Callable[[Path], object],
    found: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path(name))
    assert wrong_path(Path(name), MANIFEST) == (found, remedy)
    with pytest.raises(ArtifactError, match=f"^{name} is not an artifact; found {found}; {remedy}$"):
        read_manifest(Path(name))
