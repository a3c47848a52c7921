"""Reads through TensorStore the parameters that are not chunk files in the artifact's own layout.

These are weights that plain Orbax saved again: with other chunks, compressed, zarr or zarr3, in an OCDBT
database or not. Every row is checked against the manifest, as for chunk files. Nothing else needs
TensorStore, and it is imported when the first such component is opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from wanrun.artifact.layout import ITEM_BYTES, ArrayLayout, array_folder, zarr_metadata
from wanrun.artifact.parameters import Parameter
from wanrun.errors import ArtifactError
from wanrun.files import read_bounded

MAX_METADATA_BYTES = 2**20
"""The largest zarr.json, in bytes; real ones have some hundreds."""

BLOCK_BYTES = 64 * 2**20
"""Bytes per read, unless the array's chunks are larger: enough to keep several requests in flight."""

OCDBT_CACHE_BYTES = 100_000_000
"""Cache for the index of an OCDBT database, so that it is read once per component."""

FORMATS: tuple[tuple[str, bool, str], ...] = tuple(
    (folder, database, driver)
    for folder in ("", "state/")
    for database in (False, True)
    for driver in ("zarr3", "zarr")
)
"""Where Orbax stores an array: (folder inside the checkpoint, in an OCDBT database, TensorStore driver).
Orbax's second API uses the folder ``state``."""

_WAIT_SECONDS = 0.2
_ERRORS = (ValueError, OSError, IndexError, NotImplementedError)  # TensorStore's exceptions


def needs_tensorstore(folder: Path, layout: ArrayLayout) -> bool:
    """Returns whether a local array that could not be read as chunk files was saved in another form.

    Cheap: it reads at most one small file. False for a damaged array in the artifact's own layout, and
    for a missing array.
    """
    state = folder.parent / "state"
    traces = (
        folder / ".zarray",
        folder.parent / "manifest.ocdbt",
        state / "manifest.ocdbt",
        state / folder.name,
    )
    try:
        if not (folder / "zarr.json").exists():
            return any(trace.exists() for trace in traces)
        return bool(
            json.loads(read_bounded(folder / "zarr.json", MAX_METADATA_BYTES)) != zarr_metadata(layout)
        )
    except (OSError, ValueError, RecursionError):
        return False


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the runs of consecutive rows: the first of each, and the one after its last."""
    starts = [place for place, row in enumerate(rows) if not place or rows[place - 1] != row - 1]
    for start, after in pairwise([*starts, len(rows)]):
        yield rows[start], rows[after - 1] + 1


class TensorStoreReader:
    """A component's checkpoint, opened with TensorStore; its methods are thread-safe.

    Args:
        location: the component's folder.

    Raises:
        ArtifactError: if TensorStore is not installed.
    """

    def __init__(self, location: Path, name: str) -> None:
        try:
            import tensorstore
        except ImportError as error:
            raise ArtifactError(
                f"the weights in {location} are not chunk files, which only TensorStore reads",
                found=error,
                remedy="pip install tensorstore, or give the weights that wanbuild wrote",
            ) from None
        self._tensorstore, self._name, self.location = tensorstore, name, location
        self._context = tensorstore.Context({"cache_pool#ocdbt": {"total_bytes_limit": OCDBT_CACHE_BYTES}})
        self._base: dict[str, Any] = {"driver": "file", "path": f"{location.absolute()}/"}
        self._format = FORMATS[0]
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Ends waiting reads; they raise CancelledError."""
        self._cancelled.set()

    def read(
        self,
        path: str,
        parameter: Parameter,
        destination: memoryview,
        verify: str = "fast",
        rows: Sequence[int] | None = None,
    ) -> None:
        """Reads a parameter into memory, a few rows at a time, and verifies each row.

        Args:
            destination: writable bytes, as many as the rows have, or more.
            verify: 'fast' checks every row's crc32c; 'sha256' also the sha256 of a parameter that is read
                whole.
            rows: the rows to read, in rising order; None for all of them.

        Raises:
            ArtifactError: if the storage fails, or the array is missing, has another shape or dtype, or is
                damaged.
            CancelledError: after ``cancel``.
        """
        layout = parameter.layout
        source = self._open(path)
        found = f"{source.dtype.name} {tuple(source.shape)}"
        if found != f"{layout.dtype} {layout.shape}":
            raise ArtifactError(
                f"weights do not fit the artifact: {self._name}/{path} at {self.location}",
                expected=f"{layout.dtype} {layout.shape}",
                found=found,
                remedy="give the weights that this artifact was made with",
            )
        rows, unit = range(layout.rows) if rows is None else rows, layout.row_shape[0]
        held = np.frombuffer(destination, source.dtype.numpy_dtype).reshape(-1, *layout.shape[1:])
        target = self._tensorstore.array(held)  # shares the array's memory
        whole, place = hashlib.sha256(), 0
        for first, after in _runs(rows):
            moved = (place - first) * unit
            for begin, end in self._blocks(source, layout, first * unit, after * unit):
                self._wait(target[begin + moved : end + moved].write(source[begin:end]), path)
                while place < len(rows) and (rows[place] + 1) * unit <= end:
                    content = destination[place * layout.row_bytes : (place + 1) * layout.row_bytes]
                    row, checksum = rows[place], f"{crc32c(content):08x}"
                    self._check(f"row {row} has the wrong crc32c", path, parameter.crc32c[row], checksum)
                    if verify == "sha256":
                        whole.update(hashlib.sha256(content).digest())
                    place += 1
        if verify == "sha256" and len(rows) == layout.rows:
            self._check("it has the wrong sha256", path, parameter.sha256, whole.hexdigest())

    def _open(self, path: str) -> Any:
        """Opens an array; the form of the component's previous array is tried first."""
        for form in (self._format, *(form for form in FORMATS if form != self._format)):
            folder, database, driver = form
            store = {**self._base, "path": self._base["path"] + folder}
            if database:
                store = {"driver": "ocdbt", "base": store, "cache_pool": "cache_pool#ocdbt", "path": ""}
            store["path"] += array_folder(path) + "/"
            spec = {"driver": driver, "kvstore": store}
            opening = self._tensorstore.open(spec, open=True, read=True, context=self._context)
            try:
                opened = self._wait(opening, path)
            except _NotFoundError:
                continue
            self._format = form
            return opened
        raise ArtifactError(
            f"weights are missing: {self._name}/{path}",
            expected=f"an array {array_folder(path)} at {self.location}",
            found="none",
            remedy="copy the weights again, or check --weights",
        )

    def _blocks(self, source: Any, layout: ArrayLayout, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Splits a range of axis 0 at whole chunks, so that no chunk of it is read or unpacked twice."""
        chunk = min(source.chunk_layout.read_chunk.shape[0] or layout.shape[0], layout.shape[0])
        chunk_bytes = math.prod((chunk, *layout.shape[1:])) * ITEM_BYTES[layout.dtype]
        step = chunk * max(1, BLOCK_BYTES // chunk_bytes)
        return pairwise([begin, *range((begin // step + 1) * step, end, step), end])

    def _wait(self, future: Any, path: str) -> Any:
        while True:
            if self._cancelled.is_set():
                future.cancel()
                raise CancelledError
            try:
                return future.result(timeout=_WAIT_SECONDS)
            except TimeoutError:
                continue
            except _ERRORS as error:
                raise self._failure(str(error), path) from None

    def _failure(self, text: str, path: str) -> Exception:
        """Converts TensorStore's error text, a status and details, to an exception of ours."""
        status, _, detail = text.partition(": ")
        if status == "NOT_FOUND" and re.match(r'Error opening "\w+" driver: Metadata at ', detail):
            return _NotFoundError(detail)
        detail = re.sub(r" \[(tensorstore_spec|source locations)='.*", "", detail, flags=re.S)
        return ArtifactError(
            f"weights cannot be read: {self._name}/{path} at {self.location}",
            found=f"{status}: {detail}" if detail else text,
            remedy="copy the weights again, or check --weights",
        )

    def _check(self, what: str, path: str, expected: str, found: str) -> None:
        if found != expected:
            raise ArtifactError(
                f"weights are damaged: {self._name}/{path}, {what} at {self.location}",
                expected=expected,
                found=found,
                remedy="copy the weights again, or check that they are those this artifact was made with",
            )


class _NotFoundError(Exception):
    """An array does not exist in one of the forms."""
