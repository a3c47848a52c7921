"""Weights that are no chunk files of ours, as plain Orbax and TensorStore save them again."""

from __future__ import annotations

import functools
import json
import operator
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orbax.checkpoint as ocp
import pytest

from helpers.stored_weights import (
    BF16,
    BIG,
    LITTLE,
    Stored,
    flip,
    parameter_of,
    read,
    read_one,
    refusal,
    write_zarr3,
)
from wanrun.artifact.layout import array_folder
from wanrun.artifact.manifest import Component
from wanrun.artifact.parameters import Parameter
from wanrun.errors import ArtifactError
from wanrun.weights import tensorstore_reader as tensorstore_restore
from wanrun.weights.restore import Restore
from wanrun.weights.tensorstore_reader import TensorStoreReader, needs_tensorstore


def tree_of(component: Component, values: Mapping[str, bytes]) -> dict[str, Any]:
    """Nested dicts of arrays, as a user of plain Orbax has them."""
    tree: dict[str, Any] = {}
    for path, data in values.items():
        layout = component.parameters[path].layout
        *parents, leaf = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        dtype = BF16 if layout.dtype == "bfloat16" else np.dtype(layout.dtype)
        node[leaf] = np.frombuffer(data, dtype).reshape(layout.shape)
    return tree


# --- forms of a checkpoint ----------------------------------------------------------------------------------


def _pytree(folder: Path, tree: Any, chunk_bytes: int | None = None, **options: Any) -> None:
    import jax

    arguments = None
    if chunk_bytes is not None:
        arguments = jax.tree.map(lambda value: ocp.SaveArgs(chunk_byte_size=chunk_bytes), tree)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(folder, tree, save_args=arguments)


def _standard(folder: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def _v1(folder: Path, tree: Any) -> None:
    import orbax.checkpoint.experimental.v1 as v1

    v1.save(folder, tree)


def _with_codecs(*codecs: Any, chunk: int = 1) -> Callable[[Path, Any], None]:
    """Arrays written by TensorStore alone, in chunks of every axis's length over ``chunk``."""

    def save(folder: Path, tree: Any) -> None:
        import jax

        for keys, value in jax.tree_util.tree_leaves_with_path(tree):
            path = ".".join(key.key for key in keys)
            write_zarr3(folder / path, value, [-(-size // chunk) for size in value.shape], codecs)

    return save


def _second_api_without_database(folder: Path, tree: Any) -> None:
    folder.mkdir()
    _pytree(folder / "state", tree, use_ocdbt=False, use_zarr3=False)


FORMS: dict[str, Callable[[Path, Any], None]] = {
    "ocdbt zarr": lambda folder, tree: _pytree(folder, tree, use_ocdbt=True, use_zarr3=False),
    "ocdbt zarr3": lambda folder, tree: _pytree(folder, tree, use_ocdbt=True, use_zarr3=True),
    "ocdbt in small chunks": lambda folder, tree: _pytree(folder, tree, 512, use_ocdbt=True),
    "zarr": lambda folder, tree: _pytree(folder, tree, use_ocdbt=False, use_zarr3=False),
    "zarr3": lambda folder, tree: _pytree(folder, tree, use_ocdbt=False, use_zarr3=True),
    "zarr3 in small chunks": lambda folder, tree: _pytree(folder, tree, 512, use_ocdbt=False, use_zarr3=True),
    "not compressed": lambda folder, tree: _pytree(
        folder, tree, use_ocdbt=False, use_zarr3=True, use_compression=False
    ),
    "standard": _standard,
    "second api": _v1,
    "second api without a database": _second_api_without_database,
    "gzip": _with_codecs(LITTLE, {"name": "gzip", "configuration": {"level": 1}}, chunk=3),
    "big endian and crc32c": _with_codecs(BIG, {"name": "crc32c"}),
    "transposed": _with_codecs("transpose", LITTLE, chunk=2),
}


@pytest.fixture(scope="module")
def saved(stored: Stored, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The transformer's checkpoint in a form, made once. Not to be changed."""
    made: dict[str, Path] = {}

    def make(form: str) -> Path:
        if form not in made:
            made[form] = tmp_path_factory.mktemp("saved") / "transformer"
            FORMS[form](made[form], tree_of(stored.component, stored.expected))
        return made[form]

    return make


@pytest.mark.parametrize("form", FORMS)
def test_every_form_restores_to_the_same_bits(
    saved: Callable[[str], Path], stored: Stored, form: str
) -> None:
    component, expected = stored.component, stored.expected
    assert {parameter.layout.dtype for parameter in component.parameters.values()} == {"bfloat16", "float32"}
    assert read(saved(form), component, "sha256") == expected


# Chunk files of exactly our size that hold something else are taken for damaged ones of ours.
@pytest.mark.parametrize("form", [form for form in FORMS if form != "big endian and crc32c"])
def test_the_restore_reads_every_form(
    saved: Callable[[str], Path], stored: Stored, tmp_path: Path, form: str
) -> None:
    """In the artifact, and elsewhere; several threads ask for the chunks of one parameter."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "transformer").symlink_to(saved(form))
    for artifact, weights in ((tmp_path, None), (tmp_path / "nothing", str(tmp_path / "weights"))):
        with ThreadPoolExecutor(4) as pool:
            restore = Restore(artifact, "transformer", stored.component, pool, "sha256", weights=weights)
            tree = restore.result()
        for path, data in stored.expected.items():
            assert functools.reduce(operator.getitem, path.split("/"), tree).tobytes() == data


@pytest.mark.parametrize("form", FORMS)
def test_forms_that_are_not_chunk_files_are_known(
    saved: Callable[[str], Path], stored: Stored, form: str
) -> None:
    for path, parameter in stored.component.parameters.items():
        assert needs_tensorstore(saved(form) / array_folder(path), parameter.layout)


def test_our_own_layout(stored: Stored) -> None:
    assert read(stored.folder, stored.component, "sha256") == stored.expected
    for path, parameter in stored.component.parameters.items():
        assert not needs_tensorstore(stored.folder / array_folder(path), parameter.layout)


def test_a_damaged_array_of_our_own_is_not_taken_for_another_form(stored: Stored, tmp_path: Path) -> None:
    path, parameter = next(iter(stored.component.parameters.items()))
    folder = tmp_path / "transformer" / array_folder(path)
    assert not needs_tensorstore(folder, parameter.layout)  # nothing there at all
    shutil.copytree(stored.folder, tmp_path / "transformer")
    shutil.rmtree(folder / "c")
    assert not needs_tensorstore(folder, parameter.layout)
    text = (folder / "zarr.json").read_text()
    for damaged in ("", text[:-3], "[" * 100_000):
        (folder / "zarr.json").write_text(damaged)
        assert not needs_tensorstore(folder, parameter.layout)
    (folder / "zarr.json").unlink()
    assert not needs_tensorstore(folder, parameter.layout)
    (folder / "zarr.json").mkdir()
    assert not needs_tensorstore(folder, parameter.layout)


# --- blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [(12, 10), (1, 10), (5, 3), (4, 10), (8, 7)])
@pytest.mark.parametrize("block_bytes", [1, 200, 2**20])
def test_blocks_and_rows_need_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: tuple[int, int], block_bytes: int
) -> None:
    """However chunks, blocks and rows cut axis 0, each chunk is read once and each row is checked."""
    monkeypatch.setattr(tensorstore_restore, "BLOCK_BYTES", block_bytes)
    value = np.random.default_rng(3).standard_normal((12, 10), np.float32)
    write_zarr3(tmp_path / "a.b", value, list(chunk), (LITTLE,))
    parameter = parameter_of(value, 3)
    found = np.zeros(value.nbytes, np.uint8)
    reader = TensorStoreReader(tmp_path, "model")
    reader.read("a/b", parameter, memoryview(found), "sha256")
    assert found.tobytes() == value.tobytes()

    begins = [begin for begin, _ in reader._blocks(reader._open("a/b"), parameter.layout, 0, len(value))]
    assert all(begin % chunk[0] == 0 for begin in begins)
    if block_bytes == 1:
        assert len(begins) == -(-12 // chunk[0])

    # Some rows, of which chunks may hold more.
    for rows in ([0], [1], [0, 2], [1, 2]):
        some = np.zeros(value.nbytes, np.uint8)
        reader.read("a/b", parameter, memoryview(some), "sha256", rows)
        wanted = value.reshape(3, -1)[rows]
        assert some.tobytes() == wanted.tobytes() + bytes(value.nbytes - wanted.nbytes)

    # Every row: a flip in row r is found there, whatever has been read before it.
    for row in range(3):
        wrong = list(parameter.crc32c)
        wrong[row] = "00000000"
        changed = msgspec.structs.replace(parameter, crc32c=tuple(wrong))
        with pytest.raises(ArtifactError, match=f"model/a/b, row {row} has the wrong crc32c"):
            reader.read("a/b", changed, memoryview(found))


# --- damage -------------------------------------------------------------------------------------------------


def test_a_flipped_byte_in_data_without_checksums(plain: tuple[Path, Parameter, np.ndarray]) -> None:
    location, parameter, value = plain
    assert read_one(location, parameter).tobytes() == value.tobytes()
    file = location / "stack" / "c" / "1" / "0" / "0"
    flip(file, 40 * 24 * 2 + 77)
    for verify in ("fast", "sha256"):
        line = refusal(location, parameter, verify)
        assert f"weights are damaged: model/stack, row 3 has the wrong crc32c at {location}" in line
        assert f"expected {parameter.crc32c[3]}; found " in line and "copy the weights again" in line


def test_swapped_rows(plain: tuple[Path, Parameter, np.ndarray], tmp_path: Path) -> None:
    _, parameter, value = plain
    swapped = np.ascontiguousarray(value[[0, 1, 2, 4, 3, 5]])
    write_zarr3(tmp_path / "other" / "stack", swapped, [6, 40, 24], (LITTLE, {"name": "crc32c"}))
    assert "row 3 has the wrong crc32c" in refusal(tmp_path / "other", parameter)


def test_sha256_is_checked_when_asked_for(plain: tuple[Path, Parameter, np.ndarray]) -> None:
    location, parameter, _ = plain
    changed = msgspec.structs.replace(parameter, sha256="0" * 64)
    read_one(location, changed)
    line = refusal(location, changed, "sha256")
    assert "it has the wrong sha256" in line and f"expected {'0' * 64}; found {parameter.sha256}" in line


def test_a_missing_chunk(plain: tuple[Path, Parameter, np.ndarray]) -> None:
    """TensorStore reads it as zeros without a word."""
    location, parameter, _ = plain
    (location / "stack" / "c" / "2" / "0" / "0").unlink()
    assert "row 4 has the wrong crc32c" in refusal(location, parameter)


def test_chunks_of_zeros_that_were_not_stored(tmp_path: Path) -> None:
    value = np.random.default_rng(5).standard_normal((4, 8), np.float32)
    value[2] = 0
    write_zarr3(tmp_path / "model" / "stack", value, [1, 8], (LITTLE,))
    (tmp_path / "model" / "stack" / "c" / "2" / "0").unlink()
    assert read_one(tmp_path / "model", parameter_of(value, 4)).tobytes() == value.tobytes()


def test_a_truncated_chunk(plain: tuple[Path, Parameter, np.ndarray]) -> None:
    location, parameter, _ = plain
    os.truncate(location / "stack" / "c" / "0" / "0" / "0", 100)
    line = refusal(location, parameter)
    assert f"weights cannot be read: model/stack at {location}; found " in line and "copy the weights" in line


@pytest.mark.parametrize("codec", ["crc32c", "gzip"])
def test_damage_that_tensorstore_finds(tmp_path: Path, codec: str) -> None:
    value = np.random.default_rng(6).standard_normal((4, 500), np.float32)
    write_zarr3(tmp_path / "model" / "stack", value, [4, 500], (LITTLE, {"name": codec}))
    (file,) = (file for file in (tmp_path / "model" / "stack" / "c").rglob("*") if file.is_file())
    parameter = parameter_of(value, 4)
    assert read_one(tmp_path / "model", parameter).tobytes() == value.tobytes()
    flip(file, file.stat().st_size // 2)
    line = refusal(tmp_path / "model", parameter)
    assert "weights cannot be read: model/stack" in line or "has the wrong crc32c" in line


def test_a_damaged_database(plain: tuple[Path, Parameter, np.ndarray], tmp_path: Path) -> None:
    _, parameter, value = plain
    for case, damage in {
        "index": lambda folder: flip(folder / "manifest.ocdbt", 40),
        "data": lambda folder: shutil.rmtree(folder / "ocdbt.process_0"),
    }.items():
        folder = tmp_path / case
        _pytree(folder, {"stack": value})
        assert read_one(folder, parameter).tobytes() == value.tobytes()
        damage(folder)
        assert "weights cannot be read: model/stack" in refusal(folder, parameter)


def test_arrays_of_another_model(tmp_path: Path) -> None:
    value = np.random.default_rng(6).standard_normal((4, 30), np.float32)
    parameter = parameter_of(value, 4)
    for name, other in {"dtype": value.astype(BF16), "shape": value[:3], "dimensions": value[0]}.items():
        folder = tmp_path / name
        write_zarr3(folder / "stack", np.ascontiguousarray(other), list(other.shape), (LITTLE,))
        line = refusal(folder, parameter)
        assert "weights do not fit the artifact: model/stack" in line
        assert f"expected float32 (4, 30); found {other.dtype.name} {other.shape}" in line


def test_arrays_that_are_not_there(tmp_path: Path) -> None:
    value = np.random.default_rng(6).standard_normal((4, 30), np.float32)
    _pytree(tmp_path / "database", {"other": value})
    (tmp_path / "empty").mkdir()
    for folder in ("database", "empty", "missing"):
        line = refusal(tmp_path / folder, parameter_of(value, 4))
        assert "weights are missing: model/stack" in line
        assert f"expected an array stack at {tmp_path / folder}; found none" in line


def test_metadata_that_cannot_be_used(plain: tuple[Path, Parameter, np.ndarray]) -> None:
    location, parameter, _ = plain
    metadata = location / "stack" / "zarr.json"
    good = json.loads(metadata.read_text())
    for text in (
        "{",
        json.dumps({**good, "codecs": [{"name": "unheard of"}]}),
        json.dumps({**good, "shape": 3}),
    ):
        metadata.write_text(text)
        assert "weights cannot be read: model/stack" in refusal(location, parameter)


def test_a_read_can_be_cancelled(plain: tuple[Path, Parameter, np.ndarray]) -> None:
    location, parameter, _ = plain
    reader = TensorStoreReader(location, "model")
    reader.cancel()
    with pytest.raises(CancelledError):
        reader.read("stack", parameter, memoryview(bytearray(parameter.layout.nbytes)))
