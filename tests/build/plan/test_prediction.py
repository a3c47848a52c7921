"""Predictions against published figures, and the terms of a prediction."""

from __future__ import annotations

import dataclasses

import pytest

from wanbuild.plan.generation import Generation
from wanbuild.plan.meshes import step_seconds
from wanbuild.plan.prediction import EFFICIENCIES, Share, predicted, rate, transfer_seconds
from wanbuild.plan.published import published_manifest, published_names
from wanbuild.plan.work import Product, Work
from wanbuild.programs.build_options import BuildOptions, Shape
from wanbuild.targets.chips import CHIPS
from wanrun.artifact.mesh import Sizes

PAIR = {"data": 2, "context": 4}


def generation(name: str, chip: str, size: tuple[int, int], **options: str) -> Generation:
    manifest = published_manifest(published_names()[name])
    return Generation(manifest, Shape(*size, 81, 1, True), BuildOptions(**options), CHIPS[chip], 40)


@pytest.mark.parametrize(
    ("name", "chip", "mesh", "size", "least", "most"),
    [
        # MaxDiffusion, Wan 2.2 on eight devices of v7x.
        ("wan2.2-t2v-a14b", "v7x", PAIR, (1280, 720), 2.63, 2.7),
        # A server in PyTorch on one H200; diffusers and the best of others on one H100.
        ("wan2.2-t2v-a14b", "h200", {}, (832, 480), 5.1, 5.14),
        ("wan2.1-i2v-14b-480p", "h100", {}, (832, 480), 5.18, 9.77),
    ],
)
def test_published_steps_are_predicted_within_a_factor_of_two(
    name: str, chip: str, mesh: Sizes, size: tuple[int, int], least: float, most: float
) -> None:
    found = step_seconds(generation(name, chip, size), mesh)
    assert least / 2 < found < most * 2


def test_the_published_decoder_is_predicted_within_a_factor_of_two() -> None:
    """MaxDiffusion on eight devices of v7x: 2.9 to 3.6 s."""
    one = generation("wan2.2-t2v-a14b", "v7x", (1280, 720))
    (decode,) = (call for call in one.calls if call.name == "decode_video")
    assert 2.9 / 2 < one.time(decode, PAIR).seconds < 3.6 * 2


def test_a_published_video_on_v6e_is_predicted_within_a_factor_of_two() -> None:
    """MaxDiffusion, image to video on eight devices: 251 s."""
    one = generation("wan2.2-i2v-a14b", "v6e", (1280, 720))
    total = sum(one.time(call, {"data": 2, "fsdp": 4}).seconds * call.times for call in one.calls)
    assert 251 / 2 < total < 251 * 2


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
    efficiency = getattr(EFFICIENCIES[row.platform], product.kind)
    assert rate(product, row) == pytest.approx(row.bf16 * share * efficiency)


def test_float32_is_six_passes_on_a_tpu_and_single_numbers_on_a_gpu() -> None:
    narrow, wide = (Product("matmul", dtype, 1024, 1024) for dtype in ("bfloat16", "float32"))
    assert rate(narrow, CHIPS["v5p"]) == pytest.approx(6 * rate(wide, CHIPS["v5p"]))
    assert rate(wide, CHIPS["h100"]) == pytest.approx(67e12 * EFFICIENCIES["cuda"].matmul)


def test_terms_are_added_and_the_largest_is_the_bound() -> None:
    chip = dataclasses.replace(CHIPS["h200"], bf16=1e12, bandwidth=1e9, link=1e9)
    assumed = EFFICIENCIES["cuda"]
    work = Work({Product("matmul", "bfloat16", 16, 16): 1e12}, nbytes=4e9)
    time = predicted(work, chip, Share(products=0.5, weights=1e9, whole_weights=2e9, sent=3e9))
    assert time.products == pytest.approx(0.5 / assumed.matmul)
    assert time.bytes == pytest.approx((0.5 * 2 + 1) / assumed.memory)
    assert time.exchange == pytest.approx(3 / assumed.links)
    assert time.seconds == pytest.approx(time.products + time.bytes + time.exchange)
    assert time.bound == "exchange"


def test_staged_transfer_shares_the_host_links() -> None:
    chip = CHIPS["v7x"]
    assumed = EFFICIENCIES["tpu"]
    whole = 8e9 / (chip.host_link * assumed.host)
    assert transfer_seconds(8e9, 8e9, 1, chip) == pytest.approx(whole)
    spread = 7e9 / (chip.link * assumed.links)
    assert transfer_seconds(8e9, 8e9, 8, chip) == pytest.approx(whole / 8 + spread)
    assert transfer_seconds(8e9, 1e9, 8, chip) == pytest.approx(whole / 8)
