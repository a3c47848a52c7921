"""A prompt becomes a job: its options are checked, its outputs named, and what is there already is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from wanrun import __version__
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.denoising.noise import initial_noise
from wanrun.denoising.schedule import schedule
from wanrun.generation.options import check_latents, choose_profile, latents_shape, resolve_options
from wanrun.generation.request import Request
from wanrun.jobs.claims import Claims
from wanrun.jobs.existing import missing_videos
from wanrun.jobs.media_sets import Checked, MediaSet, MediaSets
from wanrun.jobs.outputs import (
    check_file,
    check_folder,
    check_free,
    expand,
    numbered,
    usable_names,
    video_paths,
)
from wanrun.jobs.requests import Entry
from wanrun.jobs.run import RunOptions
from wanrun.media.types import check_media
from wanrun.media.write_video import metadata_sidecar


@dataclass(frozen=True)
class Draft:
    """One prompt whose options are good and whose outputs can be written; no media were read for it.

    Attributes:
        entry: where it comes from.
        profile: what it is made with.
        options: what the generation takes, the artifact's defaults filled in.
        videos: the path of each video.
        latents: where the final latents go; None where they are not asked for.
        there: whether all of it is there, so that it is to be compared and perhaps nothing is to be made.
    """

    entry: Entry
    profile: Profile
    options: Mapping[str, Any]
    videos: tuple[Path, ...]
    latents: Path | None
    there: bool

    @property
    def media(self) -> MediaSet:
        """What the video is made from besides the prompt."""
        overlap = self.options.get("segment_overlap")  # so that media with the default one are the same
        return MediaSet(self.profile.name, replace(self.entry.media, segment_overlap=overlap))


@dataclass(frozen=True)
class Job:
    """One prompt whose options and outputs are good, and whose media can be used.

    Attributes:
        draft: the prompt, its options and its outputs.
        fps: frames per second of the videos.
        missing: which of the videos are to be written; the others are there, with the same metadata.
        latents: where the final latents go; None where they are not asked for, or there.
        metadata: what is written into each video, but for the number of the video.
        num_segments: how often the steps are made: of a long video once for each part of it.
    """

    draft: Draft
    fps: float
    missing: tuple[int, ...]
    latents: Path | None
    metadata: Mapping[str, Any]
    num_segments: int = 1

    @property
    def finished(self) -> bool:
        """Whether all of it is there."""
        return not self.missing and self.latents is None


@dataclass(frozen=True)
class JobMaker:
    """Makes drafts of prompts, which cost nothing, and jobs of drafts, for which media are read.

    Attributes:
        artifact: the artifact's folder.
        manifest: its manifest.
        run: what the whole run is told.
        many: whether the prompts come from a file. Then an output without fields is numbered where there are
            several prompts, and a video that is there with the metadata it would get is finished. The video
            of a single prompt must not be there.
        noise: the initial latents, float32 (B, C, T, h, w), where they were given.
        facts: what else the metadata records, for it has an influence on the video.
        media: reads what the videos are made from.
        claims: notes which files are written.
    """

    artifact: Path
    manifest: Manifest
    run: RunOptions
    many: bool
    noise: np.ndarray | None
    facts: Mapping[str, Any]
    media: MediaSets
    claims: Claims
    _tables: set[tuple[Any, ...]] = field(default_factory=set)

    def resolve(self, request: Request) -> tuple[Profile, dict[str, Any]]:
        """A request's profile, and its options with the artifact's defaults filled in, all of them checked.

        Raises:
            UsageError: for options that would have no effect, or that no solver or noise takes.
            ArtifactError: for a profile or a form of the loop that is not built.
        """
        profile = choose_profile(self.manifest, self.artifact, request)
        options = resolve_options(self.manifest, profile, request)
        initial_noise(request.seed, (1,))  # refuses a bad seed
        timesteps = tuple(options.get("timesteps", ()))
        table = (options["solver"], options["num_steps"], options["flow_shift"], timesteps)
        if table not in self._tables:
            schedule(options, self.manifest)
            self._tables.add(table)
        if self.noise is not None:
            check_latents(self.noise, latents_shape(self.manifest, profile))
        return profile, options

    def path(self, entry: Entry, option: str) -> Path:
        """The path that --output or --save-latents is for this prompt.

        Raises:
            UsageError: for a name with an unknown field.
        """
        pattern = str(getattr(self.run, option))
        if entry.total > 1:
            pattern = numbered(pattern)
        return self._expand(entry, pattern, "--" + option.replace("_", "-"))

    @staticmethod
    def _expand(entry: Entry, pattern: str, option: str) -> Path:
        line = entry.line
        return Path(
            expand(pattern, option, index=entry.index, total=entry.total, seed=line.seed, prompt=line.prompt)
        )

    def draft(self, entry: Entry) -> Draft:
        """Checks a prompt as far as nothing has to be read for it, and claims the names of its outputs.

        Raises:
            UsageError: for an option out of range, media that the model does not take, or an output that
                cannot be written or is there already.
            ArtifactError: for a profile or a form of the loop that is not built.
        """
        profile, options = self.resolve(entry.line)
        check_media(self.manifest, entry.media)
        if entry.line.output is None:
            path = self.path(entry, "output")
        else:
            path = self._expand(entry, entry.line.output, "output")
        latents = None if self.run.save_latents is None else self.path(entry, "save_latents")
        with usable_names():
            videos = video_paths(path, profile.num_videos)
            check_folder(path.parent)
            check_file(latents, "--save-latents", overwrite=self.many or self.run.overwrite)
            self.claims.write([*videos, *map(metadata_sidecar, videos), latents], entry.where)
            if not self._compared:
                check_free(videos, self.run.overwrite)
            outputs = videos if latents is None else [*videos, latents]
            there = self._compared and all(file.exists() for file in outputs)
        return Draft(entry, profile, options, tuple(videos), latents, there)

    def job(self, draft: Draft) -> Job:
        """Reads what a job is made from, and finds what is there of it.

        Raises:
            UsageError: for media that cannot be used, or an output that is there and would be another.
        """
        videos, latents = draft.videos, draft.latents
        read = self.media.digest if draft.there else self.media.check
        media = read(draft.media)
        with usable_names():
            metadata = self._metadata(draft, media)
            missing = missing_videos(videos, metadata) if self._compared else tuple(range(len(videos)))
            if latents is not None and latents.exists() and not self.run.overwrite:
                check_file(latents, "--save-latents", overwrite=not missing)
                latents = None
        job = Job(draft, metadata["fps"], missing, latents, metadata, media.num_segments)
        if not job.finished:
            self.media.keep(draft.media)
        return job

    @property
    def _compared(self) -> bool:
        """Whether a video that is there may be the one that would be made."""
        return self.many and not self.run.overwrite

    def _metadata(self, draft: Draft, media: Checked) -> dict[str, Any]:
        fps = draft.entry.line.fps
        facts = dict(self.facts)
        if media.num_frames is not None:  # the profile's are those of a segment
            facts |= {"num_frames": media.num_frames, "segment_frames": draft.profile.num_frames}
        if "latents" in facts and media.num_segments == 1:  # they are the noise of the first segment
            facts["seed"] = None
        return {
            **draft.options,
            "content_digest": self.manifest.content_digest,
            "fps": float(self.manifest.model.defaults.fps if fps is None else fps),
            "num_videos": draft.profile.num_videos,
            "wanrun": __version__,
            **facts,
            # "video" is the number of the video that is made.
            **{"video_file" if name == "video" else name: fact for name, fact in media.facts.items()},
        }
