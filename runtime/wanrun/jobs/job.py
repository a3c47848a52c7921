"""A request becomes a job: its options are checked, its outputs named, and what is there already is found."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanrun import __version__
from wanrun.artifact.manifest import Manifest, Profile
from wanrun.denoising.noise import initial_noise
from wanrun.denoising.solvers import solver_table
from wanrun.errors import UsageError, field
from wanrun.generation.options import check_numbers, resolve_options
from wanrun.jobs.media_sets import Checked, MediaSets
from wanrun.jobs.outputs import (
    check_file,
    check_folder,
    check_free,
    expand,
    numbered,
    usable_names,
    video_paths,
)
from wanrun.jobs.requests import Request
from wanrun.media.types import check_media
from wanrun.media.write_video import metadata_sidecar


@dataclass(frozen=True)
class Draft:
    """One prompt whose options are good and whose outputs can be written; no media were read for it.

    Attributes:
        request: where it comes from.
        options: what the generation takes, the artifact's defaults filled in.
        videos: the path of each video.
        latents: where the final latents go; None where they are not asked for.
        there: whether all of it is there, so that it is to be compared and perhaps nothing is to be made.
    """

    request: Request
    options: Mapping[str, Any]
    videos: tuple[Path, ...]
    latents: Path | None
    there: bool


@dataclass(frozen=True)
class Job:
    """One prompt whose options and outputs are good.

    Attributes:
        request: where it comes from.
        options: what the generation takes, the artifact's defaults filled in.
        fps: frames per second of the videos.
        videos: the path of each video.
        missing: which of them are to be written; the others are there, with the same metadata.
        latents: where the final latents go; None where they are not asked for, or there.
        metadata: what is written into each video, but for the number of the video.
        num_segments: how often the steps are made: of a long video once for each part of it.
    """

    request: Request
    options: Mapping[str, Any]
    fps: float
    videos: tuple[Path, ...]
    missing: tuple[int, ...]
    latents: Path | None
    metadata: Mapping[str, Any]
    num_segments: int = 1

    @property
    def finished(self) -> bool:
        """Whether all of it is there."""
        return not self.missing and self.latents is None


class JobMaker:
    """Makes jobs of requests, one after the other: a name can be taken once.

    First the draft of every job, which costs nothing; then the jobs, for which media are read.

    Args:
        artifact: its folder, which no output may lie in.
        manifest: its manifest.
        profile: the run's.
        options: the command line's options by name.
        many: whether the requests come from a prompts file. Then a name without fields is numbered where
            there are more than one, and a video that is there with the metadata it would get is finished;
            a video of a single prompt must not be there.
        facts: what else the metadata records, for it has an influence on the video.
        media: reads what the videos are made from.
    """

    def __init__(
        self,
        artifact: Path,
        manifest: Manifest,
        profile: Profile,
        options: Mapping[str, Any],
        many: bool,
        facts: Mapping[str, Any],
        media: MediaSets,
    ) -> None:
        self._artifact = Path(os.path.realpath(artifact))
        self._manifest, self._profile, self._options = manifest, profile, options
        self._many, self._facts, self._media = many, facts, media
        self._taken: dict[str, str] = {}
        self._read: dict[str, str] = {}
        self._tables: set[tuple[str, int, float]] = set()

    def take(self, paths: Sequence[Path | None], owner: str) -> None:
        """Notes that these files are written by ``owner``.

        Raises:
            UsageError: if one is taken already, is read, or lies inside the artifact.
        """
        names: dict[str, Path] = {}
        for path in paths:
            if path is None:
                continue
            name = os.path.realpath(path)
            self._check_not_read(path, name)
            other = owner if name in names else self._taken.get(name)
            if other is not None and not self._many:
                raise UsageError(
                    f"two outputs are the same file, {name}",
                    remedy="give --output, --save-latents and --timing-json names of their own",
                )
            if other is not None:
                raise UsageError(
                    f"the output {path} is also that of {other}",
                    remedy="give each its own name, for example with {index}",
                )
            if Path(name).is_relative_to(self._artifact):
                raise UsageError(f"{path} lies inside the artifact", remedy="write the results elsewhere")
            names[name] = path
        self._taken |= dict.fromkeys(names, owner)

    def _check_not_read(self, path: Path, name: str) -> None:
        """Raises UsageError if a file of this real name is read, or would be a frame of what is read."""
        if name in self._read:
            raise UsageError(
                f"the output {path} is also that of {self._read[name]}, which is read",
                remedy="choose another output",
            )
        folder = os.path.dirname(name)  # noqa: PTH120 - a real path
        if folder in self._read:
            raise UsageError(
                f"the output {path} lies inside the folder of {self._read[folder]}, which is read",
                remedy="write the results elsewhere",
            )

    def reserve(self, path: Path, owner: str) -> None:
        """Notes that this file or folder of frames, which may lie anywhere, is read for ``owner``."""
        self._read.setdefault(os.path.realpath(path), owner)

    def reserve_media(self, requests: Sequence[Request]) -> None:
        """Notes that what these requests read must not be written; to be called before the first job."""
        for request in requests:
            for name, path in request.media_files:
                self.reserve(path, f"{request.where} ({name})" if self._many else field(name))

    def check_shared(self, shared: Request, requests: Sequence[Request]) -> None:
        """Checks what the requests of a prompts file have in common, so that it is said once.

        Args:
            shared: the command line's options.
            requests: the lines'.

        Raises:
            UsageError: for an option out of range, a name with an unknown field or suffix, or a folder that
                cannot be written to.
            ArtifactError: for a form of the loop that is not built.
        """
        if shared.steps is None and any(request.steps is not None for request in requests):
            # Whether the artifact's default suits the loop is then a matter of the lines that have no other.
            shared = dataclasses.replace(shared, steps=1)
        self._resolve(shared)
        for option in ("output", "save_latents"):
            users = [request for request in requests if option != "output" or request.output is None]
            if not users or self._options[option] is None:
                continue
            with usable_names():
                path = self._path(users[0], option)
                one_folder = "{" not in str(self._options[option].parent)
                if option == "output":
                    video_paths(path)
                    if one_folder:
                        check_folder(path.parent)
                elif one_folder:
                    check_file(path, "--save-latents", overwrite=True)

    def _path(self, request: Request, option: str) -> Path:
        """The path that --output or --save-latents is for this request."""
        pattern = str(self._options[option])
        if request.total > 1:
            pattern = numbered(pattern)
        return self._expand(request, pattern, "--" + option.replace("_", "-"))

    @staticmethod
    def _expand(request: Request, pattern: str, option: str) -> Path:
        return Path(
            expand(
                pattern,
                option,
                index=request.index,
                total=request.total,
                seed=request.seed,
                prompt=request.prompt,
            )
        )

    def draft(self, request: Request) -> Draft:
        """Checks a request as far as nothing has to be read for it, and takes the names of its outputs.

        Raises:
            UsageError: for an option out of range, media that the model does not take, or an output that
                cannot be written or is there already.
            ArtifactError: for a form of the loop that is not built.
        """
        options = self._resolve(request)
        check_media(self._manifest, request.media)
        if request.output is None:
            path = self._path(request, "output")
        else:
            path = self._expand(request, request.output, "output")
        latents = None if self._options["save_latents"] is None else self._path(request, "save_latents")
        with usable_names():
            videos = video_paths(path, self._profile.num_videos)
            check_folder(path.parent)
            check_file(latents, "--save-latents", overwrite=self._many or self._options["overwrite"])
            self.take([*videos, *map(metadata_sidecar, videos), latents], request.where)
            if not self._compared:
                check_free(videos, self._options["overwrite"])
            outputs = videos if latents is None else [*videos, latents]
            there = self._compared and all(file.exists() for file in outputs)
        return Draft(request, options, tuple(videos), latents, there)

    def job(self, draft: Draft) -> Job:
        """Reads what a job is made from, and finds what is there of it.

        Raises:
            UsageError: for media that cannot be used, or an output that is there and would be another.
        """
        request, options, videos, latents = draft.request, draft.options, draft.videos, draft.latents
        read = self._media.digest if draft.there else self._media.check
        media = read(request.media)
        with usable_names():
            metadata = self._metadata(request, options, media)
            missing = self._missing(videos, metadata) if self._compared else tuple(range(len(videos)))
            if latents is not None and latents.exists() and not self._options["overwrite"]:
                check_file(latents, "--save-latents", overwrite=not missing)
                latents = None
        job = Job(request, options, metadata["fps"], videos, missing, latents, metadata, media.num_segments)
        if not job.finished:
            self._media.keep(request.media)
        return job

    @property
    def _compared(self) -> bool:
        """Whether a video that is there may be the one that would be made."""
        return self._many and not self._options["overwrite"]

    def _metadata(self, request: Request, options: Mapping[str, Any], media: Checked) -> dict[str, Any]:
        fps = self._manifest.model["defaults"]["fps"] if request.fps is None else request.fps
        facts = dict(self._facts)
        if media.num_frames is not None:  # the profile's are those of a segment
            facts |= {"num_frames": media.num_frames, "segment_frames": self._profile.num_frames}
        if "latents" in facts and media.num_segments == 1:  # they are the noise of the first segment
            facts["seed"] = None
        return {
            **options,
            "content_digest": self._manifest.content_digest,
            "fps": float(fps),
            "num_videos": self._profile.num_videos,
            "wanrun": __version__,
            **facts,
            # "video" is the number of the video that is made.
            **{"video_file" if name == "video" else name: fact for name, fact in media.facts.items()},
        }

    def _resolve(self, request: Request) -> dict[str, Any]:
        """The request's options with the artifact's defaults filled in, all of them checked."""
        check_numbers(vars(request))
        scale = request.guidance_scale
        if scale is not None and (scale > 1) != self._profile.guidance:
            raise UsageError(
                f"{field('guidance_scale')} does not fit the run's profile",
                expected="more than 1" if self._profile.guidance else "at most 1",
                found=scale,
                remedy="the profile is chosen by --guidance-scale: use a file for each kind",
            )
        options = resolve_options(
            self._manifest,
            self._profile,
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            seed=request.seed,
            num_steps=request.steps,
            guidance_scale=request.guidance_scale,
            guidance_scale_2=request.guidance_scale_2,
            boundary=request.boundary,
            flow_shift=request.flow_shift,
            solver=request.solver,
            loop=self._options["loop"],
            conditioning_scale=request.conditioning_scale,
            segment_overlap=request.segment_overlap,
        )
        initial_noise(request.seed, (1,))  # refuses a bad seed
        table = (options["solver"], options["num_steps"], options["flow_shift"])
        if table not in self._tables:
            solver_table(*table, self._manifest.model["num_train_timesteps"])
            self._tables.add(table)
        return options

    def _missing(self, videos: Sequence[Path], metadata: Mapping[str, Any]) -> tuple[int, ...]:
        """Which videos are not there yet; those that are have to be the ones that would be made."""
        missing = []
        for index, video in enumerate(videos):
            expected = {**metadata, "video": index}
            if video.exists():
                check_free([video], overwrite=True)
                _check_same(video, expected)
            else:
                missing.append(index)
                # What a run leaves that was killed just before it named the video.
                if not _is_leftover(metadata_sidecar(video), expected):
                    check_free([video], overwrite=False)
        return tuple(missing)


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as a file gives it back, without the version, which two runs may differ in."""
    plain = json.loads(json.dumps(dict(metadata), default=str))
    plain.pop("wanrun", None)
    return dict(plain)


def _check_same(video: Path, expected: Mapping[str, Any]) -> None:
    """Raises UsageError unless a video that is there is the one that would be made."""
    from wanrun.media.write_video import read_metadata

    remedy = "pass --overwrite to make all again, or choose another output"
    try:
        there = _plain(read_metadata(video))
    except UsageError as error:
        raise UsageError(f"the output {video} exists; {error}", remedy=remedy) from None
    wanted = _plain(expected)
    if there == wanted:
        return
    if not there:
        raise UsageError(f"the output {video} exists, and does not say how it was made", remedy=remedy)
    key = next(key for key in sorted({*wanted, *there}) if wanted.get(key, ...) != there.get(key, ...))
    raise UsageError(
        f"the output {video} exists, and was made otherwise",
        expected=f"{key} {_shown(wanted, key)}",
        found=_shown(there, key),
        remedy=remedy,
    )


def _shown(metadata: Mapping[str, Any], key: str) -> str:
    text = json.dumps(metadata[key], ensure_ascii=False) if key in metadata else "none"
    return text if len(text) <= 60 else text[:60] + "..."


def _is_leftover(sidecar: Path, expected: Mapping[str, Any]) -> bool:
    """Whether a sidecar without its video holds what would be written to it."""
    try:
        there = json.loads(sidecar.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(there, dict) and _plain(there) == _plain(expected)
