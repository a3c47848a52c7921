"""What the commands show, as text files in docs/screens. Run as a script it records all of them anew.

PYTHONPATH=tests python tests/helpers/screens.py [NAME ...]

The demo's checkpoint and artifact are used, so run ``make demo`` first. A line of a terminal that is written
over is shown once for each thing that it says, with the time that it showed last.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import click
from click.testing import CliRunner

from wanbuild.cli import wanbuild
from wancli.run import wanrun
from wancli.serve import serve

REPOSITORY = Path(__file__).parents[2]
SCREENS = REPOSITORY / "docs" / "screens"
COLUMNS = 100

ARTIFACT = "artifacts/demo/artifact"
PROMPT = "a red ball rolls to the right over green ground"

PROGRAMS: Mapping[str, click.Command] = MappingProxyType(
    {"wanrun": wanrun, "wanrun serve": serve, "wanbuild": wanbuild}
)
HELP: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{program: (program,) for program in PROGRAMS},
        **{f"wanbuild {name}": ("wanbuild", name) for name in sorted(wanbuild.commands)},
    }
)
"""Every command that has a help of its own, by what a user types: its program, and the name below it."""


@dataclass(frozen=True)
class Screen:
    """One file.

    Args:
        about: its first line.
        commands: as a user types them, in the repository.
        terminal: whether the output is a terminal; else it is a pipe.
    """

    about: str
    commands: Sequence[str]
    terminal: bool = False


SCREENS_BY_NAME: Mapping[str, Screen] = MappingProxyType(
    {
        "help": Screen("What each command says of itself.", [f"{name} --help" for name in HELP]),
        "demo": Screen("The demo on a terminal, after installation.", ["make demo"], terminal=True),
        "log": Screen(
            "A run whose output goes to a file, as that of a server's does.",
            [
                f'wanrun {ARTIFACT} --prompt "{PROMPT}" --seed 3 --steps 30 '
                "--output artifacts/demo/log.mp4 --overwrite"
            ],
        ),
        "inspect": Screen("What an artifact holds.", [f"wanbuild inspect {ARTIFACT}"]),
        "timing": Screen(
            "Where the time of a run goes.",
            [
                f'wanrun {ARTIFACT} --prompt "{PROMPT}" --steps 30 --output artifacts/demo/timing.mp4 '
                "--overwrite --timing"
            ],
        ),
    }
)


def recorded(screen: Screen) -> str:
    """Runs a screen's commands and returns the file's text."""
    parts = [f"{screen.about}\n"]
    for command in screen.commands:
        if command.endswith(" --help"):
            output = _help(command.removesuffix(" --help"))
        else:
            output = _on_terminal(command) if screen.terminal else _in_pipe(command)
        parts.append(f"\n$ {command}\n{output.rstrip()}\n")
    return "".join(parts)


def _environment() -> dict[str, str]:
    binaries = Path(sys.executable).parent
    changes = {"COLUMNS": str(COLUMNS), "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    return {**os.environ, **changes}


def _help(name: str) -> str:
    """What a command prints of itself, in this process: there are many of them."""
    program, *below = HELP[name]
    words, width = [*below, "--help"], COLUMNS - 2  # as click leaves two free on a terminal
    done = CliRunner().invoke(PROGRAMS[program], words, prog_name=program, terminal_width=width)
    assert done.exit_code == 0, done.output
    return done.output


def _in_pipe(command: str) -> str:
    done = subprocess.run(
        shlex.split(command),
        cwd=REPOSITORY,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


def _on_terminal(command: str) -> str:
    """Runs a command whose output is a terminal, and returns what it showed."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        shlex.split(command), cwd=REPOSITORY, env=_environment(), stdout=follower, stderr=follower
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 2**16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    assert process.wait() == 0, shown.decode()
    return seen(shown.decode())


def seen(shown: str) -> str:
    """Returns the lines that a terminal showed, and of one that was written over each thing that it said."""
    lines = []
    for line in shown.replace("\r\n", "\n").split("\n"):
        *over, last = line.split("\r")
        said: dict[str, str] = {}
        for text in map(str.rstrip, over):
            if text:
                said[re.sub(r"[\d.]+|[█░]+", "#", text)] = text
        lines += [f"  ~ {text}" for text in said.values()]
        lines.append(last.rstrip())
    return "\n".join(lines)


def main(names: Sequence[str]) -> None:
    SCREENS.mkdir(exist_ok=True)
    for name in names or SCREENS_BY_NAME:
        text = recorded(SCREENS_BY_NAME[name])
        (SCREENS / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"recorded {name}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main(sys.argv[1:])
