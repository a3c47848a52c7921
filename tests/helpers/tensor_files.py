"""Weight files as NumPy arrays, bfloat16 and float8 too, which safetensors' own NumPy form does not read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save_file as save_arrays

State = dict[str, np.ndarray]

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "U8": np.dtype(np.uint8),
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    }
)


def load_file(path: Path) -> State:
    """Reads a file with the safetensors package."""
    tensors = safetensors.deserialize(path.read_bytes())
    return {
        name: np.frombuffer(bytearray(item["data"]), DTYPES[item["dtype"]]).reshape(item["shape"])
        for name, item in tensors
    }


def save_file(state: Mapping[str, np.ndarray], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a file with the safetensors package."""
    save_arrays(dict(state), path, metadata={"format": "pt", **(metadata or {})})
