"""The report of a run of ``wanrun``: from its worklist, outcomes and timings to the records of a page."""

from __future__ import annotations

__all__ = ["reported"]

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import wanrun
from wanreport import pictures
from wanreport.page import now, write_report
from wanreport.report import Cell, Column, Fact, Facts, Film, Films, Note, Picture, Report, Section, Table
from wanreport.waterfall import waterfall
from wanrun import in_bytes
from wanrun.errors import UsageError, WanError


class Entry(Protocol):
    """The place of a prompt in its file."""

    @property
    def index(self) -> int: ...
    @property
    def where(self) -> str: ...


class Planned(Protocol):
    """One prompt with its job and its videos."""

    @property
    def entry(self) -> Entry: ...
    @property
    def job(self) -> wanrun.Job: ...
    @property
    def videos(self) -> Sequence[Path]: ...


class Worklist(Protocol):
    """Prompts with a job to do, those whose videos were there, and the errors of other lines by number."""

    @property
    def artifact(self) -> wanrun.Artifact: ...
    @property
    def jobs(self) -> Sequence[Planned]: ...
    @property
    def finished(self) -> Sequence[Planned]: ...
    @property
    def failures(self) -> Mapping[int, WanError]: ...
    @property
    def many(self) -> bool: ...
    def shown(self, video: Path) -> str: ...


Outcomes = Mapping[int, wanrun.Outcome]
"""By the number of a prompt: how its job ended."""


@dataclass(frozen=True)
class _Row:
    """A prompt, or an invalid line of the prompts file, and its outcome."""

    index: int
    state: str
    generation: wanrun.Generation | None = None
    videos: Sequence[Path] = ()
    seconds: float | None = None
    error: str = ""


@contextlib.contextmanager
def reported(
    path: Path, how: Any, work: Worklist, outcomes: Outcomes, timings: wanrun.Timings
) -> Iterator[None]:
    """Writes the report when the block ends, even with an error, which the report then shows.

    Args:
        path: the report's file.
        how: the options of the run, of which the report names the loading options.
        work: the prompts and their jobs.
        outcomes: the jobs' outcomes, once the block has ended.
        timings: of the run.

    Raises:
        UsageError: if the report cannot be written. The error of the block has precedence.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(UsageError):
            write_report(path, run_report(how, work, outcomes, timings, error))
        raise
    write_report(path, run_report(how, work, outcomes, timings))


def run_report(
    how: Any,
    work: Worklist,
    outcomes: Outcomes,
    timings: wanrun.Timings,
    error: Exception | None = None,
) -> Report:
    """Returns the report of a run. ``error`` ended it early; other arguments are as for ``reported``."""
    rows, measured = _rows(work, outcomes), timings.as_json()
    films, small = _films(rows, work)
    sections = [Section("What ended the run", (Note(str(error), "bad"),))] if error is not None else []
    if work.many:
        sections.append(Section("Prompts", (_table(rows, small),)))
    if films:
        sections.append(Section("Videos" if len(films) > 1 else "Video", (Films(tuple(films)),)))
    if options := _options(rows, how):
        sections.append(Section("Options of every prompt" if work.many else "Options", (Facts(options),)))
    marks = [("ready to denoise", measured["process_to_ready_seconds"])]
    marks.append(("first step", measured["process_to_first_step_seconds"]))
    spans = [(span.name, span.start, span.end) for span in timings.labelled_spans]
    sections += [
        Section("Time", (waterfall(spans, max(measured["total_seconds"], 1e-3), marks),)),
        Section("Artifact", (Facts(_artifact(work.artifact, rows, timings.target)),)),
        Section("Agreement", _agreement(work.artifact, rows)),
    ]
    failed = error is not None or any(row.state == "failed" for row in rows)
    title = f"A run of {work.artifact.manifest.model.variant}"
    figures = _figures(measured, rows, timings.target)
    return Report(
        "Report of a run", title, _verdict(rows, work.many), not failed, now(), figures, tuple(sections)
    )


def _rows(work: Worklist, outcomes: Outcomes) -> list[_Row]:
    rows = {one.entry.index: _row_of(one, "there already") for one in work.finished}
    for planned in work.jobs:
        outcome = outcomes.get(index := planned.entry.index)
        if outcome is None:
            rows[index] = _row_of(planned, "not tried")
        elif outcome.error is not None:
            rows[index] = _row_of(planned, "failed", error=str(outcome.error))
        else:
            rows[index] = _row_of(planned, "made", seconds=outcome.elapsed)
    for index, failure in work.failures.items():
        rows[index] = _Row(index, "failed", error=str(failure))
    return [rows[index] for index in sorted(rows)]


def _row_of(planned: Planned, state: str, **facts: Any) -> _Row:
    return _Row(planned.entry.index, state, planned.job.generation, planned.videos, **facts)


def _verdict(rows: Sequence[_Row], many: bool) -> str:
    if not many:
        return "The video was made" if rows[0].state == "made" else "No video was made"
    counts = {state: sum(row.state == state for row in rows) for state in _TONES}
    told = [f"{count} {state}" for state, count in counts.items() if count]
    return f"{len(rows)} prompt{'s' * (len(rows) != 1)}: {', '.join(told)}"


_TONES: Mapping[str, Any] = {"made": "good", "there already": "soft", "failed": "bad", "not tried": "soft"}


def _films(rows: Sequence[_Row], work: Worklist) -> tuple[list[Film], dict[int, Picture]]:
    """Returns the videos that exist, and a small picture of the first one of each prompt."""
    films, small, room = list[Film](), dict[int, Picture](), pictures.PAGE_BYTES
    for row in rows:
        if row.generation is None or row.state not in ("made", "there already"):
            continue
        for number, video in enumerate(row.videos):
            name, title = f"video-{row.index}-{number}", str(row.generation.options["prompt"])
            facts: tuple[Fact, ...] = (Fact("File", work.shown(video), code=True),)
            alt = f"Video of prompt {row.index}" if work.many else "The video"
            try:
                if row.state != "made" and not video.exists():
                    raise UsageError("missing_file", "It was made before, and is not on this machine.")
                frames = pictures.frames_of(video)
                clip, note = pictures.clip(video, room)
                facts += tuple(_file_facts(row.generation, video))
            except UsageError as error:
                films.append(Film(title, alt, None, note=str(error), facts=facts, name=name))
                continue
            room -= len(clip.uri) * 3 // 4 if clip is not None else 0
            poster = None if clip is None or clip.animated else pictures.still(frames[0], pictures.POSTER)
            films.append(Film(title, alt, pictures.sheet(frames), clip, poster, note, facts, name))
            middle = frames[len(frames) // 2]
            small.setdefault(row.index, pictures.still(middle, pictures.THUMBNAIL))
    return films, small


def _file_facts(generation: wanrun.Generation, video: Path) -> Iterator[Fact]:
    profile = generation.profile
    yield Fact("Shape", f"{profile.width}x{profile.height}, {generation.fps:g} frames a second")
    if video.is_file():
        size, digest = pictures.digest(video)
        yield Fact("Size", in_bytes(size))
        yield Fact("sha256", digest, code=True)


def _values(generation: wanrun.Generation) -> dict[str, str]:
    """Returns the options of a generation as texts, as the command line names them."""
    flags = {row.name: row.flag.strip("-").replace("-", " ") for row in wanrun.options()}
    values = {name: value for name, value in generation.options.items() if name not in ("prompt", "height")}
    values["width"] = f"{generation.profile.width}x{generation.profile.height}"
    named = {"size" if name == "width" else flags.get(name, name): values[name] for name in values}
    named |= {"fps": f"{generation.fps:g}", "profile": generation.profile.name}
    if generation.loras:
        named["lora"] = generation.loras
    for name in () if generation.media is None else generation.media.__struct_fields__:
        if (given := getattr(generation.media, name)) not in (None, ()):
            named[flags[name]] = given
    return {name: _text(value) for name, value in named.items()}


def _text(value: Any) -> str:
    if value is None or value == "":
        return "none"
    return ", ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)


def _options(rows: Sequence[_Row], how: Any) -> tuple[Fact, ...]:
    """Returns the options that all prompts share, and the loading options that are not defaults."""
    made = [_values(row.generation) for row in rows if row.generation is not None]
    same = {} if not made else {name: made[0][name] for name in made[0] if len(_told(made, name)) == 1}
    loading = how.loading
    changed = {
        name.replace("_", " "): getattr(loading, name)
        for name in loading.__struct_fields__
        if getattr(loading, name) != getattr(type(loading)(), name)
    }
    facts = {**same, **{name: _text(value) for name, value in changed.items()}}
    return tuple(Fact(name[:1].upper() + name[1:], value) for name, value in facts.items())


def _told(made: Sequence[Mapping[str, str]], name: str) -> set[str]:
    """Returns the values of an option among the prompts."""
    return {values.get(name, "none") for values in made}


def _table(rows: Sequence[_Row], small: Mapping[int, Picture]) -> Table:
    """Returns a row for each prompt, with a column for each option in which they differ."""
    made = {row.index: _values(row.generation) for row in rows if row.generation is not None}
    names = dict.fromkeys(name for values in made.values() for name in values)
    differ = [name for name in names if len(_told(list(made.values()), name)) > 1]
    columns = [Column("Prompt"), Column("No.", True), Column("Outcome"), Column("Took", True)]
    columns += [Column(name[:1].upper() + name[1:], _numbers(made.values(), name)) for name in differ]
    lines = []
    for row in rows:
        prompt = (
            "(a line that cannot be used)"
            if row.generation is None
            else str(row.generation.options["prompt"]) or "(empty)"
        )
        link = f"video-{row.index}-0" if row.state in ("made", "there already") else ""
        cells = [
            Cell(
                prompt, None, "soft" if row.generation is None else "", row.error, link, small.get(row.index)
            )
        ]
        took = "" if row.seconds is None else f"{row.seconds:.2f} s"
        cells += [Cell(str(row.index), float(row.index)), Cell(row.state, tone=_TONES[row.state])]
        cells.append(Cell(took, row.seconds))
        values = [made.get(row.index, {}).get(name, "") for name in differ]
        lines.append((*cells, *(Cell(value, number(value)) for value in values)))
    caption = "The prompts of this run, and the options in which they differ"
    return Table(caption, tuple(columns), tuple(lines))


def number(text: str) -> float | None:
    """Returns the number in a text; None if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def _numbers(made: Any, name: str) -> bool:
    return all(number(values[name]) is not None for values in made if name in values)


def _figures(measured: Mapping[str, Any], rows: Sequence[_Row], target: str | None) -> tuple[Fact, ...]:
    def moment(name: str) -> str:
        return "not reached" if measured[name] is None else f"{measured[name]:.2f} s"

    steps, least = measured["step_seconds"], measured["process_to_ready_floor_seconds"]
    floor = "" if least is None else f"at least {least:.2f} s at the best rates seen here"
    found = measured["cache_hits"] + measured["cache_misses"]
    figures = [
        Fact("In all", f"{measured['total_seconds']:.2f} s", "since the process started"),
        Fact("Ready to denoise", moment("process_to_ready_seconds"), floor),
        Fact("First step done", moment("process_to_first_step_seconds")),
    ]
    if steps:
        middle = statistics.median(steps)
        figures.append(Fact("Median step", f"{middle:.3g} s", f"of {len(steps)}, {measured['loop']}"))
    figures.append(Fact("Peak memory", in_bytes(measured["peak_rss_bytes"]), "resident in the process"))
    costs = [row.generation.cost().bytes.get(target or "") for row in rows if row.generation is not None]
    if known := [cost for cost in costs if cost is not None]:
        figures.append(Fact("Largest program", in_bytes(max(known)), "on the device, with its weights"))
    figures += [
        Fact("Weights read", in_bytes(measured["restore_bytes"]), "from storage"),
        Fact("Cache hits", f"{measured['cache_hits']} of {found}", "executables that were not compiled"),
    ]
    return tuple(figures)


def _artifact(artifact: wanrun.Artifact, rows: Sequence[_Row], target: str | None) -> tuple[Fact, ...]:
    manifest = artifact.manifest
    profiles = dict.fromkeys(row.generation.profile for row in rows if row.generation is not None)
    facts = [Fact("Folder", str(artifact), code=True)]
    facts += [
        Fact(name[0].upper() + name[1:], digest, code=True) for name, digest in manifest.digests.items()
    ]
    facts += [Fact("Merged LoRA", str(lora), f"sha256 {lora.sha256}") for lora in manifest.loras]
    chosen = [lora for row in rows if row.generation is not None for lora in row.generation.loras]
    digests = dict.fromkeys((lora.name, lora.sha256) for lora in chosen)
    facts += [Fact("LoRA", name, f"sha256 {digest}") for name, digest in digests]
    facts.append(Fact("Target", target or "none was loaded", _machine(manifest, target)))
    facts += [
        Fact(
            "Profile",
            profile.name,
            f"computed in {profile.options.dtype}, VAE in {profile.options.vae_dtype}",
        )
        for profile in profiles
    ]
    facts.append(Fact("Made by", manifest.written_by))
    facts.append(Fact("Run by", f"wanrun {wanrun.__version__}"))
    return tuple(facts)


def _machine(manifest: Any, target: str | None) -> str:
    """Returns the kind of device that a target was built for, and its packages."""
    if target not in manifest.targets:
        return ""
    environment = manifest.targets[target].environment
    packages = [f"{name} {version}" for name, version in environment.get("packages", {}).items()]
    return ", ".join(map(str, filter(None, [environment.get("device_kind"), *packages])))


def _agreement(artifact: wanrun.Artifact, rows: Sequence[_Row]) -> tuple[Note, Facts]:
    """Returns the known facts about the results, and the commands that find out more."""
    profiles = {row.generation.profile.name for row in rows if row.generation is not None}
    recorded = ", ".join(sorted(profiles & artifact.manifest.golden.keys()))
    what = f"a recorded result of {recorded}" if recorded else "no recorded result of these profiles"
    command = f"wanbuild verify {artifact} --report FILE.html"
    with_diffusers = Fact("Compare with diffusers", f"{command} --source CHECKPOINT", code=True)
    return (
        Note(f"A run compares its videos with nothing. The artifact's golden/ has {what}."),
        Facts((Fact("Compare with golden/", command, code=True), with_diffusers)),
    )
