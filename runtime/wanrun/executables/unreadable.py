"""The error for a program that JAX cannot read, and the command that helps."""

from __future__ import annotations

import shlex
from pathlib import Path

from wanrun.artifact.programs import ProgramSet
from wanrun.errors import ArtifactError


def refresh_command(artifact: Path) -> str:
    """Returns the command that exports and compiles an artifact's programs again."""
    return f"wanbuild refresh --artifact {shlex.quote(str(artifact))}"


def unreadable(artifact: Path, programs: ProgramSet, name: str, reader: str, reason: object) -> ArtifactError:
    """Returns the error for a program that this JAX cannot read.

    Args:
        artifact: the artifact's folder.
        programs: the program's set.
        name: the program's name.
        reader: the version of JAX that tried to read it.
        reason: JAX's message.
    """
    oldest = min(programs.exported.values(), default=None)
    return ArtifactError(
        f"program {name} of {artifact}, which jax {programs.jax} exported on {oldest}, cannot be read",
        expected=f"one that jax {reader} reads",
        found=reason,
        remedy=f"run {refresh_command(artifact)}",
    )
