"""The programs that spread weights over a mesh: the same bits in the same places as without them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from helpers.devices import on_devices
from helpers.manifests import plain_program
from wanbuild.conversion.orbax import plan_layout
from wanbuild.models.partition import PARAMETERS
from wanbuild.programs import spreading
from wanbuild.programs.export import describe
from wanbuild.programs.shardings import weights_placed
from wanbuild.programs.spreading import is_staged, spread
from wanbuild.targets.parsing import parse_mesh
from wanrun.artifact.layout import ArrayLayout
from wanrun.artifact.mesh import jax_mesh
from wanrun.artifact.parameters import Component, Parameter, flat, nest
from wanrun.weights.buffers import Memory
from wanrun.weights.experts import Footprint
from wanrun.weights.transfer import Transfer

STAGED_BYTES = 300

ARRAYS: dict[str, tuple[tuple[int, ...], str, tuple[str | None, ...], int]] = {
    "blocks/q/weight": ((3, 8, 16), "bfloat16", ("layers", "heads", "embed"), 3),
    "blocks/o/weight": ((5, 16, 8), "float32", ("layers", "embed", "heads"), 5),
    "blocks/odd/weight": ((6, 7, 10), "bfloat16", ("layers", "heads", "embed"), 6),
    "blocks/table": ((8, 1, 6, 4), "float32", ("layers", None, None, "embed"), 8),
    "embedder/weight": ((24, 8), "float32", ("mlp", "embed"), 6),
    "shared": ((20, 8), "float32", ("vocab", "embed"), 10),
    "one/row": ((16, 8), "float32", ("mlp", "embed"), 1),
    "blocks/q/bias": ((3, 8), "float32", ("layers", "heads"), 3),
}
"""Shape, dtype, logical axes and rows. The last two are not staged: one row, and 96 bytes."""


def component() -> Component:
    parameters = {
        path: Parameter(
            layout=ArrayLayout(shape, dtype, rows, 1), axes=axes, crc32c=("00000000",) * rows, sha256=""
        )
        for path, (shape, dtype, axes, rows) in ARRAYS.items()
    }
    return Component("weights/model", parameters)


def compare(meshes: list[str]) -> None:
    """Brings a component to meshes over these devices, staged and directly."""
    for text in meshes:
        mesh = jax_mesh(parse_mesh(text), jax.devices())
        assert mesh is not None
        check(text, mesh)


def check(text: str, mesh: jax.sharding.Mesh) -> None:
    model, random = component(), np.random.default_rng(5)
    # Bits of every kind: -0.0 and the payloads of NaNs too, which arithmetic would change.
    values = {
        path: random.integers(0, 2 ** (16 if dtype == "bfloat16" else 32), shape, np.uint32)
        .astype(np.uint16 if dtype == "bfloat16" else np.uint32)
        .view(np.uint16 if dtype == "bfloat16" else np.float32)
        for path, (shape, dtype, _, _) in ARRAYS.items()
    }
    axes = {path: one.axes for path, one in model.parameters.items()}
    abstract = {path: jax.ShapeDtypeStruct(one.shape, one.dtype) for path, one in values.items()}
    weights = weights_placed(nest(abstract), axes, mesh)
    with mock.patch.object(spreading, "STAGED_BYTES", STAGED_BYTES):
        spec = spread("model", model, weights, PARAMETERS, mesh)
    assert spec is not None and spec.name == "spread_model" and list(spec.inputs) == ["rows"]
    (rows,) = spec.arguments
    assert rows.keys() == ARRAYS.keys() - {"one/row", "blocks/q/bias"}
    program = plain_program(inputs=spec.inputs, avals=describe(spec, {}))

    memory = Memory(model)
    for path, value in values.items():
        aligned = memory.array(path, model.parameters[path].layout, True)
        aligned[...], values[path] = value, aligned
    direct = Transfer(model, PARAMETERS, mesh)
    expected, nothing = direct.put(nest(values))
    assert not nothing and not direct.rows
    shards = [(path, shard.data) for path, one in expected.items() for shard in one.addressable_shards]
    copied = [data.nbytes for path, data in shards if not aliased(data, values[path])]
    own = sum(one.addressable_shards[0].data.nbytes for one in expected.values())
    assert direct.footprint == Footprint(model.nbytes, own, model.nbytes + sum(copied)), text
    staged = Transfer(model, PARAMETERS, mesh, program)
    read = {path: held(values[path], model.parameters[path], staged.rows.get(path)) for path in values}
    small, brought = staged.put(nest(read))
    with spec.tracing():
        shardings = jax.tree.map(lambda leaf: leaf.sharding, spec.outputs)
        compiled = jax.jit(spec.function, out_shardings=shardings).lower(rows).compile()
    found = {**small, **compiled(brought)["weights"]}
    assert found.keys() == expected.keys()
    padded = sum(one.nbytes for one in read.values())
    assert staged.footprint == Footprint(padded, own, own * mesh.size)
    for path, array in expected.items():
        assert found[path].sharding == array.sharding == flat(weights)[path].sharding, (text, path)
        for one, other in zip(found[path].addressable_shards, array.addressable_shards, strict=True):
            assert one.device == other.device
            part = np.asarray(values[path][other.index]).tobytes()
            assert np.asarray(one.data).tobytes() == part == np.asarray(other.data).tobytes(), (text, path)
    # What XLA does where it finds no better way: everything everywhere, or sums, which change -0.0 and NaNs.
    assert "all-reduce" not in compiled.as_text() and "collective-permute" not in compiled.as_text()
    own_rows(text, mesh, program)


def aliased(part: jax.Array, whole: np.ndarray) -> bool:
    offset = part.unsafe_buffer_pointer() - whole.ctypes.data
    return 0 <= offset < whole.nbytes


def own_rows(text: str, mesh: jax.sharding.Mesh, program: Any) -> None:
    """Each process reads the rows of its own devices: all of them together read each row once."""
    model = component()
    for processes in (n for n in (1, 2, mesh.size) if mesh.size % n == 0):
        groups = np.array(mesh.devices.flat).reshape(processes, -1)
        transfers = [Transfer(model, PARAMETERS, mesh, program, list(group)) for group in groups]
        for path in program.avals["inputs"]["rows"]:
            total = model.parameters[path].layout.rows
            read = [[row for row in one.rows.get(path, range(total)) if row < total] for one in transfers]
            assert [row for rows in read for row in rows] == list(range(total)), (text, path)
            share = -(-total // mesh.size) * len(groups[0])
            assert max(map(len, read)) == min(share, total), (text, path)


def held(value: np.ndarray, parameter: Parameter, rows: tuple[int, ...] | None) -> np.ndarray:
    """What a process reads of a parameter: these rows, and zeros for padding."""
    if rows is None:
        return value
    by_row = value.reshape(parameter.layout.rows, -1, *value.shape[1:])
    padding = np.zeros_like(by_row[:1])
    return np.concatenate([by_row[row] if row < len(by_row) else padding[0] for row in rows])


@pytest.mark.thorough
def test_the_same_bits_as_without() -> None:
    meshes = ["tensor=2", "fsdp=4", "context=8", "data=2,tensor=2", "ring=2,fsdp=2,tensor=2", "ring=3"]
    on_devices(8, compare, meshes)


def test_large_parameters_are_staged() -> None:
    """Of a published model: matrices, and no biases and norms."""
    stacked = {(30, 1536, 8960): True, (30, 1536): False, (30, 1, 6, 1536): True}
    for shape, expected in stacked.items():
        assert is_staged(plan_layout(shape, "bfloat16", stacked=True)) == expected
    assert is_staged(plan_layout((256384, 4096), "bfloat16", stacked=False))
    assert not is_staged(plan_layout((5120, 4096), "bfloat16", stacked=False))  # one row
