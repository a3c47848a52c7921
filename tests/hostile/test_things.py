"""FIFOs, devices and endless files where files should be: one line and the right exit code, at once."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.damage import Declines, Refused, one_error
from helpers.fake_pipeline import Fake, run_here
from helpers.media_files import frames, image, make_task
from helpers.refusals import check_json
from hostile.refusal import check_named, refusal, time_limit
from hostile.things import ENDLESS
from wanbuild.cli import wanbuild
from wancli.console import run


@pytest.mark.slow
@pytest.mark.usefixtures("no_weights_are_read")
@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("option", ["--latents", "--image", "--last-image"])
def test_an_input_that_is_none(
    refused: Refused, artifact: Path, tmp_path: Path, option: str, kind: str
) -> None:
    make_task(artifact, "i2v")
    path = tmp_path / "given.png"
    given = [] if option == "--image" else ["--image", image(tmp_path / "i.png")]
    ENDLESS[kind](path)
    with time_limit():
        assert str(path) in refused(artifact, *given, option, path, code=2)


@pytest.mark.slow
@pytest.mark.usefixtures("no_weights_are_read")
@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("place", ["video", "video/00001.png", "mask"])
def test_a_video_that_is_none(
    refused: Refused, artifact: Path, tmp_path: Path, place: str, kind: str
) -> None:
    make_task(artifact, "vace")
    given = {name: frames(tmp_path / name, 9) for name in ("video", "mask")}
    path = tmp_path / place
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    ENDLESS[kind](path)
    options = [option for name, folder in given.items() for option in (f"--{name}", folder)]
    with time_limit():
        assert str(path) in refused(artifact, *options, code=2)


def test_a_file_that_ends_later_than_its_picture(declines: Declines, artifact: Path, tmp_path: Path) -> None:
    """All of it would be read for its digest."""
    make_task(artifact, "i2v")
    path = image(tmp_path / "i.png")
    with path.open("rb+") as file:
        file.truncate(2**40)
    with time_limit():
        declines(artifact, "unreadable", "--image", path, code=2, message="i.png", found="larger")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
@pytest.mark.parametrize("name", ["o.npy", "o.npy.json", "z.npy"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_output_that_is_none(
    capsys: pytest.CaptureFixture[str],
    fake: Fake,
    artifact: Path,
    tmp_path: Path,
    name: str,
    kind: str,
    overwrite: bool,
) -> None:
    ENDLESS[kind](tmp_path / name)
    (tmp_path / "p.txt").write_text("a fox\n")
    for prompts in (["--prompt", "a fox"], ["--prompts", tmp_path / "p.txt"]):
        outputs = ["--output", tmp_path / "o.npy", "--save-latents", tmp_path / "z.npy"]
        with time_limit():
            done = run_here(capsys, artifact, *prompts, *outputs, *["--overwrite"] * overwrite)
        (line,) = done.err
        assert done.code == 2 and str(tmp_path / name) in line
    assert fake.loads == []


def test_a_source_that_becomes_none(
    toy_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that was checked is opened again for its digest."""
    from wanbuild import build as module
    from wanbuild.conversion import provenance
    from wanbuild.source import checkpoint as checkpoint_module

    checkpoint = Path(shutil.copytree(toy_checkpoint, tmp_path / "checkpoint"))
    path, read = checkpoint / "tokenizer" / "tokenizer.json", module.read_small_files

    def replaced(source: checkpoint_module.Source) -> provenance.SmallFiles:
        path.unlink()
        ENDLESS["a pipe"](path)
        return read(source)

    monkeypatch.setattr(module, "read_small_files", replaced)
    with time_limit():
        arguments = [str(checkpoint), "--artifact", str(tmp_path / "artifact"), "--json-errors"]
        assert run(wanbuild, ["convert", *arguments]) == 4
    check_json(one_error(capsys), "unreadable", message=path)


def _lora(folder: Path) -> tuple[object, ...]:
    shapes = {"A": (4, 40), "B": (40, 4)}
    module = "base_model.model.blocks.0.attn1.to_q.lora_{}.weight"
    weights = {module.format(part): np.ones(shape, np.float32) for part, shape in shapes.items()}
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 4}')
    return ("--artifact", folder / "artifact", "--lora", folder / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "recipe.toml"])
def test_what_a_build_is_given(
    toy_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    arguments: tuple[object, ...] = ("build", tmp_path / name)
    code, exit_code = "unreadable", 2
    if name != "recipe.toml":
        arguments, code, exit_code = ("convert", toy_checkpoint, *_lora(tmp_path)), "unsupported", 4
        (tmp_path / name).unlink()
    if name == "adapter_model.safetensors" and kind != "a terabyte":
        code, exit_code = "missing_file", 2
    ENDLESS[kind](tmp_path / name)
    check_named(refusal(capsys, tmp_path, wanbuild, arguments, exit_code), code, (name,))
