"""What a run has to do, found before the work: good lines, bad ones, and what is there already."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fake_pipeline import make_two_experts, write_lines
from helpers.manifests import with_profiles
from helpers.media_files import image, make_task
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import WanError
from wanrun.files import sha256_of
from wanrun.jobs.plan import Plan
from wanrun.media.write_video import write_video

PlanOf = Callable[..., Plan]
LATENTS = (1, 16, 3, 8, 12)


def refusal(plan_of: PlanOf, given: dict[str, Any] | None = None, **run: Any) -> str:
    with pytest.raises(WanError) as caught:
        plan_of(given, **run)
    return str(caught.value)


def test_a_prompt_of_the_command_line(plan_of: PlanOf, tmp_path: Path) -> None:
    plan = plan_of({"seed": 3}, prompt="a fox")
    (job,) = plan.jobs
    assert job.draft.entry.where == "" and job.draft.videos == (tmp_path / "o.npy",)
    assert (plan.finished, plan.failures, plan.noise, plan.many) == ([], [], None, False)
    assert plan.inputs_of(job) is None and plan.first_expert == "transformer"
    assert plan.first_prompts() == ["a fox", ""] and not plan.guidance_off
    assert job.metadata["text_encoder"] == "jax"


def test_without_an_output_a_single_prompt_takes_a_free_name(
    plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for _ in range(3):
        (job,) = plan_of({}, prompt="a fox", output=None).jobs
        found += job.draft.videos
        job.draft.videos[0].write_bytes(b"a video")
    assert found == [Path("out.mp4"), Path("out-2.mp4"), Path("out-3.mp4")]
    (job,) = plan_of({}, prompt="a fox", output=None, overwrite=True).jobs
    assert job.draft.videos == (Path("out.mp4"),)
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "one"})
    assert "out.mp4 exists" in str(plan_of(prompts=file, output=None).failures[0])


def test_lines_that_can_be_made_and_others(plan_of: PlanOf, tmp_path: Path) -> None:
    lines = [
        {"prompt": "one"},
        {"prompt": "two", "seed": -1},
        "[]",
        {"prompt": "four", "negative_prompt": "n"},
    ]
    file = write_lines(tmp_path / "p.jsonl", *lines)  # type: ignore[arg-type]
    plan = plan_of(prompts=file)
    assert [job.draft.entry.index for job in plan.jobs] == [1, 4]
    assert [str(failure).partition(": ")[0] for failure in plan.failures] == [f"{file}:2", f"{file}:3"]
    assert plan.first_prompts() == ["one", "", "four", "n"] and plan.first_prompts(1) == ["one", ""]
    assert plan.many


def test_a_bad_prompt_of_the_command_line_ends_the_run(plan_of: PlanOf) -> None:
    assert "seed is out of range" in refusal(plan_of, {"seed": -1}, prompt="a fox")
    assert refusal(plan_of).startswith("no prompt was given")
    assert refusal(plan_of, prompt="a", prompts=Path("p")).startswith("--prompt and --prompts exclude each")


def test_what_is_there_is_finished(plan_of: PlanOf, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.txt", "one", "two")
    first, _ = plan_of(prompts=file).jobs
    write_video(np.zeros((9, 64, 96, 3), np.uint8), tmp_path / "o-1.npy", 16, {**first.metadata, "video": 0})
    plan = plan_of(prompts=file)
    assert [job.draft.entry.index for job in plan.finished] == [1]
    assert [job.draft.entry.index for job in plan.jobs] == [2]
    assert plan_of(prompts=file, overwrite=True).finished == []


def test_initial_latents(plan_of: PlanOf, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).standard_normal(LATENTS, np.float32)
    np.save(tmp_path / "z.npy", noise)
    plan = plan_of(prompt="a fox", latents=tmp_path / "z.npy")
    assert plan.noise is not None and np.array_equal(plan.noise, noise) and plan.noise.flags.writeable
    (job,) = plan.jobs
    assert job.metadata["latents"] == "z.npy" and job.metadata["seed"] is None
    assert job.metadata["latents_sha256"] == sha256_of(noise.tobytes())


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY\x01\x00v\x00{'descr':", b"PK\x03\x04"])
def test_latents_that_cannot_be_read(plan_of: PlanOf, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "z.npy").write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # NumPy leaves a damaged zip file open
        message = refusal(plan_of, prompt="a fox", latents=tmp_path / "z.npy")
        gc.collect()
    assert f"the latents {tmp_path / 'z.npy'} cannot be read" in message and "float32 .npy file" in message


def test_files_of_the_run_are_claimed_too(plan_of: PlanOf, tmp_path: Path) -> None:
    file, output = write_lines(tmp_path / "p.txt", "one"), tmp_path / "o.npy"
    assert "two outputs are the same file" in refusal(plan_of, prompt="a", timing_json=output)
    assert "is also that of --prompts, which is read" in refusal(plan_of, prompts=file, timing_json=file)
    plan = plan_of(prompts=file, timing_json=output)  # a line that cannot be made does not end the run
    (failure,) = plan.failures
    assert plan.jobs == [] and "o.npy is also that of --timing-json" in str(failure)


def test_media_of_the_command_line_are_checked_once(plan_of: PlanOf, artifact: Path, tmp_path: Path) -> None:
    make_task(artifact, "i2v")
    file = write_lines(tmp_path / "p.txt", "one", "two")
    message = refusal(plan_of, {"image": str(tmp_path / "none.png")}, prompts=file)
    assert "none.png" in message and "p.txt" not in message
    picture = str(image(tmp_path / "a.png"))
    plan = plan_of({"image": picture}, prompts=file)
    one, two = plan.jobs
    inputs = plan.inputs_of(one)
    assert inputs is not None and plan.inputs_of(two) is inputs
    one_line = write_lines(tmp_path / "one.txt", "one")
    (failure,) = plan_of({"image": picture}, prompts=one_line, output=Path(picture), overwrite=True).failures
    assert f"a.png is also that of {one_line}:1 (image), which is read" in str(failure)


def test_the_expert_that_is_needed_first(plan_of: PlanOf, artifact: Path) -> None:
    make_two_experts(artifact)
    assert plan_of(prompt="a").first_expert == "transformer"
    assert plan_of({"boundary": 1.0}, prompt="a").first_expert == "transformer_2"


def test_guidance_that_no_profile_has(plan_of: PlanOf, artifact: Path) -> None:
    manifest = read_manifest(artifact)
    make_two_experts(artifact)
    (without,) = [p for p in read_manifest(artifact).profiles.values() if not p.guidance]
    with_profiles(manifest, [without]).write(artifact)
    assert plan_of(prompt="a").guidance_off
    assert not plan_of({"guidance_scale": 1.0}, prompt="a").guidance_off
    assert "no profile is built" in refusal(plan_of, {"guidance_scale": 3.0}, prompt="a")
