"""A job of a run: one prompt with its generation, its outputs, and those of them that exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from wancli.jobs.existing import made_before, missing_videos
from wancli.jobs.media_sets import MediaSets
from wancli.jobs.outputs import check_folder, expand, numbered
from wancli.jobs.run import RunOptions
from wanrun import Artifact, Generation
from wanrun.claims import Claims, check_file, usable_names
from wanrun.errors import UsageError
from wanrun.media.video_paths import numbered_video, video_paths
from wanrun.media.write_video import check_free, metadata_sidecar
from wanrun.request.options import check_latents, latents_shape
from wanrun.request.prompts_file import Entry
from wanrun.request.resolve import resolve_request

if TYPE_CHECKING:
    from wanfleet.outbox import VideoStore


@dataclass(frozen=True)
class Job:
    """One prompt of a run.

    Attributes:
        latents: the path of the final latents; None if they are not requested, or exist.
        missing: the numbers of the videos to write; the others exist, with the same metadata.
        metadata: the metadata of each video, except the video's number; empty until the media are read.
    """

    entry: Entry
    generation: Generation
    videos: tuple[Path, ...]
    latents: Path | None
    missing: tuple[int, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether all outputs exist."""
        return not self.missing and self.latents is None


@dataclass(frozen=True)
class JobMaker:
    """Makes jobs of prompts: ``job`` is cheap, and ``compared`` reads the media.

    Attributes:
        many: whether the prompts come from a file. Then an output without fields is numbered if there are
            several prompts, and an existing video with the same metadata is finished. The video of a single
            prompt must not exist.
        noise: the given initial latents, float32 (B, C, T, h, w), or None.
        influences: facts beside a prompt's own options that decide its video, for the metadata.
        media: reads the media of the jobs.
        claims: notes the files that are written.
        store: the object store of the videos, which are written in its folder before; or None.
    """

    artifact: Artifact
    run: RunOptions
    many: bool
    noise: np.ndarray | None
    influences: Mapping[str, Any]
    media: MediaSets
    claims: Claims
    store: VideoStore | None = None

    def path(self, entry: Entry, option: str) -> Path:
        """Returns the path of --output or --save-latents for this prompt; its line may name an output.

        Raises:
            UsageError: for a name with an unknown field, or of a folder in an object store.
        """
        line, pattern, name = entry.line, str(getattr(self.run, option)), "--" + option.replace("_", "-")
        if option == "output" and line.output is not None:
            pattern, name = line.output, "output"
            if self.store is not None:
                pattern = self.store.file(pattern)
        elif entry.total > 1:
            pattern = numbered(pattern)
        return Path(
            expand(pattern, name, index=entry.index, total=entry.total, seed=line.seed, prompt=line.prompt)
        )

    def job(self, entry: Entry) -> Job:
        """Resolves a prompt, and claims the names of its outputs; reads no media.

        Raises:
            UsageError: for an option out of range, media that the model does not take, or an output that
                cannot be written or exists already.
            ArtifactError: for a profile or a form of the loop that is not built.
        """
        entry = self._with_its_seed(entry)
        generation = resolve_request(entry.line, self.artifact, loop=self.run.loading.form)
        if self.noise is not None:
            check_latents(self.noise, latents_shape(self.artifact.manifest, generation.profile))
        path = self.path(entry, "output")
        latents = None if self.run.save_latents is None else self.path(entry, "save_latents")
        with usable_names():
            videos = video_paths(path, generation.profile.num_videos)
            if self.store is None:
                check_folder(path.parent)
            check_file(latents, "--save-latents", overwrite=self.many or self.run.overwrite)
            self.claims.write([*videos, *map(metadata_sidecar, videos), latents], entry.where)
            if not self.many or self.run.overwrite:
                check_free(videos, self.run.overwrite, sidecars=self.run.overwrite)
        return Job(entry, generation, tuple(videos), latents, tuple(range(len(videos))))

    def _with_its_seed(self, entry: Entry) -> Entry:
        """Returns a line whose seed was drawn with that of its first video, if that was made before."""
        if not entry.drawn or self.run.overwrite:
            return entry
        try:
            path = self.path(entry, "output")
            there = (made_before(one, self.store) for one in (path, numbered_video(path, 0)))
            seed = next((found for found in there if found is not None), {}).get("seed")
            if type(seed) is int:
                return replace(entry, line=structs.replace(entry.line, seed=seed))
        except UsageError:  # of a file, reported where the videos are checked
            if self.store is not None:
                raise
        return entry

    def compared(self, job: Job) -> Job:
        """Reads a job's media, and finds its outputs that exist.

        Raises:
            UsageError: for media that cannot be used, or an existing output with other metadata.
        """
        overwrite, latents, missing = self.run.overwrite, job.latents, job.missing
        with usable_names():
            outputs = job.videos if latents is None else (*job.videos, latents)
            there = self.many and all(file.exists() for file in outputs)
            there = not overwrite and (there or self.store is not None)
        inputs = self.media.facts(job.generation, digests=there)
        metadata = job.generation.metadata(inputs, self.influences)
        with usable_names():
            if not overwrite:  # a single prompt's videos are not there, but perhaps their sidecars
                missing = missing_videos(job.videos, metadata, self.store)
            if latents is not None and latents.exists() and not overwrite:
                check_file(latents, "--save-latents", overwrite=not missing)
                latents = None
        job = replace(job, latents=latents, missing=missing, metadata=metadata)
        if job.finished:
            self.media.spare(job.generation)
        return job
