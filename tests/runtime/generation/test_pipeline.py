"""What a pipeline loads and when: nothing that is not needed, everything that is, and each once."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

import wanrun
from helpers.damage import flip, own
from helpers.manifests import programs_of
from helpers.refusals import refuses
from wanbuild.cli import wanbuild
from wancli.console import run
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.programs import Profile
from wanrun.errors import ArtifactError
from wanrun.executables.executables import Executables
from wanrun.generation.conditioning import Encoded
from wanrun.generation.pipeline import Pipeline
from wanrun.media.inputs import Inputs
from wanrun.text.artifact_encoder import ArtifactTextEncoder, text_programs
from wanrun.timing.timings import Timings
from wanrun.weights.bound_programs import Programs

PROMPT = "a fox in the snow"
DECODE = "decode_first", "decode_video"
TEXT = ["encode_text_64", "encode_text_128", "encode_text_256", "encode_text"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that are loaded, in order."""
    loaded: list[str] = []
    load = Executables._load

    def record(self: Executables, profile: Profile, name: str, data: bytes) -> Any:
        loaded.append(name)
        return load(self, profile, name, data)

    monkeypatch.setattr(Executables, "_load", record)
    return loaded


@pytest.fixture
def embedded(artifact: Path) -> Path:
    """An artifact with the embeddings of the prompt and of the empty one."""
    assert run(wanbuild, ["embed", "--artifact", str(artifact), "--prompt", PROMPT, "--prompt", ""]) == 0
    return artifact


@pytest.mark.slow
def test_everything_for_any_prompt(toy_artifact: Path, reads: list[str], loads: list[str]) -> None:
    timings = Timings()
    with wanrun.load(toy_artifact, embeddings="none", timings=timings) as pipeline:
        said = f"<Pipeline of wan2.1-t2v, 96x64x9-b1-cfg for cpu, in {toy_artifact}>"
        assert repr(pipeline) == said
        assert reads[:2] == ["text_encoder", "transformer"]
        assert loads[:6] == [*TEXT, "prepare", "denoise_step"]
        pipeline.generate(PROMPT, num_steps=1, timings=timings)
        pipeline.generate("another " * 100, num_steps=1, timings=timings)
        assert reads == ["text_encoder", "transformer", "vae"]
        assert loads == [*TEXT, "prepare", "denoise_step", *DECODE]
        assert (timings.cache_hits, timings.cache_misses) == (8, 0)


@pytest.mark.slow
def test_what_was_resolved_before_is_run(toy_artifact: Path, artifact: Path) -> None:
    """A server checks a request, runs it later, and tells the warnings to whoever asked."""
    told: list[str] = []
    with wanrun.load(toy_artifact, warn=told.append) as pipeline:
        generation = wanrun.resolve(toy_artifact, PROMPT, num_steps=2, seed=3)
        found = pipeline.run(generation)
        expected = pipeline.generate(PROMPT, num_steps=2, seed=3)
        assert np.array_equal(found.frames, expected.frames) and found.options == expected.options
        assert found.warnings == () and found.options.items() >= generation.options.items()
        cut = pipeline.generate("word " * 600, num_steps=1, guidance_scale=4)
        assert [" 512 tokens" in line for line in cut.warnings] == [True]
        photo = Inputs(warnings=("image a.png: stretched",))
        assert pipeline.generate(PROMPT, num_steps=1, inputs=photo).warnings == photo.warnings
        assert told == [], "of loading there was nothing to tell"
        with refuses("wrong_type", what="generation", expected="Generation"):
            pipeline.run(PROMPT)  # type: ignore[arg-type]
        manifest = read_manifest(artifact)
        defaults = structs.replace(manifest.model.defaults, fps=7)
        manifest.changed(model=structs.replace(manifest.model, defaults=defaults)).write(artifact)
        other = wanrun.resolve(artifact, PROMPT)
        with refuses("changed", expected=pipeline.manifest.content_digest):
            pipeline.run(other)


@pytest.mark.slow
def test_only_the_length_that_a_known_prompt_needs(toy_artifact: Path, loads: list[str]) -> None:
    with wanrun.load(toy_artifact, prompts=[PROMPT, ""], embeddings="none") as pipeline:
        pipeline.generate(PROMPT, "", num_steps=1)
    assert loads == ["encode_text_64", "prepare", "denoise_step", *DECODE]


@pytest.mark.slow
def test_no_text_encoder_where_both_embeddings_are_at_hand(
    embedded: Path, reads: list[str], loads: list[str]
) -> None:
    """It is not even looked at: one that is damaged does not stop the run."""
    with wanrun.load(embedded, prompts=[PROMPT, ""], embeddings="none") as pipeline:
        expected = pipeline.generate(PROMPT, "", num_steps=2)
    own(embedded, "weights")
    flip(embedded / "weights/text_encoder/shared/c/0/0", 99)
    reads.clear(), loads.clear()
    with wanrun.load(embedded, prompts=[PROMPT, ""]) as pipeline:
        pipeline.warmup()
        found = pipeline.generate(PROMPT, "", num_steps=2)
        assert reads == ["transformer", "vae"] and loads == ["prepare", "denoise_step", *DECODE]
        assert np.array_equal(found.latents, expected.latents)
        assert np.array_equal(found.frames, expected.frames)
        with refuses("damaged", ArtifactError, what="text_encoder/shared, row 0"):
            pipeline.generate("a prompt that nobody knew", "", num_steps=1)
    with refuses("damaged", ArtifactError, what="text_encoder/shared, row 0"):
        wanrun.load(embedded, prompts=["a prompt that nobody knew"])


@pytest.mark.thorough
def test_the_last_generation_frees_what_it_needs_no_more(toy_artifact: Path, reads: list[str]) -> None:
    """The transformer before the first frame is decoded; another generation reads it again."""
    with wanrun.load(toy_artifact, embeddings="none") as pipeline:
        generation, freed = pipeline.resolve(PROMPT, num_steps=1), list[bool]()
        expected = pipeline.run(generation)
        names = ("text_encoder", "transformer")
        leaves = [weakref.ref(next(iter(_leaves(pipeline.component_weights(name))))) for name in names]

        def decoded(*_: object) -> None:
            gc.collect()
            freed.extend(leaf() is None for leaf in leaves)

        last = pipeline.run(generation, on_frames=decoded, last=True)
        assert freed and all(freed) and np.array_equal(last.latents, expected.latents)
        reads.clear()
        assert np.array_equal(pipeline.run(generation).frames, expected.frames)
        assert reads == ["transformer"]


@pytest.mark.thorough
def test_low_memory_frees_the_text_encoder(toy_artifact: Path, reads: list[str]) -> None:
    with wanrun.load(toy_artifact, embeddings="none") as pipeline:
        expected = pipeline.generate(PROMPT, num_steps=1)
        again = pipeline.component_weights("text_encoder")
        assert again is pipeline.component_weights("text_encoder")
    reads.clear()
    with wanrun.load(toy_artifact, embeddings="none", memory="low") as pipeline:
        assert reads[0] == "transformer" and "text_encoder" not in reads
        freed: list[bool] = []
        release = ArtifactTextEncoder.release

        def watch(self: ArtifactTextEncoder) -> None:
            leaf = next(iter(_leaves(pipeline.component_weights("text_encoder"))))
            memory = weakref.ref(leaf)
            del leaf
            release(self)
            gc.collect()
            freed.append(memory() is None)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ArtifactTextEncoder, "release", watch)
            found = pipeline.generate(PROMPT, num_steps=1)
        assert freed == [True]
        assert np.array_equal(found.latents, expected.latents)
        before = reads.count("text_encoder")
        pipeline.generate(PROMPT, num_steps=1)  # remembered
        assert reads.count("text_encoder") == before
        pipeline.generate("an owl", num_steps=1)
        assert reads.count("text_encoder") == before + 1


def _leaves(tree: Any) -> Any:
    if hasattr(tree, "items"):
        for value in tree.values():
            yield from _leaves(value)
    else:
        yield tree


@pytest.mark.slow
def test_a_failure_behind_the_steps_ends_the_run_at_once(artifact: Path) -> None:
    """A damaged VAE does not cost the steps that are left."""
    own(artifact, "weights")
    flip(artifact / "weights/vae/decoder.conv_in.weight/c/0/0/0/0/0", 77)
    steps: list[int] = []

    def on_step(done: int, total: int) -> None:
        steps.append(done)
        time.sleep(0.2)

    damaged = refuses("damaged", ArtifactError, what="vae/decoder/conv_in/weight, row 0")
    with wanrun.load(artifact, prompts=[PROMPT, ""]) as pipeline, damaged:
        pipeline.generate(PROMPT, "", num_steps=50, on_step=on_step)
    assert len(steps) < 25


def test_ready_is_before_the_prompts_are_encoded(toy_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding goes on while the transformer is restored, and is no part of being ready."""
    timings = Timings()
    encode = ArtifactTextEncoder.__call__

    def wait(self: ArtifactTextEncoder, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        started = time.monotonic()
        while timings.as_json()["process_to_ready_seconds"] is None:
            assert time.monotonic() - started < 60, "never ready"
            time.sleep(0.01)
        return encode(self, ids, mask)

    monkeypatch.setattr(ArtifactTextEncoder, "__call__", wait)
    with wanrun.load(toy_artifact, prompts=[PROMPT], timings=timings, embeddings="none"):
        ((_, encoded),) = timings.spans["text"]
        ready = timings.as_json()["process_to_ready_seconds"]
        assert max(end for _, end in timings.spans["restore"][:2]) <= ready < encoded


@pytest.mark.slow
def test_warm_up_runs_every_program_once(toy_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    bound = Programs.bound

    def record(self: Programs, name: str, *loras: Any, **components: str) -> Callable[..., Any]:
        program = bound(self, name, *loras, **components)

        def call(**arguments: Any) -> Any:
            ran.append(name)
            return program(**arguments)

        return call

    monkeypatch.setattr(Programs, "bound", record)
    with wanrun.load(toy_artifact, embeddings="none") as pipeline:
        timings = Timings()
        pipeline.warmup(timings)
        assert ran == [*TEXT, "prepare", "denoise_step", *DECODE]
        assert sorted([*ran, "denoise_loop"]) == sorted(programs_of(pipeline.manifest, pipeline.profile.name))
        assert timings.step_seconds == []
        assert timings.seconds.keys() == {"warmup", "restore", "transfer", "executables", "decode"}
        expected = pipeline.generate(PROMPT, num_steps=2)
    with wanrun.load(toy_artifact, embeddings="none") as pipeline:
        assert np.array_equal(pipeline.generate(PROMPT, num_steps=2).latents, expected.latents)


def test_the_same_embedding_in_every_length(toy_artifact: Path) -> None:
    """Padding is masked: a shorter program gives a prompt's rows what the longest gives them.

    Float32 sums of other lengths have another order: some 1e-6 of the largest value.
    """
    pipeline: Pipeline
    with wanrun.load(toy_artifact, embeddings="none") as pipeline:
        session = pipeline.session(pipeline.profile)
        lengths = text_programs(session.programs)
        assert list(lengths.items()) == list(zip([64, 128, 256, 512], TEXT, strict=True))
        random = np.random.default_rng(5)
        for tokens in (1, 17, 63, 64):
            ids = np.zeros((1, 512), np.int32)
            ids[0, :tokens] = random.integers(3, 250, tokens)
            mask = (np.arange(512) < tokens).astype(np.int32)[None]
            results = [
                np.asarray(
                    session.programs.bound(name)(ids=ids[:, :length], mask=mask[:, :length])["embeddings"]
                )[0]
                for length, name in lengths.items()
            ]
            expected = results[-1]
            assert np.all(expected[tokens:] == 0) and np.abs(expected[:tokens]).max() > 0.1
            for rows in results[:-1]:
                error = np.abs(rows - expected[: len(rows)]).max() / np.abs(expected).max()
                assert error < 1e-5


def test_closing_lets_go_of_all(toy_artifact: Path) -> None:
    pipeline, inputs = wanrun.load(toy_artifact, lazy=True), Inputs()
    pipeline._sessions._last[inputs] = {("digest",): Encoded({}, {"condition": 1})}
    weights, stages = pipeline._weights, list(pipeline._texts._stages.values())
    pipeline.close()
    assert len(pipeline._sessions._last) == 0 and stages
    for submit in (
        lambda: weights.request(["vae"]),
        lambda: weights.executables.request(pipeline.profile, ["prepare"]),
    ):
        with pytest.raises(RuntimeError, match="shutdown"):
            submit()
