"""Lists the jobs of a run, with all cheap checks, before the work that costs minutes.

First come the cheap checks; then the images and videos are read, which may take seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

import wanhub
from wancli.jobs.media_sets import MediaSets
from wancli.jobs.output_names import check_encoder, check_folder
from wancli.jobs.planned import Planned, Planner
from wancli.jobs.run_options import RunOptions
from wanrun import Artifact, Timings, open_regular
from wanrun.artifact.select import UnbuiltError
from wanrun.claims import Claims, check_file, usable_names
from wanrun.errors import ArtifactError, UsageError, WanError, field
from wanrun.files import NPY_DAMAGE
from wanrun.generation.video_parts import spool_of
from wanrun.media.video_paths import video_paths
from wanrun.request.building import built
from wanrun.request.generation import influences_of
from wanrun.request.prompts_file import Entry, Line, numbered, read_entries, read_line
from wanrun.request.reading import is_drawn
from wanrun.terminal.lines import print_error

if TYPE_CHECKING:
    from wanfleet.uploads import VideoStore


@dataclass(frozen=True)
class Worklist:
    """The prompts of a run with their jobs, and the results of its checks.

    Attributes:
        jobs: the prompts with a job to do, in order.
        finished: those whose outputs all exist.
        failures: the errors of the other lines of the prompts file, by their number, in order.
        noise: the given initial latents, float32 (B, C, T, h, w), or None.
        many: whether the prompts come from a file, or there are several seeds.
        store: the object store of the videos; None where they stay in their folders.
    """

    artifact: Artifact
    jobs: Sequence[Planned]
    finished: Sequence[Planned]
    failures: Mapping[int, WanError]
    noise: np.ndarray | None
    many: bool
    media: MediaSets
    store: VideoStore | None = None

    def shown(self, video: Path) -> str:
        """Returns a video's path or URL, for messages."""
        return str(video) if self.store is None else self.store.where(video.name)

    def first_prompts(self, jobs: int | None = None) -> list[str]:
        """Returns the prompts and negative prompts of the first jobs (None: of all jobs), each once."""
        return list(dict.fromkeys(text for one in self.jobs[:jobs] for text in one.job.generation.prompts))


MAX_LATENTS_BYTES = 2**30
"""The most bytes of a file of initial latents: of 81 frames of 1280x720 it has 19 MB."""


def _read_latents(path: Path) -> np.ndarray:
    try:
        # NumPy would wait for the writer of a pipe, and warn of a size that is too large to multiply.
        with open_regular(path, MAX_LATENTS_BYTES), np.errstate(over="raise"):
            # Mapped, so that a header that promises more than the file holds is refused, not allocated.
            latents = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, zipfile.BadZipFile, *NPY_DAMAGE) as error:
        raise UsageError(
            "unreadable", f"the latents {path} cannot be read: {error}", remedy="give a float32 .npy file"
        ) from None
    if not isinstance(latents, np.ndarray):
        raise UsageError(
            "unreadable", f"the latents {path} are not one array", remedy="give a float32 .npy file"
        )
    return latents


def _each(
    steps: Sequence[tuple[Entry, Callable[[], Planned]]], bad: dict[int, WanError], timings: Timings
) -> list[Planned]:
    """Returns each step's result; keeps its line's error by index, and raises one that all lines have."""
    jobs, errors = list[Planned](), list[WanError]()
    checking = timings.phase("check", None, lambda: (len(jobs) + len(errors), len(steps)), "prompt")
    with checking if len(steps) > 1 else contextlib.nullcontext():
        for entry, step in steps:
            try:
                jobs.append(step())
            except (UsageError, ArtifactError) as error:
                if not entry.where:
                    raise
                bad[entry.index] = error.located(entry.where)
                errors.append(error.again())
    if not jobs and len(errors) > 1 and len({error.text for error in errors}) == 1:
        raise errors[0]
    return jobs


def _built(planner: Planner, entries: Sequence[Entry], timings: Timings) -> Artifact:
    """Returns the artifact after building every profile that prompts ask for and it lacks."""
    for entry in entries:
        try:
            planner.resolved(entry)
        except UnbuiltError as error:
            target = planner.run.loading.target
            planner = replace(planner, artifact=built(planner.artifact, error, target, timings, print_error))
        except (UsageError, ArtifactError):
            continue  # reported in the prompt's turn
    return planner.artifact


def _read(run: RunOptions, given: Mapping[str, Any]) -> Line:
    """Returns the command line's request; without a prompt if the prompts are in a file."""
    if run.prompt is not None and run.prompts is not None:
        raise UsageError("conflict", "--prompt and --prompts exclude each other", remedy="pass one of them")
    if run.shard is not None and run.prompts is None:
        raise UsageError("no_effect", "--shard is for a file of prompts", remedy="pass --prompts FILE")
    if run.prompt is None and run.prompts is None:
        raise UsageError(
            "missing_parameter",
            "no prompt was given",
            remedy="pass --prompt TEXT (an empty one is allowed) or --prompts FILE",
        )
    seeds = [] if run.seeds is None else [("seeds", run.seeds)]
    return read_line([("prompt", run.prompt or ""), *seeds, *given.items()])


def make_worklist(
    opened: Callable[[], Artifact], run: RunOptions, given: Mapping[str, Any], timings: Timings
) -> Worklist:
    """Makes all checks that need neither jax nor a weight, and returns the jobs.

    ``opened`` opens the artifact, once the request is valid. ``given`` has the command line's options of a
    generation, by name. ``timings`` records the reading of media.

    Raises UsageError for an option out of range, latents that do not fit, media that cannot be used, a
    prompts file that cannot be read, or an output that cannot be written; an error in one line of the prompts
    file is a failure of the worklist instead. Raises ArtifactError if the artifact cannot be read, or has no
    such profile or form of the loop.
    """
    if run.prompt is None and run.prompts is None:
        opened()  # a folder without an artifact is reported before a missing prompt
    shared = _read(run, given)  # before the artifact is looked at
    artifact = opened()
    bad, many = dict[int, WanError](), run.prompts is not None or run.seeds is not None
    each = numbered(Entry(shared, drawn=is_drawn(given.get("seed"))).each)
    entries = [replace(one, total=len(each)) for one in each]
    if run.prompts is not None:
        entries, unread = read_entries(run.prompts, shared, is_drawn(given.get("seed")))
        own = _share(run, [*(entry.index for entry in entries), *unread])
        entries = [entry for entry in entries if entry.index in own]
        bad |= {index: error for index, error in unread.items() if index in own}
    noise = None if run.latents is None else _read_latents(run.latents)
    media, claims = MediaSets(timings), _claims(artifact, run, entries)
    output, store = run.output or str(_default_output(run, shared)), None
    if "://" in output:
        from wanfleet.uploads import VideoStore

        store = VideoStore(output, kept=run.report is not None)
        output = store.pattern
    run = structs.replace(run, output=output)
    name = None if run.latents is None else run.latents.name
    influences = artifact.influences | influences_of(noise, name)
    planner = Planner(artifact, run, many, noise, influences, media, claims, store)
    with contextlib.nullcontext() if store is None else store.naming(bad):
        if many:
            _check_names(planner, entries)
        if run.loading.build:
            planner = replace(planner, artifact=_built(planner, entries, timings))
        jobs = _each([(entry, partial(planner.planned, entry)) for entry in entries], bad, timings)
        check_encoder(video for job in jobs for video in job.videos)
        jobs = _each([(job.entry, partial(planner.compared, job)) for job in jobs], bad, timings)
    return Worklist(
        planner.artifact,
        [job for job in jobs if not job.finished],
        [job for job in jobs if job.finished],
        dict(sorted(bad.items())),
        None if noise is None else np.array(noise),
        many,
        media,
        store,
    )


def _share(run: RunOptions, indexes: Sequence[int]) -> set[int]:
    """Returns the numbers of this job's lines; prints how many they are, or that a shard is not used."""
    from wanfleet.shard import AUTO, find_shard, told_number

    if run.shard is not None:
        shard = find_shard(run.shard, os.environ)
        own = set(filter(shard.has, indexes))
        none = "" if own else ": there are more jobs than prompts, and this one has nothing to make"
        print_error(f"{shard}: {len(own)} of {len(indexes)} prompts{none}")
        return own
    if (variable := told_number(os.environ)) and not run.of_several:
        part = f"--shard {AUTO} makes only this job's part"
        print_error(f"{variable} is set, and all {len(indexes)} prompts are made here: {part}")
    return set(indexes)


def _default_output(run: RunOptions, shared: Line) -> Path:
    """Returns the default name of a run's videos; for a single prompt one that is free."""
    first = Path("out.mp4")
    if run.prompts is not None or run.overwrite:
        return first
    names = itertools.chain([first], (Path(f"out-{number}.mp4") for number in itertools.count(2)))
    # A name whose video an ended run has begun is free for one that may go on with it.
    in_parts = shared.clips is not None or shared.window_frames is not None
    return next(
        name
        for name in names
        if not any(video.exists() for video in video_paths(name, shared.num_videos or 1))
        and (in_parts or not spool_of(name).exists())
    )


def _claims(artifact: Artifact, run: RunOptions, entries: Sequence[Entry]) -> Claims:
    """Records the files that the run reads, and those that it writes apart from its jobs'."""
    claims = Claims(artifact.folder, artifact.origin)
    for entry in entries:
        for name, path in entry.media_files:
            claims.read(path, f"{entry.where} ({name})" if entry.where else field(name))
    for read, option in ((run.prompts, "--prompts"), (run.latents, "--latents")):
        if read is not None:
            claims.read(read, option)
    claims.write([run.timing_json], "--timing-json")
    claims.write([run.report], "--report")
    return claims


def _check_names(planner: Planner, entries: Sequence[Entry]) -> None:
    """Checks the names that all lines of a prompts file share, so that an error is reported once."""
    for option in ("output", "save_latents"):
        users = [entry for entry in entries if option != "output" or entry.line.output is None]
        if not users or getattr(planner.run, option) is None:
            continue
        with usable_names():
            path = planner.path(users[0], option)
            one_folder = "{" not in str(Path(getattr(planner.run, option)).parent)
            if option == "output":
                video_paths(path)
                if one_folder and planner.store is None:
                    check_folder(path.parent)
            elif one_folder:
                check_file(path, "--save-latents", overwrite=True)


def fetch_needed(work: Worklist, loading: Mapping[str, Any], timings: Timings, warmup: bool) -> None:
    """Fetches the files of a partial copy that the jobs, and a warm-up, read."""
    if not work.artifact.origin:
        return
    from wanrun import needed

    generations = [planned.job.generation for planned in work.jobs]
    profiles = list({one.profile.name: one.profile for one in generations}.values())
    loras = {one.name for generation in generations for one in generation.loras}
    decoders = {one.options.get("decoder", "full") for one in generations} | ({"full"} if warmup else set())
    names = needed(
        work.artifact,
        loading,
        profiles=profiles,
        prompts=work.first_prompts(),
        loras=loras,
        decoders=decoders,
    )
    wanhub.fetch(work.artifact, names, print_error, lambda progress: timings.phase("fetch", None, progress))
