"""Wan 2.2 through the command lines against diffusers' WanPipeline: two experts, and a timestep per token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wanrun
from helpers.fake_pipeline import write_lines
from helpers.reference_models import relative_error
from helpers.whole_path import LATENTS, NEGATIVE, PROMPT, generate, within_one_level
from wanbuild.check.reference_pipeline import Made, Reference
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.errors import ArtifactError

# diffusers hands arrays to NumPy in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

LOOPS = ("step", "scan")
KINDS = ("latents", "video")


@dataclass(frozen=True)
class Case:
    """Options of one generation; None is not given.

    Args:
        calls: how often the high-noise expert runs for a prompt, and how often the low-noise one.
    """

    steps: int
    calls: tuple[int, ...]
    seed: int = 0
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    boundary: float | None = None
    flow_shift: float | None = None
    solver: str | None = None

    def given(self) -> dict[str, Any]:
        """What is given, by the command line's names."""
        return {key: value for key, value in vars(self).items() if key != "calls" and value is not None}


# The checkpoint says shift 3 and boundary 0.875: five steps of UniPC are at 999, 923 | 818, 667, 429.
TWO_EXPERTS: Mapping[str, Case] = {
    "crossed": Case(5, (2, 3), 7, guidance_scale=4, guidance_scale_2=2.5),
    "a boundary that is a timestep": Case(6, (3, 3), 1, 2.5, 4, boundary=0.856, solver="dpm++"),
    "euler": Case(6, (3, 3), 2, guidance_scale=3, flow_shift=8, solver="euler"),
    "one scale of two off": Case(6, (3, 3), 3, 4, 1, flow_shift=5),
    "low-noise alone": Case(3, (0, 3), 4, 4, 2, boundary=1),
    "high-noise alone": Case(3, (3, 0), 5, 4, 2, boundary=0),
}
WITHOUT_GUIDANCE: Mapping[str, Case] = {"no guidance": Case(5, (2, 3), 6, guidance_scale=1)}
PER_TOKEN: Mapping[str, Case] = {
    "unipc": Case(5, (5,), 7, guidance_scale=4),
    "euler": Case(4, (4,), 8, guidance_scale=2.5, flow_shift=7, solver="euler"),
}


class Judge:
    """The reference pipeline of a checkpoint."""

    def __init__(self, checkpoint: Path, variant: str, width: int, height: int, num_frames: int) -> None:
        self._reference = Reference(checkpoint, variant)
        self.pipe = self._reference.pipe
        self._shape = {"width": width, "height": height, "num_frames": num_frames}
        self._made: dict[Case, Made] = {}

    def __call__(self, case: Case) -> Made:
        """What it makes of a case; computed once."""
        if case not in self._made:
            self._made[case] = self.run(case)
        return self._made[case]

    def run(self, case: Case) -> Made:
        options = case.given()
        steps = options.pop("steps")
        return generate(self._reference, num_inference_steps=steps, **self._shape, **options)


def counts(made: Made, case: Case) -> tuple[int, ...]:
    """How often the reference called each expert."""
    return tuple(made.count(name) for name in TRANSFORMERS[: len(case.calls)])


class Maker:
    """Makes all cases of an artifact with one run of ``wanrun`` a form of the loop."""

    def __init__(self, artifact: Path, commands: Any, folder: Path, cases: Mapping[str, Case]) -> None:
        self._artifact, self._commands, self._folder = artifact, commands, folder
        self._cases = list(cases.values())
        self._loops: set[str] = set()

    def __call__(self, loop: str, case: Case) -> tuple[np.ndarray, np.ndarray]:
        """Latents and frames of a case."""
        if loop not in self._loops:
            self._run(loop)
            self._loops.add(loop)
        index = self._cases.index(case) + 1
        latents, frames = (np.load(self._folder / f"{loop}-{kind}-{index}.npy") for kind in KINDS)
        return latents, frames

    def _run(self, loop: str) -> None:
        lines = [{"prompt": PROMPT, **case.given()} for case in self._cases]
        file = write_lines(self._folder / "cases.jsonl", *lines)
        timing = self._folder / "timing.json"
        latents, videos = (self._folder / f"{loop}-{kind}-{{index}}.npy" for kind in KINDS)
        self._commands.succeeds(
            *("wanrun", "--artifact", self._artifact, "--prompts", file, "--negative-prompt", NEGATIVE),
            *("--guidance-scale", self._cases[0].guidance_scale, "--loop", loop, "--no-embedding-cache"),
            *("--save-latents", latents, "--output", videos, "--timing-json", timing),
        )
        # One length of encode_text, which no embedding that another run has stored replaces, prepare, a form
        # of the loop, decode_video: the same for both experts.
        seconds = json.loads(timing.read_text())
        assert (seconds["cache_misses"], seconds["cache_hits"]) == (0, 4)


def check(judge: Judge, made: Maker, case: Case, loop: str, record: Callable[[str, object], None]) -> None:
    """Holds a case against the reference."""
    expected = judge(case)
    prompts = 1 if case.guidance_scale == 1 else 2
    assert counts(expected, case) == tuple(prompts * count for count in case.calls)
    latents, frames = made(loop, case)
    error, share = relative_error(latents, expected.latents), within_one_level(frames, expected.levels[0])
    record("latents_relative_error", error)
    print(f"latents {error:.1e}, {share:.2%} of uint8 within one level, std {frames.std():.0f}", flush=True)
    assert latents.dtype == np.float32 and frames.dtype == np.uint8
    assert error < LATENTS
    assert share >= 0.999
    assert frames.std() > 20  # a constant video would agree with anything


@pytest.fixture(scope="module")
def experts(two_experts_checkpoint: Path) -> Judge:
    return Judge(two_experts_checkpoint, "wan2.2-t2v", 96, 64, 9)


@pytest.fixture(scope="module")
def made(two_experts_artifact: Path, commands: Any, tmp_path_factory: pytest.TempPathFactory) -> Maker:
    return Maker(two_experts_artifact, commands, tmp_path_factory.mktemp("two"), TWO_EXPERTS)


@pytest.fixture(scope="module")
def made_without(
    two_experts_artifact: Path, commands: Any, tmp_path_factory: pytest.TempPathFactory
) -> Maker:
    return Maker(two_experts_artifact, commands, tmp_path_factory.mktemp("nocfg"), WITHOUT_GUIDANCE)


@pytest.mark.essential
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", TWO_EXPERTS)
def test_two_experts(experts: Judge, made: Maker, name: str, loop: str, record_property: Any) -> None:
    check(experts, made, TWO_EXPERTS[name], loop, record_property)


@pytest.mark.parametrize("loop", LOOPS)
def test_two_experts_without_guidance(
    experts: Judge, made_without: Maker, loop: str, record_property: Any
) -> None:
    (case,) = WITHOUT_GUIDANCE.values()
    check(experts, made_without, case, loop, record_property)


def test_the_scale_of_the_high_noise_expert_decides(experts: Judge, two_experts_artifact: Path) -> None:
    """In Python too: with one of at most 1 there is no guidance, in neither expert."""
    with wanrun.load(two_experts_artifact, embeddings="none") as pipeline:
        for scales in ((0.5, None), (1.0, 0.5), (-1.0, 1.0), (1.5, 0.5)):
            case = Case(4, (2, 2), 9, *scales)
            expected, options = experts(case), case.given()
            prompts = 2 if scales[0] > 1 else 1
            assert counts(expected, case) == tuple(prompts * count for count in case.calls)
            found = pipeline.generate(PROMPT, NEGATIVE, num_steps=options.pop("steps"), **options)
            assert relative_error(found.latents, expected.latents) < LATENTS, scales


@pytest.mark.parametrize("scale", [-1.0, 0.5, 1.0])
def test_a_scale_that_no_profile_is_for(toy_artifact: Path, cli: Any, tmp_path: Path, scale: float) -> None:
    """Python refuses it as the command does."""
    line = cli.fails(
        *(3, "wanrun", "--artifact", toy_artifact, "--prompt", PROMPT, "--size", "96x64", "--frames", 9),
        *("--guidance-scale", scale, "--output", tmp_path / "o.npy"),
    )
    with (
        wanrun.load(toy_artifact, lazy=True, embeddings="none") as pipeline,
        pytest.raises(ArtifactError) as caught,
    ):
        pipeline.generate(PROMPT, NEGATIVE, guidance_scale=scale)
    assert line == f"error: {caught.value}" and "guidance off; expected one of 96x64x9-b1-cfg" in line


def test_options_of_the_command_line(
    made: Maker, two_experts_artifact: Path, commands: Any, tmp_path: Path
) -> None:
    """What a line of a prompts file asks for can be asked for by options."""
    names = dict(zip(LOOPS, ("crossed", "a boundary that is a timestep"), strict=True))
    expected = {loop: made(loop, TWO_EXPERTS[name]) for loop, name in names.items()}
    for loop, name in names.items():
        case, latents, video = TWO_EXPERTS[name], tmp_path / f"{loop}-latents.npy", tmp_path / f"{loop}.npy"
        options = [(f"--{key.replace('_', '-')}", value) for key, value in case.given().items()]
        commands.succeeds(
            *(
                "wanrun",
                "--artifact",
                two_experts_artifact,
                "--prompt",
                PROMPT,
                "--negative-prompt",
                NEGATIVE,
            ),
            *(item for option in options for item in option),
            *("--loop", loop, "--save-latents", latents, "--output", video),
        )
        for path, array in zip((latents, video), expected[loop], strict=True):
            assert np.array_equal(np.load(path), array)


def test_swapped_scales_and_experts_are_noticed(experts: Judge, made: Maker) -> None:
    """The reference with either of them swapped is far from what we make."""
    case = TWO_EXPERTS["crossed"]
    latents, _ = made("step", case)
    assert case.guidance_scale is not None and case.guidance_scale_2 is not None
    scales = replace(case, guidance_scale=case.guidance_scale_2, guidance_scale_2=case.guidance_scale)
    one_scale = replace(case, guidance_scale_2=None)
    errors = {
        "scales": relative_error(latents, experts(scales).latents),
        "one scale": relative_error(latents, experts(one_scale).latents),
        "boundary": relative_error(latents, experts(replace(case, boundary=0.8)).latents),
    }
    pipe = experts.pipe
    pipe.transformer, pipe.transformer_2 = pipe.transformer_2, pipe.transformer
    try:
        errors["experts"] = relative_error(latents, experts.run(case).latents)
    finally:
        pipe.transformer, pipe.transformer_2 = pipe.transformer_2, pipe.transformer
    print(*(f"{name} {error:.1e}" for name, error in errors.items()), flush=True)
    assert min(errors.values()) > 100 * LATENTS


@pytest.fixture(scope="module")
def per_token(ti2v_checkpoint: Path) -> Judge:
    return Judge(ti2v_checkpoint, "wan2.2-ti2v", 160, 96, 13)


@pytest.fixture(scope="module")
def made_per_token(ti2v_artifact: Path, commands: Any, tmp_path_factory: pytest.TempPathFactory) -> Maker:
    return Maker(ti2v_artifact, commands, tmp_path_factory.mktemp("ti2v"), PER_TOKEN)


@pytest.mark.essential
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_timestep_per_token(
    per_token: Judge, made_per_token: Maker, name: str, loop: str, record_property: Any
) -> None:
    pipe, config = per_token.pipe, per_token.pipe.vae.config
    assert pipe.config.expand_timesteps and config.z_dim == 48 and pipe.vae_scale_factor_spatial == 16
    assert np.ptp(config.latents_mean) > 0.1 and np.ptp(config.latents_std) > 0.1  # as published
    check(per_token, made_per_token, PER_TOKEN[name], loop, record_property)
