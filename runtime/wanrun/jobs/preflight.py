"""Checks of a request, made before the work that costs minutes.

First those that cost nothing; then the images and videos are read, which may take seconds.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wanrun.artifact.manifest import Manifest, Profile, read_manifest
from wanrun.artifact.select import select_profile
from wanrun.denoising.schedule import schedule
from wanrun.errors import UsageError
from wanrun.files import NPY_DAMAGE, sha256_of
from wanrun.generation.options import (
    check_experts,
    check_latents,
    check_numbers,
    check_task_options,
    has_guidance,
    latents_shape,
)
from wanrun.jobs.job import Job, JobMaker
from wanrun.jobs.media_sets import MediaSets
from wanrun.jobs.outputs import check_encoder, check_file, check_new_folder, usable_names
from wanrun.jobs.requests import Request, have_media_of, read_requests, request_from_options
from wanrun.media.types import Inputs, check_media
from wanrun.timing import Timings


@dataclass(frozen=True)
class Plan:
    """What a run has to do.

    Attributes:
        manifest: the artifact's.
        profile: the chosen one.
        jobs: what is to be made, in order.
        finished: what is there already.
        failures: what is wrong with the other lines of the prompts file, in order.
        noise: the initial latents, float32 (B, C, T, h, w), where they were given.
        many: whether the prompts come from a file.
        media: reads what the videos are made from, and holds what the first job needs of it, if it was read
            for it.
    """

    manifest: Manifest
    profile: Profile
    jobs: Sequence[Job]
    finished: Sequence[Job]
    failures: Sequence[UsageError]
    noise: np.ndarray | None
    many: bool
    media: MediaSets

    def inputs_of(self, job: Job) -> Inputs | None:
        """What the pipeline takes of a job's media: the same object for jobs that share them, one after the
        other. None where a model takes none, or none of what it could take is given.

        Raises:
            UsageError: if they cannot be read any more, or were changed since they were checked.
        """
        return self.media.inputs(job.request.media)

    def first_prompts(self, jobs: int | None = None) -> list[str]:
        """The prompts of the first jobs (None: of all), the negative ones too, each once."""
        texts = [job.options[name] for job in self.jobs[:jobs] for name in ("prompt", "negative_prompt")]
        return list(dict.fromkeys(text for text in texts if text is not None))

    @property
    def loop(self) -> str:
        """The form of the denoising loop of every job, of which there has to be one."""
        return str(self.jobs[0].options["loop"])

    @property
    def first_expert(self) -> str:
        """The transformer that the first job needs first; there has to be a job."""
        _, (first, *_) = schedule(self.jobs[0].options, self.manifest)
        return first.transformer


def _read_latents(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    try:
        # Mapped, so that a header that promises more than the file holds is refused, not allocated.
        latents = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, zipfile.BadZipFile, *NPY_DAMAGE) as error:
        raise UsageError(
            f"the latents {path} cannot be read: {error}", remedy="give a float32 .npy file"
        ) from None
    if not isinstance(latents, np.ndarray):
        raise UsageError(f"the latents {path} are not one array", remedy="give a float32 .npy file")
    check_latents(latents, shape)
    return np.array(latents)


def _influences(options: Mapping[str, Any], noise: np.ndarray | None) -> dict[str, Any]:
    """What besides a prompt's own options decides what its video shows."""
    facts: dict[str, Any] = {"text_encoder": options["text_encoder"]}
    if noise is not None:
        facts |= {
            "latents": options["latents"].name,
            "latents_sha256": sha256_of(noise.tobytes()),
        }
    return facts


def _num_references(manifest: Manifest, shared: Request, requests: Sequence[Request]) -> int:
    """How many reference images the profile is built for: as the command line gives, or the first line that
    gives any."""
    if "reference_image" not in manifest.model.get("inputs", {}):
        return 0
    return next((number for request in (shared, *requests) if (number := len(request.reference_image))), 0)


@contextmanager
def _noted(bad: dict[int, UsageError], request: Request, many: bool) -> Iterator[None]:
    """Notes what is wrong with a line of the prompts file, which does not end the run."""
    try:
        yield
    except UsageError as error:
        if not many:
            raise
        bad[request.index] = error.located(request.where)


def preflight(artifact: Path, options: Mapping[str, Any], timings: Timings) -> Plan:
    """Checks everything that can be found wrong before jax is imported and a weight is read.

    Args:
        artifact: the artifact's folder.
        options: the command line's options by name.
        timings: where the time is noted that reading media takes.

    Raises:
        UsageError: for an option out of range, latents that do not fit, media that cannot be used, a prompts
            file that cannot be read, or an output that cannot be written. What is wrong with one line of the
            prompts file is a failure of the plan instead.
        ArtifactError: if the artifact cannot be read, or has no such profile or form of the loop.
    """
    prompt, file = options["prompt"], options["prompts"]
    if prompt is not None and file is not None:
        raise UsageError("--prompt and --prompts exclude each other", remedy="pass one of them")
    if prompt is None and file is None:
        raise UsageError(
            "no prompt was given", remedy="pass --prompt TEXT (an empty one is allowed) or --prompts FILE"
        )
    shared = request_from_options(options, prompt or "")
    check_numbers(vars(shared))
    manifest = read_manifest(artifact)
    guidance = has_guidance(manifest, shared.guidance_scale)
    check_experts(manifest, guidance, vars(shared))
    check_task_options(manifest, vars(shared))
    requests, bad = ([shared], {}) if file is None else read_requests(file, options)
    if have_media_of(shared, requests):
        check_media(manifest, shared.media)
    profile = select_profile(
        manifest,
        artifact,
        options["size"],
        options["frames"],
        options["num_videos"],
        guidance,
        _num_references(manifest, shared, requests),
    )
    latents = options["latents"]
    noise = None if latents is None else _read_latents(latents, latents_shape(manifest, profile))
    media, facts = MediaSets(manifest, profile, timings), _influences(options, noise)
    maker = JobMaker(artifact, manifest, profile, options, file is not None, facts, media)
    maker.reserve_media(requests)
    if file is not None:
        maker.reserve(file, "--prompts")
        maker.check_shared(shared, requests)
    with usable_names():
        check_file(options["timing_json"], "--timing-json", overwrite=True)
        check_new_folder(options["trace"], "--trace")
    maker.take([options["timing_json"]], "--timing-json")
    maker.take([options["trace"]], "--trace")
    drafts, jobs, many = [], [], file is not None
    for request in requests:
        with _noted(bad, request, many):
            drafts.append(maker.draft(request))
    check_encoder(video for draft in drafts for video in draft.videos)
    if drafts and have_media_of(shared, requests):  # so that it is said once
        read = media.digest if all(draft.there for draft in drafts) else media.check
        read(shared.media)
    for draft in drafts:
        with _noted(bad, draft.request, many):
            jobs.append(maker.job(draft))
    return Plan(
        manifest,
        profile,
        [job for job in jobs if not job.finished],
        [job for job in jobs if job.finished],
        [bad[index] for index in sorted(bad)],
        noise,
        many,
        media,
    )
