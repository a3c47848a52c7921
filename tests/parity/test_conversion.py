"""What the naive conversion is made of, against torch: reading weight files, and casts between dtypes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file as load_torch

from helpers.naive_conversion import as_bfloat16, as_float32
from helpers.tensor_files import load_file, save_file

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def finite(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of up to two bytes; a million of four bytes, half of them between two bfloat16s."""
    if dtype.itemsize < 4:
        bits = torch.arange(256**dtype.itemsize, dtype=torch.int32).to(BITS[dtype.itemsize])
    else:
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(-(2**31), 2**31, (1_000_000,), dtype=torch.int32, generator=generator)
        bits[::2] = (bits[::2] & ~0xFFFF) | 0x8000
    values = bits.view(dtype)
    return values[values.float().isfinite() & values.to(torch.bfloat16).isfinite()]


def same_bits(found: np.ndarray, expected: torch.Tensor) -> bool:
    return found.tobytes() == expected.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_casts_have_torch_s_bits(dtype: str, tmp_path: Path) -> None:
    values = finite(DTYPES[dtype])
    assert len(values) > 60_000
    stored = values.view(BITS[values.itemsize]).numpy().view(np.dtype(f"u{values.itemsize}"))
    save_file({"x": stored.view(_numpy_dtype(dtype))}, tmp_path / "x.safetensors")
    ours = load_file(tmp_path / "x.safetensors")["x"]
    assert same_bits(as_float32(ours), values.to(torch.float32))
    assert same_bits(as_bfloat16(ours), values.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_are_read_and_written_as_by_torch(dtype: str, tmp_path: Path) -> None:
    values = finite(DTYPES[dtype])[:240].reshape(2, 3, 40)
    array = values.view(BITS[values.itemsize]).numpy().view(_numpy_dtype(dtype))
    save_file({"a": array, "b": array[1]}, tmp_path / "x.safetensors")
    theirs, ours = load_torch(tmp_path / "x.safetensors"), load_file(tmp_path / "x.safetensors")
    assert theirs.keys() == ours.keys() == {"a", "b"}
    for name, value in theirs.items():
        assert str(value.dtype) == f"torch.{dtype}" and ours[name].dtype.name == dtype
        assert tuple(value.shape) == ours[name].shape and same_bits(ours[name], value)
    assert same_bits(ours["a"], values)


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))
