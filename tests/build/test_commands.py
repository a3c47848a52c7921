"""``wanbuild inspect`` and recipes."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from wanbuild import cli as commands
from wanbuild import recipe
from wanrun.errors import UsageError

REPOSITORY = Path(__file__).parents[2]


def test_inspect(toy_artifact: Path) -> None:
    runner = CliRunner()
    text = runner.invoke(commands.wanbuild, ["inspect", "--artifact", str(toy_artifact)])
    assert text.exit_code == 0
    for part in ("wan2.1-t2v", "96x64x9-b1-cfg", "transformer", "text_encoder", "vae", "denoise_step"):
        assert part in text.output
    data = json.loads(
        runner.invoke(commands.wanbuild, ["inspect", "--artifact", str(toy_artifact), "--json"]).output
    )
    manifest = json.loads((toy_artifact / "manifest.json").read_text())
    assert data["content_digest"] == manifest["content_digest"]
    assert data["components"]["transformer"]["bytes"] == manifest["components"]["transformer"]["bytes"]
    assert data["components"]["transformer"]["shapes"]["blocks/attn1/to_q/weight"] == ["float32", [3, 40, 40]]


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "artifacts").glob("*.toml")), ids=lambda path: path.stem
)
def test_the_recipes_are_read(path: Path) -> None:
    plan = recipe.read_recipe(path)
    assert plan.source == str(path.parent / "checkpoint")
    assert plan.compile["sizes"] == [(832, 480)]


def test_recipes_know_the_commands_options() -> None:
    """A recipe's fields are options of the commands, by the names that the commands pass on."""
    for name in ("convert", "compile"):
        command = commands.wanbuild.commands[name]
        assert isinstance(command, click.Command)
        assert set(recipe.FIELDS[name]) <= {parameter.name for parameter in command.params}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('artifact = "a"', "source is missing"),
        ('source = "s"\nartifact = "a"\n[convert]\nspeed = 1', "unknown field convert.speed"),
        ('source = "s"\nartifact = "a"\n[compile]\nframes = 81', "compile.frames has the wrong type"),
        ('source = "s"\nartifact = "a"\n[compile]\nguidance = [1]', "compile.guidance has the wrong type"),
        ('source = "s"\nartifact = "a"\n[compile]\nsizes = ["big"]', "compile.sizes"),
        ('source = "s"\nartifact = "a"\n[convert]\nweights_dtype = "int3"', "bfloat16 or float32"),
        ('source = "s"\nartifact = "a"\ncompile = 3', "compile is not a table"),
        ("source = ", "cannot be read"),
    ],
)
def test_a_recipe_that_is_not_understood(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        recipe.read_recipe(path)
    assert part in str(caught.value)


def test_build_passes_a_recipe_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wanbuild import verify

    calls: list[object] = []
    monkeypatch.setattr(commands, "_convert", lambda *a, **k: calls.append(("convert", a, k)))
    monkeypatch.setattr(commands, "_compile", lambda *a, **k: calls.append(("compile", a, k)))
    monkeypatch.setattr(verify, "record", lambda artifact, report: calls.append(("record", artifact)))
    path = tmp_path / "recipe.toml"
    path.write_text('source = "s"\nartifact = "a"\n[compile]\nframes = [81, 5]\nsizes = ["64*32"]\n')
    assert CliRunner().invoke(commands.wanbuild, ["build", str(path)]).exit_code == 0
    artifact = tmp_path / "a"
    assert calls == [
        ("convert", (str(tmp_path / "s"), artifact), {"force": False}),
        ("compile", (artifact,), {"frames": [81, 5], "sizes": [(64, 32)]}),
        ("record", artifact),
    ]
