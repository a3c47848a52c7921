"""Checks of a request that cost nothing, made before the work that costs minutes."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wanrun.errors import UsageError
from wanrun.experts import schedule
from wanrun.files import sha256_of
from wanrun.jobs import Job, JobMaker
from wanrun.manifest import Manifest, Profile, read_manifest
from wanrun.options import check_experts, check_latents, check_numbers, latents_shape
from wanrun.outputs import check_file, check_new_folder, usable_names
from wanrun.requests import located, read_requests, request_from_options
from wanrun.select import select_profile


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
    """

    manifest: Manifest
    profile: Profile
    jobs: Sequence[Job]
    finished: Sequence[Job]
    failures: Sequence[UsageError]
    noise: np.ndarray | None
    many: bool

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
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
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
            "seed": None,
            "latents": options["latents"].name,
            "latents_sha256": sha256_of(noise.tobytes()),
        }
    return facts


def preflight(artifact: Path, options: Mapping[str, Any]) -> Plan:
    """Checks everything that can be found wrong before jax is imported and a weight is read.

    Args:
        artifact: the artifact's folder.
        options: the command line's options by name.

    Raises:
        UsageError: for an option out of range, latents that do not fit, a prompts file that cannot be read,
            or an output that cannot be written. What is wrong with one line of the prompts file is a failure
            of the plan instead.
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
    check_numbers(vars(shared), "--")
    manifest = read_manifest(artifact)
    scale = shared.guidance_scale
    guidance = (manifest.model["defaults"]["guidance_scale"] if scale is None else scale) > 1
    check_experts(manifest, guidance, vars(shared), "--")
    profile = select_profile(
        manifest, artifact, options["size"], options["frames"], options["num_videos"], guidance
    )
    requests, bad = ([shared], {}) if file is None else read_requests(file, options)
    latents = options["latents"]
    noise = None if latents is None else _read_latents(latents, latents_shape(manifest, profile))
    maker = JobMaker(artifact, manifest, profile, options, file is not None, _influences(options, noise))
    if file is not None:
        maker.reserve(file, "--prompts")
        maker.check_shared(shared, requests)
    with usable_names():
        check_file(options["timing_json"], "--timing-json", overwrite=True)
        check_new_folder(options["trace"], "--trace")
    maker.take([options["timing_json"]], "--timing-json")
    maker.take([options["trace"]], "--trace")
    jobs = []
    for request in requests:
        try:
            jobs.append(maker(request))
        except UsageError as error:
            if file is None:
                raise
            bad[request.index] = located(error, request.where)
    return Plan(
        manifest,
        profile,
        [job for job in jobs if not job.finished],
        [job for job in jobs if job.finished],
        [bad[index] for index in sorted(bad)],
        noise,
        file is not None,
    )
