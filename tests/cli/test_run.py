"""The command line: what it gives to a run and to the pipeline, and what it writes also where a run fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from helpers.fake_pipeline import Fake, Run, make_two_experts, run_here, write_lines
from helpers.manifests import plain_adapter, with_profiles, without_profiles
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import WanError

Call = Callable[..., Run]


@pytest.fixture
def wan(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs wanrun here, with an output and two steps."""

    def call(*arguments: object) -> Run:
        return run_here(capsys, artifact, "--output", tmp_path / "o.gif", "--steps", 2, *arguments)

    return call


def test_the_first_prompt_decides_what_is_loaded(
    wan: Call, fake: Fake, artifact: Path, tmp_path: Path
) -> None:
    make_two_experts(artifact)
    lines = [{"prompt": "one", "guidance_scale": 1.0, "boundary": 1.0, "loop": "scan"}, {"prompt": "two"}]
    assert wan("--prompts", write_lines(tmp_path / "p.jsonl", *lines)).code == 0
    (load,) = fake.loads
    assert (load["first_expert"], load["loop"]) == ("transformer_2", "scan")
    assert load["profile"] == "96x64x9-b1-nocfg"
    assert load["prompts"] == ["one"] and load["inputs"] is None  # no negative prompt without guidance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            [],
            {"memory": "auto", "embeddings": "all", "verify": "fast", "allow_compile": False, "target": None},
        ),
        (["--memory", "low", "--no-embedding-cache"], {"memory": "low", "embeddings": "artifact"}),
        (["--transfer", "staged", "--warmup"], {"transfer": "staged", "text_encoder_device": None}),
        (["--text-encoder-device", "cpu"], {"text_encoder_device": "cpu"}),
        (["--verify", "sha256", "--allow-compile"], {"verify": "sha256", "allow_compile": True}),
        (["--weights", "/elsewhere", "--target", "cpu"], {"weights": "/elsewhere", "target": "cpu"}),
    ],
)
def test_how_it_is_loaded(wan: Call, fake: Fake, arguments: list[str], expected: dict[str, object]) -> None:
    assert wan("--prompt", "a fox", *arguments).code == 0
    assert fake.loads[0].items() >= expected.items()
    warm = ["warmup"] if "--warmup" in arguments else []
    assert fake.asked == [*warm, "a fox", "closed"]


@pytest.mark.slow
def test_profiles_of_later_prompts_are_told_when_one_is_loaded(
    wan: Call, fake: Fake, artifact: Path, tmp_path: Path
) -> None:
    manifest = read_manifest(artifact)
    (first,) = manifest.profiles.values()
    second = msgspec.structs.replace(first, guidance=False, index=1)
    with_profiles(manifest, [first, second]).write(artifact)
    lines = [{"prompt": "one"}, {"prompt": "two", "guidance_scale": 1.0}, {"prompt": "three"}]
    given = write_lines(tmp_path / "p.jsonl", *lines)
    assert wan("--prompts", given, "--allow-compile", "--target", "cpu").code == 0
    (loaded,) = fake.loads
    assert (loaded["profile"], loaded["later"]) == (first.name, [first.name, second.name, first.name])


def test_list(wan: Call, fake: Fake, artifact: Path) -> None:
    manifest = read_manifest(artifact)
    assert wan("--list").out == [f"wan2.1-t2v  {manifest.content_digest}", "96x64x9-b1-cfg  targets: cpu"]
    manifest.changed(adapters={"style": plain_adapter("style", rank=8)}).write(artifact)
    assert wan("--list").out[2].startswith("lora style  rank 8, ")
    changed = without_profiles(manifest)
    changed.write(artifact)
    model, none = wan("--list").out
    assert model == f"wan2.1-t2v  {changed.content_digest}" and "wanbuild compile" in none
    assert fake.loads == []


@pytest.mark.parametrize("fails", [False, True])
def test_timings_are_written_whatever_comes_of_it(wan: Call, fake: Fake, tmp_path: Path, fails: bool) -> None:
    def happens() -> None:
        if fails:
            raise WanError("not_finite", "not finite")

    fake.happens["a fox"] = happens
    done = wan("--prompt", "a fox", "--timing", "--timing-json", tmp_path / "t.json")
    assert done.code == (1 if fails else 0)
    assert json.loads((tmp_path / "t.json").read_text())["import_seconds"] > 0
    assert ("TIMING SUMMARY" in done.out) == (not fails)
    assert done.err == (["error: not finite"] if fails else [])


def test_the_exit_code_is_that_of_the_first_failure(wan: Call, fake: Fake, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "one"}, {"prompt": "two", "seed": -2})
    done = wan("--prompts", file)
    assert done.code == 2 and done.out[-1].split()[::2] == ["1", "0", "1"]  # made, skipped, failed
    assert wan("--prompts", write_lines(tmp_path / "q.jsonl", "{}")).code == 2
    assert len(fake.loads) == 1  # nothing is loaded where nothing can be made
