"""The adapters of a generation's LoRAs are those that were chosen, and are read once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.manifests import plain_adapter, plain_manifest, write_adapter
from wanrun.artifact.artifact import Artifact
from wanrun.errors import AdapterError
from wanrun.files import file_sha256
from wanrun.request.adapters import ChosenLora, applied_loras

SHAPES = {"transformer/blocks/norm2/bias": (3, 8)}


def chosen(path: Path, strength: float, file: bool) -> ChosenLora:
    return ChosenLora(
        name=path.stem,
        sha256=file_sha256(path),
        strengths={"transformer": strength},
        file=str(path) if file else None,
    )


def test_of_the_artifact_and_of_a_file(tmp_path: Path) -> None:
    manifest = plain_manifest(adapters={"style": plain_adapter("style")})
    (tmp_path / "adapters").mkdir()
    own = write_adapter(tmp_path / "adapters" / "style.safetensors", SHAPES)
    other = write_adapter(tmp_path / "other.safetensors", SHAPES, rank=3)
    loras = chosen(own, 0.5, file=False), chosen(other, -1.0, file=True)
    artifact = Artifact(manifest, tmp_path)
    applied = applied_loras(loras, artifact)
    assert [(one.file.path, one.strengths["transformer"]) for one in applied] == [(own, 0.5), (other, -1.0)]
    again = applied_loras(loras, artifact)
    assert all(one.file is two.file for one, two in zip(applied, again, strict=True))
    assert applied_loras((), artifact) == ()


def test_another_file_than_was_chosen(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "style.safetensors", SHAPES)
    lora, nothing = chosen(path, 1.0, file=True), SimpleNamespace()
    unread: Any = nothing
    write_adapter(path, SHAPES, rank=5)
    with pytest.raises(AdapterError) as caught:
        applied_loras([lora], unread)
    assert (caught.value.expected, caught.value.found) == (lora.sha256, file_sha256(path))


def test_one_that_the_artifact_has_no_more(tmp_path: Path) -> None:
    """As where a server opens a model again whose adapters were removed."""
    path = write_adapter(tmp_path / "style.safetensors", SHAPES)
    with pytest.raises(AdapterError, match="style"):
        applied_loras([chosen(path, 1.0, file=False)], Artifact(plain_manifest(), tmp_path))
