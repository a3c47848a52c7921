"""Meshes: how they are written, and how a parameter is cut along their axes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanbuild.targets.parsing import parse_mesh
from wanrun.artifact.layout import ArrayLayout
from wanrun.artifact.mesh import (
    AXES,
    Cuts,
    check_rules,
    check_sizes,
    cut,
    device_bytes,
    jax_sizes,
    mesh_text,
    normal,
    num_devices,
    shard_count,
)
from wanrun.artifact.parameters import Component, Parameter

RULES = {"heads": ("tensor",), "mlp": ("tensor",), "embed": ("fsdp",)}


SIZES = st.dictionaries(st.sampled_from(sorted(AXES)), st.integers(1, 4))


@given(SIZES)
def test_a_mesh_is_read_back_from_its_text(sizes: dict[str, int]) -> None:
    mesh = normal(sizes)
    check_sizes(mesh)
    if mesh:
        assert parse_mesh(mesh_text(mesh)) == mesh
    split = jax_sizes(mesh)
    assert 1 not in split.values() and num_devices(split) == num_devices(mesh)
    assert split.get("guidance", 1) * split.get("videos", 1) == mesh.get("data", 1)


@pytest.mark.parametrize(
    "sizes", [{"x": 2}, {"data": 1}, {"context": 4, "data": 2}, {"tensor": 2048}, {"data": 0}]
)
def test_what_a_manifest_may_not_have(sizes: dict[str, int]) -> None:
    if list(sizes) == ["context", "data"]:  # the order does not matter
        check_sizes(sizes)
    else:
        with pytest.raises(ValueError, match="a mesh of"):
            check_sizes(sizes)


@pytest.mark.parametrize("along", [("data",), ("x",), ("tensor", "tensor")])
def test_rules_of_no_mesh(along: tuple[str, ...]) -> None:
    check_rules({"heads": ("tensor", "videos"), "embed": ()})
    with pytest.raises(ValueError, match="heads"):
        check_rules({"heads": along})


def test_a_mesh_axis_cuts_one_dimension() -> None:
    rules = {"heads": ("tensor",), "embed": ("tensor",)}
    assert cut(("heads", "embed"), (8, 8), rules, {"tensor": 2}) == (("tensor",), ())


def test_a_mesh_in_words() -> None:
    assert mesh_text({"context": 4, "data": 2}) == "data=2,context=4"  # as a manifest sorts them


@pytest.mark.parametrize(
    ("axes", "shape", "cuts"),
    [
        (("layers", "heads", "embed"), (3, 8, 16), ((), ("tensor",), ("fsdp",))),
        (("layers", "embed", "mlp"), (3, 16, 8), ((), ("fsdp",), ("tensor",))),
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
        "both": Parameter(
            layout=ArrayLayout((3, 8, 16), "bfloat16", 3, 1),
            axes=("layers", "heads", "embed"),
            crc32c=("0",) * 3,
            sha256="",
        ),
        "one": Parameter(
            layout=ArrayLayout((3, 8), "float32", 3, 1),
            axes=("layers", "heads"),
            crc32c=("0",) * 3,
            sha256="",
        ),
        "none": Parameter(layout=ArrayLayout((5,), "float32", 1, 1), axes=(None,), crc32c=("0",), sha256=""),
    }
    component = Component("c", parameters)
    assert device_bytes(component, RULES, {}) == component.nbytes == 768 + 96 + 20
    assert device_bytes(component, RULES, {"tensor": 4, "fsdp": 2, "ring": 3}) == 768 // 8 + 96 // 4 + 20
