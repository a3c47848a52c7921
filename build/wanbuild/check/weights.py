"""Checks an artifact's weights: the files are the manifest's, and wanrun and plain Orbax read the same bits.

Parameters are read in batches, so memory does not grow with a component.
"""

from __future__ import annotations

import functools
import operator
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c
from msgspec import structs

from wanbuild.conversion.orbax import add_metadata, metadata_files
from wanrun.artifact.artifact import Artifact, named_weights
from wanrun.artifact.named import WEIGHTS
from wanrun.artifact.parameters import Component, Parameter, nest
from wanrun.errors import ArtifactError
from wanrun.files import check_digest, digest_found, sha256_of
from wanrun.machine.environment import usable_cores
from wanrun.units import in_bytes
from wanrun.weights.buffers import DTYPES
from wanrun.weights.restore import REBUILD

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

Report = Callable[[str], None]


BATCH_BYTES = 256 * 2**20
"""Bytes of the parameters that Orbax reads at a time; a larger parameter is a batch by itself."""


def check_places(artifact: Artifact) -> None:
    """Raises ArtifactError for an unlisted file in weights/, or for damaged or missing Orbax metadata.

    A copy has no metadata, so it is written first.
    """
    add_metadata(artifact)
    check_names(artifact)
    for component in artifact.manifest.components.values():
        check_metadata(artifact.folder, component)


def check_with_orbax(artifact: Artifact, report: Report) -> None:
    """Restores every component with plain Orbax, and compares the bits with the manifest's row checksums.

    Raises ArtifactError for the first parameter that Orbax does not restore, or restores with other bits.

    At most twice the bytes of a batch are in memory: its arrays, and chunks that TensorStore has read but not
    yet copied. Measured: 0.53 GB for 1200 parameters in batches of 0.27 GB, and 0.67 to 1.03 GB for an array
    of 0.63 GB. The largest parameter of the 14B models has 5.7 GB.
    """
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler()
    with ocp.Checkpointer(handler) as checkpointer, ThreadPoolExecutor(usable_cores()) as pool:
        for name, component in artifact.manifest.components.items():
            started = time.perf_counter()
            for batch in batches(component):
                tree = _restore(checkpointer, artifact.folder, name, component, batch)
                for path, parameter in batch.parameters.items():
                    array = functools.reduce(operator.getitem, path.split("/"), tree)
                    _compare(f"{name}/{path}", parameter, array, pool)
                del tree, array
            report(f"{_line(name, component, started)}, the same through plain Orbax")


def check_names(artifact: Artifact) -> None:
    """Raises ArtifactError for the first file or folder in weights/ that the manifest does not imply."""
    implied: set[str] = set()
    for name, component in artifact.manifest.components.items():
        layouts = {path: parameter.layout for path, parameter in component.parameters.items()}
        implied |= {f"{component.folder}/{file}" for file in metadata_files(layouts)}
        implied |= {one.name for one in named_weights(name, component)}
    implied |= {str(parent) for name in implied for parent in PurePosixPath(name).parents}
    # Links are followed, as the restore does; a loop of links has a name that is not implied.
    for folder, folders, files in os.walk(artifact.folder / WEIGHTS.folder, followlinks=True):
        for path in (Path(folder, name) for name in sorted((*folders, *files))):
            if path.relative_to(artifact.folder).as_posix() not in implied:
                raise ArtifactError(
                    "mismatch",
                    f"{path} does not belong to the artifact",
                    expected="nothing in weights/ that the manifest does not list",
                    remedy="remove it",
                )


def check_metadata(artifact: Path, component: Component) -> None:
    """Raises ArtifactError for the first Orbax metadata file that differs from what wanbuild writes."""
    layouts = {path: parameter.layout for path, parameter in component.parameters.items()}
    for name, content in metadata_files(layouts).items():
        path = artifact / component.folder / name
        check_digest(digest_found(path, len(content)), sha256_of(content), f"{path} is damaged", REBUILD)


def batches(component: Component) -> Iterator[Component]:
    """Yields parts of a component, each of at most ``BATCH_BYTES`` or of one parameter."""
    batch: dict[str, Parameter] = {}
    nbytes = 0
    for path, parameter in sorted(component.parameters.items()):
        if batch and nbytes + parameter.layout.nbytes > BATCH_BYTES:
            yield structs.replace(component, parameters=batch)
            batch, nbytes = {}, 0
        batch[path] = parameter
        nbytes += parameter.layout.nbytes
    if batch:
        yield structs.replace(component, parameters=batch)


def _restore(
    checkpointer: ocp.Checkpointer, artifact: Path, name: str, component: Component, batch: Component
) -> Any:
    """Returns the component's tree with a batch's arrays, restored, and placeholders for the others."""
    import jax
    import orbax.checkpoint as ocp

    def leaf(path: str, parameter: Parameter) -> Any:
        if path not in batch.parameters:
            return ocp.PLACEHOLDER
        return jax.ShapeDtypeStruct(parameter.layout.shape, DTYPES[parameter.layout.dtype])

    item = nest({path: leaf(path, parameter) for path, parameter in component.parameters.items()})
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    folder = (artifact / component.folder).absolute()
    try:
        return checkpointer.restore(folder, args=ocp.args.PyTreeRestore(item, restore_args=as_numpy))
    except (ValueError, OSError, KeyError, TypeError) as error:
        first, last = min(batch.parameters), max(batch.parameters)
        paths = first if first == last else f"{first} to {last}"
        reason, *_ = str(error).strip().splitlines() or [""]
        raise ArtifactError(
            "damaged",
            f"plain Orbax does not restore {name} in {folder} ({paths})",
            found=f"{type(error).__name__}: {reason}",
            remedy=f"{REBUILD}, or install the Orbax that wanbuild is tested with",
        ) from error


def _compare(name: str, parameter: Parameter, array: np.ndarray, pool: ThreadPoolExecutor) -> None:
    """Raises ArtifactError unless the array has the parameter's shape, dtype and bits."""
    layout, what = parameter.layout, f"plain Orbax restores {name} differently"
    expected, found = f"{layout.dtype} {layout.shape}", f"{array.dtype.name} {array.shape}"
    if found != expected:
        raise ArtifactError("damaged", what, expected=expected, found=found, remedy=REBUILD)
    data = array.reshape(-1).view(np.uint8).data
    starts = range(0, layout.nbytes, layout.row_bytes)
    checksums = pool.map(lambda start: f"{crc32c(data[start : start + layout.row_bytes]):08x}", starts)
    for row, (checksum, listed) in enumerate(zip(checksums, parameter.crc32c, strict=True)):
        if checksum != listed:
            where = f"row {row} with crc32c"
            raise ArtifactError("damaged", what, expected=f"{where} {listed}", found=checksum, remedy=REBUILD)


def _line(name: str, component: Component, started: float) -> str:
    rate = component.nbytes / (time.perf_counter() - started)
    return f"{name:<14} {len(component.parameters):>4} parameters, {in_bytes(rate)}/s"
