"""A prompt becomes a job: options with the artifact's defaults, names of its own, and what is there of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.refusals import check_refusal, refuses
from helpers.run_options import run_options
from wancli.jobs.media_sets import MediaSets
from wancli.jobs.planned import Planned, Planner
from wancli.jobs.worklist import Worklist
from wanrun import __version__
from wanrun.artifact.artifact import open_artifact
from wanrun.claims import Claims
from wanrun.errors import ArtifactError, UsageError
from wanrun.media.write_video import write_video
from wanrun.request.prompts_file import Entry, Line
from wanrun.request.reading import read_request
from wanrun.timing.timings import Timings

SHAPE = (1, 16, 3, 8, 12)


@pytest.fixture
def maker(artifact: Path, tmp_path: Path) -> Callable[..., Planner]:
    """Makes jobs of the toy artifact: keywords of ``RunOptions``, and attributes of ``Planner``."""

    def make(
        many: bool = True, noise: np.ndarray | None = None, facts: Mapping[str, Any] | None = None, **run: Any
    ) -> Planner:
        how = run_options(**{"output": tmp_path / "o.npy", **run})
        media, claims = MediaSets(Timings()), Claims(artifact)
        return Planner(open_artifact(artifact), how, many, noise, facts or {}, media, claims)

    return make


def entry(index: int = 1, total: int = 1, **options: Any) -> Entry:
    line = read_request({"prompt": "A red fox!", "num_steps": 2, **options}.items(), Line)
    return Entry(line, f"p.txt:{index}" if total > 1 else "", index, total)


def plan(maker: Planner, **options: Any) -> Planned:
    return maker.compared(maker.planned(entry(**options)))


def paths(planned: Planned) -> list[Path]:
    """The files that are to be written."""
    return [output.path for output in planned.job.outputs]


def test_the_artifact_s_defaults_fill_in(maker: Callable[..., Planner]) -> None:
    generation = maker().planned(entry(seed=3)).job.generation
    defaults = maker().artifact.manifest.model.defaults
    assert generation.options["num_steps"] == 2 and generation.options["seed"] == 3
    for name in ("guidance_scale", "flow_shift", "solver"):
        assert generation.options[name] == getattr(defaults, name)
    assert generation.profile.name == "96x64x9-b1-cfg" and generation.media is None


@pytest.mark.parametrize(
    ("output", "total", "own", "name"),
    [
        ("o.npy", 1, None, "o.npy"),
        ("o.npy", 12, None, "o-03.npy"),
        ("{slug}-{seed}.gif", 12, None, "a-red-fox-5.gif"),
        ("o.npy", 12, "mine-{index}.png", "mine-03.png"),
        ("o.npy", 12, "mine.png", "mine.png"),  # a line's own name is not numbered
    ],
)
def test_names(
    maker: Callable[..., Planner],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    output: str,
    total: int,
    own: str | None,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {} if own is None else {"output": own}
    planned = maker(output=Path(output)).planned(entry(3 if total > 1 else 1, total, seed=5, **options))
    assert planned.videos == (Path(name),) and paths(planned) == [Path(name)]


def test_names_of_two_lines_differ(maker: Callable[..., Planner], tmp_path: Path) -> None:
    jobs = maker(save_latents=tmp_path / "z.npy", output=tmp_path / "o.gif")
    assert paths(jobs.planned(entry(1, 2))) == [tmp_path / "o-1.gif", tmp_path / "z-1.npy"]
    with refuses("exists", what="p.txt:1"):
        jobs.planned(entry(2, 2, output=str(tmp_path / "o-1.gif")))


def test_what_a_single_prompt_would_replace_is_refused(maker: Callable[..., Planner], tmp_path: Path) -> None:
    (tmp_path / "o.npy").write_bytes(b"the only copy")
    with refuses("exists", what="o.npy ", remedy="--overwrite"):
        maker(many=False).planned(entry())
    assert paths(plan(maker(many=False, overwrite=True))) == [tmp_path / "o.npy"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seed": 2**64}, UsageError, "the seed is out of range"),
        ({"flow_shift": 1e9, "num_steps": 50}, UsageError, "not distinct in float32"),
        ({"size": "832x480"}, ArtifactError, "no profile is built for 832x480"),
        ({"image": "a.png"}, UsageError, "image cannot be used with wan2.1-t2v"),
    ],
)
def test_options_that_cannot_be_used(
    maker: Callable[..., Planner], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        maker().planned(entry(**options))


def test_initial_latents_have_to_fit(maker: Callable[..., Planner]) -> None:
    assert maker(noise=np.zeros(SHAPE, np.float32)).planned(entry())
    with refuses("mismatch", what="latents"):
        maker(noise=np.zeros(SHAPE[1:], np.float32)).planned(entry())


def test_the_metadata(maker: Callable[..., Planner]) -> None:
    facts = {"text_encoder": "jax"}
    planned = plan(maker(facts=facts), seed=5, fps=8)
    assert planned.job.generation.fps == planned.metadata["fps"] == 8.0
    expected = {**planned.job.generation.options, **facts, "seed": 5, "num_videos": 1, "wanrun": __version__}
    assert planned.metadata.items() >= expected.items()
    assert planned.metadata["content_digest"] == maker().artifact.manifest.content_digest
    # Given latents are the noise: the seed has no influence.
    with_latents = plan(maker(facts={"latents": "z.npy", "latents_sha256": "0"}), seed=5)
    assert with_latents.metadata["seed"] is None and with_latents.job.generation.fps == 16.0


def test_what_is_there_already_is_finished(maker: Callable[..., Planner], tmp_path: Path) -> None:
    video, latents = tmp_path / "o.npy", tmp_path / "z.npy"
    planned = plan(maker(save_latents=latents))
    assert paths(planned) == [video, latents] and not planned.finished
    frames = np.zeros((9, 64, 96, 3), np.uint8)
    write_video(frames, tmp_path / "o.npy", planned.job.generation.fps, {**planned.metadata, "video": 0})
    planned = plan(maker(save_latents=latents))  # the latents are still to be made
    assert paths(planned) == [latents] and not planned.finished
    latents.touch()
    assert plan(maker(save_latents=latents)).finished
    again = plan(maker(save_latents=latents, overwrite=True))
    assert paths(again) == [video, latents] and not again.finished
    with refuses("exists", expected="seed 1", found=0):
        plan(maker(), seed=1)


def test_a_killed_run_does_not_block_its_repeat(maker: Callable[..., Planner], tmp_path: Path) -> None:
    """It leaves a sidecar without its video. One of another run is not replaced unasked."""
    sidecar = tmp_path / "o.npy.json"
    planned = plan(maker(many=False), seed=3)
    sidecar.write_text(json.dumps({**planned.metadata, "video": 0}))
    again = plan(maker(many=False), seed=3)
    assert paths(again) == [tmp_path / "o.npy"]
    with refuses("exists", what=sidecar, remedy="--overwrite"):
        plan(maker(many=False), seed=4)
    assert paths(plan(maker(many=False, overwrite=True), seed=4)) == [tmp_path / "o.npy"]
    sidecar.unlink()
    sidecar.mkdir()
    for overwrite in (False, True):
        with refuses("wrong_kind", what=sidecar):
            plan(maker(many=False, overwrite=overwrite), seed=3)


def test_a_drawn_seed_is_that_of_the_video_that_is_there(
    worklist_of: Callable[..., Worklist], tmp_path: Path
) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "v.npy"
    prompts.write_text('{"prompt": "a fox", "seed": "random"}')
    (planned,) = worklist_of(prompts=prompts, output=output).jobs
    assert planned.entry.drawn
    write_video(np.zeros((9, 64, 96, 3), np.uint8), output, 16, {**planned.metadata, "video": 0})
    again = worklist_of(prompts=prompts, output=output)
    assert not again.jobs and again.finished[0].entry.line.seed == planned.entry.line.seed
    (new,) = worklist_of(prompts=prompts, output=output, overwrite=True).jobs
    assert new.entry.line.seed != planned.entry.line.seed
    prompts.write_text('{"prompt": "a cat", "seed": "random"}')
    (failure,) = worklist_of(prompts=prompts, output=output).failures.values()
    check_refusal(failure, "exists", expected='prompt "a cat"', found='"a fox"')
