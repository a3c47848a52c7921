"""``wanrun --report``: what the page of a run says, also where prompts fail or the run ends early."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

import wanrun
from helpers.fake_pipeline import Fake, Run, run_here, write_lines
from helpers.manifests import full_manifest, of_one_size, plain_adapter, with_profiles
from helpers.pages import Seen
from wanreport import run_report
from wanreport.run_report import number
from wanrun.artifact.adapter import Lora
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.programs import Profile
from wanrun.errors import ArtifactError, WanError

Call = Callable[..., Run]
HOSTILE = "</script><img onerror=alert(1) src=x>"


@pytest.fixture
def wan(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: Fake) -> Call:
    """Runs wanrun here, with an output, two steps and a report."""

    def call(*arguments: object) -> Run:
        output = ("--output", tmp_path / "o.gif", "--report", tmp_path / "r.html")
        return run_here(capsys, artifact, *output, "--steps", 2, *arguments)

    return call


def seen(tmp_path: Path) -> Seen:
    return Seen((tmp_path / "r.html").read_text())


def raising(error: Exception) -> Callable[[], object]:
    def call() -> None:
        raise error

    return call


def test_one_video(wan: Call, artifact: Path, tmp_path: Path) -> None:
    assert wan("--prompt", "a fox", "--seed", 7, "--memory", "low").code == 0
    page = seen(tmp_path)
    for text in ("A run of wan2.1-t2v", "The video was made", "a fox", "96x64x9-b1-cfg", "low", "import"):
        assert text in page.text
    for digest in read_manifest(artifact).digests.values():
        assert digest in page.text
    kinds = [image["class"] for image in page.all("img")]
    assert kinds == ["moving", "sheet instead"] and len(page.all("table")) == 1  # the waterfall
    assert page.text.index("Seed") < page.text.index("7", page.text.index("Seed")) < page.text.index("Time")


def test_images_are_among_the_options() -> None:
    """By their files, and with how they were fitted."""
    manifest = of_one_size(full_manifest())
    built = next(iter(manifest.profiles.values())).options
    artifact = Artifact(with_profiles(manifest, [Profile(96, 64, 9, 1, True, 0, built)]), Path("a"))
    generation = wanrun.resolve(artifact, "a fox", image="fox.png", video="run.mp4", fit="pad")
    values = run_report._values(generation)
    assert [values[name] for name in ("image", "video", "fit")] == ["fox.png", "run.mp4", "pad"]
    assert "mask" not in values


@pytest.mark.slow
def test_loras_are_named(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: Fake
) -> None:
    """The merged ones; chosen ones with their strengths among the options, or in a column; their digests."""
    manifest = read_manifest(artifact)
    merged = Lora(file="merged.safetensors", sha256="1e" * 32, scale=0.5, component=None)
    slots = {
        name: structs.replace(one, options=structs.replace(one.options, lora_rank=16))
        for name, one in manifest.profiles.items()
    }
    adapters = {"style": structs.replace(plain_adapter("style"), sha256="0f" * 32)}
    manifest.changed(adapters=adapters, profiles=slots, loras=(merged,)).write(artifact)
    output = ("--output", tmp_path / "o.gif", "--report", tmp_path / "r.html", "--steps", 2)
    lines = write_lines(tmp_path / "p.jsonl", {"prompt": "one", "lora": "style:-0.25"}, {"prompt": "two"})
    assert run_here(capsys, artifact, *output, "--prompts", lines, "--lora", "style:0.5").code == 0
    text = seen(tmp_path).text
    for said in ("style at strength -0.25", "style at strength 0.5", "0f" * 32, str(merged), merged.sha256):
        assert said in text
    made = run_here(capsys, artifact, *output, "--prompts", lines, "--lora", "style:0.75")
    assert made.code == 2 and "0.75}" in made.err[0]  # another video than that which is there
    refused = run_here(capsys, artifact, *output, "--prompt", "a fox", "--lora", "stile")
    assert refused.code == 2 and "wanbuild lora" in refused.err[0]


@pytest.mark.slow
def test_every_line_of_a_prompts_file_is_a_row(wan: Call, fake: Fake, tmp_path: Path) -> None:
    """Made, there already, failed, no usable line; a prompt is a text; what differs has a column."""
    first = write_lines(tmp_path / "p.jsonl", {"prompt": HOSTILE, "seed": 1}, {"prompt": "two"})
    assert wan("--prompts", first).code == 0
    fake.happens["bad"] = raising(WanError("not_finite", "not finite"))
    lines = ({"prompt": HOSTILE, "seed": 1}, {"prompt": "two"}, {"prompt": "bad"}, "{}", {"prompt": "five"})
    assert wan("--prompts", write_lines(tmp_path / "p.jsonl", *lines)).code == 2
    page = seen(tmp_path)
    head, *rows = page.rows[:6]
    assert head == ["Prompt", "No.", "Outcome", "Took", "Seed"]
    assert [(row[1], row[2], row[4]) for row in rows] == [
        ("1", "there already", "1"),
        ("2", "there already", "0"),
        ("3", "failed", "0"),
        ("4", "failed", ""),
        ("5", "made", "0"),
    ]
    assert [row[3] != "" for row in rows] == [False, False, False, False, True]
    assert rows[0][0] == HOSTILE and not [one for one in page.all("img") if "onerror" in one]
    assert rows[2][0] == "badnot finite"
    assert f"{tmp_path / 'p.jsonl'}:4: " in rows[3][0]
    (line,) = re.findall(r"5 prompts: [^.]*?failed", page.text)
    assert re.findall(r"\d+", line) == ["5", "1", "2", "2"]
    links, names = [one["href"] for one in page.all("a")], [one.get("id") for one in page.all("figure")]
    assert links == [f"#{name}" for name in names] == ["#video-1-0", "#video-2-0", "#video-5-0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [WanError("not_finite", "the latents are not finite"), ArtifactError("damaged", "it is damaged")]
)
@pytest.mark.parametrize("many", [False, True])
def test_a_run_that_ends_early_has_a_report(
    wan: Call, fake: Fake, tmp_path: Path, error: WanError, many: bool
) -> None:
    fake.happens["a fox"] = raising(error)
    file = write_lines(tmp_path / "p.txt", "a fox", "a cat")
    done = wan("--prompts", file) if many else wan("--prompt", "a fox")
    assert done.code == error.exit_code and done.err[0].endswith(str(error))
    page = seen(tmp_path)
    ended = not many or isinstance(error, ArtifactError)
    assert ("ended the run" in page.text) == ended and str(error) in page.text
    if not many:
        assert "No video" in page.text
    else:
        assert [row[2] for row in page.rows[1:3]] == ["failed", "not tried" if ended else "made"]


@pytest.mark.slow
def test_a_video_that_is_gone_is_said(wan: Call, fake: Fake, tmp_path: Path) -> None:
    fake.happens["two"] = lambda: (tmp_path / "o-1.gif").unlink()
    assert wan("--prompts", write_lines(tmp_path / "p.txt", "one", "two")).code == 0
    assert "o-1.gif cannot" in seen(tmp_path).text


def test_a_report_that_cannot_be_written(wan: Call, tmp_path: Path, fake: Fake) -> None:
    """Before the start, and at the end, where the videos stay."""
    done = wan("--prompt", "a fox", "--report", tmp_path / "none" / "r.html")
    assert done.code == 2 and "--report" in done.err[0] and fake.loads == []
    fake.happens["a fox"] = (tmp_path / "r.html").mkdir
    done = wan("--prompt", "a fox")
    assert done.code == 2 and "the report" in done.err[-1] and "cannot be written" in done.err[-1]
    assert (tmp_path / "o.gif").exists()


def test_numbers() -> None:
    assert [number(text) for text in ("3", "2.5", "unipc", "")] == [3.0, 2.5, None, None]
