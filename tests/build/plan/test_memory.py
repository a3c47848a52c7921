"""Memory by formula beside what compilers said, and the ways to hold weights."""

from __future__ import annotations

import dataclasses

import pytest

from wanbuild.build_options import BuildOptions
from wanbuild.plan.memory import Figures, estimated, need, usable
from wanbuild.plan.planned_generation import PlannedGeneration
from wanbuild.plan.published_model import published_manifest, published_names
from wanbuild.programs.shape import Shape
from wanbuild.targets.chips import CHIPS
from wanbuild.targets.parsing import parse_mesh
from wanrun.artifact.mesh import Sizes

GIB = 2**30


def generation(
    name: str, size: tuple[int, int], chip: str = "h200", rank: int = 0, tile: int = 0
) -> PlannedGeneration:
    manifest, options = (
        published_manifest(published_names()[name]),
        BuildOptions(lora_rank=rank, vae_tile=tile),
    )
    return PlannedGeneration(manifest, Shape(*size, 81, 1, True), options, CHIPS[chip], 40)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("chip", "name", "size", "program", "gigabytes", "tile"),
    [
        # Temporaries of compiled programs on one device, of decoders with the history.
        ("h200", "wan2.1-t2v-14b", (1280, 720), "denoise_step", 7.2, 0),
        ("h200", "wan2.1-t2v-14b", (832, 480), "denoise_step", 2.7, 0),
        ("h200", "wan2.1-t2v-1.3b", (832, 480), "denoise_step", 1.1, 0),
        ("h200", "wan2.1-t2v-1.3b", (832, 480), "decode_video", 7.77, 0),
        ("h200", "wan2.1-t2v-1.3b", (416, 240), "decode_video", 1.95, 0),
        ("h200", "wan2.2-ti2v-5b", (1280, 704), "decode_video", 17.6, 0),
        ("v6e", "wan2.1-t2v-1.3b", (832, 480), "decode_video", 11.7, 0),
        ("h200", "wan2.1-i2v-14b-720p", (1280, 720), "encode_video", 11.8, 0),
        # Tiles take what one tile does, and an NVIDIA GPU's other layouts of the weights.
        ("cpu", "wan2.1-t2v-1.3b", (832, 480), "decode_video", 1.56, 256),
        ("h200", "wan2.1-t2v-1.3b", (832, 480), "decode_video", 2.58, 256),
    ],
)
def test_temporaries_are_those_of_compiled_programs(
    chip: str, name: str, size: tuple[int, int], program: str, gigabytes: float, tile: int
) -> None:
    one = generation(name, size, "h200" if chip == "cpu" else chip, tile=tile)
    one = (
        dataclasses.replace(one, chip=dataclasses.replace(one.chip, platform=chip)) if chip == "cpu" else one
    )
    found = estimated(one, {})[program].temporaries + one.carried(program)
    assert found == pytest.approx(gigabytes * 1e9, rel=0.25)


@pytest.mark.slow
def test_meshes_divide_weights_and_work() -> None:
    one = generation("wan2.1-t2v-14b", (1280, 720))

    def figures(mesh: str) -> Figures:
        return estimated(one, parse_mesh(mesh))["denoise_step"]

    assert figures("fsdp=8").arguments < figures("context=8").arguments / 6
    assert figures("context=8").temporaries < figures("data=2,context=4").temporaries * 1.1
    assert figures("context=8").temporaries < figures("context=2").temporaries / 3.9


def held(memory: float, sizes: Sizes) -> tuple[str, bool]:
    one = generation("wan2.2-t2v-a14b", (832, 480))
    small = dataclasses.replace(one, chip=dataclasses.replace(one.chip, memory_bytes=int(memory * GIB)))
    found = need(small, sizes, estimated(small, sizes))
    return found.held, found.fits


@pytest.mark.thorough
def test_two_experts_are_held_as_the_memory_allows() -> None:
    """29 GB each, beside them 11.4 GB of text encoder and 6 GB of programs; 3 GB if layers stream."""
    assert held(96, {}) == ("all", True)
    assert held(64, {}) == ("one", True)
    assert held(42, {}) == ("low", True)
    assert held(32, {}) == ("stream", True)
    assert held(13, {}) == ("stream", True)
    assert held(11, {}) == ("stream", False)
    assert held(32, {"fsdp": 4}) == ("all", True)


def test_the_runtimes_margin_is_left_free() -> None:
    assert usable(100 * GIB) == 95 * GIB


@pytest.mark.slow
def test_the_largest_program_counts() -> None:
    one = generation("wan2.1-t2v-1.3b", (832, 480))
    figures = estimated(one, {})
    least = need(one, {}, figures)
    larger = {**figures, "encode_text": dataclasses.replace(figures["encode_text"], temporaries=10**11)}
    assert need(one, {}, larger).total > least.total + 9e10


@pytest.mark.slow
def test_slots_are_held_beside_the_weights_of_each_expert() -> None:
    """Of A14B: R (in + out) of each product of a layer, in bfloat16; a mesh cuts them as their weights."""
    plain, slots = (generation("wan2.2-t2v-a14b", (832, 480), rank=rank) for rank in (0, 64))
    config = slots.step.config
    layer = 8 * 2 * config.dim + 2 * (config.dim + config.ffn_dim)
    assert slots.slots_bytes({}) == pytest.approx(2 * 64 * config.num_layers * layer, rel=0.02)
    assert plain.slots_bytes({}) == 0
    assert 0.4 < slots.slots_bytes({"tensor": 8}) / slots.slots_bytes({}) < 0.6
    assert slots.slots_bytes({"fsdp": 8}) == slots.slots_bytes({})
    needs = [need(one, {}, estimated(one, {})) for one in (plain, slots)]
    assert {one.held for one in needs} == {"all"}
    assert needs[1].weights - needs[0].weights == 2 * slots.slots_bytes({})
    figures = [estimated(one, {})["denoise_step"].arguments for one in (plain, slots)]
    assert figures[1] - figures[0] == slots.slots_bytes({})
