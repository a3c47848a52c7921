"""What a verification finds: its lines, comparisons and videos, and the report of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from wanreport import pictures
from wanreport.page import now, write_report
from wanreport.report import Cell, Column, Fact, Facts, Film, Films, Lines, Note, Part, Report, Section, Table
from wanrun import relative_error
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.errors import ArtifactError, UsageError
from wanrun.executables.tolerance import LEVELS, levels_apart, most_levels
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.result import Result
from wanrun.replay.golden import Golden
from wanrun.timing.timings import Timings
from wanrun.units import in_bytes

Say = Callable[[str], None]
Videos = list[tuple[str, np.ndarray]]
"""Titles, and frames uint8 (T, H, W, 3)."""


class CheckFigures(Protocol):
    """The figures of a ``wanbuild.check.reference.Check``."""

    @property
    def name(self) -> str: ...
    @property
    def error(self) -> float: ...
    @property
    def limit(self) -> float: ...
    @property
    def note(self) -> str: ...


@dataclass(frozen=True)
class Comparison:
    """A result's difference from what it is compared with.

    Attributes:
        found: the difference, in words or as a number with its unit.
        tolerance: the largest difference that passes.
        share: the difference as a share of the tolerance; None where only equal results pass.
        note: more figures.
    """

    name: str
    found: str
    tolerance: str
    share: float | None
    passed: bool
    against: str
    note: str = ""


@dataclass
class Findings:
    """The lines, comparisons and videos of a verification, in the order in which they were made."""

    lines: list[str] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    videos: Videos = field(default_factory=list)

    def saying(self, say: Say) -> Say:
        """Returns a function that prints a line with ``say`` and keeps it."""

        def call(line: str) -> None:
            self.lines.append(line)
            say(line)

        return call

    def watched(self, pipeline: Pipeline, title: str) -> Pipeline:
        """Returns a pipeline whose videos are kept: a replay returns only digests and samples of them."""
        return cast("Pipeline", _Watched(pipeline, title, self.videos))

    def replayed(self, profile: str, file: str, expected: Golden, found: Golden) -> None:
        """Adds the comparisons of ``wanrun.replay.golden.compare``, including those that fail."""
        kind = "this" if expected.machine == found.machine else "another"
        against = f"{file}, recorded on {kind} kind of machine"
        if expected.machine == found.machine:
            for what in ("latents", "frames"):
                same = getattr(expected, f"{what}_sha256") == getattr(found, f"{what}_sha256")
                digest = f"sha256 {getattr(found, f'{what}_sha256')[:16]}"
                said = "equal" if same else "another digest"
                self._add(Comparison(f"{profile}: {what}", said, "equal", None, same, against, digest))
            return
        before, after = expected.samples, found.samples
        same_size = len(before) == len(after)
        error = relative_error(np.asarray(after), np.asarray(before)) if same_size else float("inf")
        self._add(measured(f"{profile}: latents", error, expected.tolerance, against))
        frames = (np.asarray(one.frame_samples, np.float64) for one in (expected, found))
        levels, most = levels_apart(*frames), most_levels(expected.tolerance)
        told = (f"{levels:.2f} levels", f"{most:.1f} of {LEVELS} levels")
        self._add(Comparison(f"{profile}: frames", *told, levels / most, levels <= most, against))

    def compared(self, checks: Iterable[CheckFigures], source: str, videos: Videos) -> None:
        """Adds the checks of a comparison with diffusers on a checkpoint, and the videos of both."""
        against = f"diffusers in float32, of {source}"
        for check in checks:
            self._add(measured(check.name, check.error, check.limit, against, check.note))
        self.videos += videos

    def _add(self, comparison: Comparison) -> None:
        self.comparisons.append(comparison)


def measured(name: str, error: float, limit: float, against: str, note: str = "") -> Comparison:
    """Returns the comparison of a relative error with its limit."""
    return Comparison(name, f"{error:.1e}", f"{limit:.0e}", error / limit, error <= limit, against, note)


class _Watched:
    """A pipeline that keeps the frames of its results."""

    def __init__(self, pipeline: Pipeline, title: str, videos: Videos) -> None:
        self._pipeline, self._title, self._videos = pipeline, title, videos

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def run(self, *arguments: Any, **options: Any) -> Result:
        result = self._pipeline.run(*arguments, **options)
        self._videos.append((self._title, result.frames[0]))
        return result


@contextlib.contextmanager
def reported(path: Path | None, artifact: Path, findings: Findings, what: str) -> Iterator[None]:
    """Writes the report of the block when it ends, even with an error; a path of None means no report.

    ``what`` is the verdict if it ends well. Raises UsageError if the report cannot be written, unless the
    block has raised an error.
    """
    timings = Timings.from_now()
    try:
        yield
    except Exception as error:
        if path is not None:
            with contextlib.suppress(UsageError):
                write_report(path, verification(artifact, findings, timings, what, error))
        raise
    if path is not None:
        write_report(path, verification(artifact, findings, timings, what))


def verification(
    artifact: Path, findings: Findings, timings: Timings, what: str, error: Exception | None = None
) -> Report:
    """Returns the report of a verification; ``what`` is the verdict, unless an error ended it."""
    sections = [] if error is None else [Section("What failed", (Note(str(error), "bad"),))]
    sections.append(Section("Agreement", (_agreement(findings),)))
    if findings.videos:
        films = tuple(
            Film(title, title, pictures.sheet(pictures.images(frames)), note=_shape(frames))
            for title, frames in findings.videos
        )
        sections.append(Section("Videos", (Films(films),)))
    if findings.lines:
        sections.append(Section("Checked", (Lines(tuple(findings.lines)),)))
    manifest = _manifest(artifact)
    facts = [Fact("Folder", str(artifact), code=True)]
    if manifest is not None:
        facts += _digests(manifest)
    sections.append(Section("Artifact", (Facts(tuple(facts)),)))
    name = (
        artifact.resolve().name
        if manifest is None
        else f"{artifact.resolve().name}, {manifest.model.variant}"
    )
    verdict = what if error is None else "The verification failed"
    figures = _figures(findings, timings)
    return Report("Report of a verification", name, verdict, error is None, now(), figures, tuple(sections))


def _agreement(findings: Findings) -> Part:
    if not findings.comparisons:
        return Note("Nothing was compared.")
    columns = (
        *(
            Column("Result"),
            Column("Difference", True),
            Column("Tolerance", True),
            Column("Of the tolerance", True),
        ),
        *(Column("Verdict"), Column("Compared with")),
    )
    rows = tuple(_row(comparison) for comparison in findings.comparisons)
    return Table("What the artifact computes, and what that is compared with", columns, rows)


def _row(one: Comparison) -> tuple[Cell, ...]:
    share = "" if one.share is None else f"{100 * one.share:.3g} %"
    key = one.share if one.share is not None and np.isfinite(one.share) else None
    verdict = Cell("passed", tone="good") if one.passed else Cell("failed", tone="bad")
    numbers = (Cell(one.found), Cell(one.tolerance), Cell(share, key))
    return Cell(one.name, detail=one.note), *numbers, verdict, Cell(one.against)


def _figures(findings: Findings, timings: Timings) -> tuple[Fact, ...]:
    found = timings.as_json()
    passed = sum(one.passed for one in findings.comparisons)
    shares = [one.share for one in findings.comparisons if one.share is not None]
    worst = [Fact("Largest difference", f"{100 * max(shares):.3g} %", "of its tolerance")] if shares else []
    return (
        Fact("Comparisons passed", f"{passed} of {len(findings.comparisons)}"),
        *worst,
        Fact("Took", f"{found['total_seconds']:.1f} s"),
        Fact("Peak memory", in_bytes(found["peak_rss_bytes"]), "resident in the process"),
    )


def _manifest(artifact: Path) -> Manifest | None:
    """Returns the manifest; None if it cannot be read."""
    try:
        return read_manifest(artifact)
    except ArtifactError:
        return None


def _digests(manifest: Manifest) -> Iterator[Fact]:
    for name, digest in manifest.digests.items():
        yield Fact(name[0].upper() + name[1:], digest, code=True)
    yield Fact("Profiles", ", ".join(manifest.profiles) or "none")
    yield Fact("Targets", ", ".join(manifest.targets) or "none")
    yield Fact("Made by", manifest.written_by)


def _shape(frames: np.ndarray) -> str:
    count, height, width, _ = frames.shape
    return f"{count} frames of {width}x{height}: some of them, from the first to the last."
