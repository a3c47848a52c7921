"""Which mesh is picked, and what is said where none fits."""

from __future__ import annotations

import dataclasses
import math

import pytest

from helpers.refusals import check_refusal
from wanbuild.build_options import BuildOptions
from wanbuild.plan.meshes import Candidate, candidate_meshes, refusal
from wanbuild.plan.planned_generation import PlannedGeneration
from wanbuild.plan.published_model import published_manifest, published_names
from wanbuild.programs.shape import Shape
from wanbuild.programs.shardings import check_mesh
from wanbuild.targets.chips import CHIPS
from wanrun.artifact.mesh import mesh_text
from wanrun.errors import UsageError

pytestmark = pytest.mark.slow

BOTH = ((1280, 720), (832, 480))


def generation(
    name: str, chip: str, size: tuple[int, int] = (832, 480), guidance: bool = True, **options: str
) -> PlannedGeneration:
    shape = Shape(*size, 81, 1, guidance)
    return PlannedGeneration(
        published_manifest(published_names()[name]), shape, BuildOptions(**options), CHIPS[chip], 40
    )


def best(one: PlannedGeneration, count: int) -> Candidate:
    return candidate_meshes(one, count)[0]


def test_all_meshes_of_a_number_of_devices_that_work() -> None:
    one = generation("wan2.1-t2v-1.3b", "v6e")
    found = candidate_meshes(one, 8)
    assert len({mesh_text(each.sizes) for each in found}) == len(found) == 20
    for each in found:
        assert math.prod(each.sizes.values()) == 8
        check_mesh(each.sizes, one.step.config, one.shape, 8)
    fitting = [each.video for each in found if each.need.fits]
    assert fitting == sorted(fitting)


def test_the_published_mesh_is_the_fastest() -> None:
    assert best(generation("wan2.2-t2v-a14b", "v7x", (1280, 720)), 8).sizes == {"data": 2, "context": 4}


def test_weights_that_do_not_fit_whole_are_gathered_layer_by_layer() -> None:
    found = best(generation("wan2.1-t2v-14b", "v5e", (1280, 720)), 8)
    assert found.need.fits
    assert "fsdp" in found.sizes


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
