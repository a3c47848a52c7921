"""The safetensors reader: equal to the safetensors package on good files, at least as strict on bad ones."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from wanbuild.tensors import MAX_HEADER_BYTES, TensorFile
from wanrun.errors import SourceError


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def _write(path: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def _entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "a.weight": _random(rng, (5, 3, 1, 2), np.float32),
        "b": _random(rng, (7,), np.float16),  # 14 bytes: what follows is not aligned to 4
        "c.bias": _random(rng, (3, 4), ml_dtypes.bfloat16),
        "d": _random(rng, (), np.float32),
        "e": _random(rng, (0, 4), np.float32),
    }


def test_arrays_are_the_package_s(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    expected = load_file(path)
    with TensorFile(path) as file:
        assert file.metadata == {"format": "pt"}
        assert file.entries.keys() == tensors.keys()
        for name, value in expected.items():
            array = file.array(name)
            assert (array.dtype, array.shape) == (tensors[name].dtype, value.shape)
            assert array.tobytes() == value.tobytes() == tensors[name].tobytes()
            assert file.entries[name].nbytes == value.nbytes
            assert value.size == 0 or not array.flags.writeable


def test_arrays_are_views_that_outlive_close(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    with TensorFile(path) as file:
        array = file.array("a.weight")
        assert array.base is not None
        assert np.shares_memory(array, file.array("a.weight"))
    assert array.tobytes() == tensors["a.weight"].tobytes()
    with pytest.raises(ValueError, match="closed"):
        file.array("a.weight")


def _resident_kib() -> int:
    """Memory mapped from files and touched, of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1])
    raise AssertionError("no RssFile in /proc/self/status")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")
def test_drop_gives_pages_back_and_they_can_be_read_again(tmp_path: Path) -> None:
    big = np.random.default_rng(0).standard_normal((4, 1 << 20)).astype(np.float32)  # 16 MiB
    path = tmp_path / "x.safetensors"
    save_file({"big": big, "z": big[0]}, path)
    with TensorFile(path) as file:
        before = _resident_kib()
        total = file.array("big").sum()
        touched = _resident_kib()
        file.drop("big")
        dropped = _resident_kib()
        assert touched - before > 15_000  # of 16 384: other mappings move a little
        assert dropped - before < 1_000
        assert file.array("big").sum() == total == big.sum()


def test_threads_read_the_same_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tensors = {f"t{i}": _random(rng, (257, 31), np.float32) for i in range(16)}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    wrong: list[str] = []
    with TensorFile(path) as file:

        def read(names: list[str]) -> None:
            for name in names:
                if file.array(name).tobytes() != tensors[name].tobytes():
                    wrong.append(name)
                file.drop(name)

        threads = [threading.Thread(target=read, args=(list(tensors)[i::2] * 20,)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": _entry(0, 8), "b": _entry(4, 12)}, 12, "'b' overlaps"),
        ({"a": _entry(0, 8), "b": _entry(12, 16)}, 16, "'b' leaves a hole"),
        ({"a": _entry(4, 8)}, 8, "'a' leaves a hole"),
        ({"a": _entry(0, 8)}, 12, "bytes after the last tensor"),
        ({"a": _entry(0, 8)}, 7, "cut off"),
        ({"a": _entry(0, 8, [3])}, 8, "length of 'a'"),
        ({"a": _entry(0, 8, [-2, -1])}, 8, "shape of 'a'"),
        ({"a": _entry(0, 8, [True, 2])}, 8, "shape of 'a'"),
        ({"a": {**_entry(0, 8), "data_offsets": [8, 0]}}, 8, "data_offsets of 'a'"),
        ({"a": {**_entry(0, 8), "data_offsets": [0, 4, 8]}}, 8, "data_offsets of 'a'"),
        ({"a": {**_entry(0, 8), "data_offsets": [0.0, 8.0]}}, 8, "data_offsets of 'a'"),
        ({"a": _entry(0, 8, dtype="F33")}, 8, "dtype of 'a'"),
        ({"a": _entry(0, 8, dtype="f32")}, 8, "dtype of 'a'"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "entry 'a'"),
        ({"a": {**_entry(0, 8), "extra": 1}}, 8, "entry 'a'"),
        ({"a": [0, 8]}, 8, "entry 'a'"),
        ({"__metadata__": {"k": 1}, "a": _entry(0, 8)}, 8, "__metadata__"),
        ({"__metadata__": "k", "a": _entry(0, 8)}, 8, "__metadata__"),
        (b'[{"a": 1}]', 0, "header"),
        (b' {"a": 1}', 0, "header"),
        (b"{nonsense}", 0, "header"),
        (b'{"a": NaN}', 0, "header"),
        (b"{\xff\xfe}", 0, "header"),
        (b'{"a":' * 100_000, 0, "header"),
        (b'{"a": ' + b"1" * 5000 + b"}", 0, "header"),
        (
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
            b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            8,
            "duplicate name 'a'",
        ),
        (
            b'{"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}',
            8,
            "duplicate name 'shape'",
        ),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, header: Any, data: int, message: str) -> None:
    path = _write(tmp_path / "x.safetensors", header, np.random.default_rng(0).bytes(data))
    with pytest.raises(SourceError, match=message) as caught:
        TensorFile(path)
    assert str(path) in str(caught.value)
    assert caught.value.remedy == "download it again"


@pytest.mark.parametrize("length", [1 << 20, MAX_HEADER_BYTES + 1, 2**64 - 1])
def test_a_wrong_header_length_is_refused(tmp_path: Path, length: int) -> None:
    path = _write(tmp_path / "x.safetensors", {"a": _entry(0, 8)}, bytes(range(8)), length)
    with pytest.raises(SourceError, match=r"cut off|header length"):
        TensorFile(path)


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_a_truncated_download_is_refused(tmp_path: Path, tensors: dict[str, np.ndarray], keep: int) -> None:
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SourceError, match=r"cut off.*download it again"):
        TensorFile(path)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"is missing.*download"):
        TensorFile(tmp_path / "x.safetensors")
    with pytest.raises(SourceError, match="cannot be read"):
        TensorFile(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "Wan2.1_VAE.pth", "model.ckpt", "model.pt"])
def test_a_pickle_is_refused_without_being_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceError, match=r"pickled.*safetensors"):
        TensorFile(tmp_path / name)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint8, ml_dtypes.float8_e4m3fn])
def test_other_dtypes_open_and_are_refused_at_use(tmp_path: Path, dtype: Any) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.random.default_rng(0).uniform(1, 9, (4,)).astype(dtype)}, path)
    with TensorFile(path) as file:
        assert file.entries["a"].dtype == dtype
        with pytest.raises(SourceError, match=r"a in .* is not a plain weight; expected BF16 or F16 or F32"):
            file.array("a")


def test_never_laxer_than_the_package(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Header bytes changed at random: what the package refuses is refused, and what is accepted is equal."""
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    good = path.read_bytes()
    header_end = 8 + int.from_bytes(good[:8], "little")
    rng = np.random.default_rng(11)
    alphabet = np.frombuffer(b'0123456789[]{}",: -eFB\x00', np.uint8)
    accepted = refused = 0
    for _ in range(1500):
        raw = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            raw[rng.integers(0, header_end)] = rng.choice(alphabet)
        path.write_bytes(raw)
        try:
            theirs: dict[str, Any] | None = dict(safetensors.deserialize(bytes(raw)))
        except safetensors.SafetensorError:
            theirs = None
        try:
            file = TensorFile(path)
        except SourceError:
            refused += 1
            continue
        accepted += 1
        assert theirs is not None, bytes(raw[:header_end])
        assert file.entries.keys() == theirs.keys()
        for name, entry in file.entries.items():
            assert (list(entry.shape), entry.dtype_name) == (theirs[name]["shape"], theirs[name]["dtype"])
            assert raw[entry.offset : entry.offset + entry.nbytes] == theirs[name]["data"]
    assert accepted > 50  # a changed name or metadata is still a good file
    assert refused > 500
