"""A component's checkpoint: how parameters are split into chunk files, and Orbax's files next to them.

Orbax's and zarr's metadata are written without these libraries, so that equal weights give equal bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from wanhub.marker import is_copy
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.layout import ITEM_BYTES, ArrayLayout, array_folder, zarr_metadata
from wanrun.errors import unwritable
from wanrun.files import replace_file

SMALL_BYTES = 4 * 2**20
"""A stacked parameter up to this size is one chunk file; a file per layer would be mostly overhead."""

LARGE_BYTES = 64 * 2**20
"""A parameter that is not stacked is split into rows of at most this size, which threads read in parallel."""


def plan_layout(shape: tuple[int, ...], dtype: str, stacked: bool) -> ArrayLayout:
    """Chooses rows and chunk files for a parameter of a stored dtype.

    If ``stacked``, axis 0 of ``shape`` is the layer axis.
    """
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if stacked:
        return ArrayLayout(shape, dtype, shape[0], 1 if nbytes <= SMALL_BYTES else shape[0])
    wanted = -(-nbytes // LARGE_BYTES)
    rows = next((n for n in range(wanted, min(shape[0], 4 * wanted) + 1) if shape[0] % n == 0), 1)
    return ArrayLayout(shape, dtype, rows, rows)


def orbax_metadata(layouts: Mapping[str, ArrayLayout]) -> dict[str, Any]:
    """Returns the content of the checkpoint's ``_METADATA``: the tree of parameters, by path."""

    def entry(path: str, layout: ArrayLayout) -> tuple[str, dict[str, Any]]:
        keys = path.split("/")
        value = {
            "value_type": "np.ndarray",
            "skip_deserialize": False,
            "write_shape": list(layout.chunk_shape),
        }
        return str(tuple(keys)), {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": value,
        }

    return {
        "tree_metadata": dict(entry(path, layouts[path]) for path in sorted(layouts)),
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


CHECKPOINT_METADATA: dict[str, Any] = {
    "item_handlers": "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler",
    "metrics": {},
    "performance_metrics": {},
    # Orbax writes the time here; a constant makes two conversions of one source byte-identical.
    "init_timestamp_nsecs": 0,
    "commit_timestamp_nsecs": 0,
    "custom_metadata": {},
}
"""Content of the checkpoint's ``_CHECKPOINT_METADATA``."""


def metadata_files(layouts: Mapping[str, ArrayLayout]) -> dict[str, bytes]:
    """Returns every file of a checkpoint that is not a chunk file, by its name in the checkpoint's folder.

    ``wanbuild verify`` compares them byte for byte, so a change here is a new format version.
    """
    contents = {
        **{f"{array_folder(path)}/zarr.json": zarr_metadata(layouts[path]) for path in sorted(layouts)},
        "_METADATA": orbax_metadata(layouts),
        "_CHECKPOINT_METADATA": CHECKPOINT_METADATA,
    }
    return {name: json.dumps(content).encode("ascii") for name, content in contents.items()}


def add_metadata(artifact: Artifact) -> None:
    """Writes a copy's metadata files; raises UsageError if it cannot.

    A copy does not fetch them, because a run reads only chunk files.
    """
    if not is_copy(artifact.folder):
        return
    try:
        for component in artifact.manifest.components.values():
            layouts = {path: one.layout for path, one in component.parameters.items()}
            for name, data in metadata_files(layouts).items():
                path = artifact.folder / component.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.is_file() or path.read_bytes() != data:
                    replace_file(path, data)
    except OSError as error:
        raise unwritable(f"the copy {artifact}", error) from error
