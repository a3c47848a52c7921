"""Ways to damage an artifact, and what the tests of bad input share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.manifests import programs_of
from wanrun.artifact.manifest import digests_of, read_manifest

PROFILE = "96x64x9-b1-cfg"
USED = ("decode_first", "decode_video", "denoise_step", "encode_text_64", "prepare")
"""The programs that a run with short prompts loads."""
PROGRAMS = tuple(sorted((*USED, "denoise_loop", "encode_text_128", "encode_text_256", "encode_text")))

Refused = Callable[..., str]
Declines = Callable[..., dict[str, Any]]


def linked(artifact: Path, folder: Path) -> Path:
    """Makes folder an artifact with a manifest of its own, whose folders are links to another's."""
    folder.mkdir()
    for entry in artifact.iterdir():
        if entry.is_dir():
            (folder / entry.name).symlink_to(entry)
        else:
            shutil.copy(entry, folder)
    return folder


def own(artifact: Path, folder: str) -> None:
    """Copies a folder that was a link, so that the test may damage what is in it."""
    path = artifact / folder
    if path.is_symlink():
        original = path.resolve()
        path.unlink()
        shutil.copytree(original, path)


def flag(name: str) -> str:
    """How the command line spells an option, for ``WanError.spelled``."""
    return f"--{name.replace('_', '-')}"


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith(("error: ", '{"error": ')) and "internal error" not in line
    assert not any(text.startswith("wrote") for text in output.out.splitlines())
    return line


def flip(path: Path, offset: int) -> None:
    """Flips one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def edit(artifact: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edits manifest.json as text, so that its digest is that of the content before."""
    path = artifact / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def resealed(data: dict[str, Any]) -> dict[str, Any]:
    """A manifest's JSON with digests that fit, as somebody who means harm would make them.

    What has no such records, and so no digests, stays as it is.
    """
    try:
        return data | digests_of(data)
    except (ValueError, LookupError, TypeError, AttributeError):
        return data


def edit_environment(artifact: Path, **facts: Any) -> None:
    """Changes what the manifest says that its target was built with, as if it had been built there."""
    manifest = read_manifest(artifact)
    target = manifest.targets["cpu"]
    changed = msgspec.structs.replace(target, environment={**target.environment, **facts})
    manifest.changed(targets={"cpu": changed}).write(artifact)


def executable(artifact: Path, name: str) -> Path:
    target = read_manifest(artifact).targets["cpu"]
    return artifact / target.folder / target.executables[PROFILE][name].file


def program(artifact: Path, name: str) -> Path:
    return artifact / programs_of(read_manifest(artifact), PROFILE)[name].file


# The manifest.
