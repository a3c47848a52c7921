"""Lists the jobs of a run, with all cheap checks, before the work that costs minutes.

First come the cheap checks; then the images and videos are read, which may take seconds.
"""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.denoising.schedule import schedule
from wanrun.errors import ArtifactError, UsageError, WanError, field
from wanrun.files import NPY_DAMAGE, open_regular, sha256_of
from wanrun.jobs.claims import Claims
from wanrun.jobs.job import Draft, Job, JobMaker
from wanrun.jobs.media_sets import MediaSets
from wanrun.jobs.outputs import (
    check_encoder,
    check_file,
    check_folder,
    check_new_folder,
    usable_names,
)
from wanrun.jobs.requests import Entry, Line, have_media_of, read_entries
from wanrun.jobs.run import RunOptions
from wanrun.media.types import Inputs, check_media
from wanrun.media.video_paths import video_paths
from wanrun.request.options import check_effects, has_guidance
from wanrun.request.reading import read_request
from wanrun.timing.timings import Timings


@dataclass(frozen=True)
class Worklist:
    """The jobs of a run and the results of its checks.

    Attributes:
        manifest: the artifact's manifest.
        jobs: the jobs to make, in order.
        finished: the jobs whose results all exist.
        failures: the errors of the other lines of the prompts file, in order.
        noise: the given initial latents, float32 (B, C, T, h, w), or None.
        many: whether the prompts come from a file.
        media: reads the media of the jobs, and holds those of the first job if they are the last that were
            read.
        guidance_off: whether guidance is off because no profile is built with it.
    """

    manifest: Manifest
    jobs: Sequence[Job]
    finished: Sequence[Job]
    failures: Sequence[WanError]
    noise: np.ndarray | None
    many: bool
    media: MediaSets
    guidance_off: bool = False

    def inputs_of(self, job: Job) -> Inputs | None:
        """Returns a job's media as arrays; consecutive jobs with the same media get the same object.

        None for a model without media, and for no given media.

        Raises:
            UsageError: if the media can no longer be read, or have changed since the check.
        """
        return self.media.inputs(job.draft.media)

    def first_prompts(self, jobs: int | None = None) -> list[str]:
        """Returns the prompts and negative prompts of the first jobs (None: of all jobs), each once."""
        options = [job.draft.options for job in self.jobs[:jobs]]
        texts = [one[name] for one in options for name in ("prompt", "negative_prompt")]
        return list(dict.fromkeys(text for text in texts if text is not None))

    @property
    def first_expert(self) -> str:
        """The transformer that the first job needs first; there must be a job."""
        _, (first, *_) = schedule(self.jobs[0].draft.options, self.manifest)
        return first.transformer


MAX_LATENTS_BYTES = 2**30
"""Of a file of initial latents: those of 81 frames of 1280x720 have 19 MB."""


def _read_latents(path: Path) -> np.ndarray:
    try:
        with open_regular(path, MAX_LATENTS_BYTES):  # NumPy would wait for the writer of a pipe
            # Mapped, so that a header that promises more than the file holds is refused, not allocated.
            latents = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, zipfile.BadZipFile, *NPY_DAMAGE) as error:
        raise UsageError(
            f"the latents {path} cannot be read: {error}", remedy="give a float32 .npy file"
        ) from None
    if not isinstance(latents, np.ndarray):
        raise UsageError(f"the latents {path} are not one array", remedy="give a float32 .npy file")
    return latents


def _influences(run: RunOptions, noise: np.ndarray | None) -> dict[str, Any]:
    """Returns the facts that influence a video beside its prompt's own options, for its metadata."""
    facts: dict[str, Any] = {"text_encoder": run.loading.text_encoder}
    if noise is not None and run.latents is not None:
        facts |= {"latents": run.latents.name, "latents_sha256": sha256_of(noise.tobytes())}
    return facts


@contextmanager
def _noted(bad: dict[int, WanError], entry: Entry, many: bool) -> Iterator[None]:
    """Notes the error of a line of the prompts file by its index, so that it does not end the run."""
    try:
        yield
    except (UsageError, ArtifactError) as error:
        if not many:
            raise
        bad[entry.index] = error.located(entry.where)


def _read(run: RunOptions, given: Mapping[str, Any]) -> tuple[Entry, list[Entry], dict[int, UsageError]]:
    """Returns the command line's entry, the entries of all prompts, and the errors of lines by index."""
    if run.prompt is not None and run.prompts is not None:
        raise UsageError("--prompt and --prompts exclude each other", remedy="pass one of them")
    if run.prompt is None and run.prompts is None:
        raise UsageError(
            "no prompt was given", remedy="pass --prompt TEXT (an empty one is allowed) or --prompts FILE"
        )
    shared = Entry(read_request([("prompt", run.prompt or ""), *given.items()], Line))
    if run.prompts is None:
        return shared, [shared], {}
    return shared, *read_entries(run.prompts, given)


def make_worklist(artifact: Path, run: RunOptions, given: Mapping[str, Any], timings: Timings) -> Worklist:
    """Makes all checks that need neither jax nor a weight, and returns the jobs.

    Args:
        artifact: the artifact's folder.
        run: the options of the whole run.
        given: the command line's options of a generation, by name.
        timings: where the time of reading media is recorded.

    Raises:
        UsageError: for an option out of range, latents that do not fit, media that cannot be used, a prompts
            file that cannot be read, or an output that cannot be written. An error in one line of the prompts
            file is a failure of the worklist instead.
        ArtifactError: if the artifact cannot be read, or has no such profile or form of the loop.
    """
    read_request([("prompt", ""), *given.items()], Line)  # before the artifact is looked at
    manifest = read_manifest(artifact)
    shared, entries, unread = _read(run, given)
    bad: dict[int, WanError] = dict(unread)
    check_effects(manifest, has_guidance(manifest, shared.line.guidance_scale), shared.line)
    if have_media_of(shared, entries):
        check_media(manifest, shared.media)
    many, noise = run.prompts is not None, None if run.latents is None else _read_latents(run.latents)
    media, claims = MediaSets(manifest, timings), _claims(artifact, run, entries)
    run = msgspec.structs.replace(run, output=run.output or _default_output(run, shared.line.num_videos))
    maker = JobMaker(artifact, manifest, run, many, noise, _influences(run, noise), media, claims)
    if many:
        _check_shared(maker, shared, entries)
    drafts: list[Draft] = []
    for entry in entries:
        with _noted(bad, entry, many):
            drafts.append(maker.draft(entry))
    check_encoder(video for draft in drafts for video in draft.videos)
    jobs = _jobs(maker, shared, drafts, bad)
    return Worklist(
        manifest,
        [job for job in jobs if not job.finished],
        [job for job in jobs if job.finished],
        [bad[index] for index in sorted(bad)],
        None if noise is None else np.array(noise),
        many,
        media,
        any(_guidance_is_off(manifest, draft) for draft in drafts),
    )


def _default_output(run: RunOptions, num_videos: int) -> Path:
    """Returns the name of a run's videos where none is given: one that is free, for a single prompt."""
    first = Path("out.mp4")
    if run.prompts is not None or run.overwrite:
        return first
    names = itertools.chain([first], (Path(f"out-{number}.mp4") for number in itertools.count(2)))
    return next(name for name in names if not any(video.exists() for video in video_paths(name, num_videos)))


def _claims(artifact: Path, run: RunOptions, entries: Sequence[Entry]) -> Claims:
    """Notes the files that the run reads, and the files that it writes beside those of its jobs."""
    claims = Claims(artifact, run.prompts is not None)
    for entry in entries:
        for name, path in entry.media_files:
            claims.read(path, f"{entry.where} ({name})" if entry.where else field(name))
    if run.prompts is not None:
        claims.read(run.prompts, "--prompts")
    with usable_names():
        check_file(run.timing_json, "--timing-json", overwrite=True)
        check_file(run.timing_trace, "--timing-trace", overwrite=True)
        check_new_folder(run.trace, "--trace")
    claims.write([run.timing_json], "--timing-json")
    claims.write([run.timing_trace], "--timing-trace")
    claims.write([run.trace], "--trace")
    return claims


def _jobs(maker: JobMaker, shared: Entry, drafts: Sequence[Draft], bad: dict[int, WanError]) -> list[Job]:
    """Returns the jobs of drafts whose media can be used, and notes the errors of the others."""
    jobs = []
    if drafts and have_media_of(shared, [draft.entry for draft in drafts]):  # one error for all lines
        there = all(draft.there for draft in drafts)
        for media in dict.fromkeys(draft.media for draft in drafts):
            (maker.media.digest if there else maker.media.check)(media)
    for draft in drafts:
        with _noted(bad, draft.entry, maker.many):
            jobs.append(maker.job(draft))
    return jobs


def _guidance_is_off(manifest: Manifest, draft: Draft) -> bool:
    """Returns whether a prompt runs without guidance only because no profile has guidance."""
    return draft.entry.line.guidance_scale is None and has_guidance(manifest) and not draft.profile.guidance


def _check_shared(maker: JobMaker, shared: Entry, entries: Sequence[Entry]) -> None:
    """Checks the options that all lines of a prompts file have in common, so that an error is reported once.

    Raises:
        UsageError: for an option out of range, a name with an unknown field or suffix, or a folder that
            cannot be written to.
        ArtifactError: for a profile or a form of the loop that is not built.
    """
    own = {name for entry in entries for name in _differs(entry.line, shared.line)}
    counted = maker.manifest.model.task.counted
    images = set() if counted is None else {counted[0]}
    if not own & {"profile", "size", "num_frames", "num_videos", "guidance_scale", "loop", *images}:
        # The default number of steps is checked with the lines that give no steps.
        default = shared.line.num_steps is None and shared.line.timesteps is None
        changes = {"num_steps": 1} if default and own & {"num_steps", "timesteps"} else {}
        maker.resolve(msgspec.structs.replace(shared.line, **changes))
    for option in ("output", "save_latents"):
        users = [entry for entry in entries if option != "output" or entry.line.output is None]
        if not users or getattr(maker.run, option) is None:
            continue
        with usable_names():
            path = maker.path(users[0], option)
            one_folder = "{" not in str(getattr(maker.run, option).parent)
            if option == "output":
                video_paths(path)
                if one_folder:
                    check_folder(path.parent)
            elif one_folder:
                check_file(path, "--save-latents", overwrite=True)


def _differs(line: Line, shared: Line) -> Iterator[str]:
    """Yields the options in which a line differs from the command line."""
    for name in line.__struct_fields__:
        if getattr(line, name) != getattr(shared, name):
            yield name
