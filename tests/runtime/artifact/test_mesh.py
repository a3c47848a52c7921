"""Arrays and devices: layouts in chunk files, cuts along the axes of a mesh, staged rows, and slots."""

from __future__ import annotations

import math
import zlib
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from wanbuild.components import kind_of
from wanbuild.conversion import orbax
from wanbuild.conversion.orbax import plan_layout
from wanbuild.models.low_rank import declare_slots
from wanbuild.models.params import abstract_params, flatten, parameter_axes
from wanbuild.plan.published_model import published_manifest, published_names
from wanbuild.targets.parsing import parse_mesh
from wanrun.artifact.layout import CRC_BYTES, ITEM_BYTES, ArrayLayout, zarr_metadata
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.artifact.mesh import (
    AXES,
    Cuts,
    check_rules,
    check_sizes,
    cut,
    device_bytes,
    jax_sizes,
    mesh_text,
    name_suffix,
    normal,
    num_devices,
    shard_count,
)
from wanrun.artifact.parameters import Component, Parameter
from wanrun.artifact.slots import Slot, slots_of
from wanrun.artifact.staged import padded_shape, spread_name

# --- layout ---


# No files in the checkout, no failures on a busy machine, and the same examples in every run.
relaxed = settings(deadline=None, database=None, derandomize=True)
dtypes = st.sampled_from(sorted(ITEM_BYTES))
# Axes from one to a vocabulary: sizes from bytes to terabytes, primes among them. Nothing is allocated.
shapes = st.lists(st.integers(1, 300_000), min_size=1, max_size=5).map(tuple)


@relaxed
@given(shape=shapes, dtype=dtypes, stacked=st.booleans())
def test_rows_and_chunks_divide_the_array(shape: tuple[int, ...], dtype: str, stacked: bool) -> None:
    layout = plan_layout(shape, dtype, stacked)
    assert layout.nbytes == math.prod(shape) * ITEM_BYTES[dtype]
    assert layout.rows * layout.row_bytes == layout.nbytes
    assert layout.chunks * layout.chunk_bytes == layout.nbytes
    assert layout.rows_per_chunk * layout.chunks == layout.rows
    assert layout.row_bytes == math.prod(layout.row_shape) * ITEM_BYTES[dtype]
    assert layout.chunk_bytes == math.prod(layout.chunk_shape) * ITEM_BYTES[dtype]
    assert layout.row_shape[1:] == layout.chunk_shape[1:] == shape[1:]
    assert len({layout.chunk_file(index) for index in range(min(layout.chunks, 1000))}) == min(
        layout.chunks, 1000
    )


small_shapes = st.lists(st.integers(1, 7), min_size=1, max_size=5).map(tuple)


@settings(relaxed, max_examples=40)
@given(shape=small_shapes, dtype=dtypes, stacked=st.booleans(), limit=st.integers(1, 200))
def test_tensorstore_reads_what_a_layout_describes(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], dtype: str, stacked: bool, limit: int
) -> None:
    """Files written from the layout alone hold the array, by the reader that plain Orbax uses."""
    with mock.patch.multiple(orbax, SMALL_BYTES=limit, LARGE_BYTES=limit):
        layout = plan_layout(shape, dtype, stacked)
    seed = zlib.crc32(repr((shape, dtype)).encode())
    data = np.random.default_rng(seed).integers(0, 0x70, layout.nbytes, np.uint8).tobytes()
    folder = tmp_path_factory.mktemp("array")
    (folder / "zarr.json").write_text(str(zarr_metadata(layout)).replace("'", '"'))
    for index in range(layout.chunks):
        content = data[index * layout.chunk_bytes : (index + 1) * layout.chunk_bytes]
        file = folder / layout.chunk_file(index)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content + crc32c(content).to_bytes(CRC_BYTES, "little"))
    kvstore = {"driver": "file", "path": f"{folder}/"}
    array = ts.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result().read().result()
    assert array.shape == shape
    assert array.dtype.name == dtype
    assert array.tobytes() == data


# --- mesh ---


RULES = {"heads": ("tensor",), "mlp": ("tensor",), "embed": ("fsdp",)}


SIZES = st.dictionaries(st.sampled_from(sorted(AXES)), st.integers(1, 4))


@given(SIZES)
def test_a_mesh_is_read_back_from_its_text(sizes: dict[str, int]) -> None:
    mesh = normal(sizes)
    shuffled = dict(sorted(mesh.items()))  # as a manifest sorts them
    check_sizes(shuffled)
    assert mesh_text(shuffled) == mesh_text(mesh) and name_suffix(shuffled) == name_suffix(mesh)
    if mesh:
        assert parse_mesh(mesh_text(mesh)) == mesh
    split = jax_sizes(mesh)
    assert 1 not in split.values() and num_devices(split) == num_devices(mesh)
    assert split.get("guidance", 1) * split.get("videos", 1) == mesh.get("data", 1)


def test_a_mesh_in_words() -> None:
    assert mesh_text({"context": 4, "data": 2}) == "data=2,context=4"
    assert name_suffix({"context": 4, "data": 2}) == "-data2-context4" and name_suffix({}) == ""


@pytest.mark.parametrize("sizes", [{"x": 2}, {"data": 1}, {"tensor": 2048}, {"data": 0}])
def test_what_a_manifest_may_not_have(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a mesh of"):
        check_sizes(sizes)


@pytest.mark.parametrize("along", [("data",), ("x",), ("tensor", "tensor")])
def test_rules_of_no_mesh(along: tuple[str, ...]) -> None:
    check_rules({"heads": ("tensor", "videos"), "embed": ()})
    with pytest.raises(ValueError, match="heads"):
        check_rules({"heads": along})


@pytest.mark.parametrize(
    ("axes", "shape", "cuts"),
    [
        (("layers", "heads", "embed"), (3, 8, 16), ((), ("tensor",), ("fsdp",))),
        (("layers", "embed", "mlp"), (3, 16, 8), ((), ("fsdp",), ("tensor",))),
        (("heads", "mlp"), (8, 8), (("tensor",), ())),  # a mesh axis cuts one dimension
        (("layers", "heads"), (3, 8), ((), ("tensor",))),
        (("layers", "embed"), (3, 16), ((), ())),  # a vector is not worth a collective
        (("embed", None), (16, 4), ((), ())),
        (("heads", "embed"), (6, 16), ((), ("fsdp",))),  # what does not divide stays whole
        (("heads", "embed"), (8, 15), (("tensor",), ())),
        ((None, None), (8, 16), ((), ())),
    ],
)
def test_how_a_parameter_is_cut(axes: tuple[str | None, ...], shape: tuple[int, ...], cuts: Cuts) -> None:
    sizes = {"tensor": 4, "fsdp": 2, "ring": 3}
    found = cut(axes, shape, RULES, sizes)
    assert found == cuts
    assert shard_count(found, sizes) == (4 if ("tensor",) in cuts else 1) * (2 if ("fsdp",) in cuts else 1)
    assert cut(axes, shape, RULES, {}) == ((),) * len(shape)


def test_bytes_on_one_device() -> None:
    parameters = {
        name: Parameter(layout=ArrayLayout(shape, dtype, rows, 1), axes=axes, crc32c=("0",) * rows, sha256="")
        for name, shape, dtype, rows, axes in (
            ("both", (3, 8, 16), "bfloat16", 3, ("layers", "heads", "embed")),
            ("one", (3, 8), "float32", 3, ("layers", "heads")),
            ("none", (5,), "float32", 1, (None,)),
        )
    }
    component = Component("c", parameters)
    assert device_bytes(component, RULES, {}) == component.nbytes == 768 + 96 + 20
    assert device_bytes(component, RULES, {"tensor": 4, "fsdp": 2, "ring": 3}) == 768 // 8 + 96 // 4 + 20


# --- staged ---


@pytest.mark.parametrize(
    ("shape", "rows", "devices", "padded"),
    [
        ((40, 8, 16), 40, 8, (40, 8, 16)),
        ((30, 8, 16), 30, 8, (32, 8, 16)),
        ((3, 8), 3, 8, (8, 8)),
        ((3, 8), 3, 2, (4, 8)),
        ((12, 8), 6, 4, (16, 8)),
        ((12, 8), 6, 3, (12, 8)),
        ((12,), 1, 4, (48,)),
    ],
)
def test_every_device_has_the_same_whole_number_of_rows(
    shape: tuple[int, ...], rows: int, devices: int, padded: tuple[int, ...]
) -> None:
    assert padded_shape(ArrayLayout(shape, "float32", rows, 1), devices) == padded


def test_experts_share_a_program() -> None:
    names = ["transformer", "transformer_2", "vae"]
    assert [spread_name(name) for name in names] == ["spread_transformer", "spread_transformer", "spread_vae"]


# --- slots ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["wan2.1-t2v-1.3b", "wan2.1-i2v-14b-480p", "wan2.1-vace-1.3b", "wan2.2-animate-14b"]
)
def test_what_the_build_declares(model: str) -> None:
    manifest = published_manifest(published_names()[model])
    (name, *_), config = TRANSFORMERS, manifest.configs[TRANSFORMERS[0]]
    kind = kind_of(name, config["_class_name"])
    module = declare_slots(kind.module(kind.parse(config, name), manifest.dtypes[name]), 16, jnp.bfloat16)
    axes = parameter_axes(module)
    declared = {
        path: Slot(leaf.shape, axes[path])
        for path, leaf in flatten(abstract_params(module))
        if path.endswith(("lora_a", "lora_b"))
    }
    assert slots_of(manifest.components[name], 16) == declared
    assert slots_of(manifest.components[name], 0) == {}
