"""Several profiles of one opened artifact: one copy of the weights, and each profile's own videos."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from msgspec import structs

import wanrun
from helpers.artifacts import compile_fast, shared
from helpers.damage import flip, linked, own
from helpers.memory import resident_bytes
from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import ArtifactError
from wanrun.generation import session as session_module
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.result import Result
from wanrun.weights.bound_programs import Programs
from wanrun.weights.experts import Placement, choose_placement

pytestmark = pytest.mark.slow

PROMPT = "a fox in the snow"
STEPS: Mapping[str, Any] = {"num_steps": 5, "flow_shift": 3.0, "boundary": 0.8}  # 3 high, 2 low
ROWS = 2**20
"""Rows of the token embedding of ``two_sizes``, of 128 bytes each: 134 MB, of which a prompt reads some."""

SMALL: Mapping[str, Any] = {"size": (96, 64), "num_frames": 9}
TALL: Mapping[str, Any] = {"size": (64, 96), "num_frames": 1}


@pytest.fixture(scope="session")
def two_sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy with a large token embedding and two sizes. Not to be changed."""

    def make(folder: Path) -> None:
        checkpoint = folder.with_name("two-sizes-checkpoint")
        write_toy(checkpoint, "wan2.1-t2v", configs={"text_encoder": {"vocab_size": ROWS}})
        convert(ConvertRequest(checkpoint, folder, dict.fromkeys(("transformer", "text_encoder"), "float32")))
        options = BuildOptions(dtype="float32", loop="step")
        for one in (SMALL, TALL):
            compile_fast(
                CompileRequest(folder, ["cpu"], [one["size"]], [one["num_frames"]], (True,), options=options)
            )

    return shared(tmp_path_factory, "two-sizes", make)


GUIDED: Mapping[str, Any] = {"guidance_scale": 4}
OFF: Mapping[str, Any] = {"guidance_scale": 1, "profile": "96x64x9-b1-nocfg"}
"""By its name: the loaded profile makes videos without guidance too."""

Bound = dict[str, dict[str, list[jax.Array]]]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Bound:
    """The device arrays that programs were bound to, by component and by ``profile program``."""
    found: Bound = {}
    bind = Programs.bound

    def record(self: Programs, name: str, *loras: Any, **components: str) -> Any:
        program: Any = bind(self, name, *loras, **components)
        for key, tree in program.keywords.items():
            uses = found.setdefault(components.get(key, key), {})
            uses[f"{self.profile.name} {name}"] = jax.tree.leaves(tree)
        return program

    monkeypatch.setattr(Programs, "bound", record)
    return found


def check_one_copy(bound: Bound, profiles: set[str]) -> None:
    """Every component was bound by every profile, and always the same arrays."""
    for uses in bound.values():
        assert {use.split()[0] for use in uses} == profiles
        first, *others = uses.values()
        assert first
        for other in others:
            assert all(a is b for a, b in zip(first, other, strict=True))


def same(one: Result, other: Result) -> bool:
    return np.array_equal(one.latents, other.latents) and np.array_equal(one.frames, other.frames)


def alone(artifact: Path, **choices: Any) -> Callable[..., Result]:
    """Generates with a pipeline of one profile."""

    def generate(*prompts: str, **options: Any) -> Result:
        with wanrun.load(artifact, embeddings="none", **choices) as pipeline:
            return pipeline.generate(*prompts, **options)

    return generate


@pytest.mark.thorough
@pytest.mark.parametrize("loop", ["step", "scan"])
def test_with_guidance_and_without(
    two_experts_artifact: Path, reads: list[str], bound: Bound, loop: str
) -> None:
    """Of two experts, in both forms of the loop; in turn, and the first again."""
    with wanrun.load(two_experts_artifact, embeddings="none", loop=loop) as pipeline:
        found = [pipeline.generate(PROMPT, **each, **STEPS) for each in (GUIDED, OFF, GUIDED)]
        assert reads == ["text_encoder", "transformer", "transformer_2", "vae"]
        names = {"96x64x9-b1-cfg", "96x64x9-b1-nocfg"}
        check_one_copy({name: uses for name, uses in bound.items() if name != "text_encoder"}, names)
        assert set(bound) == {"text_encoder", "transformer", "transformer_2", "vae"}
        assert len(bound["transformer_2"]) == 4  # two programs of two profiles
        first, second = (pipeline.session(pipeline.manifest.profiles[name]) for name in sorted(names))
        assert first.text is second.text
    assert same(found[0], found[2]) and not same(found[0], found[1])
    assert [result.options["guidance_scale"] for result in found] == [4, 1, 4]
    for guidance, result in ((True, found[0]), (False, found[1])):
        scale = {"guidance_scale": 4} if guidance else {}
        assert same(
            alone(two_experts_artifact, guidance=guidance, loop=loop)(PROMPT, **STEPS, **scale), result
        )


@pytest.mark.thorough
def test_two_sizes(two_sizes: Path, reads: list[str], bound: Bound) -> None:
    with wanrun.load(two_sizes, embeddings="none", **SMALL) as pipeline:
        options: Mapping[str, Any] = {"num_steps": 2}
        small = pipeline.generate(PROMPT, **options)
        tall = pipeline.generate(PROMPT, **TALL, **options)
        again = pipeline.generate(PROMPT, **SMALL, **options)
        assert reads == ["text_encoder", "transformer", "vae"]
        shared_by_both = {name: uses for name, uses in bound.items() if name != "text_encoder"}
        check_one_copy(shared_by_both, {"96x64x9-b1-cfg", "64x96x1-b1-cfg"})
        assert pipeline.profile.name == "96x64x9-b1-cfg"
    assert small.frames.shape == (1, 9, 64, 96, 3) and tall.frames.shape == (1, 1, 96, 64, 3)
    assert (tall.options["width"], tall.options["height"]) == TALL["size"]
    assert same(small, again)
    assert same(alone(two_sizes, **TALL)(PROMPT, **options), tall)
    with wanrun.load(two_sizes, **TALL) as pipeline:
        assert same(pipeline.generate(PROMPT, **SMALL, **options), small)


def held_bytes() -> int:
    gc.collect()
    return resident_bytes()


@pytest.mark.thorough
def test_memory_of_two_profiles(two_sizes: Path) -> None:
    """The second profile costs no second copy of the weights; a second pipeline does."""
    nbytes = read_manifest(two_sizes).components["text_encoder"].nbytes
    assert nbytes > 128 * ROWS
    with wanrun.load(two_sizes, embeddings="none", **SMALL) as pipeline:
        pipeline.generate(PROMPT, num_steps=2)
        one = held_bytes()
        pipeline.generate("an owl", **TALL, num_steps=2)
        two = held_bytes()
        with wanrun.load(two_sizes, embeddings="none", **TALL) as other:
            other.generate(PROMPT, num_steps=2)
            copied = held_bytes()
    assert two - one < 0.25 * nbytes  # seen: 6 of 134 MB
    assert copied - two > 0.9 * nbytes  # seen: 157


def test_another_profile_is_checked_when_it_is_asked_for(two_experts_artifact: Path, tmp_path: Path) -> None:
    """And what is wrong with it is no matter of the first."""
    artifact = linked(two_experts_artifact, tmp_path / "artifact")
    own(artifact, "executables")
    target = read_manifest(artifact).targets["cpu"]
    step = artifact / target.folder / target.executables["96x64x9-b1-nocfg"]["denoise_step"].file
    pipeline: Pipeline
    with wanrun.load(artifact, prompts=[PROMPT, ""]) as pipeline:
        flip(step, 1000)
        with refuses("damaged", ArtifactError, what=step, expected="sha256"):
            pipeline.generate(PROMPT, "", **OFF, **STEPS)
        step.unlink()
        with refuses("damaged", ArtifactError, what=step, found="No such file"):
            pipeline.generate(PROMPT, "", **OFF, **STEPS)
        assert np.isfinite(pipeline.generate(PROMPT, "", num_steps=1).latents).all()


def test_a_profile_of_another_target_is_refused(two_experts_artifact: Path, tmp_path: Path) -> None:
    artifact = linked(two_experts_artifact, tmp_path / "artifact")
    manifest = read_manifest(artifact)
    pipeline: Pipeline
    with wanrun.load(artifact, lazy=True) as pipeline:
        other = manifest.profiles["96x64x9-b1-nocfg"]
        executables = pipeline._opened.selected.target.executables
        assert isinstance(executables, dict)
        executables.pop(other.name)
        with refuses("not_built", ArtifactError, what=other.name, remedy="wanbuild compile") as caught:
            pipeline.session(other)
        assert "target cpu" in caught.value.what


def test_a_profile_without_the_loop_that_was_asked_for(two_experts_artifact: Path, tmp_path: Path) -> None:
    """Of the profile that is loaded it is an error; another one is run as it is built."""
    artifact = linked(two_experts_artifact, tmp_path / "artifact")
    manifest = read_manifest(artifact)
    other = manifest.profiles["96x64x9-b1-nocfg"]
    stepwise = structs.replace(other, options=structs.replace(other.options, loop="step"))
    manifest.changed(profiles={**manifest.profiles, other.name: stepwise}).write(artifact)
    with refuses("not_built", ArtifactError, what=other.name, found="step", remedy="--loop both"):
        wanrun.load(artifact, guidance=False, loop="scan")
    with wanrun.load(artifact, loop="scan", prompts=[PROMPT, ""]) as pipeline:
        options: Mapping[str, Any] = {"num_steps": 2, "boundary": 0}
        assert pipeline.generate(PROMPT, "", **options).options["loop"] == "scan"
        assert pipeline.generate(PROMPT, **OFF, **options).options["loop"] == "step"
        with refuses("not_built", ArtifactError, what=other.name, found="step", remedy="--loop both"):
            pipeline.generate(PROMPT, **OFF, loop="scan", **options)


def test_profiles_that_keep_their_experts_otherwise(
    two_experts_artifact: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has room for both, the other for one; they run in turn, and what differs is told."""

    kinds = iter(("both", "one"))  # the profile that is loaded, and the one that is asked for

    def choose(*arguments: Any) -> Placement:
        return dataclasses.replace(choose_placement(*arguments), kind=next(kinds))

    with wanrun.load(two_experts_artifact, prompts=[PROMPT, ""]) as pipeline:
        expected = [pipeline.generate(PROMPT, "", **each, **STEPS) for each in (GUIDED, OFF)]
    monkeypatch.setattr(session_module, "choose_placement", choose)
    reads.clear()
    told: list[str] = []
    with wanrun.load(two_experts_artifact, prompts=[PROMPT, ""], report=told.append) as pipeline:
        for _ in range(2):
            found = [pipeline.generate(PROMPT, "", **each, **STEPS) for each in (GUIDED, OFF)]
            assert all(map(same, found, expected))
            assert [result.timings.placement for result in found] == ["both", "one"]
    # Without guidance the high expert is let go of for the low one.
    assert [reads.count(name) for name in ("transformer", "transformer_2")] == [2, 3]
    assert len(told) == 2
    assert told[0].startswith("experts: both resident (")
    assert told[1].startswith("96x64x9-b1-nocfg, experts: one at a time")
