"""Options of commands: made of rows, in sections, with the names of other tools; and the artifact."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import pytest
from click.testing import CliRunner
from msgspec import Meta, Struct

from helpers.refusals import check_refusal
from wanbuild.cli import wanbuild
from wancli.aliases import command_meant, no_option
from wancli.click_options import click_option, given, made_options
from wancli.command import ENVIRONMENT, Checked, InputPath, Option, takes_artifact, understood
from wancli.console import run
from wancli.run import wanrun
from wancli.serve import serve
from wanrun.request.written import parse_size
from wanrun.rows import ARGUMENT, option, rows_of

# Made of rows.


Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Made(Struct, frozen=True):
    """A record of options of every kind."""

    place: Annotated[str, ARGUMENT]
    target: Annotated[str, option("Where.", value="CHIP")]
    sizes: Annotated[Sequence[tuple[int, int]], option("", flag="--size", value="WxH", parse=parse_size)] = ()
    frames: Annotated[Sequence[Count], option("How long.", default="as published")] = ()
    guidance: Annotated[Sequence[bool], option("Whether guided.")] = ()
    proxies: Annotated[bool, option("Whether there are proxies.", default="proxies")] = True
    form: Annotated[str, option("Which form.", choices=("step", "q8_0"), short="-f")] = "step"
    share: Annotated[Annotated[float, Meta(ge=0, le=1)], option("How much.")] = 0.5
    force: Annotated[bool, option("Replace it.")] = False


@click.command(params=list(made_options(rows_of(Made))))
@click.pass_context
def made(context: click.Context, **options: Any) -> None:
    context.obj.append(given(options))


def called(*arguments: str) -> Any:
    found: list[Any] = []
    outcome = CliRunner().invoke(made, ["--target", "h200", *arguments], obj=found)
    return found[0] if outcome.exit_code == 0 else outcome.output


def test_values_are_those_of_the_record() -> None:
    assert called() == {"target": "h200", "force": False}
    words = "--size 8x4 --size 4x8 --frames 5 --no-guidance --no-proxies -f q8-0 --share 0.1 --force"
    assert called(*words.split()) == {
        "target": "h200",
        "sizes": ((8, 4), (4, 8)),
        "frames": (5,),
        "guidance": (False,),
        "proxies": False,
        "form": "q8_0",
        "share": 0.1,
        "force": True,
    }


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--frames", "0"), "--frames"),
        (("--share", "nan"), "--share"),
        (("--share", "2"), "--share"),
        (("--form", "stream"), "--form"),
        (("--size", "8"), "--size"),
    ],
)
def test_values_out_of_range_are_refused(arguments: tuple[str, ...], option: str) -> None:
    assert f"for '{option}'" in called(*arguments).replace("' / '-f'", "'")


def test_the_help_has_defaults_and_ranges() -> None:
    text = CliRunner().invoke(made, ["--help"]).output
    for line in ("CHIP", "[required]", "--size WxH", "[default: as published]", "[x>=1]", "--no-proxies"):
        assert line in text
    assert "[x>=1]" not in CliRunner().invoke(unchecked, ["--help"]).output


@click.command()
@click_option(next(row for row in rows_of(Made) if row.name == "frames"), "Length")
def unchecked(**_: Any) -> None:
    """Whose values the record's reader checks."""


def test_a_seed_is_a_number_or_any() -> None:
    (seed,) = (param.type for param in wanrun.params if param.name == "seed")
    assert seed.convert("7", None, None) == 7
    assert seed.convert("random", None, None) == "random"
    with pytest.raises(click.BadParameter, match="nor random"):
        seed.convert("rand", None, None)


# What they have in common.


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


@pytest.mark.parametrize(
    ("program", "words", "completed"),
    [("wanrun", "--neg", "plain,--negative-prompt"), ("wanbuild", "comp", "plain,compile")],
)
def test_a_shell_completes(program: str, words: str, completed: str) -> None:
    """As ``eval "$(_WANRUN_COMPLETE=bash_source wanrun)"`` has it asked."""
    asked = {
        f"_{program.upper()}_COMPLETE": "bash_complete",
        "COMP_WORDS": f"{program} {words}",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", program],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [completed]


# Options that there are not.


@pytest.mark.parametrize(
    ("written", "meant", "remedy"),
    [
        ("--artefact", "--artefact", "use --artifact"),
        ("--sise", "--sise", "see wanbuild convert --help"),  # near one of another command alone
        ("--size", "--size", "wanbuild compile and wanbuild plan have it"),
        ("--scheduler", "--solver", "pass --default NAME=VALUE"),
        ("--tp", "--tp", "see wanbuild convert --help"),
        ("--quantized", "--quantized", "pass --quantise int8, or float8: see wanbuild convert --help"),
    ],
)
def test_what_is_told_of_an_option(written: str, meant: str, remedy: str) -> None:
    others = {"wanbuild compile": ["--size"], "wanbuild plan": ["--size"]}
    error = no_option("wanbuild convert", written, meant, ["--artifact", "--vae"], others)
    check_refusal(error, "unknown_parameter", what=written)
    assert error.remedy == remedy


def test_a_word_is_a_command_if_it_is_known_or_near() -> None:
    assert command_meant("wanrun", "serv", ["serve"]) == "use wanrun serve"
    assert command_meant("wanrun", "videos", ["serve"]) is None
