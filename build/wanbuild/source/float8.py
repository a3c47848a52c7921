"""8-bit weights of single files, and the scales that restore them: value = stored value x scale.

Sources: ComfyUI's files, whose names end in fp8_scaled (one scale for each tensor, X.scale_weight, in newer
files X.weight_scale), and LightX2V's (one scale for each row, X.weight_scale). Files whose names end in
fp8_e4m3fn have no scales. Scales of activations belong to kernels that multiply 8-bit values, and are not
read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from wanbuild.source.safetensors import FLOAT8_DTYPES, TensorEntry, TensorFile
from wanrun.errors import SourceError
from wanrun.files import sha256_of

SCALES = (".scale_weight", ".weight_scale")
"""Ends of the names of weights' scales; the weight's name ends in ``.weight`` instead."""

UNUSED = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
"""Ends of the names of tensors that come with 8-bit weights and do not change their values."""


@dataclass(frozen=True)
class Float8:
    """The dtype of an 8-bit weight with its scale.

    Args:
        table: the value of each of the 256 stored bytes, float32 (256,), multiplied by a tensor's one scale.
        rows: one scale for each row of the tensor, float32 (rows,); None if there are none.
        row_items: items of a row.
    """

    table: np.ndarray
    rows: np.ndarray | None
    row_items: int

    def values(self, stored: np.ndarray, start: int) -> np.ndarray:
        """Returns the weights, float32.

        Args:
            stored: items of the tensor as stored, one byte each, flat.
            start: the first one's index in the tensor.
        """
        values = np.take(self.table, stored.view(np.uint8), mode="wrap")  # no byte is out of range
        if self.rows is not None:
            first, last = start // self.row_items, (start + len(values) - 1) // self.row_items
            scales = np.repeat(self.rows[first : last + 1], self.row_items)
            values *= scales[start - first * self.row_items :][: len(values)]
        return values

    @property
    def digest(self) -> str:
        """sha256 of the table and the rows' scales."""
        return sha256_of(self.table.tobytes() + (b"" if self.rows is None else self.rows.tobytes()))

    def part(self, index: int, parts: int) -> Float8:
        """Returns the dtype of one of equally many rows of the tensor."""
        if self.rows is None:
            return self
        count = len(self.rows) // parts
        return Float8(self.table, self.rows[index * count : (index + 1) * count], self.row_items)


def weights_in(holders: Mapping[str, TensorFile]) -> dict[str, TensorFile]:
    """Returns the tensors that are weights, without scales; the file of each tensor, by its name."""
    return {
        key: file for key, file in holders.items() if not key.endswith(UNUSED) and _scaled(key) not in holders
    }


def _scaled(key: str) -> str | None:
    """Returns the name of the weight that a tensor is the scale of; None if its name is not a scale's."""
    end = next((end for end in SCALES if key.endswith(end)), None)
    return None if end is None else f"{key.removesuffix(end)}.weight"


def has_scales(keys: Collection[str]) -> bool:
    """Returns whether tensors of these names are scales or marks of them: each 8-bit weight has one then."""
    return any(key.endswith(UNUSED) or _scaled(key) in keys for key in keys)


def float8_of(key: str, holders: Mapping[str, TensorFile], scaled: bool) -> Float8 | None:
    """Returns how a stored weight is restored; None for one that is not of 8 bits.

    Args:
        key: the weight's name in its file.
        holders: the file of each tensor, scales among them.
        scaled: the result of ``has_scales``.

    Raises:
        SourceError: if its scale is missing although others are scaled, is neither one number nor one for
            each row, or is not a positive number; or if the weight with a scale is not of 8 bits.
    """
    entry = holders[key].entries[key]
    names = [key.removesuffix(".weight") + end for end in SCALES] if key.endswith(".weight") else []
    name = next((name for name in names if name in holders), None)
    if entry.dtype_name not in FLOAT8_DTYPES:
        if name is not None:
            raise _unknown(key, holders[key], f"{entry.dtype_name} with {name}")
        return None
    table = np.arange(256, dtype=np.uint8).view(entry.dtype).astype(np.float32)
    items = max(entry.nbytes // max(entry.shape[0], 1), 1) if entry.shape else 1
    if name is None and scaled:
        raise _unknown(key, holders[key], f"no {' and no '.join(names) or 'scale'}, among scaled weights")
    if name is None:
        return Float8(table, None, items)
    scale = _scale(holders[name], name, key, entry)
    return Float8(table * scale, None, items) if scale.size == 1 else Float8(table, scale, items)


def _scale(file: TensorFile, name: str, key: str, entry: TensorEntry) -> np.ndarray:
    """Returns a weight's scale, float32 (1,) or (rows,)."""
    shape = file.entries[name].shape
    scale = file.array(name).astype(np.float32).reshape(-1)
    rows = entry.shape[:1]
    if scale.size != 1 and (shape[:1] != rows or scale.shape != rows):
        raise _unknown(key, file, f"a scale of shape {list(shape)} for {list(entry.shape)}")
    wrong = scale[~((scale > 0) & (scale < np.inf))]
    if wrong.size:
        raise _unknown(key, file, f"the scale {wrong[0]:g} in {name}")
    return scale


def _unknown(key: str, file: TensorFile, found: str) -> SourceError:
    return SourceError(
        f"{key} in {file.path} is quantized in a way that is not known",
        expected="8-bit floats with one positive scale, or one for each row",
        found=found,
        remedy="use the published checkpoint, or a file with bfloat16 or float16 weights",
    )
