"""Restoring components: the same bits as plain Orbax reads, no copy to the device, and no damage unseen."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import ml_dtypes
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import pytest

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
from wanrun.artifact.parameters import flat as flat_leaves
from wanrun.artifact.parameters import nest
from wanrun.errors import ArtifactError
from wanrun.weights import restore as restore_module
from wanrun.weights.restore import Restore

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "/".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


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
    return (
        root
        / "weights"
        / "model"
        / array_folder(path)
        / "c"
        / str(index)
        / "0"
        / ("0" if "weight" in path else "")
    )


# --- what plain Orbax reads -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["fast", "sha256"])
def test_restore_equals_plain_orbax(converted: tuple[Path, Manifest], verify: str) -> None:
    artifact, manifest = converted
    assert set(manifest.components) == {"transformer", "vae", "text_encoder"}
    dtypes = set()
    for name, component in manifest.components.items():
        expected = ocp.PyTreeCheckpointer().restore(artifact / component.folder)
        found = restore(artifact, component, verify, name)
        assert_same_tree(found, expected)
        assert flat(found).keys() == component.parameters.keys()
        dtypes |= {str(leaf.dtype) for leaf in flat(found).values()}
    assert dtypes == {"bfloat16", "float32"}


def _pytree_checkpointer(folder: Path, target: Any) -> Any:
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    return ocp.PyTreeCheckpointer().restore(folder, item=target, restore_args=arguments)


def _standard_checkpointer(folder: Path, target: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, target)


def _v1(folder: Path, target: Any = None) -> Any:
    import orbax.checkpoint.experimental.v1 as v1

    return v1.load(folder) if target is None else v1.load(folder, target)


def _standard_untargeted(folder: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder)


@pytest.mark.slow
@pytest.mark.parametrize("read", [_pytree_checkpointer, _standard_checkpointer, _v1])
def test_orbax_restores_to_a_device(converted: tuple[Path, Manifest], read: Callable[..., Any]) -> None:
    artifact, manifest = converted
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for name, component in manifest.components.items():
        expected = restore(artifact, component, name=name)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), expected)
        found = read(artifact / component.folder, target)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
        assert_same_tree(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("read", [_standard_untargeted, _v1])
def test_orbax_restores_without_a_target(converted: tuple[Path, Manifest], read: Callable[..., Any]) -> None:
    artifact, manifest = converted
    for name, component in manifest.components.items():
        assert_same_tree(read(artifact / component.folder), restore(artifact, component, name=name))


def test_orbax_reads_the_tree_s_metadata(converted: tuple[Path, Manifest]) -> None:
    artifact, manifest = converted
    for component in manifest.components.values():
        tree = ocp.PyTreeCheckpointer().metadata(artifact / component.folder).item_metadata.tree
        found = {path: (leaf.shape, leaf.dtype.name) for path, leaf in flat(tree).items()}
        assert found == {
            path: (parameter.layout.shape, parameter.layout.dtype)
            for path, parameter in component.parameters.items()
        }


SHARDED = """
import json, sys
import jax, numpy as np, orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from wanrun.artifact.manifest import read_manifest
from wanrun.weights.restore import Restore

artifact = Path(sys.argv[1])
assert len(jax.devices()) == 8
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
cut = set()

def target(x):
    # The last axis over four devices and the first over two, where they divide: inside chunks and across.
    spec = [None] * x.ndim
    if x.shape[-1] % 4 == 0:
        spec[-1] = "a"
    if x.ndim > 1 and x.shape[0] % 2 == 0:
        spec[0] = "b"
    cut.add(tuple(axis for axis in spec if axis))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*spec)))

def check(found, expected, targets):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b, t in zip(*map(jax.tree.leaves, (found, expected, targets))):
        assert a.sharding == t.sharding and a.dtype == b.dtype, (a.sharding, t.sharding)
        for shard in a.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(b[shard.index]).tobytes()

with ThreadPoolExecutor(2) as pool:
    for name, component in read_manifest(artifact).components.items():
        expected = Restore(artifact, name, component, pool).result()
        targets = jax.tree.map(target, expected)
        folder = artifact / component.folder
        args = ocp.checkpoint_utils.construct_restore_args(targets)
        check(ocp.PyTreeCheckpointer().restore(folder, item=targets, restore_args=args), expected, targets)
        check(ocp.StandardCheckpointer().restore(folder, targets), expected, targets)
        check(v1.load(folder, targets), expected, targets)
print(json.dumps(sorted(map(list, cut))))
"""


@pytest.mark.thorough
def test_orbax_restores_over_eight_devices(
    toy_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A chunk file per layer, so that shards and chunks cross.
    monkeypatch.setattr(layout_module, "SMALL_BYTES", 0)
    convert(ConvertRequest(toy_checkpoint, tmp_path / "artifact"))
    result = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path / "artifact")],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [[], ["a"], ["b"], ["b", "a"]]


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
    for name, component in manifest.components.items():
        arrays = flat(restore(artifact, component, name=name))
        places = sorted((leaf.ctypes.data, leaf.nbytes) for leaf in arrays.values())
        assert all(start % ALIGNMENT == 0 for start, _ in places)
        ends = [start + nbytes for start, nbytes in places]
        assert all(0 <= start - end < ALIGNMENT for end, (start, _) in zip(ends, places[1:], strict=False))


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


def _flip(offset: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[offset] ^= 0x10
        file.write_bytes(data)

    return damage


def _resize(change: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        os.truncate(file, file.stat().st_size + change)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "first byte": (_flip(0), "row 2 has the wrong crc32c"),
    "middle byte": (_flip(100), "row 2 has the wrong crc32c"),
    "last byte": (_flip(-1 - CRC_BYTES), "row 2 has the wrong crc32c"),
    "checksum": (_flip(-1), "own crc32c is wrong"),
    "one byte short": (_resize(-1), "wrong size"),
    "without checksum": (_resize(-CRC_BYTES), "wrong size"),
    "empty": (lambda file: os.truncate(file, 0), "wrong size"),
    "too long": (_resize(1), "wrong size"),
    "missing": (Path.unlink, "cannot be read"),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["blocks/up/weight", "blocks/up/bias"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_noticed(layered: Layered, kind: str, path: str) -> None:
    root, component, arrays = layered
    assert_same_tree(restore(root, component), _nested(arrays))
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


def _nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {
        "blocks": {"up": {"weight": arrays["blocks/up/weight"], "bias": arrays["blocks/up/bias"]}},
        "embed": arrays["embed"],
    }


def test_swapped_layers_are_noticed(layered: Layered) -> None:
    root, component, arrays = layered
    first, second = (chunk(root, "blocks/up/weight", index) for index in (1, 3))
    first.rename(root / "aside")
    second.rename(first)
    (root / "aside").rename(second)
    # Each file is whole, so plain Orbax reads it without complaint: only the manifest knows its place.
    wrong = ocp.PyTreeCheckpointer().restore(root / component.folder)
    assert not same_bits(wrong["blocks"]["up"]["weight"], arrays["blocks/up/weight"])
    with refuses("damaged", ArtifactError, what="model/blocks/up/weight, row") as caught:
        restore(root, component)
    assert re.search(r", row [13]\b", caught.value.what)


def test_swapped_slices_of_a_large_array_are_noticed(
    layered: Layered,
) -> None:
    root, component, _ = layered
    files = [root / component.folder / "embed" / "c" / str(index) / "0" for index in (0, 2)]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, reversed(contents), strict=True):
        file.write_bytes(content)
    with refuses("damaged", ArtifactError, what="model/embed, row") as caught:
        restore(root, component)
    assert re.search(r", row [02]\b", caught.value.what)


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


SAVED_AGAIN: Mapping[str, tuple[dict[str, bool], str]] = MappingProxyType(
    {
        "as Orbax does by itself": ({}, "manifest.ocdbt"),
        "zarr": ({"use_ocdbt": False, "use_zarr3": False}, "embed/.zarray"),
        "zarr3, compressed": ({"use_ocdbt": False, "use_zarr3": True}, "embed/zarr.json"),
    }
)
"""Options of Orbax, and the file that shows that it wrote the weights."""


@pytest.mark.parametrize("form", SAVED_AGAIN)
def test_weights_that_orbax_saved_again(tmp_path: Path, form: str) -> None:
    """They are refused as what they are; a damaged file of wanbuild's beside them is not taken for theirs."""
    options, trace = SAVED_AGAIN[form]
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


def some_rows(artifact: Path, component: Component, rows: dict[str, tuple[int, ...]], verify: str) -> Restore:
    """Reads these rows of parameters, and all of the others."""
    with ThreadPoolExecutor(3) as pool:
        return Restore(artifact, "model", component, pool, verify, rows=rows)


@pytest.mark.parametrize("verify", ["fast", "sha256"])
@pytest.mark.parametrize("small_bytes", [0, 2**20])
def test_rows_alone_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int, verify: str
) -> None:
    """Of a file per row, and of one file for all; a row behind the last is zero."""
    monkeypatch.setattr(layout_module, "SMALL_BYTES", small_bytes)
    up, bias = random_bits((5, 40, 24), BF16, 1), random_bits((5, 40), F32, 2)
    component = write_component(tmp_path, {"up": up, "bias": bias}, frozenset({"up", "bias"}))
    restore = some_rows(tmp_path, component, {"up": (1, 2, 4, 5, 6)}, verify)
    found = restore.result()
    assert same_bits(found["up"][:3], up[[1, 2, 4]]) and not found["up"][3:].any()
    assert same_bits(found["bias"], bias)
    assert restore.nbytes == 3 * up[0].nbytes + bias.nbytes
    assert some_rows(tmp_path, component, {"up": ()}, verify).result()["up"].shape == (0, 40, 24)

    # What is wrong elsewhere in the parameter is not seen, and is nobody's concern here.
    (tmp_path / "weights/model/up/zarr.json").unlink()
    for row, message in [(3, None), (2, "model/up, row 2 has the wrong crc32c")]:
        layout = component.parameters["up"].layout
        file = tmp_path / "weights/model/up" / layout.chunk_file(row // layout.rows_per_chunk)
        data = bytearray(file.read_bytes())
        data[row % layout.rows_per_chunk * layout.row_bytes + 7] ^= 1
        file.write_bytes(data)
        reading = some_rows(tmp_path, component, {"up": (1, 2, 4)}, verify)
        if message is None:
            assert same_bits(reading.result()["up"], up[[1, 2, 4]])
            continue
        with pytest.raises(ArtifactError, match=message):
            reading.result()


def test_the_order_of_leaves() -> None:
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert flat_leaves(tree) == {"a/b": 1, "a/c/d": 2, "e": 3}
    assert nest(flat_leaves(tree)) == tree


@pytest.mark.parametrize("refused", [None, "open", "read"])
def test_reads_past_the_page_cache(
    refused: str | None, toy_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same values; also where the file system has no such reads, or refuses one."""
    component = read_manifest(toy_artifact).components["text_encoder"]
    with ThreadPoolExecutor(2) as pool:
        expected = flat_leaves(Restore(toy_artifact, "text_encoder", component, pool).result())
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
        found = flat_leaves(Restore(toy_artifact, "text_encoder", component, pool, direct=True).result())
    assert bool(tried) == (refused != "open")
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value)
