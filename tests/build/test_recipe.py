"""Recipes: what they may say, what they pass on, and what is built again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from helpers.damage import one_error
from wanbuild import build as build_module
from wanbuild import recipe as recipes
from wanbuild.build_options import CompileRequest
from wanbuild.check import verify
from wanbuild.cli import wanbuild
from wanbuild.conversion.convert_request import convert_request
from wanbuild.hub.repository import is_hub_id
from wanbuild.recipe import fingerprint, read_recipe
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.variants.table import variants
from wancli.console import run
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import UsageError

REPOSITORY = Path(__file__).parents[2]
LONG = "x" * 5000
PLACES = 'source = "checkpoint"\nartifact = "artifact"\n'

UNREADABLE = {
    "nested": (f"x = {'[' * 3000}{']' * 3000}", "cannot be read: maximum recursion depth"),
    "5000 digits": (f"compile.frames = [{'9' * 5000}]", "cannot be read: Exceeds the limit"),
    "NUL": ("\0", "cannot be read: Invalid statement"),
    "cut off": ("source = ", "cannot be read"),
    "no source": ('artifact = "a"', "source is missing"),
    "no artifact": ('source = "a"', "missing required field `artifact`"),
    "surrogate": ('source = "\\ud800"', "cannot be read: Escaped character"),
}

VALUES = {
    "compile.num_videos = " + "9" * 4000: "$.compile.num_videos",
    "compile.num_videos = 0x" + "f" * 4000: "$.compile.num_videos",
    "compile.frames = [-" + "9" * 400 + "]": "$.compile.frames",
    "convert.defaults.guidance_scale = " + "9" * 400: "$.convert.defaults.guidance_scale",
    "convert.defaults.guidance_scale = nan": "$.convert.defaults.guidance_scale",
    "convert.defaults.boundary = -inf": "$.convert.defaults.boundary",
    "convert.defaults.timesteps = [1e400]": "$.convert.defaults.timesteps",
    'convert.negative_prompt = "a\\u0000"': "$.convert.negative_prompt",
    'convert.lora = ["a\\u0000b"]': "$.convert.lora",
    'convert.vae = "a\\u0000b"': "$.convert.vae",
    'compile.targets = ["a\\u0000"]': "$.compile.targets",
    "convert.speed = 1": "unknown field `speed` - at `$.convert`",
    "compile.frames = 81": "got `int` - at `$.compile.frames`",
    "compile.guidance = [1]": "$.compile.guidance[0]",
    'compile.sizes = ["big"]': "compile.sizes",
    'convert.weights_dtype = "int3"': "weights_dtype cannot be",
    'compile.scheduler_dtype = "float16"': "compile.scheduler_dtype cannot be",
    'compile.loop = "scans"': "expected both or step or scan",
    'compile.loop = ["scan"]': "$.compile.loop",
    "compile.max_steps = 0": "`int` >= 1 - at `$.compile.max_steps`",
    "compile = 3": "$.compile",
    "convert.defaults.speed = 1": "unknown field `speed` - at `$.convert.defaults`",
    "convert.defaults.steps = 4.0": "`int | null`, got `float` - at `$.convert.defaults.steps`",
    "convert.defaults.steps = true": "$.convert.defaults.steps",
    'convert.defaults.fps = "16"': "$.convert.defaults.fps",
    "convert.defaults.timesteps = 1000": "$.convert.defaults.timesteps",
    "convert.defaults.timesteps = [1, false]": "$.convert.defaults.timesteps[1]",
    "convert.defaults.timesteps = []": "length >= 1 - at `$.convert.defaults.timesteps`",
    "convert.defaults = 3": "$.convert.defaults",
    f'convert.lora = ["{LONG}:0.5"]': "lora names no path; found File name too long",
    f'convert.tokenizer = "{LONG}"': "tokenizer names no path; found File name too long",
    f"compile.{LONG} = 1": "unknown field `xxx",
    f'compile.mesh = "{LONG}"': "there is no such axis",
    f'compile.sizes = ["{"9" * 5000}"]': "compile.sizes: not a size",
    "compile.frames = [2020-01-01]": "$.compile.frames",
    'compile.vae_precision = "fast"': "compile.vae_precision cannot be",
    'compile.guiders = ["cfg-zero", "cfg"]': "cannot be 'cfg'; expected cfg-zero or skip-layer",
}

MODEL = {
    'compile.targets = ["nope"]': "target nope is not known",
    f'compile.targets = ["{LONG}"]': "is not known",
    'compile.targets = ["h200-99999999999999999999"]': "different numbers of devices",
    'compile.sizes = ["33x16"]': "recipe.toml: compile.sizes 33x16 cannot be built; expected "
    "multiples of 16; use 32x16 or 48x16",
    "compile.frames = [8]": "compile.frames 8 cannot be built; expected 4n + 1; use 5 or 9",
    "compile.num_videos = 2000000000": "compile.num_videos cannot be built; expected 1048576 at most",
    "compile.num_references = 3": "compile.num_references cannot be built",
    "compile.vae_decode_chunk = 2000000": "compile.vae_decode_chunk is out of range; expected 1 to 1048576",
    "compile.max_steps = 20000": "compile.max_steps is out of range",
    'compile.mesh = "tensor=7"': "the mesh tensor=7 does not work",
}
"""What is known before the conversion only of a model that is here."""


def refused(folder: Path, text: str) -> str:
    recipe = folder / "recipe.toml"
    recipe.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_recipe(recipe)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800
    return str(caught.value)


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_no_recipe(name: str, tmp_path: Path) -> None:
    text, said = UNREADABLE[name]
    assert said in refused(tmp_path, text)


def test_values_that_nothing_takes(tmp_path: Path) -> None:
    for text, said in VALUES.items():
        assert said in refused(tmp_path, PLACES + text), text[:80]


@pytest.mark.parametrize(("name", "other"), [("source", "artifact"), ("artifact", "source")])
def test_places_that_cannot_be(name: str, other: str, tmp_path: Path) -> None:
    for value, said in (("a\\u0000b", f"$.{name}"), (LONG, "File name too long")):
        assert said in refused(tmp_path, f'{name} = "{value}"\n{other} = "a"\n')


def test_a_build_looks_at_a_checkpoints_files_alone(tmp_path: Path) -> None:
    """Not at all that lies below: whoever writes ``vae = "/"`` would wait for the whole disk."""
    (tmp_path / "source" / "vae" / "deep").mkdir(parents=True)
    for name in ("model_index.json", "vae/config.json", "vae/deep/other"):
        (tmp_path / "source" / name).write_bytes(b"{}")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'source = "source"\nartifact = "no/such/../../new"\ncompile.guiders = ["cfg-zero", "skip_layer"]\n'
    )
    read = read_recipe(recipe)
    assert read.compile["guiders"] == ["cfg-zero", "skip-layer"]
    assert read.artifact == tmp_path / "new"  # also before no/such is there
    before = fingerprint(read)
    recipe.write_text(recipe.read_text() + "[convert.defaults]\n")
    assert fingerprint(read_recipe(recipe)) == before
    (tmp_path / "source/vae/deep/other").write_bytes(b"{ }")
    assert fingerprint(read) == before
    (tmp_path / "source/vae/config.json").write_bytes(b"{ }")
    assert fingerprint(read) != before


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MODEL)))
def test_what_the_model_cannot_have_is_found_before_it_is_converted(
    number: int,
    toy_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def converts(*_: Any, **__: Any) -> None:
        raise AssertionError("the conversion has begun")

    monkeypatch.setattr(build_module, "convert_aloud", converts)
    text, said = list(MODEL.items())[number]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'source = "{toy_checkpoint}"\nartifact = "artifact"\n{text}\n')
    assert run(wanbuild, ["build", str(recipe)]) == 2
    error = one_error(capsys)
    assert said in error and len(error) < 500


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "artifacts").glob("*.toml")), ids=lambda path: path.stem
)
def test_the_recipes_are_read(path: Path) -> None:
    plan = read_recipe(path)
    assert plan.source == str(path.parent / "checkpoint") or is_hub_id(plan.source)
    (row,) = [row for name, row in variants().items() if path.stem.startswith(f"{name}-")]
    assert set(plan.compile["sizes"]) <= set(row.sizes)
    assert plan.compile["frames"] == [row.num_frames]


def test_build_passes_a_recipe_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(build_module, "convert_aloud", lambda request, *_: calls.append(("convert", request)))
    monkeypatch.setattr(
        build_module, "compile_artifact", lambda request, _: calls.append(("compile", request))
    )
    monkeypatch.setattr(verify, "record", lambda artifact, report: calls.append(("record", artifact)))
    monkeypatch.setattr(build_module, "mark_built", lambda artifact, digest: None)
    path = tmp_path / "recipe.toml"
    path.write_text('source = "s"\nartifact = "a"\n[compile]\nframes = [81, 5]\nsizes = ["64*32"]\n')
    assert CliRunner().invoke(wanbuild, ["build", str(path)]).exit_code == 0
    artifact = tmp_path / "a"
    assert calls == [
        ("convert", convert_request(str(tmp_path / "s"), artifact, {"force": False})),
        ("compile", CompileRequest(artifact, frames=[81, 5], sizes=[(64, 32)])),
        ("record", artifact),
    ]
    path.write_text('source = "s"\nartifact = "a"\n[compile]\ntargets = ["h100", "v6e-8-w8a8"]\n')
    assert CliRunner().invoke(wanbuild, ["build", str(path)]).exit_code == 0
    request = CompileRequest(artifact, ["h100", "v6e-8-w8a8"])
    assert calls[-1] == ("compile", request)  # nothing runs here


@pytest.mark.slow
def test_a_recipe_is_built_again_if_something_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded: list[Path] = []
    monkeypatch.setattr(build_module, "compile_artifact", lambda request, report: None)
    monkeypatch.setattr(verify, "record", lambda artifact, report: recorded.append(artifact))
    write_toy(tmp_path / "toy")
    path = tmp_path / "recipe.toml"
    path.write_text('source = "toy"\nartifact = "a"\n')
    build = ["build", str(path), "--if-changed"]

    def built() -> bool:
        before = len(recorded)
        assert run(wanbuild, build) == 0
        return len(recorded) > before

    assert built() and not built()
    assert capsys.readouterr().out.endswith(f"a is built as {path} says, and nothing has changed\n")
    config = tmp_path / "toy" / "transformer" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert built() and not built()
    path.write_text('source = "toy"\nartifact = "a"\n[convert]\nweights_dtype = "float32"\n')
    assert built() and not built()
    assert read_manifest(tmp_path / "a").dtypes["transformer"].weights == "float32"
    monkeypatch.setattr(recipes, "__version__", "0.0.0")
    assert built() and not built()
    assert run(wanbuild, ["build", str(path)]) == 2  # it exists, as without the option
