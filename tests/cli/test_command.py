"""What options have in common: sections, names of other tools, and the artifact in three ways."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from wanbuild.cli import wanbuild
from wancli.command import ENVIRONMENT, Checked, InputPath, Option, takes_artifact, understood
from wancli.console import run
from wancli.run import wanrun
from wancli.serve import serve

COMMANDS = [wanrun, *wanbuild.commands.values()]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command.name))
def test_every_option_is_understood_as_itself(command: click.Command) -> None:
    for param in command.params:
        if isinstance(param, click.Option):
            for flag in (*param.opts, *param.secondary_opts):
                assert understood(flag.lstrip("-")) == flag.lstrip("-")


def test_an_address_is_no_path_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    """As a path it would lose a slash, and no such file be found."""

    @click.command(cls=Checked)
    @click.option("--weights", type=InputPath())
    @click.option("--image", type=InputPath(str))
    def command(weights: Path | None, image: str | None) -> None:
        click.echo(image or weights)

    assert run(command, ["--weights", "https://a/b"]) == 2
    assert "https://a/b" in capsys.readouterr().err
    assert run(command, ["--image", "https://a/b"]) == 0
    assert capsys.readouterr().out == "https://a/b\n"


def test_numbers_are_finite() -> None:
    """click takes ``nan`` for a number of any range, and ``inf`` where a range has no end."""
    tried = 0
    for command in (*COMMANDS, serve):
        for param in command.params:
            if isinstance(param.type, click.FloatRange):
                for text in ("nan", "inf", "-inf"):
                    with pytest.raises(click.BadParameter):
                        param.type.convert(text, param, None)
                tried += 1
    assert tried >= 5


@pytest.mark.parametrize(
    ("token", "meant"),
    [
        ("num-inference-steps", "steps"),
        ("num_frames", "frames"),
        ("negative_prompt", "negative-prompt"),
        ("cfg", "guidance-scale"),
        ("save_file", "output"),
        ("nothing_known", "nothing-known"),
    ],
)
def test_names_of_other_tools(token: str, meant: str) -> None:
    assert understood(token) == meant


def test_help_has_a_section_for_each_kind_of_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(wanrun, ["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sections = [line.rstrip(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert sections[0] == "Artifact" and sections[-1] == "Options"
    assert {"VACE", "Animate", "Images", "Two experts"} < set(sections)
    assert len(sections) == len(set(sections))
    inside = "\n".join(lines[lines.index("VACE:") : lines.index("Animate:")])
    assert "--mask" in inside and "--pose-video" not in inside
    named = {param.section for param in wanrun.params if isinstance(param, Option)}
    assert named == set(sections)


@click.command("tool")
@takes_artifact(ENVIRONMENT)
def tool(artifact: Path) -> None:
    click.echo(str(artifact))


@pytest.mark.parametrize(
    ("variable", "arguments", "said", "code"),
    [
        ("", ["a"], "a", 0),
        ("", ["--artifact", "b"], "b", 0),
        ("c", [], "c", 0),
        ("c", ["a"], "a", 0),
        ("c", ["--artifact", "b"], "b", 0),
        ("c", ["a", "--artifact", "b"], "error: the artifact is given twice; found a and --artifact b", 2),
        (
            "",
            [],
            "error: no artifact was given; name its folder: tool DIR, or --artifact DIR, or WANRUN_ARTIFACT=",
            2,
        ),
    ],
)
def test_an_artifact_is_given_in_three_ways(
    variable: str,
    arguments: list[str],
    said: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(ENVIRONMENT, variable)
    assert run(tool, arguments) == code
    found = capsys.readouterr()
    assert (found.out + found.err).startswith(said)


@pytest.mark.parametrize("program", ["wanrun", "wanbuild"])
def test_a_shell_completes(program: str) -> None:
    """As ``eval "$(_WANRUN_COMPLETE=bash_source wanrun)"`` has it asked."""
    words, expected = {
        "wanrun": (f"{program} --neg", "plain,--negative-prompt"),
        "wanbuild": (f"{program} comp", "plain,compile"),
    }[program]
    asked = {
        f"_{program.upper()}_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", program],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [expected]
