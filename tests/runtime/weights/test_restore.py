"""Restoring components: the same bits as plain Orbax reads, no copy to the device, and no damage unseen."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import pytest

from helpers.damage import flip
from helpers.devices import on_devices
from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.conversion import orbax as layout_module
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.conversion.writer import ComponentWriter
from wanbuild.mapping.engine import Assignment, Fill
from wanbuild.models.params import LAYERS
from wanbuild.source.safetensors import TensorEntry
from wanrun.artifact.layout import ALIGNMENT, CRC_BYTES, array_folder
from wanrun.artifact.manifest import Component, Manifest, read_manifest
from wanrun.artifact.parameters import flat, nest
from wanrun.errors import ArtifactError
from wanrun.weights import restore as restore_module
from wanrun.weights.restore import Restore

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


def same_bits(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same_tree(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    found, expected = flat(found), flat(expected)
    assert found.keys() == expected.keys()
    assert [path for path in found if not same_bits(found[path], expected[path])] == []


def restore(
    artifact: Path, component: Component, verify: str = "fast", name: str = "model"
) -> dict[str, Any]:
    with ThreadPoolExecutor(3) as pool:
        return Restore(artifact, name, component, pool, verify).result()


class Arrays:
    """A source of tensors that lie in memory."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def entry(self, key: str) -> TensorEntry:
        array = self._arrays[key]
        return TensorEntry(array.dtype, array.shape, 0, array.nbytes, "")

    def eight_bit(self, key: str) -> None:
        return None

    def blocks(self, key: str) -> None:
        return None

    def read_blocks(self, key: str, begin: int, out: np.ndarray) -> None:
        raise NotImplementedError

    def read(self, key: str, begin: int, out: np.ndarray) -> None:
        data = np.ascontiguousarray(self._arrays[key]).reshape(-1).view(np.uint8)
        out[...] = data[begin : begin + out.size]


def write_component(
    root: Path, arrays: Mapping[str, np.ndarray], stacked: frozenset[str] = frozenset()
) -> Component:
    """Writes arrays as the component weights/model of an artifact; those named in stacked row by row."""
    rows: dict[str, np.ndarray] = {}
    assignments = []
    for path, value in arrays.items():
        parts = {f"{path}.{i}": row for i, row in enumerate(value)} if path in stacked else {path: value}
        rows |= parts
        fills = tuple(Fill(key, "copy") for key in parts)
        axes = (LAYERS if path in stacked else None, *(None,) * (value.ndim - 1))
        assignments.append(Assignment(path, value.shape, value.dtype, axes, fills))
    writer = ComponentWriter(root / "weights" / "model", assignments, Arrays(rows))
    for piece in writer.pieces():
        piece.run()
    return writer.finish().component


def random_bits(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Finite values of every size, subnormal ones too."""
    rng = np.random.default_rng(seed)
    largest = {BF16: 0x7F7F, F32: 0x7F7FFFFF}[dtype]
    bits = rng.integers(0, largest, shape, np.uint32) | rng.integers(0, 2, shape, np.uint32) << (
        8 * dtype.itemsize - 1
    )
    return bits.astype(f"u{dtype.itemsize}").view(dtype)


@pytest.fixture(scope="module")
def converted(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """The toy with the default dtypes, so that there are bfloat16 and float32 arrays. Not to be changed."""
    artifact = tmp_path_factory.mktemp("converted") / "artifact"
    convert(ConvertRequest(toy_checkpoint, artifact))
    return artifact, read_manifest(artifact)


class Layered(NamedTuple):
    root: Path
    component: Component
    arrays: dict[str, np.ndarray]


@pytest.fixture
def layered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layered:
    """A component with one chunk file per layer or slice, as arrays of a published size have."""
    monkeypatch.setattr(layout_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(layout_module, "LARGE_BYTES", 6000)
    arrays = {
        "blocks/up/weight": random_bits((4, 40, 24), BF16, 1),
        "blocks/up/bias": random_bits((4, 40), F32, 2),
        "embed": random_bits((96, 32), F32, 3),
    }
    component = write_component(tmp_path, arrays, frozenset({"blocks/up/weight", "blocks/up/bias"}))
    assert [p.layout.chunks for p in component.parameters.values()] == [4, 4, 3]
    return Layered(tmp_path, component, arrays)


def chunk(root: Path, path: str, index: int) -> Path:
    (*_, folder) = (root / "weights/model" / array_folder(path) / "c" / str(index)).rglob("*")
    return folder


# --- what plain Orbax reads -------------------------------------------------------------------------------


def checkpointer_restores(folder: Path, target: Any) -> Any:
    if target is None:
        return ocp.PyTreeCheckpointer().restore(folder)
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    return ocp.PyTreeCheckpointer().restore(folder, item=target, restore_args=arguments)


def standard_restores(folder: Path, target: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, target)


def v1_loads(folder: Path, target: Any) -> Any:
    import orbax.checkpoint.experimental.v1 as v1

    return v1.load(folder) if target is None else v1.load(folder, target)


@pytest.mark.slow
@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize("read", [checkpointer_restores, standard_restores, v1_loads])
def test_what_plain_orbax_reads(
    converted: tuple[Path, Manifest], read: Callable[..., Any], to_device: bool
) -> None:
    """On a device, if it is told of one."""
    artifact, manifest = converted
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def placed(x: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    for name, component in manifest.components.items():
        expected = restore(artifact, component, "sha256", name)
        target = jax.tree.map(placed, expected) if to_device else None
        found = read(artifact / component.folder, target)
        assert not to_device or all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
        assert_same_tree(found, expected)


def test_orbax_reads_the_tree_s_metadata(converted: tuple[Path, Manifest]) -> None:
    artifact, manifest = converted
    for component in manifest.components.values():
        tree = ocp.PyTreeCheckpointer().metadata(artifact / component.folder).item_metadata.tree
        found = {path: (leaf.shape, leaf.dtype.name) for path, leaf in flat(tree).items()}
        assert found == {
            path: (parameter.layout.shape, parameter.layout.dtype)
            for path, parameter in component.parameters.items()
        }


def restore_over_a_mesh(artifact: str) -> None:
    """Restores over eight devices: shards inside chunks and across; prints the axes that cut."""
    mesh, cut = jax.make_mesh((4, 2), ("a", "b")), set[tuple[str, ...]]()

    def target(x: np.ndarray) -> jax.ShapeDtypeStruct:
        spec: list[str | None] = [None] * x.ndim
        if x.shape[-1] % 4 == 0:
            spec[-1] = "a"
        if x.ndim > 1 and x.shape[0] % 2 == 0:
            spec[0] = "b"
        cut.add(tuple(axis for axis in spec if axis))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    for name, component in read_manifest(Path(artifact)).components.items():
        expected = flat(restore(Path(artifact), component, name=name))
        targets = {path: target(x) for path, x in expected.items()}
        for read in (checkpointer_restores, standard_restores, v1_loads):
            found = flat(read(Path(artifact) / component.folder, nest(targets)))
            assert found.keys() == expected.keys()
            for path, array in found.items():
                assert (array.sharding, array.dtype) == (targets[path].sharding, expected[path].dtype)
                assert all(same_bits(one.data, expected[path][one.index]) for one in array.addressable_shards)
    print(json.dumps(sorted(cut)))


@pytest.mark.thorough
def test_orbax_restores_over_eight_devices(
    toy_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A chunk file per layer, so that shards and chunks cross.
    monkeypatch.setattr(layout_module, "SMALL_BYTES", 0)
    convert(ConvertRequest(toy_checkpoint, tmp_path / "artifact"))
    axes = on_devices(8, restore_over_a_mesh, str(tmp_path / "artifact"))
    assert json.loads(axes) == [[], ["a"], ["b"], ["b", "a"]]


def test_zeros_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorStore leaves out chunks that equal the fill value, and Orbax then fails: all files are there."""
    monkeypatch.setattr(layout_module, "SMALL_BYTES", 0)
    stack = random_bits((3, 8, 8), BF16, 5)
    stack[1] = 0
    arrays = {"stack": stack, "bias": np.zeros(40, np.float32), "all": np.zeros((2, 16), BF16)}
    component = write_component(tmp_path, arrays, frozenset({"stack", "all"}))
    assert_same_tree(ocp.PyTreeCheckpointer().restore(tmp_path / component.folder), arrays)
    assert_same_tree(restore(tmp_path, component, "sha256"), arrays)
    assert len([p for p in (tmp_path / component.folder).rglob("c/**/*") if p.is_file()]) == 6


# --- where the arrays lie -----------------------------------------------------------------------------------


def test_arrays_are_aligned_and_share_one_block(converted: tuple[Path, Manifest]) -> None:
    artifact, manifest = converted
    assert set(manifest.components) == {"transformer", "vae", "text_encoder"}
    dtypes = set[str]()
    for name, component in manifest.components.items():
        arrays = flat(restore(artifact, component, name=name))
        assert arrays.keys() == component.parameters.keys()
        dtypes |= {leaf.dtype.name for leaf in arrays.values()}
        places = sorted((leaf.ctypes.data, leaf.nbytes) for leaf in arrays.values())
        assert all(start % ALIGNMENT == 0 for start, _ in places)
        ends = [start + nbytes for start, nbytes in places]
        assert all(0 <= start - end < ALIGNMENT for end, (start, _) in zip(ends, places[1:], strict=False))
    assert dtypes == {"bfloat16", "float32"}


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_device_put_aliases(tmp_path: Path, dtype: np.dtype) -> None:
    arrays = {
        "a": random_bits((5,), dtype, 0),  # puts what follows off a natural boundary
        "stack": random_bits((3, 1024, 515), dtype, 1),
        "whole": random_bits((1023, 2049), dtype, 2),
    }
    component = write_component(tmp_path, arrays, frozenset({"stack"}))
    restored = flat(restore(tmp_path, component))
    for path in ("stack", "whole"):
        placed = jax.device_put(restored[path], jax.devices()[0])
        assert placed.unsafe_buffer_pointer() == restored[path].ctypes.data
        assert same_bits(placed, arrays[path])


def test_the_clock_tells_when_the_first_file_was_read(
    converted: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, manifest = converted
    ticks = iter(range(1, 10_000))
    monkeypatch.setattr(restore_module, "now", lambda: float(next(ticks)))
    with ThreadPoolExecutor(1) as pool:
        reading = Restore(artifact, "text_encoder", manifest.components["text_encoder"], pool)
        reading.result()
    assert reading.started_at == 2
    assert reading.progress[0] == reading.nbytes and reading.ended_at == next(ticks) - 1
    assert reading.nbytes / reading.ended_at < reading.rate < reading.nbytes  # the fastest quarter of all


# --- damage -------------------------------------------------------------------------------------------------


def resized(file: Path, change: int) -> None:
    os.truncate(file, file.stat().st_size + change)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "first byte": (lambda file: flip(file, 0), "row 2 has the wrong crc32c"),
    "middle byte": (lambda file: flip(file, 100), "row 2 has the wrong crc32c"),
    "last byte": (lambda file: flip(file, -1 - CRC_BYTES), "row 2 has the wrong crc32c"),
    "checksum": (lambda file: flip(file, -1), "own crc32c is wrong"),
    "one byte short": (lambda file: resized(file, -1), "wrong size"),
    "without checksum": (lambda file: resized(file, -CRC_BYTES), "wrong size"),
    "empty": (lambda file: os.truncate(file, 0), "wrong size"),
    "too long": (lambda file: resized(file, 1), "wrong size"),
    "missing": (Path.unlink, "cannot be read"),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["blocks/up/weight", "blocks/up/bias"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_noticed(layered: Layered, kind: str, path: str) -> None:
    root, component, arrays = layered
    assert_same_tree(restore(root, component), nest(arrays))
    damage, message = DAMAGES[kind]
    damage(chunk(root, path, 2))
    for verify in ("fast", "sha256"):
        with pytest.raises(ArtifactError, match=message) as caught:
            restore(root, component, verify)
        assert f"model/{path}" in str(caught.value)
        assert "wanbuild convert --force" in str(caught.value)


# Bytes after the checksum change no weight, and TensorStore does not look at them.
@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind != "too long"])
def test_plain_orbax_notices_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(layout_module, "SMALL_BYTES", 0)
    value = random_bits((4, 40, 24), BF16, 1)
    # One array alone: where Orbax stops at an error, other arrays' reads would end in a closed event loop.
    component = write_component(tmp_path, {"weight": value}, frozenset({"weight"}))
    assert same_bits(ocp.PyTreeCheckpointer().restore(tmp_path / component.folder)["weight"], value)
    DAMAGES[kind][0](chunk(tmp_path, "weight", 2))
    with pytest.raises((ValueError, OSError), match=r"DATA_LOSS|NOT_FOUND|Not enough data|CRC"):
        ocp.PyTreeCheckpointer().restore(tmp_path / component.folder)


@pytest.mark.parametrize(("path", "rows"), [("blocks/up/weight", (1, 3)), ("embed", (0, 2))])
def test_swapped_files_are_noticed(layered: Layered, path: str, rows: tuple[int, int]) -> None:
    """Each is whole, so plain Orbax reads it without complaint: only the manifest knows its place."""
    root, component, arrays = layered
    first, second = (chunk(root, path, index) for index in rows)
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])
    wrong = flat(ocp.PyTreeCheckpointer().restore(root / component.folder))
    assert not same_bits(wrong[path], arrays[path])
    with refuses("damaged", ArtifactError, what=f"model/{path}, row") as caught:
        restore(root, component)
    assert re.search(rf", row [{rows[0]}{rows[1]}]\b", caught.value.what)


def test_rows_of_one_file_are_checked_one_by_one(tmp_path: Path) -> None:
    """Two rows that changed places in a small stacked parameter's file, with the file's own crc32c right."""
    value = random_bits((3, 16, 8), BF16, 7)
    component = write_component(tmp_path, {"stack": value}, frozenset({"stack"}))
    swapped = write_component(tmp_path / "other", {"stack": value[[0, 2, 1]]}, frozenset({"stack"}))
    other = tmp_path / "other" / swapped.folder / "stack" / "c" / "0" / "0" / "0"
    other.replace(tmp_path / component.folder / "stack" / "c" / "0" / "0" / "0")
    with refuses("damaged", ArtifactError, what="model/stack, row 1"):
        restore(tmp_path, component)


def test_sha256_is_checked_when_asked_for(layered: Layered) -> None:
    """As for a change that keeps the crc32c: made on purpose, it is easy."""
    root, component, _ = layered
    changed = msgspec.structs.replace(component.parameters["embed"], sha256="0" * 64)
    other = msgspec.structs.replace(component, parameters={**component.parameters, "embed": changed})
    restore(root, other, "fast")
    with pytest.raises(ArtifactError, match=f"model/embed; expected sha256 {'0' * 64}; found [0-9a-f]{{64}}"):
        restore(root, other, "sha256")


def test_a_component_that_is_not_there(converted: tuple[Path, Manifest], tmp_path: Path) -> None:
    component = converted[1].components["vae"]
    with refuses("damaged", ArtifactError, what="vae/decoder/conv_in/bias"):
        restore(tmp_path, component, name="vae")


@pytest.mark.parametrize(
    ("options", "trace"),
    [
        ({}, "manifest.ocdbt"),  # as Orbax does by itself
        ({"use_ocdbt": False, "use_zarr3": False}, "embed/.zarray"),
        ({"use_ocdbt": False, "use_zarr3": True}, "embed/zarr.json"),  # compressed
    ],
)
def test_weights_that_orbax_saved_again(tmp_path: Path, options: dict[str, bool], trace: str) -> None:
    """They are refused as what they are, by a file; a damaged one of wanbuild's is not taken for theirs."""
    arrays = {"embed": random_bits((96, 32), F32, 3)}
    component = write_component(tmp_path, arrays)
    folder = tmp_path / component.folder
    shutil.rmtree(folder / "embed" / "c")
    for damaged in (None, "", "[" * 100_000):
        if damaged is not None:
            (folder / "embed" / "zarr.json").write_text(damaged)
        with pytest.raises(ArtifactError, match="damaged: model/embed"):
            restore(tmp_path, component)
    shutil.rmtree(folder)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(folder, arrays)
    with pytest.raises(ArtifactError) as caught:
        restore(tmp_path, component)
    assert caught.value.found == folder / trace
    assert "wanbuild convert --force" in (caught.value.remedy or "")


# --- some rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["fast", "sha256"])
@pytest.mark.parametrize("small_bytes", [0, 2**20])
def test_rows_alone_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int, verify: str
) -> None:
    """Of a file per row, and of one file for all; a row behind the last is zero."""
    monkeypatch.setattr(layout_module, "SMALL_BYTES", small_bytes)
    up, bias = random_bits((5, 40, 24), BF16, 1), random_bits((5, 40), F32, 2)
    component = write_component(tmp_path, {"up": up, "bias": bias}, frozenset({"up", "bias"}))

    def reading(*rows: int) -> Restore:
        with ThreadPoolExecutor(3) as pool:
            return Restore(tmp_path, "model", component, pool, verify, rows={"up": rows})

    some = reading(1, 2, 4, 5, 6)
    found = some.result()
    assert same_bits(found["up"][:3], up[[1, 2, 4]]) and not found["up"][3:].any()
    assert same_bits(found["bias"], bias)
    assert some.nbytes == 3 * up[0].nbytes + bias.nbytes
    assert reading().result()["up"].shape == (0, 40, 24)

    # What is wrong elsewhere in the parameter is not seen, and is nobody's concern here.
    (tmp_path / "weights/model/up/zarr.json").unlink()
    layout = component.parameters["up"].layout

    def damage(row: int) -> None:
        file = tmp_path / "weights/model/up" / layout.chunk_file(row // layout.rows_per_chunk)
        flip(file, row % layout.rows_per_chunk * layout.row_bytes + 7)

    damage(3)
    assert same_bits(reading(1, 2, 4).result()["up"], up[[1, 2, 4]])
    damage(2)
    with refuses("damaged", ArtifactError, what="model/up, row 2"):
        reading(1, 2, 4).result()


@pytest.mark.parametrize("refused", [None, "open", "read"])
def test_reads_past_the_page_cache(
    refused: str | None, toy_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same values; also where the file system has no such reads, or refuses one."""
    component = read_manifest(toy_artifact).components["text_encoder"]
    with ThreadPoolExecutor(2) as pool:
        expected = flat(Restore(toy_artifact, "text_encoder", component, pool).result())
        own_open, own_read, direct, tried = os.open, os.preadv, set[int](), list[Any]()

        def opened(path: Any, flags: int, *others: Any, **options: Any) -> int:
            if not flags & os.O_DIRECT:
                found = own_open(path, flags, *others, **options)
                direct.discard(found)
                return found
            if refused == "open":
                raise OSError(errno.EINVAL, "no direct access")
            direct.add(found := own_open(path, flags & ~os.O_DIRECT, *others, **options))
            tried.append(path)
            return found

        def read(descriptor: int, *others: Any) -> int:
            if refused == "read" and descriptor in direct:
                raise OSError(errno.EINVAL, "not this one")
            return own_read(descriptor, *others)

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "preadv", read)
        found = flat(Restore(toy_artifact, "text_encoder", component, pool, direct=True).result())
    assert bool(tried) == (refused != "open")
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value)
