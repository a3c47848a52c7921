"""The counted work of programs, and the bytes that devices exchange, against XLA and formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest

from helpers.generations import generation
from wanbuild.models.attention import blocked_attention
from wanbuild.plan.exchange import PlannedStep
from wanbuild.plan.work import Work, work_of
from wanbuild.programs.spec import ProgramSpec
from wanbuild.targets.parsing import parse_mesh
from wanrun.artifact.roles import ROLES


def counted(function: object, *arrays: jax.ShapeDtypeStruct) -> Work:
    names = tuple(f"x{index}" for index in range(len(arrays)))
    return work_of(ProgramSpec("f", function, names, arrays))  # type: ignore[arg-type]


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_products_and_convolutions_as_xla_counts_them() -> None:
    def function(a: jax.Array, b: jax.Array, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return a @ b, y

    arrays = array(40, 30), array(30, 20), array(2, 18, 14, 6), array(3, 3, 6, 8)
    compiled = jax.jit(function).lower(*arrays).compile()
    cost = compiled.cost_analysis()
    assert cost is not None
    work = counted(function, *arrays)
    assert work.operations == cost["flops"] == 2 * (40 * 30 * 20 + 2 * 16 * 12 * 9 * 6 * 8)
    assert work.nbytes == 4 * (40 * 30 + 30 * 20 + 40 * 20 + 2 * 18 * 14 * 6 + 9 * 6 * 8 + 2 * 16 * 12 * 8)
    kinds = {product.kind: (product.summed, product.features) for product in work.flops}
    assert kinds == {"matmul": (30, 20), "convolution": (6, 8)}


def test_a_loop_counts_as_often_as_it_runs() -> None:
    def layer(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ weights), None

    def looped(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(layer, x, weights)[0]

    def unrolled(x: jax.Array, weights: jax.Array) -> jax.Array:
        for one in weights:
            x, _ = layer(x, one)
        return x

    arrays = array(8, 16), array(5, 16, 16)
    cost = jax.jit(unrolled).lower(*arrays).compile().cost_analysis()
    assert cost is not None
    assert counted(looped, *arrays).operations == counted(unrolled, *arrays).operations
    assert counted(looped, *arrays).operations == pytest.approx(cost["flops"], rel=0.05)


def test_a_branch_for_some_layers_counts_as_often_as_it_has_weights() -> None:
    def body(x: jax.Array, number: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.cond(number % 3 == 0, lambda x: x @ weights[number // 3], lambda x: x, x)

    def function(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, number: (body(x, number, weights), None), x, jnp.arange(12))[0]

    assert counted(function, array(8, 16), array(4, 16, 16)).operations == 4 * 2 * 8 * 16 * 16


def test_attention_in_blocks_is_a_kernel_whose_scores_stay_on_the_chip() -> None:
    heads = array(1, 6000, 2, 16, dtype="bfloat16")
    work = counted(blocked_attention, heads, heads, heads)
    assert {product.kind for product in work.flops} == {"attention"}
    assert work.operations == pytest.approx(4 * 6000 * 6000 * 2 * 16, rel=1e-3)
    assert work.nbytes == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "frames"),
    [("wan2.1-t2v-1.3b", (832, 480), 81), ("wan2.1-t2v-14b", (1280, 720), 81)],
)
def test_a_step_is_its_layers_by_formula(name: str, size: tuple[int, int], frames: int) -> None:
    """4 S T D per layer of attention, and two per weight and token of the other products."""
    one = generation(name, size=size, frames=frames)
    config, step, passes = one.step.config, one.step, 2
    S, D, F, L = step.tokens, config.dim, config.ffn_dim, config.num_layers
    assert (frames + 3) // 4 * size[0] * size[1] // 256 == S
    attention = 4 * S * (S + 512) * D
    # Self-attention has four matrices, cross-attention two besides those of the cache.
    matmul = 2 * S * (6 * D * D + 2 * D * F)
    ends = 2 * S * D * config.patch_volume * (config.in_channels + config.out_channels)
    # Attention on a CPU rounds its queries up to whole blocks.
    expected = passes * (L * (attention + matmul) + ends)
    work = one.work["denoise_step"]
    assert work.operations == pytest.approx(expected, rel=2e-3)
    kinds = by_kind(work)
    assert kinds["attention"] == pytest.approx(passes * L * attention, rel=2e-3)


@pytest.mark.slow
def test_keys_and_values_are_counted_for_all_rows_of_text() -> None:
    """A chip computes those of padding too, and in one product; a CPU only the pieces that hold tokens."""
    one = generation("wan2.1-t2v-14b", size=(1280, 720))
    config, P, T = one.step.config, 2, 512
    D, L = config.dim, config.num_layers
    embedder = 2 * P * T * (config.text_dim * D + D * D)
    work = one.work["prepare"]
    assert work.operations == pytest.approx(embedder + 2 * L * 2 * P * T * D * D, rel=1e-6)
    assert work.nbytes < 2 * (2 * L * D * D) * 2  # the weights once, and less than as much beside them


@pytest.mark.thorough
def test_slots_add_their_products() -> None:
    """2 R (in + out) per token of each product of a layer: of 14B at 480p and rank 64, 1 % of a step."""
    plain, slots = (generation("wan2.1-t2v-14b", lora_rank=rank) for rank in (0, 64))
    config, S = slots.step.config, slots.step.tokens
    layer = 6 * 2 * config.dim + 2 * (config.dim + config.ffn_dim)
    before, work = (one.work["denoise_step"].operations for one in (plain, slots))
    assert work - before == pytest.approx(2 * 2 * 64 * S * config.num_layers * layer, rel=0.01)
    assert work / before == pytest.approx(1.01, abs=1e-3)


def by_kind(work: Work) -> Mapping[str, float]:
    kinds: dict[str, float] = {}
    for product, flops in work.flops.items():
        kinds[product.kind] = kinds.get(product.kind, 0) + flops
    return kinds


@pytest.mark.slow
def test_vace_adds_its_control_blocks() -> None:
    plain, vace = (generation(f"wan2.1-{kind}-14b") for kind in ("t2v", "vace"))
    ratio = by_kind(vace.work["denoise_step"])["attention"] / by_kind(plain.work["denoise_step"])["attention"]
    assert ratio == pytest.approx(48 / 40, rel=1e-3)


@pytest.mark.slow
def test_guidance_doubles_a_step_and_the_text() -> None:
    single, double = (generation("wan2.1-t2v-1.3b", frames=17, guidance=on) for on in (False, True))
    assert double.work["denoise_step"].operations == pytest.approx(
        2 * single.work["denoise_step"].operations, rel=1e-3
    )
    assert double.calls[0].times == 2 * single.calls[0].times


@pytest.mark.slow
def test_a_decoder_counts_its_frames() -> None:
    """The first latent frame is one frame, the others are four: 81 frames are 20.25 times 4.

    All convolutions as the reference has them would be 269.15 TFLOP, of which 22.8 follow upsampling; those
    take 16 products instead of 36, and the last one's 0.5 are a matmul.
    """
    few, many = (generation("wan2.1-t2v-1.3b", frames=frames) for frames in (5, 81))
    works = []
    for one in (few, many):
        works.append(Work())
        for call in one.calls:
            if ROLES[call.role].when == "video":
                works[-1].add(one.work[call.name], call.times)
    ratio = works[1].operations / works[0].operations
    assert 15 < ratio < 20
    convolutions = by_kind(works[1])["convolution"]
    assert convolutions > 0.95 * works[1].operations
    assert math.isclose(convolutions, (269.15 - 22.8 * 20 / 36 - 0.5) * 1e12, rel_tol=1e-3)


# The bytes that devices exchange in a step, by formula.


@pytest.fixture(scope="module")
def small() -> PlannedStep:
    """The step of 1.3B at 832x480, 81 frames, between CPU devices."""
    return step("wan2.1-t2v-1.3b", (832, 480))


def step(name: str, size: tuple[int, int]) -> PlannedStep:
    one = generation(name, "v5p", size).step
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
