"""The bytes that devices exchange in a step, by formula."""

from __future__ import annotations

import pytest

from wanbuild.build_options import BuildOptions
from wanbuild.plan.exchange import PlannedStep
from wanbuild.plan.planned_generation import PlannedGeneration
from wanbuild.plan.published_model import published_manifest, published_names
from wanbuild.programs.shape import Shape
from wanbuild.targets.chips import CHIPS
from wanbuild.targets.parsing import parse_mesh


@pytest.fixture(scope="module")
def small() -> PlannedStep:
    """The step of 1.3B at 832x480, 81 frames, between CPU devices."""
    return step("wan2.1-t2v-1.3b", (832, 480))


def step(name: str, size: tuple[int, int]) -> PlannedStep:
    manifest = published_manifest(published_names()[name])
    one = PlannedGeneration(manifest, Shape(*size, 81, 1, True), BuildOptions(), CHIPS["v5p"], 50).step
    return PlannedStep(
        one.config, one.component, one.shape, one.latent_shape, one.text_length, activation_bytes=4
    )


@pytest.mark.parametrize(
    ("mesh", "kind", "gigabytes"),
    [
        # As compiled programs have them: benchmarks/RESULTS.md, "Meshes"; of ring=8 in each of two passes.
        ("data=2,context=4", "all-to-all", 4.529),
        ("data=2,context=4", "all-gather", 0.085),
        ("ring=8", "collective-permute", 10.567),
        ("data=2,ring=2,context=2", "collective-permute", 3.019),
        ("data=2,fsdp=4", "all-gather", 1.961),
        ("data=2,tensor=4", "all-reduce", 27.190),
    ],
)
def test_formulas_are_those_of_compiled_programs(
    small: PlannedStep, mesh: str, kind: str, gigabytes: float
) -> None:
    assert small.sent(parse_mesh(mesh))[kind] == pytest.approx(gigabytes * 1e9, rel=1e-3, abs=1e6)


def test_one_device_sends_nothing(small: PlannedStep) -> None:
    assert sum(small.sent({}).values()) == 0
    assert small.tokens_of({}) == small.tokens_of({"data": 2}) == 32760
    assert [small.passes(sizes) for sizes in ({}, {"data": 2}, {"data": 3})] == [2, 1, 2]


def test_a_chip_sends_activations_in_bfloat16(small: PlannedStep) -> None:
    chip = PlannedStep(small.config, small.component, small.shape, small.latent_shape, small.text_length)
    mesh = parse_mesh("context=4")
    assert chip.sent(mesh)["all-to-all"] == small.sent(mesh)["all-to-all"] / 2


def test_a_vace_model_exchanges_for_its_control_blocks_too() -> None:
    mesh = parse_mesh("data=2,context=4")
    plain, vace = (step(f"wan2.1-{kind}-14b", (1280, 720)).sent(mesh) for kind in ("t2v", "vace"))
    assert vace["all-to-all"] == pytest.approx(plain["all-to-all"] * 48 / 40)
    assert plain["all-to-all"] == pytest.approx(46.449e9, rel=1e-3)
