"""Names of targets as users write them, among the targets that an artifact has."""

from __future__ import annotations

import pytest

from wanrun.artifact.mesh import name_suffix
from wanrun.artifact.target_names import TargetName, built_target, named_target

MESHES = {
    "rtx4090": {},
    "rtx4090-w8a8": {},
    "rtx4090-context2": {"context": 2},
    "rtx4060ti-16gb-local": {},
    "v7x-w8a8-data2-context4": {"data": 2, "context": 4},
    "h100-context4": {"context": 4},
    "h100-data2-context4": {"data": 2, "context": 4},
    "cpu-v4": {},
}
"""Targets of an artifact, with their meshes."""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((name, name) for name in MESHES),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),  # of several meshes, one device
        ("4090-w8a8", "rtx4090-w8a8"),
        ("4090-2", "rtx4090-context2"),
        ("4060 Ti 16GB local", "rtx4060ti-16gb-local"),
        ("v7x-w8a8", "v7x-w8a8-data2-context4"),  # the only mesh
        ("V7X-8-w8a8", "v7x-w8a8-data2-context4"),
        ("h100-8", "h100-data2-context4"),
        ("h100", None),  # two meshes
        ("v7x", None),
        ("4090-w8a8-2", None),
        ("4070", None),
        ("4060ti", None),  # another kind of target
        ("local", None),
        ("", None),
    ],
)
def test_the_target_that_is_meant(text: str, name: str | None) -> None:
    assert built_target(text, MESHES) == name


def test_a_name_is_read_back() -> None:
    for name in (TargetName("v7x"), TargetName("v7x", w8a8=True), TargetName("v7x", w8a8=True, count=8)):
        assert named_target(name.text, ["v7x"]) == name


def test_a_mesh_in_a_target_s_name() -> None:
    assert name_suffix({}) == ""
    assert name_suffix({"data": 2, "context": 4}) == "-data2-context4"
    assert name_suffix({"context": 4, "data": 2}) == "-data2-context4"  # as a manifest sorts them
