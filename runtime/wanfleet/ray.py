"""Videos of a Ray dataset: rows of options in, rows with videos and metadata out (extra ``ray``).

    rows = ray.data.read_json("prompts.jsonl")
    made = wanfleet.ray.make_videos(rows, "hf://OWNER/NAME", "s3://bucket/videos", workers=8, num_gpus=1)
    made.write_parquet("s3://bucket/made")

Each worker loads the artifact once, and begins a row while the previous one's video is decoded and stored.
Ray gives the rows of a worker that has died to another one, which makes each of them alone. A row whose video
exists is not made again; if two workers make it at once, the second video is discarded.

A dataset of Ray is computed each time that it is read, also by ``show``: then workers load the artifact
again, find the videos, and ``made`` is False. ``materialize`` computes it once.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import wanhub
import wanrun
from wanfleet.rows import Row, RowStore, added_types, check_suffix, digest, plain, request_of
from wanfleet.uploads import Uploads
from wanrun.errors import AdapterError, ArtifactError, UsageError, WanError, quoted
from wanrun.job.line import AT_ONCE

if TYPE_CHECKING:
    import pyarrow
    from ray.data import Dataset

ROWS_OF_A_BLOCK: Final = 64
"""Rows that come back together: a block is a file of a table that is written."""

_MEDIA: Final = frozenset(inspect.signature(wanrun.Media).parameters)
"""The options that ``wanrun.Media`` has."""


def make_videos(
    rows: Dataset,
    artifact: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    workers: int = 1,
    suffix: str = ".mp4",
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    actor: Mapping[str, Any] | None = None,
    **loading: Any,
) -> Dataset:
    """Makes a video of each row, by actors that load the artifact once.

    Args:
        rows: a dataset; see ``VideoMaker.__call__``.
        artifact: an artifact's folder, which every node has, or an address.
        output: the folder, which every node has, or URL of the videos.
        workers: the number of actors.
        suffix: the kind of video.
        num_cpus: CPUs of an actor, for Ray.
        num_gpus: GPUs of an actor, for Ray.
        actor: other demands of an actor, by the names that ``Dataset.map_batches`` has, such as
            ``memory``, ``resources``, ``accelerator_type`` and ``runtime_env``.
        loading: keywords of ``wanrun.load``.

    Returns:
        The rows with ``videos``, ``metadata``, ``made``, ``error`` and ``seconds``, in no particular order.
        Like all of Ray's datasets it is computed whenever it is read.

    Raises:
        UsageError: for an unknown suffix.
    """
    from ray.data import ActorPoolStrategy

    check_suffix(suffix)
    made = rows.repartition(target_num_rows_per_block=1).map_batches(
        _TableMaker,  # type: ignore[arg-type]
        batch_size=1,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(
            size=workers, max_concurrent_calls_per_actor=AT_ONCE, enable_true_multi_threading=True
        ),
        fn_constructor_args=(os.fspath(artifact), os.fspath(output), suffix),
        fn_constructor_kwargs=loading,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        **(actor or {}),
    )
    return made.repartition(target_num_rows_per_block=ROWS_OF_A_BLOCK, strict=True)


class VideoMaker:
    """An actor of Ray Data. ``make_videos`` makes some; a class of callable objects for ``Dataset.map``.

    Threads may share one: a row begins when the one before it has made its steps.

    Args:
        artifact: an artifact's folder or address.
        output: the folder or URL of the videos.
        suffix: the kind of video, such as ``.mp4``.
        loading: keywords of ``wanrun.load``.

    Raises:
        ArtifactError, UsageError: as ``wanhub.load`` and ``Uploads``; UsageError for an unknown suffix.
    """

    def __init__(self, artifact: str, output: str, suffix: str = ".mp4", **loading: Any) -> None:
        check_suffix(suffix)
        self._uploads, self._suffix = Uploads(output), suffix
        self._store = RowStore(self._uploads)
        self._pipeline = wanhub.load(artifact, **loading)
        names = {row.name: {row.name, *row.also} for row in wanrun.options()}
        self._known, self._seeds = set[str]().union(*names.values()), names["seed"]

    def __call__(self, row: Row) -> Row:
        """Makes the videos of a row.

        Args:
            row: ``prompt`` and other options of a generation by name, images and videos as ``wanrun.Media``
                takes them; ``output``, a name for the video without a suffix; other columns stay. A seed
                that is to be drawn is the same whenever the row is made.

        Returns:
            The row with ``videos``, their paths or URLs; ``metadata``, JSON; ``made``, whether they were made
            now; ``seconds``, of a video that was made without the wait for another row's steps; and
            ``error``, why there is no video, or "".

        Raises:
            ArtifactError: if the artifact is not usable: then no row is.
        """
        started, added = time.monotonic(), Row()
        try:
            added = self._made({key: plain(value) for key, value in row.items()})
        except WanError as error:
            if isinstance(error, ArtifactError) and not isinstance(error, AdapterError):
                raise
            added["error"] = str(error)
        nothing = {"videos": [], "metadata": "", "made": False, "error": ""}
        return {**row, **nothing, "seconds": time.monotonic() - started, **added}

    def _made(self, row: Row) -> Row:
        """Returns the columns added to a row; makes its videos unless they exist."""
        asked = {name: row[name] for name in row.keys() & self._known if row[name] is not None}
        drawn = [name for name in self._seeds & asked.keys() if str(asked[name]) in ("random", "-1")]
        try:
            generation = self._resolved(asked | dict.fromkeys(drawn, 0))
        except ArtifactError as error:  # it has not what this row asks for
            return {"error": str(error)}
        inputs = generation.read_media()
        request = request_of(generation, inputs, bool(drawn))
        name = row.get("output") or request[:16]
        if not isinstance(name, str) or "/" in name or name.startswith("."):
            raise UsageError(
                "invalid_value", f"{quoted(name)} is no name of a video", expected="a name without a folder"
            )
        if (there := self._store.made(name, request)) is not None:
            return there
        if drawn:  # the same for each worker that gets the row
            generation = self._resolved(asked | dict.fromkeys(drawn, int(digest([request, name])[:8], 16)))
        with (
            tempfile.TemporaryDirectory(prefix="wan-video-") as folder,
            self._store.turn(name, Path(folder)) as passed,
        ):
            started, path = time.monotonic(), Path(folder) / f"{name}{self._suffix}"
            outputs = wanrun.outputs_of(path, generation.profile.num_videos)
            job = wanrun.Job(name, generation, outputs)
            outcome = wanrun.run_job(self._pipeline, job, inputs=inputs, passed=passed)
            if outcome.error is not None:
                raise outcome.error
            files = [output.path for output in outputs]
            facts = {"request": request, "videos": [file.name for file in files], **outcome.metadata}
            return {**self._store.deliver(name, files, facts), "seconds": time.monotonic() - started}

    def _resolved(self, asked: Row) -> wanrun.Generation:
        """Returns the generation of options by any of their names."""
        names = {also: row.name for row in wanrun.options() for also in row.also}
        asked = {names.get(name, name): value for name, value in asked.items()}
        given = {name: asked[name] for name in asked.keys() & _MEDIA}
        others = {name: value for name, value in asked.items() if name not in {*given, "prompt"}}
        media = wanrun.Media(**given) if given else None
        return self._pipeline.resolve(asked.get("prompt", ""), media=media, **others)


class _TableMaker(VideoMaker):
    """Makes the rows of an Arrow table: its columns keep their types, and the added ones have fixed types."""

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:  # type: ignore[override]
        import pyarrow

        rows = [super(_TableMaker, self).__call__(row) for row in table.to_pylist()]
        types = added_types()
        table = table.drop_columns([name for name in table.column_names if name in types])
        for name, kind in types.items():
            table = table.append_column(name, pyarrow.array([row[name] for row in rows], kind))
        return table
