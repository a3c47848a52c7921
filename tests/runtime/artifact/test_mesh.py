"""Meshes: how they are written, and how a parameter is cut along their axes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    name_suffix,
    normal,
    num_devices,
    parse_mesh,
    shard_count,
)
from wanrun.artifact.parameters import Component, Parameter
from wanrun.errors import UsageError

RULES = {"heads": ("tensor",), "mlp": ("tensor",), "embed": ("fsdp",)}


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("data=2,context=4", {"data": 2, "context": 4}),
        (" context = 4 ".replace(" = ", "=") + ", data=2", {"data": 2, "context": 4}),
        ("data=1,context=1", {}),
        ("", {}),
        ("tensor=8", {"tensor": 8}),
    ],
)
def test_what_is_written(text: str, sizes: dict[str, int]) -> None:
    """An axis that is left out has one device; the order is always that of the table."""
    assert list(parse_mesh(text).items()) == list(sizes.items())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model=2", "--mesh has an unknown axis; expected one of data, ring, fsdp, context, tensor; found"),
        ("2x4", "unknown axis"),
        ("data=2,", "unknown axis"),
        ("data=2,data=2", "--mesh has data twice"),
        ("data", "--mesh has no number of devices for data; expected data=2; found 'data'"),
        ("data=0", "no number of devices"),
        ("data=-2", "no number of devices"),
        ("data=2.0", "no number of devices"),
        ("data=\N{SUPERSCRIPT TWO}", "no number of devices"),
        ("data=" + "9" * 5000, "no number of devices"),
    ],
)
def test_what_is_no_mesh(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_mesh(text)


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
    with pytest.raises(ValueError, match="heads is cut along"):
        check_rules({"heads": along})


def test_a_mesh_axis_cuts_one_dimension() -> None:
    rules = {"heads": ("tensor",), "embed": ("tensor",)}
    assert cut(("heads", "embed"), (8, 8), rules, {"tensor": 2}) == (("tensor",), ())


def test_a_target_s_name() -> None:
    assert name_suffix({}) == ""
    assert name_suffix({"data": 2, "context": 4}) == "-data2-context4"
    assert name_suffix({"context": 4, "data": 2}) == "-data2-context4"  # as a manifest sorts them
    assert mesh_text({"context": 4, "data": 2}) == "data=2,context=4"


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
