"""docs/screens has what the commands show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from helpers.screens import PROGRAMS, SCREENS, SCREENS_BY_NAME, recorded, seen


def text(name: str) -> str:
    return (SCREENS / f"{name}.txt").read_text(encoding="utf-8")


def test_every_screen_is_there() -> None:
    assert {path.stem for path in SCREENS.iterdir()} == set(SCREENS_BY_NAME)
    for name, screen in SCREENS_BY_NAME.items():
        lines = text(name).splitlines()
        assert lines[0] == screen.about
        assert [line[2:] for line in lines if line.startswith("$ ")] == list(screen.commands)
        assert len(lines) >= 2 + 2 * len(screen.commands)


def test_help_is_what_the_commands_say() -> None:
    """After a change of an option: PYTHONPATH=tests python tests/helpers/screens.py help"""
    assert text("help") == recorded(SCREENS_BY_NAME["help"])


@pytest.mark.parametrize("name", SCREENS_BY_NAME)
def test_options_on_the_screens_exist(name: str) -> None:
    for line in re.findall(r"^\$ ((?:wanrun|wanbuild) .*)$", text(name), re.MULTILINE):
        program, *words = shlex.split(line)
        command: click.Command = PROGRAMS[program]
        if isinstance(command, click.Group) and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        known = {option for param in command.params for option in param.opts} | {"--help"}
        assert {word for word in words if word.startswith("--")} <= known


def test_a_line_that_is_written_over_is_shown_once_for_each_thing_it_says() -> None:
    shown = "a\r\nread (1/2)\rread (2/2)   \rwrite, 0 s\r            \rdone\r\n"
    assert [line.split() for line in seen(shown).split("\n")] == [
        ["a"],
        ["~", "read", "(2/2)"],
        ["~", "write,", "0", "s"],
        ["done"],
        [],
    ]


def test_no_path_of_a_machine_is_shown() -> None:
    home = str(Path.home())
    assert not [name for name in SCREENS_BY_NAME if home in text(name) or "/work/" in text(name)]
