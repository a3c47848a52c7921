"""What a generation gives: its result, its steps as they are made, and its timings."""

from __future__ import annotations

import base64
import gc
import pickle
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import imageio.v3 as iio
import msgspec
import numpy as np
import pytest

import wanrun
from helpers.manifests import plain_manifest, with_model
from helpers.options import PROFILE
from helpers.refusals import refuses
from wanrun.artifact.manifest import Recorded, read_manifest
from wanrun.errors import UsageError
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.sampler import Sampler
from wanrun.media.write_video import read_metadata
from wanrun.timing.timings import Timings

PROMPT = "a fox in the snow"


@pytest.fixture
def result() -> wanrun.Result:
    frames = np.random.default_rng(0).integers(0, 256, (2, 5, 32, 48, 3), dtype=np.uint8)
    latents = np.zeros((2, 16, 2, 4, 6), np.float32)
    return wanrun.Result(frames, latents, {"prompt": "a fox " * 9, "seed": 7, "fps": 16.0}, Timings())


def test_what_it_is_in_a_line(result: wanrun.Result) -> None:
    line = repr(result)
    assert line.startswith("<Result 'a fox a fox ") and "...'" in line and line.endswith("48x32>")
    assert re.findall(r"\b\d+\b", line) == ["7", "2", "5"]


def test_it_comes_from_another_process(result: wanrun.Result) -> None:
    with result.timings.phase("denoise"):
        result.timings.begin("decode", progress=lambda: (1, 2))  # which goes on
        again = pickle.loads(pickle.dumps(result))
    result.timings.add("text", 1.0, 2.0)
    assert again.options == result.options and np.array_equal(again.frames, result.frames)
    assert again.timings.spans == {} and again.timings.running == []
    again.timings.add("text", 1.0, 2.0)
    assert again.timings.spans == {"text": [(1.0, 2.0)]}
    assert re.fullmatch(r"<Timings: \d+\.\d s in all, 0 steps>", repr(again.timings))


def test_a_notebook_shows_the_videos(result: wanrun.Result, tmp_path: Path) -> None:
    shown = result._repr_html_()
    videos = re.findall(r'src="data:video/mp4;base64,([^"]+)"', shown)
    assert len(videos) == 2 and "&lt;Result &#x27;a fox" in shown
    (tmp_path / "video.mp4").write_bytes(base64.b64decode(videos[1]))
    assert read_metadata(tmp_path / "video.mp4") == {**result.options, "video": 1}


@pytest.mark.parametrize("suffix", [".npy", ".png", ".gif"])
def test_saved_videos_have_their_metadata(result: wanrun.Result, tmp_path: Path, suffix: str) -> None:
    saved = result.save(tmp_path / f"cat{suffix}")
    assert saved == [tmp_path / f"cat-{index}{suffix}" for index in range(2)]
    for index, path in enumerate(saved):
        found = read_metadata(path)
        assert found == {**result.options, "video": index}
    if suffix == ".npy":
        assert np.array_equal(np.load(saved[1]), result.frames[1])
    if suffix == ".png":
        assert np.array_equal(iio.imread(saved[1], index=None), result.frames[1])


def test_a_file_that_is_there_stays(result: wanrun.Result, tmp_path: Path) -> None:
    (tmp_path / "cat-1.npy").write_bytes(b"mine")
    with refuses("exists", what=tmp_path / "cat-1.npy", remedy="overwrite=True"):
        result.save(str(tmp_path / "cat.npy"))
    (tmp_path / "dog-0.npy.json").write_bytes(b"mine")
    with refuses("exists", what=tmp_path / "dog-0.npy.json"):
        result.save(tmp_path / "dog.npy")
    assert (tmp_path / "cat-1.npy").read_bytes() == b"mine" and not (tmp_path / "cat-0.npy").exists()
    for path, said in (
        (None, "the wrong type"),
        ("a\0.npy", "path is no path"),
        ("a" * 300 + ".npy", "long"),
    ):
        with pytest.raises(UsageError, match=said):
            result.save(path)  # type: ignore[arg-type]
    assert result.save(tmp_path / "cat.npy", fps=30, overwrite=True)
    assert read_metadata(tmp_path / "cat-1.npy")["fps"] == 30


# What a function given as on_step sees.


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["step", "scan"])
def test_latents_and_preview(toy_artifact: Path, loop: str) -> None:
    seen: list[wanrun.Step] = []
    shown: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def without(done: int, total: int, step: wanrun.Step) -> None:
        replace(step, manifest=step.manifest.changed(preview=())).preview()

    def on_step(done: int, total: int, step: wanrun.Step) -> None:
        seen.append(step)
        shown.append((step.latents, step.clean, step.preview()))

    with wanrun.load(toy_artifact, embeddings="none", loop=loop) as pipeline:
        map_ = np.array(pipeline.manifest.preview)
        assert map_.shape == (17, 3)
        with refuses("unsupported", remedy="wanbuild compile"):
            pipeline.generate(PROMPT, num_steps=2, on_step=without)
        result = pipeline.generate(PROMPT, num_steps=3, on_step=on_step)
    latents, clean, preview = shown[-1]
    assert len(shown) == (3 if loop == "step" else 1)
    assert np.array_equal(latents, result.latents)
    np.testing.assert_allclose(clean, latents, rtol=0, atol=1e-5)  # the last step ends at sigma 0
    assert loop == "scan" or np.abs(shown[0][0] - shown[0][1]).max() > 0.1
    expected = np.moveaxis(clean[0].astype(np.float64), 0, -1) @ map_[:-1] + map_[-1]
    assert preview.dtype == np.uint8 and preview.shape == (*latents.shape[2:], 3)
    assert np.abs(preview - expected.clip(0, 255)).max() <= 0.51
    if loop == "step":
        with refuses("closed", what="latents", remedy="on_step"):
            _ = seen[0].latents


def test_frames_of_reference_images_are_no_part_of_the_video() -> None:
    manifest = with_model(plain_manifest(), leading_latents=2)
    made = np.arange(1 * 2 * 5 * 2 * 2, dtype=np.float32).reshape(1, 2, 5, 2, 2)
    step = wanrun.Step({"latents": made, "history": {"m1": -made}}, manifest, PROFILE)
    assert np.array_equal(step.latents, made[:, :, 2:]) and np.array_equal(step.all_latents, made)
    assert np.array_equal(step.clean, -made[:, :, 2:]) and np.array_equal(step.all_clean, -made)


@pytest.mark.slow
def test_the_number_of_parameters_decides(toy_artifact: Path) -> None:
    """A third one with a default is the function's own, as in a loop's lambda."""
    counts: list[tuple[int, int, int]] = []

    def two(done: int, total: int, own: int = 7) -> None:
        counts.append((done, total, own))

    with wanrun.load(toy_artifact, embeddings="none") as pipeline:
        pipeline.generate(PROMPT, num_steps=1, on_step=two)
        for wrong in (lambda done: None, lambda a, b, c, d: None):
            with refuses("wrong_type", what="on_step", expected="(done, total)"):
                pipeline.generate(PROMPT, num_steps=1, on_step=wrong)  # type: ignore[arg-type]
    assert counts == [(1, 1, 7)]


def test_a_preview_of_another_model_is_refused(toy_artifact: Path) -> None:
    manifest = read_manifest(toy_artifact)
    with pytest.raises(ValueError, match=r"previews .*\b1 rows"):
        manifest.changed(preview=((1.0, 2.0, 3.0),))


def test_a_map_that_is_recorded_with_a_profile_serves() -> None:
    """As artifacts have it whose map was fitted when they were verified."""
    rows = ((1.0, 2.0, 3.0),) * 17
    record = Recorded(file="golden/a.json", sha256="0" * 64, preview=rows)
    assert plain_manifest(golden={"x": record}).colours == rows
    assert msgspec.to_builtins(Recorded(file="a", sha256="b")) == {"file": "a", "sha256": "b"}


# Timings are a generation's.


@pytest.fixture
def pipeline(toy_artifact: Path) -> Iterator[Pipeline]:
    with wanrun.load(toy_artifact, embeddings="none") as pipeline:
        yield pipeline


@pytest.mark.slow
def test_a_result_has_its_own(pipeline: Pipeline) -> None:
    while (loaded := pipeline.timings.as_json())["process_to_ready_seconds"] is None:
        time.sleep(0.01)  # a thread of the loader says it, perhaps after load has returned
    moved = {span.name: span.nbytes for span in pipeline.timings.labelled_spans if span.nbytes}
    assert moved["restore transformer"] == moved["transfer transformer"] > 0
    assert moved["executables denoise_step"] > 0
    assert 0 < loaded["executables_floor_seconds"] <= loaded["executables_seconds"]
    known = {"executables": pipeline.timings.rates["executables"]}  # a toy's weights are too few to tell
    with wanrun.load(pipeline.artifact, embeddings="none") as again:
        assert again.timings.known_rates == known
    results = []
    for steps in (3, 2):
        started = time.monotonic()
        timings = pipeline.generate(PROMPT, num_steps=steps).timings
        elapsed = time.monotonic() - started
        total = timings.as_json()["total_seconds"]
        assert 0.8 * elapsed < total <= elapsed
        assert len(timings.step_seconds) == steps and timings.loop == "step"
        assert timings.unaccounted_seconds is not None and timings.unaccounted_seconds < elapsed
        results.append(timings)
    first, second = ({span.name for span in timings.labelled_spans} for timings in results)
    # The first brought what comes behind the steps.
    assert second == {"text", "prepare", "denoise", "decode 9 frames"}
    decoder = {f"executables decode_{name}" for name in ("first", "video")}
    assert first - second == {"restore vae", "transfer vae", *decoder}
    assert [timings.cache_hits for timings in results] == [2, 0]
    begins = [min(span.start for span in timings.labelled_spans) for timings in results]
    ends = [max(span.end for span in timings.labelled_spans) for timings in results]
    assert loaded["process_to_ready_seconds"] < begins[0] < ends[0] < begins[1] < ends[1]
    after = pipeline.timings.as_json()
    for key in ("spans", "step_seconds", "cache_hits", "process_to_first_step_seconds"):
        assert after[key] == loaded[key]
    assert results[0].as_json().keys() == Timings().as_json().keys() | {"prepare_seconds"}


@pytest.mark.slow
def test_given_ones_collect(pipeline: Pipeline) -> None:
    """As the command line's, which also have the start of the process in them."""
    timings = Timings()
    for _ in range(2):
        assert pipeline.generate(PROMPT, num_steps=2, timings=timings).timings is timings
    assert len(timings.step_seconds) == 4 and len(timings.spans["decode"]) == 2
    before = timings.as_json()["total_seconds"]
    time.sleep(0.01)
    assert timings.as_json()["total_seconds"] > before + 0.009


@pytest.mark.slow
def test_the_other_calls(pipeline: Pipeline) -> None:
    timings = Timings()
    pipeline.encode_prompts([PROMPT], timings)
    pipeline.decode(np.zeros(pipeline.latents_shape, np.float32), timings)
    assert timings.seconds.keys() == {"text", "decode", "restore", "transfer", "executables"}
    before = pipeline.timings.as_json()["spans"]
    pipeline.encode_prompts(["an owl"])
    pipeline.decode(np.zeros(pipeline.latents_shape, np.float32))
    pipeline.warmup()
    assert pipeline.timings.as_json()["spans"] == before


def reachable(root: Any) -> int:
    """How many objects hang on one, but for what belongs to modules."""
    seen, waiting = {id(root)}, [root]
    while waiting:
        for other in gc.get_referents(waiting.pop()):
            if id(other) not in seen and not isinstance(other, type | ModuleType | FunctionType):
                seen.add(id(other))
                waiting.append(other)
    return len(seen)


@pytest.mark.thorough
def test_nothing_grows(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of generations, but for their steps, leave a pipeline as large as it was."""
    frames, latents = np.zeros((1, 9, 64, 96, 3), np.uint8), np.zeros(pipeline.latents_shape, np.float32)

    def make(self: Sampler, run: Any, *arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        with run.timings.phase("denoise"):
            run.timings.steps("step", 1, 0.1)
        return frames, latents

    monkeypatch.setattr(Sampler, "__call__", make)
    sizes = []
    for count in (20, 300):
        for seed in range(count):
            result = pipeline.generate(PROMPT, seed=seed, num_steps=2)
            assert len(result.timings.labelled_spans) == 2
        gc.collect()
        sizes.append(reachable(pipeline))
    print(f"{sizes} objects")
    assert sizes[0] > 1000 and sizes[1] - sizes[0] < 100
