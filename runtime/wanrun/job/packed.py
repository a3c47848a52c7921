"""A job on its way to another process: never stored, for only the wanrun that wrote it reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from wanrun import __version__
from wanrun.errors import ArtifactError, UsageError, field
from wanrun.job.outputs import Output
from wanrun.media.inputs import MEDIA_KINDS, Media
from wanrun.request.adapters import ChosenLora

if TYPE_CHECKING:
    import numpy as np

    from wanrun.artifact.manifest import Manifest
    from wanrun.denoising.solvers import SolverTable
    from wanrun.job.job import Job


class _Array(Struct, frozen=True):
    """An array, exactly."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Start(Struct, frozen=True):
    """A ``StageStart``."""

    step: int
    kept: float
    noise: float


class _Table(Struct, frozen=True):
    """A ``SolverTable``; its arrays by name."""

    name: str
    start: float
    skipped: int
    starts: tuple[_Start, ...]
    arrays: dict[str, _Array]


class _Range(Struct, frozen=True):
    """An ``ExpertRange``."""

    transformer: str
    first: int
    last: int
    guidance_scales: tuple[float, ...]
    guider: str = "cfg"
    skip_scales: tuple[float, ...] = ()
    skip_layers: tuple[int, ...] = ()


class _File(Struct, frozen=True):
    """An ``Output``."""

    path: str
    video: int
    kind: str


class PackedJob(Struct, frozen=True, kw_only=True):
    """A ``Job`` as one message. The manifest is not sent: who receives the job has the artifact.

    Attributes:
        id: the job.
        wanrun: the version that packed it.
        content_digest: that of the artifact.
        profile: the name of the profile.
        options: as of ``Generation``; sequences are lists.
        table: the solver's table.
        ranges: the steps of each expert.
        fps: frames per second.
        media: images and videos as paths; None without.
        loras: as of ``Generation``.
        warnings: of the generation.
        outputs: the files to write.
    """

    id: str
    wanrun: str
    content_digest: str
    profile: str
    options: dict[str, Any]
    table: _Table
    ranges: tuple[_Range, ...]
    fps: float
    media: Media | None
    loras: tuple[ChosenLora, ...]
    warnings: tuple[str, ...]
    outputs: tuple[_File, ...]

    def unpack(self, manifest: Manifest) -> Job:
        """Returns the job.

        Args:
            manifest: of the artifact here.

        Raises:
            ArtifactError: if the job was packed for another artifact, which has other profiles perhaps, or by
                another version.
        """
        from wanrun.denoising.steps import ExpertRange
        from wanrun.job.job import Job
        from wanrun.request.generation import Generation

        _check("version of wanrun", __version__, self.wanrun)
        _check("content digest", manifest.content_digest, self.content_digest)
        generation = Generation(
            manifest=manifest,
            profile=manifest.profiles[self.profile],
            options=self.options,
            table=_unpacked_table(self.table),
            ranges=tuple(ExpertRange(*structs.astuple(one)) for one in self.ranges),
            fps=self.fps,
            media=self.media,
            loras=self.loras,
            warnings=self.warnings,
        )
        outputs = (Output(Path(one.path), one.video, one.kind) for one in self.outputs)
        return Job(self.id, generation, tuple(outputs))


def pack(job: Job) -> PackedJob:
    """Returns a job for another process.

    Raises:
        UsageError: for images or videos in memory.
    """
    generation = job.generation
    return PackedJob(
        id=job.id,
        wanrun=__version__,
        content_digest=generation.manifest.content_digest,
        profile=generation.profile.name,
        options=dict(generation.options),
        table=_packed_table(generation.table),
        ranges=tuple(_Range(**vars(one)) for one in generation.ranges),
        fps=generation.fps,
        media=None if generation.media is None else _as_paths(generation.media),
        loras=generation.loras,
        warnings=generation.warnings,
        outputs=tuple(_File(str(one.path), one.video, one.kind) for one in job.outputs),
    )


def _check(what: str, expected: str, found: str) -> None:
    if found != expected:
        raise ArtifactError(
            "changed",
            f"the job is of another {what}",
            expected=expected,
            found=found,
            remedy="start all processes of one installation and one artifact again",
        )


def _as_paths(media: Media) -> Media:
    """Returns media whose files are texts."""
    changes = dict[str, Any]()
    for name in MEDIA_KINDS:
        given = getattr(media, name)
        several = isinstance(given, tuple | list)
        texts = tuple(_as_path(name, one) for one in (given if several else (given,)) if one is not None)
        if texts:
            changes[name] = texts if several else texts[0]
    return structs.replace(media, **changes)


def _as_path(name: str, source: object) -> str:
    if not isinstance(source, Path | str):
        raise UsageError(
            "missing_file",
            f"{field(name)} is in memory",
            expected="a file",
            remedy="save it, and give its path",
        )
    return str(source)


def _packed_table(table: SolverTable) -> _Table:
    arrays = {
        name: _packed(value) for name, value in vars(table).items() if name not in _Table.__struct_fields__
    }
    starts = tuple(_Start(**vars(one)) for one in table.starts)
    return _Table(table.name, table.start, table.skipped, starts, arrays)


def _unpacked_table(table: _Table) -> SolverTable:
    from wanrun.denoising.solvers import SolverTable, StageStart

    arrays: dict[str, Any] = {name: _unpacked(array) for name, array in table.arrays.items()}
    starts = tuple(StageStart(*structs.astuple(one)) for one in table.starts)
    return SolverTable(name=table.name, start=table.start, skipped=table.skipped, starts=starts, **arrays)


def _packed(array: np.ndarray) -> _Array:
    return _Array(array.dtype.str, array.shape, array.tobytes())


def _unpacked(array: _Array) -> np.ndarray:
    import numpy as np

    return np.frombuffer(array.data, np.dtype(array.dtype)).reshape(array.shape)
