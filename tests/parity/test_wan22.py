"""Wan 2.2 through the command lines against diffusers' WanPipeline: two experts, and a timestep per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wanrun
from helpers.reference_models import relative_error
from helpers.whole_path import LATENTS, LOOPS, NEGATIVE, PROMPT, Case, WholePath
from wanrun.artifact.manifest import TRANSFORMERS

# diffusers hands arrays to NumPy in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

# The checkpoint says shift 3 and boundary 0.875: five steps of UniPC are at 999, 923 | 818, 667, 429.
TWO_EXPERTS: Mapping[str, Case] = {
    "crossed": Case(5, seed=7, options={"guidance_scale": 4, "guidance_scale_2": 2.5}),
    "a boundary that is a timestep": Case(
        6,
        seed=1,
        options={"guidance_scale": 2.5, "guidance_scale_2": 4, "boundary": 0.856, "solver": "dpm++"},
    ),
    "euler": Case(6, seed=2, options={"guidance_scale": 3, "flow_shift": 8, "solver": "euler"}),
    "one scale of two off": Case(
        6, seed=3, options={"guidance_scale": 4, "guidance_scale_2": 1, "flow_shift": 5}
    ),
    "guidance in some steps": Case(
        6,
        seed=10,
        options={"guidance_scale": 4, "guidance_scale_2": 2.5, "guidance_start": 0.2, "guidance_end": 0.8},
    ),
    "cfg-zero": Case(
        6,
        seed=11,
        options={"guidance_scale": 4, "guidance_scale_2": 2.5, "guider": "cfg-zero", "guidance_end": 0.9},
    ),
    "skip-layer": Case(
        6,
        seed=12,
        options={
            "guidance_scale": 4,
            "guidance_scale_2": 2.5,
            "guider": "skip-layer",
            "skip_layers": [1],
            "skip_scale": 2.0,
            "skip_start": 0.1,
            "skip_end": 0.9,
        },
    ),
    "cfg and nag": Case(4, seed=12, options={"guidance_scale": 4, "guidance_scale_2": 1, "nag_scale": 5}),
    "low-noise alone": Case(3, seed=4, options={"guidance_scale": 4, "guidance_scale_2": 2, "boundary": 1}),
    "high-noise alone": Case(3, seed=5, options={"guidance_scale": 4, "guidance_scale_2": 2, "boundary": 0}),
}
CALLS: Mapping[str, tuple[int, int]] = {
    "crossed": (4, 6),
    "guidance in some steps": (3, 6),
    "cfg-zero": (4, 7),
    "skip-layer": (5, 11),  # a third pass in steps 1 to 4
    "cfg and nag": (4, 4),
    "low-noise alone": (0, 6),
    "high-noise alone": (6, 0),
    "no guidance": (2, 3),
    "nag": (2, 2),
    "unipc": (10, 0),
    "euler of one": (8, 0),
}
"""How often each expert is called, with guidance twice a step; else three steps each."""

WITHOUT_GUIDANCE: Mapping[str, Case] = {
    "no guidance": Case(5, seed=6),
    "nag": Case(4, seed=13, options={"nag_scale": 11}),
}
PER_TOKEN: Mapping[str, Case] = {
    "unipc": Case(5, seed=7, options={"guidance_scale": 4}),
    "euler of one": Case(4, seed=8, options={"guidance_scale": 2.5, "flow_shift": 7, "solver": "euler"}),
}


def check(path: WholePath, name: str, loop: str, record: Any) -> None:
    """Holds a case against the reference."""
    path.check(name, record, loop)
    assert path.calls(name) == CALLS.get(name, (6, 6))
    # One length of encode_text, prepare, a form of the loop, the decoder's two: the same for both experts.
    assert path.timings[loop]["cache_hits"] == 5


@pytest.fixture(scope="module")
def experts(
    two_experts_checkpoint: Path, two_experts_artifact: Path, commands: Any, tmp_path_factory: Any
) -> WholePath:
    toy = two_experts_checkpoint, two_experts_artifact
    return WholePath(toy, commands, tmp_path_factory.mktemp("two"), TWO_EXPERTS)


@pytest.fixture(scope="module")
def without_guidance(
    two_experts_checkpoint: Path, two_experts_artifact: Path, commands: Any, tmp_path_factory: Any
) -> WholePath:
    toy = two_experts_checkpoint, two_experts_artifact
    return WholePath(toy, commands, tmp_path_factory.mktemp("nocfg"), WITHOUT_GUIDANCE, scale=1.0)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", TWO_EXPERTS)
def test_two_experts(experts: WholePath, name: str, loop: str, record_property: Any) -> None:
    check(experts, name, loop, record_property)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", WITHOUT_GUIDANCE)
def test_two_experts_without_guidance(
    without_guidance: WholePath, name: str, loop: str, record_property: Any
) -> None:
    check(without_guidance, name, loop, record_property)


@pytest.mark.thorough
def test_the_scale_of_the_high_noise_expert_decides(experts: WholePath, two_experts_artifact: Path) -> None:
    """In Python too: with one of at most 1 there is no guidance, in neither expert.

    The programs of a profile with guidance have the bits then of those of one without.
    """
    with wanrun.load(two_experts_artifact, embeddings="none") as pipeline:
        for first, second in ((0.5, None), (1.0, 0.5), (-1.0, 1.0), (1.5, 0.5)):
            options = {"guidance_scale": first} | ({} if second is None else {"guidance_scale_2": second})
            expected = experts.run(Case(4, seed=9, options=options))
            prompts = 2 if first > 1 else 1
            assert [expected.count(name) for name in TRANSFORMERS] == [2 * prompts] * 2
            found = pipeline.generate(PROMPT, NEGATIVE, num_steps=4, seed=9, **options)
            assert relative_error(found.latents, expected.latents) < LATENTS, options
            assert pipeline.profile.guidance
            if first <= 1:
                other = pipeline.generate(PROMPT, profile="96x64x9-b1-nocfg", num_steps=4, seed=9)
                assert np.array_equal(found.latents, other.latents)


def test_options_of_the_command_line(
    experts: WholePath, two_experts_artifact: Path, commands: Any, tmp_path: Path
) -> None:
    """What a line of a prompts file asks for can be asked for by options."""
    for loop, name in zip(LOOPS, ("crossed", "a boundary that is a timestep"), strict=True):
        latents, video = tmp_path / f"{loop}-latents.npy", tmp_path / f"{loop}.npy"
        expected, line = experts.ours(name, loop), TWO_EXPERTS[name].line()
        options = [(f"--{key.replace('_', '-')}", value) for key, value in line.items()]
        commands.succeeds(
            *("wanrun", "--artifact", two_experts_artifact, "--negative-prompt", NEGATIVE),
            *(item for option in options for item in option),
            *("--loop", loop, "--save-latents", latents, "--output", video),
        )
        for path, array in zip((latents, video), expected, strict=True):
            assert np.array_equal(np.load(path), array)


def test_swapped_scales_and_experts_are_noticed(experts: WholePath) -> None:
    """The reference with either of them swapped is far from what we make."""
    latents, _ = experts.ours("crossed", "step")
    case = TWO_EXPERTS["crossed"]

    def error(**options: float) -> float:
        return relative_error(latents, experts.run(replace(case, options=options)).latents)

    errors = {
        "scales": error(guidance_scale=2.5, guidance_scale_2=4),
        "one scale": error(guidance_scale=4),
        "boundary": error(**case.options, boundary=0.8),
    }
    pipe = experts.reference.pipe
    pipe.transformer, pipe.transformer_2 = pipe.transformer_2, pipe.transformer
    try:
        errors["experts"] = error(**case.options)
    finally:
        pipe.transformer, pipe.transformer_2 = pipe.transformer_2, pipe.transformer
    print(*(f"{name} {error:.1e}" for name, error in errors.items()), flush=True)
    assert min(errors.values()) > 100 * LATENTS


@pytest.fixture(scope="module")
def per_token(ti2v_checkpoint: Path, ti2v_artifact: Path, commands: Any, tmp_path_factory: Any) -> WholePath:
    toy = ti2v_checkpoint, ti2v_artifact
    return WholePath(toy, commands, tmp_path_factory.mktemp("ti2v"), PER_TOKEN, (160, 96, 13))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_timestep_per_token(per_token: WholePath, name: str, loop: str, record_property: Any) -> None:
    pipe, config = per_token.reference.pipe, per_token.reference.pipe.vae.config
    assert pipe.config.expand_timesteps and config.z_dim == 48 and pipe.vae_scale_factor_spatial == 16
    assert np.ptp(config.latents_mean) > 0.1 and np.ptp(config.latents_std) > 0.1  # as published
    check(per_token, name, loop, record_property)
