"""Memory by formula beside what compilers said, the ways to hold weights, and what fits instead."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from helpers.generations import generation
from helpers.refusals import check_refusal
from wanbuild.build_options import BuildOptions
from wanbuild.plan.memory import Figures, estimated, need, usable
from wanbuild.plan.meshes import Candidate, candidate_meshes, refusal
from wanbuild.plan.plan import fitting_instead
from wanbuild.plan.planned_generation import PlannedGeneration
from wanbuild.plan.published_model import published_manifest, published_names
from wanbuild.programs.export import profile_of
from wanbuild.programs.shape import Shape
from wanbuild.programs.shardings import check_mesh
from wanbuild.programs.xla import TooLargeError, refused_bytes
from wanbuild.targets.chips import CHIPS
from wanbuild.targets.parsing import parse_mesh
from wanbuild.targets.target import CPU, TargetSpec
from wanrun.artifact.mesh import Sizes, mesh_text
from wanrun.errors import UsageError

GIB = 2**30


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
    one = generation(name, "h200" if chip == "cpu" else chip, size, vae_tile=tile)
    one = (
        dataclasses.replace(one, chip=dataclasses.replace(one.chip, platform=chip)) if chip == "cpu" else one
    )
    found = estimated(one, {})[program].temporaries + one.carried(program)
    assert found == pytest.approx(gigabytes * 1e9, rel=0.25)


@pytest.mark.slow
def test_meshes_divide_weights_and_work() -> None:
    one = generation("wan2.1-t2v-14b", size=(1280, 720))

    def figures(mesh: str) -> Figures:
        return estimated(one, parse_mesh(mesh))["denoise_step"]

    assert figures("fsdp=8").arguments < figures("context=8").arguments / 6
    assert figures("context=8").temporaries < figures("data=2,context=4").temporaries * 1.1
    assert figures("context=8").temporaries < figures("context=2").temporaries / 3.9


def held(memory: float, sizes: Sizes) -> tuple[str, bool]:
    one = generation("wan2.2-t2v-a14b")
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
    one = generation("wan2.1-t2v-1.3b")
    figures = estimated(one, {})
    least = need(one, {}, figures)
    larger = {**figures, "encode_text": dataclasses.replace(figures["encode_text"], temporaries=10**11)}
    assert need(one, {}, larger).total > least.total + 9e10


@pytest.mark.slow
def test_slots_are_held_beside_the_weights_of_each_expert() -> None:
    """Of A14B: R (in + out) of each product of a layer, in bfloat16; a mesh cuts them as their weights."""
    plain, slots = (generation("wan2.2-t2v-a14b", lora_rank=rank) for rank in (0, 64))
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


# Which mesh is picked, and what is said where none fits.


BOTH = ((1280, 720), (832, 480))


def best(one: PlannedGeneration, count: int) -> Candidate:
    return candidate_meshes(one, count)[0]


@pytest.mark.slow
def test_all_meshes_of_a_number_of_devices_that_work() -> None:
    one = generation("wan2.1-t2v-1.3b", "v6e")
    found = candidate_meshes(one, 8)
    assert len({mesh_text(each.sizes) for each in found}) == len(found) == 20
    for each in found:
        assert math.prod(each.sizes.values()) == 8
        check_mesh(each.sizes, one.step.config, one.shape, 8)
    fitting = [each.video for each in found if each.need.fits]
    assert fitting == sorted(fitting)


@pytest.mark.slow
def test_the_published_mesh_is_the_fastest() -> None:
    assert best(generation("wan2.2-t2v-a14b", "v7x", (1280, 720)), 8).sizes == {"data": 2, "context": 4}


@pytest.mark.slow
def test_weights_that_do_not_fit_whole_are_gathered_layer_by_layer() -> None:
    found = best(generation("wan2.1-t2v-14b", "v5e", (1280, 720)), 8)
    assert found.need.fits
    assert "fsdp" in found.sizes


@pytest.mark.slow
def test_without_guidance_there_is_no_pair() -> None:
    assert best(generation("wan2.1-t2v-14b", "v7x", guidance=False), 8).sizes == {"context": 8}


def refused(one: PlannedGeneration, count: int) -> UsageError:
    found = best(one, count)
    assert not found.need.fits
    return refusal(one, count, found, BOTH)


@pytest.mark.thorough
def test_what_does_not_fit_is_refused_with_more_devices_that_would() -> None:
    error = refused(generation("wan2.1-t2v-14b", "rtx4070ti", (1280, 720)), 1)
    remedy = "--target rtx4070ti-8 --mesh data=2,fsdp=4"
    check_refusal(error, "too_large", what="1280x720x81", expected="12.2 GB", found=" GB", remedy=remedy)
    assert "rtx4070ti" in error.what


def on_less(one: PlannedGeneration, nbytes: float) -> PlannedGeneration:
    """The generation on a device that has so many bytes less than it needs at least."""

    def having(memory_bytes: float) -> PlannedGeneration:
        return dataclasses.replace(one, chip=dataclasses.replace(one.chip, memory_bytes=int(memory_bytes)))

    return having((best(having(0), 1).need.total - nbytes) / 0.95)


@pytest.mark.thorough
def test_a_smaller_size_and_fewer_frames_that_would_fit_are_named() -> None:
    one = generation("wan2.1-t2v-14b", "h100", (1280, 720), vae_dtype="bfloat16")
    one = dataclasses.replace(one, shape=dataclasses.replace(one.shape, num_videos=4))
    error = refused(on_less(one, 1e9), 1)
    check_refusal(error, "too_large", remedy="--size 832x480")
    check_refusal(error, "too_large", remedy="--frames ")


@pytest.mark.thorough
def test_a_dtype_that_would_fit_is_named() -> None:
    one = generation("wan2.1-t2v-1.3b", "h100", (1280, 720), vae_dtype="float32")
    check_refusal(refused(on_less(one, 1e9), 1), "too_large", remedy="--vae-dtype bfloat16")


# A program that a device's memory cannot hold: the number, and what would fit instead.


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 24.50G of 15.75G hbm. Exceeded "
            "hbm capacity by 8.75G.",
            int(24.5 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
            "(27.88G) exceeds available HBM (15.75G).",
            int(27.88 * 2**30),
        ),
        ("RESOURCE_EXHAUSTED: too many threads", None),
        ("INTERNAL: Used 24.50G of 15.75G hbm.", None),
    ],
)
def test_what_the_compiler_says(text: str, nbytes: int | None) -> None:
    assert refused_bytes(RuntimeError(text)) == nbytes


def too_large(name: str, shape: Shape, tmp_path: Path, **mesh: int) -> TooLargeError:
    """The error for Wan 2.1 14B on a chip, whose artifact's manifest is in the folder."""
    manifest = published_manifest(published_names()["wan2.1-t2v-14b"])
    manifest.write(tmp_path)
    nothing: Any = None
    chip = CHIPS.get(name)
    target = TargetSpec(name, "", CPU, nothing, chip.memory_bytes if chip else 2**30, {}, mesh)
    error = TooLargeError("denoise_step", target, 60 * 10**9)
    error.profile = profile_of(manifest, shape, BuildOptions())
    return error


@pytest.mark.thorough
def test_what_fits_instead(tmp_path: Path) -> None:
    error = fitting_instead(tmp_path, too_large("rtx4090", Shape(1280, 720, 81, 1, True), tmp_path))
    assert error.exit_code == 2 and "\n" not in str(error)
    check_refusal(error, "too_large", what="denoise_step ", expected="25.77 GB", remedy="--loop stream")
    check_refusal(error, "too_large", what="rtx4090", found=" 34.23 GB")
    error = fitting_instead(tmp_path, too_large("rtx4080", Shape(1280, 720, 81, 1, True), tmp_path))
    assert all(option in str(error) for option in ("--vae-tile 256", "--loop stream"))
    error = fitting_instead(tmp_path, too_large("rtx4080", Shape(1280, 720, 161, 1, True), tmp_path))
    check_refusal(error, "too_large", found=" 42.82 GB", remedy="--target rtx4080-")


def test_a_target_that_is_no_chip_keeps_its_error(tmp_path: Path) -> None:
    error = too_large("cpu", Shape(832, 480, 81, 1, True), tmp_path)
    assert fitting_instead(tmp_path, error) is error
