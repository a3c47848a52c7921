"""``wanbuild verify`` on an artifact's weights: damage of every kind, plain Orbax beside it, memory."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from helpers.damage import flip, linked, own
from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.check import weights
from wanbuild.conversion import orbax
from wanbuild.conversion.convert_request import ConvertRequest
from wanrun import intact
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import ArtifactError


def silent(line: str) -> None:
    del line


@pytest.fixture(scope="module")
def converted(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact without programs, bfloat16 and float32, with a chunk file per layer. Not to be changed."""
    artifact = tmp_path_factory.mktemp("converted") / "artifact"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orbax, "SMALL_BYTES", 0)
        patch.setattr(orbax, "LARGE_BYTES", 4096)
        convert(ConvertRequest(toy_checkpoint, artifact))
    return artifact


@pytest.fixture
def damaged(converted: Path, tmp_path: Path) -> Path:
    """The same for the test to damage."""
    artifact = linked(converted, tmp_path / "artifact")
    own(artifact, "weights")
    return artifact


STACK = "transformer/blocks.attn1.to_q.weight"


def check_weights(artifact: Path, report: Callable[[str], None] = silent) -> None:
    """What ``wanbuild verify`` does with the weights alone."""
    opened = open_artifact(artifact)
    weights.check_places(opened)
    records = ("profiles", "program_sets", "targets", "golden", "embeddings")
    none: dict[str, Any] = {name: {} for name in records}
    intact.check_intact(opened.changed(**none), report)


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


# --- an artifact that is whole ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_whole_artifact(converted: Path) -> None:
    manifest = read_manifest(converted)
    lines: list[str] = []
    check_weights(converted, lines.append)
    weights.check_with_orbax(Artifact(manifest, converted), lines.append)
    assert [line.split()[0] for line in lines] == 2 * ["text_encoder", "transformer", "vae"]
    assert (
        ["intact" in line for line in lines]
        == ["Orbax" not in line for line in lines]
        == 3 * [True] + 3 * [False]
    )


@pytest.mark.slow
def test_through_links(converted: Path, tmp_path: Path) -> None:
    """The weights may lie on another file system."""
    artifact = linked(converted, tmp_path / "artifact")
    (artifact / "weights").unlink()
    (artifact / "weights").mkdir()
    for folder in (converted / "weights").iterdir():
        (artifact / "weights" / folder.name).symlink_to(folder)
    manifest = read_manifest(artifact)
    check_weights(artifact)
    weights.check_with_orbax(Artifact(manifest, artifact), silent)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 20_000, 10**9])
def test_orbax_has_a_batch_at_a_time(converted: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain Orbax never holds more than a batch, and every parameter is in one."""
    monkeypatch.setattr(weights, "BATCH_BYTES", limit)
    restore, sizes, seen = ocp.Checkpointer.restore, [], []

    def watched(self: Any, folder: Path, *arguments: Any, **options: Any) -> Any:
        tree = restore(self, folder, *arguments, **options)
        arrays = [leaf for leaf in jax.tree.leaves(tree) if leaf is not ocp.PLACEHOLDER]
        assert all(type(array) is np.ndarray for array in arrays)
        sizes.append(sum(array.nbytes for array in arrays))
        seen.append(len(arrays))
        return tree

    monkeypatch.setattr(ocp.Checkpointer, "restore", watched)
    manifest = read_manifest(converted)
    component = manifest.components["transformer"]
    manifest = manifest.changed(components={"transformer": component})
    weights.check_with_orbax(Artifact(manifest, converted), silent)
    parameters = component.parameters.values()
    largest = max(parameter.layout.nbytes for parameter in parameters)
    assert sum(seen) == len(parameters) and sum(sizes) == component.nbytes
    assert max(sizes) <= max(limit, largest)
    assert (len(sizes) == len(parameters)) == (limit == 1) and (len(sizes) == 1) == (limit == 10**9)


def test_a_folder_in_place_of_metadata(damaged: Path) -> None:
    path = damaged / "weights" / "transformer" / "_METADATA"
    path.unlink()
    path.mkdir()
    with refuses("damaged", ArtifactError, what=path, found=os.strerror(errno.EISDIR)):
        check_weights(damaged)


# --- what does not belong there -----------------------------------------------------------------------------


def _loop(path: Path) -> None:
    path.symlink_to(path.parent)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, _loop])
@pytest.mark.parametrize(
    "name", ["notes.txt", "vae/manifest.ocdbt", f"{STACK}/.zarray", f"{STACK}/c/3", f"{STACK}/c/0/1"]
)
def test_a_name_that_is_not_listed(damaged: Path, name: str, make: Callable[[Path], object]) -> None:
    path = damaged / "weights" / name
    make(path)
    with refuses("mismatch", ArtifactError, what=path, expected="weights/"):
        check_weights(damaged)


# --- what plain Orbax notices by itself ---------------------------------------------------------------------


def _no_longer_listed(weights_folder: Path) -> None:
    change(
        weights_folder / "transformer" / "_METADATA",
        lambda data: data["tree_metadata"].pop(str(("blocks", "attn1", "to_q", "weight"))),
    )


def _exchange(weights_folder: Path) -> None:
    folder = weights_folder / STACK / "c"
    for old, new in (("0", "spare"), ("1", "0"), ("spare", "1")):
        (folder / old).rename(folder / new)


def _in_zarr(key: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / STACK / "zarr.json", lambda data: data.update({key: value}))


ORBAX_DAMAGES: Mapping[str, tuple[Callable[[Path], object], dict[str, str]]] = {
    "a flipped bit": (lambda folder: flip(folder / STACK / "c/1/0/0", 7), {"what": "transformer"}),
    "cut off": (lambda folder: os.truncate(folder / STACK / "c/1/0/0", 7), {}),
    "a missing chunk": (lambda folder: (folder / STACK / "c/1/0/0").unlink(), {}),
    "a missing array": (lambda folder: shutil.rmtree(folder / STACK), {}),
    "a missing component": (lambda folder: shutil.rmtree(folder / "vae"), {"what": "vae"}),
    "chunks that changed places": (_exchange, {"expected": "row 0"}),
    "another dtype": (
        _in_zarr("data_type", "float16"),
        {"expected": "bfloat16 (3, 40, 40)", "found": "float16 (3, 40, 40)"},
    ),
    "another shape": (
        _in_zarr("shape", [2, 40, 40]),
        {"expected": "bfloat16 (3, 40, 40)", "found": "bfloat16 (2, 40, 40)"},
    ),
    "other codecs": (_in_zarr("codecs", [{"name": "bytes", "configuration": {"endian": "little"}}]), {}),
    "no JSON": (lambda folder: os.truncate(folder / STACK / "zarr.json", 9), {}),
    "a parameter that is not in the tree": (_no_longer_listed, {}),
    "no tree": (lambda folder: (folder / "transformer/_METADATA").unlink(), {}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ORBAX_DAMAGES)
def test_orbax_notices(damaged: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without our own checks before it, which are more exact about what is wrong."""
    # One array a batch: where Orbax stops at an error, others' reads would end in a closed event loop.
    monkeypatch.setattr(weights, "BATCH_BYTES", 1)
    manifest = read_manifest(damaged)
    damage, parts = ORBAX_DAMAGES[kind]
    damage(damaged / "weights")
    with refuses("damaged", ArtifactError, **{"what": "plain Orbax ", "remedy": "copy the artifact"} | parts):
        weights.check_with_orbax(Artifact(manifest, damaged), silent)
    with pytest.raises(ArtifactError):
        check_weights(damaged)
