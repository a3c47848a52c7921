"""Meshes that a profile cannot have: one line with the reason and the nearest mesh that works."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from wanbuild.models.eight_bit import linear_layers, store_in_eight_bits
from wanbuild.models.params import abstract_params, parameter_axes
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.transformer_config import TransformerConfig
from wanbuild.programs.shape import Shape
from wanbuild.programs.shardings import check_blocks, check_mesh, meshes, weights_placed
from wanbuild.targets.parsing import parse_mesh
from wanrun.artifact.mesh import num_devices
from wanrun.errors import UsageError


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
    ("mesh", "heads", "guidance", "videos", "message"),
    [
        (
            "context=8",
            12,
            True,
            1,
            r"the mesh context=8 does not work: the heads are not divisible by context; "
            r"expected a divisor of 12; found 8; use --mesh data=2,context=4",
        ),
        (
            "context=16",
            40,
            True,
            1,
            r"more devices than there are; expected at most 8; found 16; .* context=8",
        ),
        ("fsdp=2,tensor=3", 40, True, 1, r"by fsdp x tensor; .* found 6; use --mesh "),
        (
            "data=3",
            12,
            True,
            1,
            r"does not divide the batch \(1 video\(s\), guidance on\); expected 1 or 2; found 3",
        ),
        (
            "data=2,context=4",
            12,
            False,
            1,
            r"guidance off\); expected 1; found 2; use --mesh ring=2,context=4",
        ),
        ("data=4,context=2", 12, True, 3, r"expected 1 or 2 or 3 or 6; found 4; use --mesh "),
    ],
)
def test_the_nearest_that_works(mesh: str, heads: int, guidance: bool, videos: int, message: str) -> None:
    config, shape = config_of(heads), shape_of(guidance, videos)
    with pytest.raises(UsageError, match=message) as caught:
        check_mesh(parse_mesh(mesh), config, shape, 8)
    nearest = str(caught.value).rpartition("use --mesh ")[2]
    check_mesh(parse_mesh(nearest), config, shape, 8)


def test_halves_of_a_mesh_have_no_nag() -> None:
    halves = parse_mesh("data=2,context=4")
    with pytest.raises(UsageError, match=r"--nag.*--mesh ring=2,context=4"):
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
