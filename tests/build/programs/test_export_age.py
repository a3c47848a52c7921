"""How old programs may be, and what is said of old ones."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
import pytest

from helpers.manifests import built_with, plain_manifest, plain_program, program_set
from wanbuild.programs import export_age
from wanbuild.programs.export_age import age_warning, readable_until
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.programs import Profile, ProgramSet

ARTIFACT = Artifact(plain_manifest(), Path("my artifact"))


def exported(*days: str) -> ProgramSet:
    """A set of a profile for each of these days."""
    programs = {day: {"prepare": plain_program()} for day in days}
    dates = {day: datetime.date.fromisoformat(day) for day in days}
    return msgspec.structs.replace(program_set(programs), programs=programs, exported=dates)


@pytest.mark.parametrize(
    ("day", "end"),
    [
        ("2026-11-22", "2027-05-22"),
        ("2026-06-30", "2026-12-30"),
        ("2026-08-31", "2027-02-28"),
        ("2027-08-31", "2028-02-29"),
        ("2026-12-31", "2027-06-30"),
    ],
)
def test_six_months_later(day: str, end: str) -> None:
    assert readable_until(datetime.date.fromisoformat(day)) == datetime.date.fromisoformat(end)


@pytest.mark.parametrize(
    ("day", "warned"),
    [
        ("2026-06-14", False),
        ("2026-10-30", False),
        ("2026-10-31", True),
        ("2026-11-30", True),
        ("2028-01-01", True),
    ],
)
def test_a_warning_from_a_month_before(monkeypatch: pytest.MonkeyPatch, day: str, warned: bool) -> None:
    monkeypatch.setattr(export_age, "today", lambda: datetime.date.fromisoformat(day))
    line = age_warning(ARTIFACT, exported("2026-09-09", "2026-05-31"))
    assert (line is not None) == warned
    if line is not None:
        assert (
            "exported on 2026-05-31 by jax 0; JAX promises that newer versions read them until 2026-11-30"
            in line
        )
        assert line.endswith("; run wanbuild refresh --artifact 'my artifact'")


def test_a_set_without_programs_is_not_old() -> None:
    assert age_warning(ARTIFACT, exported()) is None


def test_days_are_in_the_manifest_and_not_in_the_content_digest() -> None:
    profile = Profile(96, 64, 9, 1, True, 0, built_with())
    older, newer = (
        msgspec.structs.replace(
            program_set({profile.name: {}}), exported={profile.name: datetime.date(2026, month, 1)}
        )
        for month in (1, 2)
    )
    first, second = (
        plain_manifest(profiles={profile.name: profile}, program_sets={one.key: one})
        for one in (older, newer)
    )
    assert first != second
    assert first.content_digest == second.content_digest
    assert first.manifest_digest != second.manifest_digest
    assert first.as_json()["program_sets"][older.key]["exported"] == {profile.name: "2026-01-01"}


def test_a_day_for_each_profile_s_programs() -> None:
    with pytest.raises(ValueError, match="days of export are given for"):
        msgspec.structs.replace(exported("2026-05-31"), exported={})
