"""Programs over a mesh give what they give on one device, in float32 to 1e-5 of the largest value.

Eight virtual CPU devices. ``python -m helpers.mesh_comparison ARTIFACT --all`` compares every mesh of 1, 2, 4
and 8 devices (benchmarks/RESULTS.md, "Meshes"). Here are those that a mistake would show in: lengths (84
tokens) and widths (14 columns of latents) that do not divide, each axis, and each family's own inputs.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from helpers.devices import on_devices
from helpers.manifests import plain_program
from helpers.refusals import refuses
from wanbuild.conversion.orbax import plan_layout
from wanbuild.models.eight_bit import linear_layers, store_in_eight_bits
from wanbuild.models.params import abstract_params, parameter_axes
from wanbuild.models.partition import PARAMETERS
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.transformer_config import TransformerConfig
from wanbuild.programs import spreading
from wanbuild.programs.export import describe
from wanbuild.programs.shape import Shape
from wanbuild.programs.shardings import check_blocks, check_mesh, meshes, weights_placed
from wanbuild.programs.spreading import is_staged, spread
from wanbuild.targets.parsing import parse_mesh
from wanrun.artifact.layout import ArrayLayout
from wanrun.artifact.mesh import jax_mesh, num_devices
from wanrun.artifact.parameters import Component, Parameter, flat, nest
from wanrun.errors import UsageError
from wanrun.weights.buffers import Memory
from wanrun.weights.experts import Footprint
from wanrun.weights.transfer import Transfer

TESTS = Path(__file__).parents[2]

Differences = dict[str, dict[str, float]]

COMPARED: Mapping[str, tuple[str, Sequence[str], str, Sequence[str]]] = {
    "Ulysses, and a ring with it": (
        "wan2.1-t2v",
        ("context=8", "data=2,ring=2,context=2"),
        "prepare,denoise_step",
        (),
    ),
    "tensor parallelism of the text encoder; the decoder's columns": (
        "wan2.1-t2v",
        ("tensor=8",),
        "encode_text,decode",
        ("--size", "112x16x9"),
    ),
    "the guidance pair and the videos share the axis data": (
        "wan2.1-t2v",
        ("data=4,ring=2",),
        "prepare,denoise_loop",
        ("--videos", "2"),
    ),
    "image tokens with padding; guiders combine the passes of both halves": (
        "wan2.1-i2v",
        ("data=2,context=4",),
        "encode_image,encode_video,prepare,denoise_step",
        ("--guiders",),
    ),
    "control blocks, slots, in parts too; guiders, whose passes follow one another": (
        "wan2.1-vace",
        ("ring=2,fsdp=2,tensor=2",),
        "prepare,denoise_step",
        ("--lora-rank", "4", "--guiders"),
    ),
    "faces by frame": (
        "wan2.2-animate",
        ("context=4,tensor=2",),
        "prepare,denoise_step",
        ("--size", "112x64x13"),
    ),
    "15 tokens over 4 devices, some with tokens of two frames; the residual VAE of a start": (
        "wan2.2-ti2v",
        ("data=2,context=4",),
        "encode_start,denoise_step,decode_alike",
        ("--size", "160x32x9"),
    ),
}

BFLOAT16 = (
    "wan2.1-t2v",
    ("one device", "data=2,ring=2,context=2"),
    "denoise_step",
    ("--mesh-dtype", "bfloat16", "--guiders"),
)


@pytest.fixture(scope="module")
def found(
    toy_artifact: Path, ti2v_artifact: Path, media_toy: Callable[[str], tuple[Path, Path]]
) -> dict[str, Differences]:
    """The largest relative difference of each program, by mesh; one process compares all."""
    artifacts = {"wan2.1-t2v": toy_artifact, "wan2.2-ti2v": ti2v_artifact}
    lines = [
        [str(artifacts.get(variant) or media_toy(variant)[1]), *meshes, "--programs", programs, *options]
        for variant, meshes, programs, options in (*COMPARED.values(), BFLOAT16)
    ]
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "helpers.mesh_comparison"],
        input="\n".join(map(shlex.join, lines)),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = [map(json.loads, answer.splitlines()) for answer in done.stdout.split("\n\n")]
    by_mesh = [{line["mesh"]: line["differences"] for line in answer} for answer in answers]
    return dict(zip((*COMPARED, "bfloat16", ""), by_mesh, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("what", COMPARED)
def test_a_mesh_beside_one_device(found: dict[str, Differences], what: str) -> None:
    _, meshes, programs, _ = COMPARED[what]
    assert list(found[what]) == list(meshes)
    for mesh, values in found[what].items():
        assert set(values) == set(programs.split(",")), mesh
        assert all(0 < value < 1e-5 for value in values.values()), (mesh, values)


@pytest.mark.thorough
def test_bfloat16(found: dict[str, Differences]) -> None:
    """Within its own rounding: on a mesh it is as far from float32 as on one device."""
    alone, shared = (found["bfloat16"][mesh]["denoise_step"] for mesh in BFLOAT16[1])
    assert 1e-3 < shared < 1.5 * alone  # the largest of 5 376 differences


# Meshes that a profile cannot have: one line with the reason and the nearest mesh that works.


def config_of(heads: int) -> TransformerConfig:
    return TransformerConfig(heads, 128, 8960, 30, 4096)


def shape_of(guidance: bool = True, videos: int = 1) -> Shape:
    return Shape(832, 480, 81, videos, guidance)


@pytest.mark.parametrize(
    ("mesh", "heads", "guidance", "videos"),
    [
        ("data=2,context=4", 40, True, 1),
        ("data=2,context=4", 12, True, 1),
        ("ring=8", 1, True, 1),
        ("ring=2,context=4", 12, False, 1),
        ("data=4,context=2", 12, True, 2),
        ("data=3", 12, False, 3),
        ("fsdp=2,context=2,tensor=2", 40, False, 1),
        ("", 1, False, 1),
    ],
)
def test_meshes_that_work(mesh: str, heads: int, guidance: bool, videos: int) -> None:
    check_mesh(parse_mesh(mesh), config_of(heads), shape_of(guidance, videos), 8)


@pytest.mark.parametrize(
    ("mesh", "heads", "guidance", "videos", "expected", "found", "remedy"),
    [
        ("context=8", 12, True, 1, "a divisor of 12", "8", "data=2,context=4"),
        ("context=16", 40, True, 1, "at most 8", "16", "context=8"),
        ("fsdp=2,tensor=3", 40, True, 1, "", "6", ""),
        ("data=3", 12, True, 1, "1 or 2", "3", ""),
        ("data=2,context=4", 12, False, 1, "1", "2", "ring=2,context=4"),
        ("data=4,context=2", 12, True, 3, "1 or 2 or 3 or 6", "4", ""),
    ],
)
def test_the_nearest_that_works(
    mesh: str, heads: int, guidance: bool, videos: int, expected: str, found: str, remedy: str
) -> None:
    config, shape = config_of(heads), shape_of(guidance, videos)
    parts = {"expected": expected, "found": found, "remedy": f"--mesh {remedy}"}
    with refuses("mismatch", what=f"the mesh {mesh} ", **parts) as caught:
        check_mesh(parse_mesh(mesh), config, shape, 8)
    check_mesh(parse_mesh(str(caught.value.remedy).rpartition("--mesh ")[2]), config, shape, 8)


def test_halves_of_a_mesh_have_no_nag() -> None:
    halves = parse_mesh("data=2,context=4")
    with refuses("mismatch", what="--nag", remedy="--mesh ring=2,context=4"):
        check_mesh(halves, config_of(40), shape_of(), 8, nag=True)
    check_mesh(halves, config_of(40), shape_of(guidance=False, videos=2), 8, nag=True)


def test_all_meshes_are_tried() -> None:
    """The ordered ways to write every number up to 8 as a product of five."""
    for count, ways in {1: 1, 2: 5, 3: 5, 4: 15, 5: 5, 6: 25, 7: 5, 8: 35}.items():
        found = list(meshes(count))
        assert len(found) == ways == len({tuple(mesh.items()) for mesh in found})
        assert {math.prod(mesh.values()) for mesh in found} == {count} == {num_devices(m) for m in found}
    assert 10_000 < sum(1 for count in range(1, 257) for _ in meshes(count)) < 100_000


@pytest.mark.parametrize(
    ("axis", "size", "works"), [("tensor", 2, True), ("fsdp", 2, True), ("tensor", 4, False)]
)
def test_scales_of_blocks_are_cut_as_their_weights(axis: str, size: int, works: bool) -> None:
    """64 inputs are two blocks."""
    module = WanTransformer(TransformerConfig(4, 16, 128, 3, 32), jnp.bfloat16)
    layers = {path: "q8_0" for path in linear_layers(module) if path.startswith("blocks/")}
    module = store_in_eight_bits(module, layers)
    mesh: Any = AbstractMesh((size,), (axis,))
    placed = weights_placed(abstract_params(module), parameter_axes(module), mesh)
    assert placed["blocks"]["attn1"]["to_out"]["scale"].shape == (3, 64, 2)
    if works:
        check_blocks(placed, layers)
    else:
        with pytest.raises(UsageError) as caught:
            check_blocks(placed, layers)
        assert str(caught.value.found).partition(",")[0] == "blocks/attn1/to_out"


# The programs that spread weights over a mesh: the same bits in the same places as without them.


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
