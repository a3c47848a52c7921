"""The commands that the files for clusters give, and what wanrun says that it takes."""

from __future__ import annotations

import re
from pathlib import Path

import click

from wancli.run import wanrun
from wancli.serve import serve

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "docs" / "deploy"


def options(command: click.Command) -> set[str]:
    """The names of a command's options."""
    return {name for param in command.params if isinstance(param, click.Option) for name in param.opts}


def unknown(arguments: list[str]) -> set[str]:
    """The options among the arguments of ``wanrun`` that neither it nor ``wanrun serve`` has."""
    command = serve if arguments[:1] == ["serve"] else wanrun
    used = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    return used - options(command)


def dockerfile(instruction: str) -> list[str]:
    """What follows an instruction in the Dockerfile, with its continued lines, in order."""
    text = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(rf"^{instruction} +(.*)$", text, re.MULTILINE)
