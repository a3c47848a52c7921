"""Predictions against published figures, and the manifests of published models."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from helpers.generations import generation
from helpers.refusals import refuses
from wanbuild.plan.meshes import step_seconds
from wanbuild.plan.prediction import Share, efficiency_of, predicted, rate, transfer_seconds
from wanbuild.plan.published_model import (
    model_manifest,
    published_manifest,
    published_names,
    published_variant,
)
from wanbuild.plan.subject import read_subject
from wanbuild.plan.work import Product, Work
from wanbuild.published.variant_configs import PUBLISHED_MODELS
from wanbuild.source.checkpoint import open_source
from wanbuild.source.match import variant_of
from wanbuild.targets.chips import CHIPS
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun.artifact.manifest import TRANSFORMERS, read_manifest
from wanrun.artifact.mesh import Sizes
from wanrun.artifact.roles import ROLES

PAIR = {"data": 2, "context": 4}
NEAR = 1.35
"""The factor within which predictions and published figures agree."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "chip", "mesh", "size", "least", "most"),
    [
        # MaxDiffusion, Wan 2.2 on eight devices of v7x.
        ("wan2.2-t2v-a14b", "v7x", PAIR, (1280, 720), 2.63, 2.7),
        # A server in PyTorch on one H200; diffusers and the best of others on one H100.
        ("wan2.2-t2v-a14b", "h200", {}, (832, 480), 5.1, 5.14),
        ("wan2.1-i2v-14b-480p", "h100", {}, (832, 480), 5.18, 9.77),
        # The same of an RTX 4090 D, by the RTX 4090's multiprocessors: the best attends in 8 bits.
        ("wan2.1-i2v-14b-480p", "rtx4090", {}, (832, 480), 20.26 * 114 / 128, 30.5 * 114 / 128),
        # TurboDiffusion, 50 steps of the original, without what it loses by offloading.
        ("wan2.1-t2v-1.3b", "rtx5090", {}, (832, 480), 184 / 50, 184 / 50),
        ("wan2.1-t2v-14b", "rtx5090", {}, (1280, 720), 3182 / 50, 3182 / 50),
    ],
)
def test_published_steps_are_predicted(
    name: str, chip: str, mesh: Sizes, size: tuple[int, int], least: float, most: float
) -> None:
    found = step_seconds(generation(name, chip, size), mesh)
    assert least / NEAR < found < most * NEAR


@pytest.mark.slow
def test_the_published_decoder_is_predicted() -> None:
    """MaxDiffusion on eight devices of v7x: 2.9 to 3.6 s; in three passes it is not published."""
    seconds = {}
    for precision in ("highest", "high"):
        one = generation("wan2.2-t2v-a14b", "v7x", (1280, 720), vae_precision=precision)
        decode = (call for call in one.calls if ROLES[call.role].when == "video")
        seconds[precision] = sum(one.time(call, PAIR).seconds * call.times for call in decode)
    assert 2.9 / NEAR < seconds["highest"] < 3.6 * NEAR
    assert 1.8 < seconds["highest"] / seconds["high"] <= 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "chip", "mesh", "size", "frames", "steps", "published"),
    [
        # MaxDiffusion, image to video on eight devices.
        ("wan2.2-i2v-a14b", "v6e", {"data": 2, "fsdp": 4}, (1280, 720), 81, 40, 251),
        # The tables of efficiency of Wan 2.1 and 2.2.
        ("wan2.1-t2v-1.3b", "rtx4090", {}, (832, 480), 81, 50, 261.4),
        ("wan2.2-ti2v-5b", "rtx4090", {}, (1280, 704), 121, 50, 534.7),
        ("wan2.2-t2v-a14b", "h20", {}, (1280, 720), 81, 40, 4048.7),
        ("wan2.2-t2v-a14b", "a100", {}, (1280, 720), 81, 40, 2735.7),
    ],
)
def test_published_videos_are_predicted(
    name: str, chip: str, mesh: Sizes, size: tuple[int, int], frames: int, steps: int, published: float
) -> None:
    one = dataclasses.replace(generation(name, chip, size, frames), steps=steps)
    total = sum(one.time(call, mesh).seconds * call.times for call in one.calls)
    assert published / NEAR < total < published * NEAR


@pytest.mark.slow
def test_nothing_is_faster_than_the_peak() -> None:
    one = generation("wan2.1-t2v-14b", "h200", (1280, 720))
    assert step_seconds(one, {}) > one.work["denoise_step"].operations / CHIPS["h200"].bf16


@pytest.mark.parametrize(
    ("chip", "product", "share"),
    [
        ("v5p", Product("attention", "bfloat16", 128, 1024), 1.0),
        ("v7x", Product("attention", "bfloat16", 128, 1024), 0.5),
        ("v7x", Product("attention", "bfloat16", 75600, 128), 0.5 * 75600 / (296 * 256)),
        ("v7x", Product("convolution", "bfloat16", 96, 96), (96 / 256) ** 2),
        ("h100", Product("convolution", "bfloat16", 96, 96), 1.0),
    ],
)
def test_a_shape_fills_a_part_of_the_unit(chip: str, product: Product, share: float) -> None:
    row = CHIPS[chip]
    efficiency = getattr(efficiency_of(row), product.kind)
    assert rate(product, row, "highest") == pytest.approx(row.bf16 * share * efficiency)


def test_float32_is_six_passes_on_a_tpu_and_single_numbers_on_a_gpu() -> None:
    narrow, wide = (Product("matmul", dtype, 1024, 1024) for dtype in ("bfloat16", "float32"))
    v5p, h100 = CHIPS["v5p"], CHIPS["h100"]
    assert rate(narrow, v5p, "highest") == pytest.approx(6 * rate(wide, v5p, "highest"))
    assert rate(narrow, v5p, "high") == pytest.approx(3 * rate(wide, v5p, "high"))
    assert rate(wide, h100, "highest") == pytest.approx(67e12 * efficiency_of(h100).matmul)
    assert rate(wide, h100, "high") == pytest.approx(494.5e12 * efficiency_of(h100).matmul)


def test_terms_are_added_and_the_largest_is_the_bound() -> None:
    chip = dataclasses.replace(CHIPS["h200"], bf16=1e12, bandwidth=1e9, link=1e9)
    assumed = efficiency_of(chip)
    work = Work({Product("matmul", "bfloat16", 16, 16): 1e12}, nbytes=4e9)
    share = Share(products=0.5, weights=1e9, whole_weights=2e9, sent=3e9, layers=2, tokens=1e7)
    time = predicted(work, chip, share)
    assert time.products == pytest.approx(0.5 / assumed.matmul)
    assert time.bytes == pytest.approx((0.5 * 2 + 1) / assumed.memory)
    assert time.exchange == pytest.approx(3 / assumed.links)
    assert time.passes == pytest.approx(2 * (assumed.passes * 0.01 / assumed.memory + assumed.launches))
    assert time.seconds == pytest.approx(time.products + time.bytes + time.passes + time.exchange)
    assert time.bound == "exchange"


def test_staged_transfer_shares_the_host_links() -> None:
    chip = CHIPS["v7x"]
    assumed = efficiency_of(chip)
    whole = 8e9 / (chip.host_link * assumed.host)
    assert transfer_seconds(8e9, 8e9, 1, chip) == pytest.approx(whole)
    spread = 7e9 / (chip.link * assumed.links)
    assert transfer_seconds(8e9, 8e9, 8, chip) == pytest.approx(whole / 8 + spread)
    assert transfer_seconds(8e9, 1e9, 8, chip) == pytest.approx(whole / 8)


# Manifests without weights: of published models, and of a checkpoint as its conversion writes it.


@pytest.mark.slow
@pytest.mark.parametrize("repository", PUBLISHED_MODELS)
def test_every_published_model_has_a_manifest(repository: str) -> None:
    manifest = published_manifest(repository)
    assert manifest.model.variant == published_variant(repository).name
    assert manifest.components.keys() == PUBLISHED_MODELS[repository].keys()
    assert manifest.components["text_encoder"].nbytes == pytest.approx(11.36e9, rel=1e-3)


@pytest.mark.slow
def test_a_transformer_has_the_published_number_of_parameters() -> None:
    """Of image to video; those of text alone are counted in the tests of toys."""
    component = published_manifest(published_names()["wan2.1-i2v-14b-480p"]).components["transformer"]
    count = sum(
        one.layout.nbytes / {"bfloat16": 2, "float32": 4}[one.layout.dtype]
        for one in component.parameters.values()
    )
    assert count == pytest.approx(16.4e9, rel=0.01)


def test_a_checkpoint_has_the_layouts_that_its_conversion_writes(
    toy_checkpoint: Path, toy_artifact: Path
) -> None:
    with open_source(toy_checkpoint) as source:
        configs = {
            name: {**part.config, **({"_class_name": part.class_name} if name in TRANSFORMERS else {})}
            for name, part in source.components.items()
        }
        dtypes = {name: policy.weights for name, policy in read_manifest(toy_artifact).dtypes.items()}
        planned = model_manifest(variant_of(source), configs, dtypes=dtypes)
    converted = read_manifest(toy_artifact)
    for name, component in converted.components.items():
        layouts = {path: (one.layout, one.axes) for path, one in component.parameters.items()}
        found = planned.components[name].parameters
        assert {path: (one.layout, one.axes) for path, one in found.items()} == layouts
    left_out = {"defaults", "options"}
    fields = set(type(converted.model).__struct_fields__) - left_out
    assert {n: getattr(planned.model, n) for n in fields} == {n: getattr(converted.model, n) for n in fields}


@pytest.mark.parametrize("text", ["wan2.1-t2v-14b", "Wan-AI/Wan2.1-T2V-14B-Diffusers", "WAN2.1-T2V-14B"])
def test_names_of_a_published_model(text: str) -> None:
    subject = read_subject(text)
    assert subject.name == "wan2.1-t2v-14b"
    assert subject.sizes == ((832, 480), (1280, 720))


def test_a_model_for_one_height_is_planned_for_it() -> None:
    assert read_subject("wan2.1-i2v-14b-720p").sizes == ((1280, 720),)


@pytest.mark.slow
def test_a_checkpoint_an_artifact_and_a_recipe(toy_artifact: Path, tmp_path: Path) -> None:
    write_toy(tmp_path / "toy", "wan2.2-t2v")
    assert read_subject(str(tmp_path / "toy")).manifest.model.options["boundary"] == 0.875
    artifact = read_subject(str(toy_artifact))
    assert artifact.sizes[0] == (96, 64)
    assert (artifact.choices["frames"], artifact.choices["guidance"]) == (9, True)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'source = "toy"\nartifact = "a"\n[convert]\nweights_dtype = "float32"\n'
        "[convert.defaults]\nsteps = 4\n"
        '[compile]\nsizes = ["64x64"]\nmesh = "ring=2"\n'
    )
    subject = read_subject(str(recipe))
    assert subject.manifest.dtypes["transformer_2"].weights == "float32"
    assert subject.choices == {"sizes": [(64, 64)], "mesh": {"ring": 2}}
    assert subject.defaults == {"steps": 4}
    recipe.write_text('source = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"\nartifact = "a"\n')
    assert read_subject(str(recipe)).manifest.model.variant == "wan2.1-t2v"


def test_an_unknown_model_lists_the_known_ones(tmp_path: Path) -> None:
    with refuses("unknown_name", what="'wan3'", expected="wan2.1-t2v-1.3b, "):
        read_subject("wan3")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('source = "nowhere"\nartifact = "a"\n')
    with refuses("unknown_name", what=recipe):
        read_subject(str(recipe))
