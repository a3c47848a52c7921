"""The commands that need the build extra."""

from __future__ import annotations

import importlib.util
from typing import Any

import click

from wancli.command import Checked
from wancli.error_line import JSON_ERRORS, JSON_ERRORS_HELP
from wanrun.errors import UsageError

BUILD_EXTRA = ("flax", "orbax.checkpoint", "safetensors", "huggingface_hub", "iced_x86", "gguf")
"""The modules that the extra ``build`` installs. Help, ``inspect`` and ``embed`` need none of them."""


def error_options(command: Any) -> Any:
    """Gives a command the options of every command, for which ``wancli.console`` looks."""
    as_json = click.option(JSON_ERRORS, is_flag=True, expose_value=False, help=JSON_ERRORS_HELP)
    debug = click.option("--debug", is_flag=True, expose_value=False, help="Print tracebacks.")
    return debug(as_json(command))


class BuildCommand(Checked):
    """A command that checks that all of the build extra is installed before it starts."""

    def invoke(self, context: click.Context) -> Any:
        if missing := [name for name in BUILD_EXTRA if not _installed(name)]:
            raise UsageError(
                "not_installed",
                f"wanbuild {self.name} needs the build extra",
                found=", ".join(f"no {name}" for name in missing),
                remedy="pip install '.[build]' in the checkout",
            )
        return super().invoke(context)


def _installed(name: str) -> bool:
    """Returns whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # the parent is missing, or sys.modules holds None
        return False
