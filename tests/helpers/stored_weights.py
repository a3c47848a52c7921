"""Weights in forms that are not chunk files of ours: what tests share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from crc32c import crc32c

from wanbuild.conversion.convert import ConvertRequest, convert
from wanrun.artifact.layout import ArrayLayout, array_folder
from wanrun.artifact.manifest import Component, read_manifest
from wanrun.artifact.parameters import Parameter
from wanrun.errors import ArtifactError
from wanrun.files import sha256_of
from wanrun.weights.tensorstore_reader import TensorStoreReader

BF16 = np.dtype(ml_dtypes.bfloat16)
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}


def write_zarr3(folder: Path, value: np.ndarray, chunk: list[int], codecs: Any) -> None:
    if codecs and codecs[0] == "transpose":
        order = [*range(1, value.ndim), 0]
        codecs = [{"name": "transpose", "configuration": {"order": order}}, *codecs[1:]]
    metadata = {
        "shape": list(value.shape),
        "data_type": value.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": list(codecs),
    }
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
    }
    ts.open(spec, create=True).result().write(value).result()


def parameter_of(value: np.ndarray, rows: int) -> Parameter:
    parts = [part.tobytes() for part in np.split(value, rows)]
    digests = b"".join(bytes.fromhex(sha256_of(part)) for part in parts)
    checksums = tuple(f"{crc32c(part):08x}" for part in parts)
    layout = ArrayLayout(value.shape, value.dtype.name, rows, 1)
    axes = (None,) * value.ndim
    return Parameter(layout=layout, axes=axes, crc32c=checksums, sha256=sha256_of(digests))


class Stored(NamedTuple):
    """A component as chunk files.

    Attributes:
        artifact: the artifact's folder.
        component: its entry in the manifest.
        expected: the bytes of each parameter.
    """

    artifact: Path
    component: Component
    expected: dict[str, bytes]

    @property
    def folder(self) -> Path:
        return self.artifact / self.component.folder


def convert_transformer(checkpoint: Path, artifact: Path) -> Stored:
    """Converts a checkpoint with the default dtypes, so that there are bfloat16 and float32 arrays."""
    convert(ConvertRequest(checkpoint, artifact))
    component = read_manifest(artifact).components["transformer"]
    return Stored(artifact, component, chunk_bytes(artifact / component.folder, component))


def chunk_bytes(folder: Path, component: Component) -> dict[str, bytes]:
    """The bytes of each parameter, from the chunk files: rows, each file with its crc32c at the end."""
    values = {}
    for path, parameter in component.parameters.items():
        layout = parameter.layout
        array = folder / array_folder(path)
        files = [array / layout.chunk_file(index) for index in range(layout.chunks)]
        values[path] = b"".join(file.read_bytes()[: layout.chunk_bytes] for file in files)
    return values


def read(
    location: Path, component: Component, verify: str = "fast", name: str = "transformer"
) -> dict[str, bytes]:
    """Every parameter's bytes, read by several threads."""
    reader = TensorStoreReader(location, name)

    def one(path: str) -> bytes:
        parameter = component.parameters[path]
        data = np.full(parameter.layout.nbytes, 0x5A, np.uint8)
        reader.read(path, parameter, memoryview(data), verify)
        return data.tobytes()

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(component.parameters, pool.map(one, component.parameters), strict=True))


def write_plain(folder: Path) -> tuple[Path, Parameter, np.ndarray]:
    """A checkpoint of one array, not compressed and without checksums: 6 rows, chunks of two rows."""
    value = np.random.default_rng(5).integers(0, 2**15, (6, 40, 24), np.uint16).view(BF16)
    write_zarr3(folder / "stack", value, [2, 40, 24], (LITTLE,))
    return folder, parameter_of(value, 6), value


def read_one(location: Path, parameter: Parameter, verify: str = "fast") -> np.ndarray:
    data = np.zeros(parameter.layout.nbytes, np.uint8)
    TensorStoreReader(location, "model").read("stack", parameter, memoryview(data), verify)
    return data


def refusal(location: Path, parameter: Parameter, verify: str = "fast") -> str:
    with pytest.raises(ArtifactError) as caught:
        read_one(location, parameter, verify)
    line = str(caught.value)
    assert "model/stack" in line and "\n" not in line and "tensorstore_spec" not in line
    assert len(line) < 600
    return line


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 0x10
    file.write_bytes(data)
