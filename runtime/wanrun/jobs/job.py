"""Makes a job of a prompt: checks its options, names its outputs, and finds the outputs that exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from wanrun import __version__
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.denoising.noise import initial_noise
from wanrun.denoising.schedule import schedule
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
)
from wanrun.jobs.requests import Entry
from wanrun.jobs.run import RunOptions
from wanrun.media.types import check_media
from wanrun.media.video_paths import video_paths
from wanrun.media.write_video import metadata_sidecar
from wanrun.request.options import (
    check_latents,
    choose_profile,
    frame_rate,
    latents_shape,
    resolve_options,
)
from wanrun.request.request import Request


@dataclass(frozen=True)
class Draft:
    """One prompt with checked options and writable outputs; its media were not read yet.

    Attributes:
        entry: the prompt's line.
        profile: the profile that makes it.
        options: the options of the generation, with the artifact's defaults.
        videos: the path of each video.
        latents: the path of the final latents; None if they are not requested.
        there: whether all outputs exist, and are compared: if they are the same, nothing is made.
    """

    entry: Entry
    profile: Profile
    options: Mapping[str, Any]
    videos: tuple[Path, ...]
    latents: Path | None
    there: bool

    @property
    def media(self) -> MediaSet:
        """The images and videos of the prompt, with the profile that they are prepared for."""
        overlap = self.options.get("segment_overlap")  # the resolved one, so that equal media compare equal
        return MediaSet(self.profile.name, structs.replace(self.entry.media, segment_overlap=overlap))


@dataclass(frozen=True)
class Job:
    """One prompt with checked options, outputs and media.

    Attributes:
        draft: the prompt, its options and its outputs.
        fps: frames per second of the videos.
        missing: the numbers of the videos to write; the others exist, with the same metadata.
        latents: the path of the final latents; None if they are not requested, or exist.
        metadata: the metadata of each video, except the video's number.
        num_segments: the number of windows; the steps run once for each window.
    """

    draft: Draft
    fps: float
    missing: tuple[int, ...]
    latents: Path | None
    metadata: Mapping[str, Any]
    num_segments: int = 1

    @property
    def finished(self) -> bool:
        """Whether all outputs exist."""
        return not self.missing and self.latents is None


@dataclass(frozen=True)
class JobMaker:
    """Makes drafts of prompts, which is cheap, and jobs of drafts, which reads media.

    Attributes:
        artifact: the artifact's folder.
        manifest: its manifest.
        run: the options of the whole run.
        many: whether the prompts come from a file. Then an output without fields is numbered if there are
            several prompts, and an existing video with the same metadata is finished. The video of a single
            prompt must not exist.
        noise: the given initial latents, float32 (B, C, T, h, w), or None.
        facts: further facts that influence the video, for the metadata.
        media: reads the media of the jobs.
        claims: notes the files that are written.
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
        """Returns a request's profile, and its checked options with the artifact's defaults.

        Raises:
            UsageError: for options that have no effect, or that the solver or the noise does not take.
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
        """Returns the path of --output or --save-latents for this prompt.

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
        """Makes the checks of a prompt that read no media, and claims the names of its outputs.

        Raises:
            UsageError: for an option out of range, media that the model does not take, or an output that
                cannot be written or exists already.
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
                check_free(videos, self.run.overwrite, sidecars=self.run.overwrite)
            outputs = videos if latents is None else [*videos, latents]
            there = self._compared and all(file.exists() for file in outputs)
        return Draft(entry, profile, options, tuple(videos), latents, there)

    def job(self, draft: Draft) -> Job:
        """Reads a job's media, and finds its outputs that exist.

        Raises:
            UsageError: for media that cannot be used, or an existing output with other metadata.
        """
        videos, latents = draft.videos, draft.latents
        read = self.media.digest if draft.there else self.media.check
        media = read(draft.media)
        with usable_names():
            metadata = self._metadata(draft, media)
            missing = tuple(range(len(videos)))
            if not self.run.overwrite:  # a single prompt's videos are not there, but perhaps their sidecars
                missing = missing_videos(videos, metadata)
            if latents is not None and latents.exists() and not self.run.overwrite:
                check_file(latents, "--save-latents", overwrite=not missing)
                latents = None
        job = Job(draft, metadata["fps"], missing, latents, metadata, media.num_segments)
        if not job.finished:
            self.media.keep(draft.media)
        return job

    @property
    def _compared(self) -> bool:
        """Whether existing videos are compared with those that the run would make."""
        return self.many and not self.run.overwrite

    def _metadata(self, draft: Draft, media: Checked) -> dict[str, Any]:
        facts = dict(self.facts)
        if media.num_frames is not None:  # the profile's num_frames are those of a window
            facts |= {"num_frames": media.num_frames, "segment_frames": draft.profile.num_frames}
        if "latents" in facts and media.num_segments == 1:  # they replace only the first window's noise
            facts["seed"] = None
        return {
            **draft.options,
            "content_digest": self.manifest.content_digest,
            "fps": frame_rate(self.manifest, draft.entry.line),
            "num_videos": draft.profile.num_videos,
            "wanrun": __version__,
            **facts,
            # "video" in the metadata is the number of the result, so the option's file is "video_file".
            **{"video_file" if name == "video" else name: fact for name, fact in media.facts.items()},
        }
