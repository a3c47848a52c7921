"""A tiny decoder beside the VAE, from the file to the video: what is read, what is recorded, what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.artifacts import OWN_PROGRAMS, build_artifact, shared
from helpers.damage import linked
from helpers.refusals import refuses
from helpers.tiny_decoder import write_tiny
from wanbuild.build import convert
from wanbuild.cli import wanbuild
from wanbuild.conversion.convert_request import ConvertRequest
from wancli.console import run
from wanrun import Step, load, needed, resolve
from wanrun.artifact.manifest import TINY_VAE
from wanrun.artifact.named import WEIGHTS
from wanrun.errors import SourceError, UsageError
from wanrun.timing.timings import Timings

PROMPT = "a cat"


@pytest.fixture(scope="module")
def artifact(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy artifact with a tiny decoder; all programs but the decoder's are compiled once for both."""
    file = write_tiny(tmp_path_factory.mktemp("tiny") / "taew2_1.safetensors")

    def build(folder: Path) -> None:
        build_artifact(toy_checkpoint, folder, shipping=OWN_PROGRAMS, files={TINY_VAE: file})

    return shared(tmp_path_factory, "tiny", build)


def read(timings: Timings) -> set[str | None]:
    """The components that a call has read."""
    return {span.label for span in timings.labelled_spans if span.phase == "restore"}


@pytest.mark.thorough
def test_what_is_not_asked_for_is_not_read(artifact: Path) -> None:
    videos: dict[str, Any] = {}
    looked: list[tuple[np.ndarray, np.ndarray]] = []

    def look(done: int, total: int, step: Step) -> None:
        if step.tiny is not None:
            looked.append((step.decoded(), step.clean))
            return
        with pytest.raises(UsageError, match="decoder tiny"):
            step.decoded()

    for decoder, other in (("tiny", "vae"), ("full", TINY_VAE)):
        timings = Timings()
        with load(artifact, prompts=[PROMPT, ""], timings=timings) as pipeline:
            made = pipeline.generate(PROMPT, "", num_steps=1, decoder=decoder, timings=timings, on_step=look)
            assert other not in read(timings) and len(read(timings) & {"vae", TINY_VAE}) == 1
            assert np.array_equal(pipeline.decode(made.latents, decoder=decoder), made.frames)
            if decoder == "tiny":
                ((shown, clean),) = looked
                (whole,) = pipeline.decode(clean, decoder=decoder)
                expected = whole[::4].reshape(3, 16, 4, 24, 4, 3).mean((2, 4))
                assert shown.dtype == np.uint8 and np.abs(shown - expected).max() <= 0.5
            with pytest.raises(UsageError, match="full, tiny"):
                pipeline.decode(made.latents, decoder="small")
        assert made.options.get("decoder") == (decoder if decoder == "tiny" else None)
        videos[decoder] = made
    tiny, full = videos.values()
    assert np.array_equal(tiny.latents, full.latents) and tiny.frames.shape == full.frames.shape
    assert tiny.frames.std() > 10 and not np.array_equal(tiny.frames, full.frames)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("decoders", "unread"),
    [({"tiny"}, {"vae"}), ({"full"}, {TINY_VAE}), ({"tiny", "full"}, set()), (None, set())],
)
def test_a_copy_fetches_the_decoder_that_runs(
    artifact: Path, decoders: set[str] | None, unread: set[str]
) -> None:
    components = {one.of for one in needed(artifact, decoders=decoders) if one.kind is WEIGHTS}
    assert {"vae", TINY_VAE, "transformer", "text_encoder"} - components == unread


@pytest.mark.thorough
def test_its_cost_is_its_own(artifact: Path) -> None:
    tiny, full = (resolve(artifact, PROMPT, decoder=name).cost() for name in ("tiny", "full"))
    assert tiny.calls["decode_tiny"] == full.calls["decode_first"] == 1 and full.calls["decode"] == 2
    assert not {"decode_first", "decode"} & tiny.calls.keys() and "decode_tiny" not in full.calls
    assert tiny.flops["cpu"] < full.flops["cpu"]


@pytest.mark.thorough
def test_it_is_recorded_and_its_licence_is_told(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    copy = linked(artifact, tmp_path / "copy")
    assert run(wanbuild, ["verify", str(copy), "--record"]) == 0
    (file,) = (copy / "golden").iterdir()
    samples = json.loads(file.read_text())["tiny_samples"]
    assert len(samples) == 256 and len(set(samples)) > 50
    capsys.readouterr()
    assert run(wanbuild, ["sbom", str(copy)]) == 0
    parts = {one["name"]: one for one in json.loads(capsys.readouterr().out)["components"]}
    assert parts[f"weights/{TINY_VAE}"]["licenses"] == [{"license": {"id": "MIT"}}]
    assert "licenses" not in parts["weights/vae"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "taew2_2.safetensors",
            {"channels": 48, "patch": 2},
            "16 channels for",
        ),
        ("lighttaew2_1.safetensors", {}, "latents with another mean"),
        ("taew2_1.pth", {}, "a pickled checkpoint"),
    ],
)
def test_other_files_are_refused(
    toy_checkpoint: Path, tmp_path: Path, name: str, options: dict[str, int], message: str
) -> None:
    file = write_tiny(tmp_path / name, **options)
    with pytest.raises(SourceError, match=message):
        convert(ConvertRequest(toy_checkpoint, tmp_path / "artifact", files={TINY_VAE: file}))
    assert not (tmp_path / "artifact").exists()


def test_an_artifact_without_one_says_how_to_get_it(toy_artifact: Path) -> None:
    with refuses("not_built", remedy="--tiny-vae"):
        resolve(toy_artifact, PROMPT, decoder="tiny")
