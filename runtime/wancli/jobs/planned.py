"""A prompt of a run with its job: its outputs are named and checked, and existing ones are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from wancli.jobs.existing import made_before, missing_videos
from wancli.jobs.media_sets import MediaSets
from wancli.jobs.output_names import check_folder, expand, numbered
from wancli.jobs.run_options import STDOUT, RunOptions
from wanrun import Artifact, Job, Output, outputs_of
from wanrun.claims import Claims, check_file, usable_names
from wanrun.denoising.latents import check_latents
from wanrun.errors import UsageError
from wanrun.generation.video_parts import seed_in, spool_for, spool_of
from wanrun.job.outputs import LATENTS
from wanrun.media.video_paths import numbered_video
from wanrun.media.write_video import check_free, metadata_sidecar
from wanrun.request.generation import Generation
from wanrun.request.lengths import check_live, check_start
from wanrun.request.prompts_file import Entry
from wanrun.request.resolve import resolve_request

if TYPE_CHECKING:
    from wanfleet.uploads import VideoStore


@dataclass(frozen=True)
class Planned:
    """A prompt of a run.

    Attributes:
        job: has the outputs that do not exist; the others have the same metadata.
        videos: all videos of the prompt.
        metadata: the metadata of each video, except the video's number; empty until the media are read.
        parts: the number of the video's parts that an ended run has left.
    """

    entry: Entry
    job: Job
    videos: tuple[Path, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    parts: int = 0

    @property
    def spool(self) -> Path:
        """The folder of its clips while they are made."""
        return spool_of(self.videos[0])

    @property
    def finished(self) -> bool:
        """Whether all outputs exist."""
        return not self.job.outputs


@dataclass(frozen=True)
class Planner:
    """Plans jobs of prompts: ``planned`` is cheap, and ``compared`` reads the media.

    Attributes:
        many: whether the prompts come from a file, or there are several seeds. Then an output without
            fields is numbered if there are several prompts, and an existing video with the same metadata
            is finished. The video of a single prompt must not exist.
        noise: the given initial latents, float32 (B, C, T, h, w), or None.
        influences: facts that decide a video besides a prompt's options, for the metadata.
        claims: records the files that are written.
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

        Raises UsageError for a name with an unknown field, or of a folder in an object store.
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

    def planned(self, entry: Entry) -> Planned:
        """Resolves a prompt, and claims the names of its outputs; reads no media.

        Raises UsageError for an option out of range, media that the model does not take, or an output that
        cannot be written or exists already. Raises ArtifactError for a profile or a form of the loop that is
        not built.
        """
        entry = self._with_its_seed(entry)
        generation = self.resolved(entry)
        self._check_latents(generation)
        path = self.path(entry, "output")
        if (to_stdout := str(path) == STDOUT) and not self.run.live:
            raise UsageError(
                "unsupported",
                "standard output takes only live video",
                remedy="pass --live, or choose another --output",
            )
        latents = None if self.run.save_latents is None else self.path(entry, "save_latents")
        with usable_names():
            outputs = (Output(path),) if to_stdout else outputs_of(path, generation.profile.num_videos)
            videos = tuple(output.path for output in outputs)
            if self.store is None and not to_stdout:
                check_folder(path.parent)
            check_file(latents, "--save-latents", overwrite=self.many or self.run.overwrite)
            files = () if to_stdout else (*videos, *map(metadata_sidecar, videos))
            self.claims.write([*files, latents], entry.where)
            if not to_stdout and (not self.many or self.run.overwrite):
                check_free(videos, self.run.overwrite, sidecars=self.run.overwrite)
        if latents is not None:
            outputs += (Output(latents, kind=LATENTS),)
        return Planned(entry, Job(f"{entry.index}/{entry.total}", generation, outputs), videos)

    def _check_latents(self, generation: Generation) -> None:
        """Checks given latents, and that the video of a live run can be."""
        if self.run.live:
            frames, decoder = self.run.length(generation), generation.options.get("decoder")
            check_live(generation.manifest, frames, "num_frames", decoder)
            if self.noise is not None:
                check_start(generation, frames, self.noise)
        elif self.noise is not None:
            check_latents(self.noise, generation.latents_shape)

    def resolved(self, entry: Entry) -> Generation:
        """Returns the generation of a prompt; reads no media. Raises as ``resolve_request``."""
        return resolve_request(entry.line, self.artifact, loop=self.run.loading.form)

    def _with_its_seed(self, entry: Entry) -> Entry:
        """Returns a line with its first video's seed, if the seed is drawn and the video was begun before."""
        if not entry.drawn:
            return entry
        try:
            path = self.path(entry, "output")
            seed = seed_in(spool_of(path)) if self.resolved(entry).in_parts else None
            if seed is None and not self.run.overwrite:
                there = (made_before(one, self.store) for one in (path, numbered_video(path, 0)))
                seed = next((found for found in there if found is not None), {}).get("seed")
            if type(seed) is int:
                return replace(entry, line=structs.replace(entry.line, seed=seed))
        except UsageError:  # of a file, reported where the videos are checked
            if self.store is not None:
                raise
        return entry

    def compared(self, planned: Planned) -> Planned:
        """Reads a prompt's media, and leaves out its outputs that exist.

        Raises UsageError for media that cannot be used, or an existing output with other metadata.
        """
        job, videos, overwrite, parts = planned.job, planned.videos, self.run.overwrite, 0
        with usable_names():
            there = self.many and all(output.path.exists() for output in job.outputs)
            there = not overwrite and (there or self.store is not None)
        inputs = self.media.facts(job.generation, digests=there)
        here = self.artifact.built_here(job.generation.profile.name)
        metadata = job.generation.metadata(inputs, {**self.influences, **here})
        with usable_names():
            # A single prompt's videos are not there, but perhaps their sidecars.
            every = overwrite or self.run.to_stdout
            missing = range(len(videos)) if every else missing_videos(videos, metadata, self.store)
            outputs = tuple(one for one in job.outputs if self._is_missing(one, missing))
        if not outputs:
            self.media.spare(job.generation)
        elif job.generation.in_parts and not self.run.of_several:
            parts = spool_for(job.generation, planned.spool, metadata, overwrite=overwrite).there()
        return replace(planned, job=replace(job, outputs=outputs), metadata=metadata, parts=parts)

    def _is_missing(self, output: Output, videos: Sequence[int]) -> bool:
        """Whether an output is to be written. Existing latents are refused if their video is to be."""
        if output.kind != LATENTS:
            return output.video in videos
        if not output.path.exists() or self.run.overwrite:
            return True
        check_file(output.path, "--save-latents", overwrite=not videos)
        return False
