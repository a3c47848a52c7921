"""The error for a program that this JAX cannot read."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec

from helpers.manifests import plain_program, program_set
from wanrun.executables.unreadable import unreadable


def test_it_names_the_versions_and_the_command() -> None:
    day = "2026-05-31"
    programs = program_set({day: {"prepare": plain_program()}})
    programs = msgspec.structs.replace(programs, exported={day: datetime.date.fromisoformat(day)})
    error = unreadable(Path("my artifact"), programs, "prepare", "0.11.1", "it is too old")
    assert error.exit_code == 3
    assert str(error) == (
        "program prepare of my artifact, which jax 0 exported on 2026-05-31, cannot be read; "
        "expected one that jax 0.11.1 reads; found it is too old; "
        "run wanbuild refresh --artifact 'my artifact'"
    )
