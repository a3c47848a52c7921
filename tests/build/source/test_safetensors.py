"""The safetensors reader: ranges of a tensor, files that change or fail while they are read, other dtypes.

That it reads what the safetensors package does, and refuses what is broken, is in tests/hostile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.refusals import refuses
from wanbuild.source.safetensors import TensorFile
from wanrun.errors import SourceError


def _random(shape: tuple[int, ...], dtype: Any, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


TENSORS = {
    "a.weight": _random((5, 3, 1, 2), np.float32),
    "b": _random((7,), np.float16),  # 14 bytes: what follows is not aligned to 4
    "c.bias": _random((3, 4), ml_dtypes.bfloat16),
}
LINUX = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads Linux's account of open files")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def test_parts_are_read_by_position(path: Path) -> None:
    """Whole arrays are those of the package: tests/hostile reads random files."""
    expected = TENSORS["a.weight"].tobytes()
    part = np.empty(10, np.uint8)
    with TensorFile(path) as file:
        for begin in (0, 3, len(expected) - 10):
            file.read("a.weight", begin, part)
            assert part.tobytes() == expected[begin : begin + 10]
        for begin in (-1, len(expected) - 9, 2**40):
            with pytest.raises(ValueError, match=r"a\.weight"):
                file.read("a.weight", begin, part)
        with pytest.raises(KeyError):
            file.read("missing", 0, part)
    with pytest.raises(ValueError, match="closed"):
        file.array("a.weight")
    file.close()


def _fail(*arguments: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@LINUX
def test_no_descriptor_is_left_open(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    good, before = path.read_bytes(), opened()
    for bad in (b"", b"x" * 100, good[:-1], good + b"x"):
        path.write_bytes(bad)
        with pytest.raises(SourceError):
            TensorFile(path)
    path.write_bytes(good)
    TensorFile(path).close()
    for thing in (tmp_path, tmp_path / "missing", Path("/dev/zero")):
        with pytest.raises(SourceError):
            TensorFile(thing)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", _fail)
        with refuses("unreadable", SourceError, what=os.strerror(errno.EIO)):
            TensorFile(path)
    assert opened() == before


def test_a_signal_does_not_close_a_file_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the descriptor may be another file's."""
    closed = list[int]()

    def interrupted(descriptor: int) -> None:
        closed.append(descriptor)
        raise KeyboardInterrupt

    file = TensorFile(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", interrupted)
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                file.close()
    assert len(closed) == 1
    os.close(closed[0])


@pytest.mark.parametrize("keep", [-1, 8, 0])
def test_a_file_that_is_cut_off_while_it_is_read(path: Path, keep: int) -> None:
    """A mapping would end the process with SIGBUS."""
    save_file({"big": _random((100_000,), np.float32)}, path)
    with TensorFile(path) as file:
        path.write_bytes(path.read_bytes()[:keep])
        with refuses("damaged", SourceError, what=path):
            file.array("big")


def test_a_file_is_read_on_when_it_is_deleted_and_not_when_the_disk_fails(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TensorFile(path) as file:
        path.unlink()
        assert file.array("a.weight").tobytes() == TENSORS["a.weight"].tobytes()
        monkeypatch.setattr(os, "preadv", _fail)
        with refuses("unreadable", SourceError, what=path):
            file.array("a.weight")


def test_threads_read_the_same_file(tmp_path: Path) -> None:
    tensors = {f"t{i}": _random((257, 31), np.float32, i) for i in range(16)}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    wrong: list[str] = []
    with TensorFile(path) as file:

        def read(names: list[str]) -> None:
            for name in names:
                if file.array(name).tobytes() != tensors[name].tobytes():
                    wrong.append(name)

        threads = [threading.Thread(target=read, args=(list(tensors)[i::2] * 20,)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with refuses("missing_file", SourceError, what=tmp_path / "x.safetensors", found=None):
        TensorFile(tmp_path / "x.safetensors")
    (tmp_path / "wan2.1_vae.safetensors").touch()
    with refuses("missing_file", SourceError, found=tmp_path / "wan2.1_vae.safetensors"):
        TensorFile(tmp_path / "wan_2.1_vae.safetensors")
    with refuses("missing_file", SourceError, found=f"no folder {tmp_path / 'weigths'}"):
        TensorFile(tmp_path / "weigths" / "x.safetensors")
    (tmp_path / "wan-Q8_0.safetensors").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(200))
    with refuses("wrong_kind", SourceError, what="GGUF", expected=".safetensors", remedy="-Diffusers"):
        TensorFile(tmp_path / "wan-Q8_0.safetensors")
    with refuses("wrong_kind", SourceError, what=tmp_path):
        TensorFile(tmp_path)
    for name in ("pytorch_model.bin", "Wan2.1_VAE.pth", "model.ckpt", "model.pt"):  # not even opened
        with refuses("untrusted", SourceError, what=name, expected="safetensors"):
            TensorFile(tmp_path / name)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint8, ml_dtypes.float8_e8m0fnu])
def test_other_dtypes_open_and_are_refused_at_use(tmp_path: Path, dtype: Any) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.random.default_rng(0).uniform(1, 9, (4,)).astype(dtype)}, path)
    with TensorFile(path) as file:
        assert file.entries["a"].dtype == dtype
        found = file.entries["a"].dtype_name
        with refuses("wrong_kind", SourceError, what=path, expected="BF16 or F16", found=found):
            file.array("a")
