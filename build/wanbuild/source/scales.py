"""8-bit weights of single files, and the scales that restore them: value = stored value x scale.

Sources: ComfyUI's files, whose names end in fp8_scaled or int8 (one scale for each tensor, X.scale_weight, in
newer files X.weight_scale, or one for each row), Kijai's, and LightX2V's (one scale for each row,
X.weight_scale). Files whose names end in fp8_e4m3fn have no scales; integers always have. Scales of
activations belong to kernels that multiply 8-bit values, and are not read. Newer files of ComfyUI say how
each layer is quantized (comfy/quant_ops.py, QUANTIZATION.md): in the metadata, or in a tensor X.comfy_quant.
Folders that NVIDIA ModelOpt has exported (modelopt/torch/export/convert_hf_config.py) say it in config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from wanbuild.config import read_json, shown
from wanbuild.source.former_names import with_names_of_config
from wanbuild.source.safetensors import EIGHT_BIT_DTYPES, TensorEntry, TensorFile
from wanrun.errors import SourceError
from wanrun.files import sha256_of

SCALES = (".scale_weight", ".weight_scale")
"""Ends of the names of weights' scales; the weight's name ends in ``.weight`` instead."""

QUANT, METADATA = ".comfy_quant", "_quantization_metadata"
"""Where newer files say how a layer is quantized: the end of a tensor's name, and a key of the metadata."""

UNUSED = (".scale_input", ".input_scale", QUANT, "scaled_fp8")
"""Ends of the names of tensors that come with 8-bit weights and do not change their values."""

FORMATS: Mapping[str, str] = MappingProxyType(
    {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8_tensorwise": "I8"}
)
"""ComfyUI's formats whose values are a stored one times a scale, and the dtype of each."""

_QUANTIZATION = "quantization_config"
"""The field of a config.json that says how weights are quantized."""

_PLAIN = frozenset({"format", "full_precision_matrix_mult", "orig_dtype", "orig_shape"})
"""Facts of a layer that do not change its values; ``convrot`` means that the weights are rotated."""

OTHER_FORMS: Mapping[str, str] = MappingProxyType(
    {
        ".weight_scale_2": "a second scale, as nvfp4 has",
        ".weight_global_scale": "a global scale, as nvfp4 has",
        ".pre_quant_scale": "a scale of its inputs, as awq has",
    }
)
"""Ends of the names of tensors that belong to forms which are not read, and what each is."""


@dataclass(frozen=True)
class StoredEightBit:
    """The dtype of an 8-bit weight with its scale.

    Attributes:
        table: the value of each of the 256 stored bytes, float32 (256,), multiplied by a tensor's one scale.
        rows: one scale for each row of the tensor, float32 (rows,); None if there are none.
        row_items: items of a row.
        scale: a tensor's one scale.
    """

    table: np.ndarray
    rows: np.ndarray | None
    row_items: int
    scale: float = 1.0

    def values(self, stored: np.ndarray, start: int) -> np.ndarray:
        """Returns the float32 weights of flat stored items, one byte each; ``start`` is the first index."""
        values = np.take(self.table, stored.view(np.uint8), mode="wrap")  # no byte is out of range
        if self.rows is not None:
            first, last = start // self.row_items, (start + len(values) - 1) // self.row_items
            scales = np.repeat(self.rows[first : last + 1], self.row_items)
            values *= scales[start - first * self.row_items :][: len(values)]
        return values

    def scales(self, first: int, count: int) -> np.ndarray:
        """Returns the scales of ``count`` rows from ``first`` on, float32."""
        if self.rows is None:
            return np.full(count, self.scale, np.float32)
        return self.rows[first : first + count]

    @property
    def digest(self) -> str:
        """sha256 of the table and the rows' scales, hexadecimal."""
        return sha256_of(self.table.tobytes() + (b"" if self.rows is None else self.rows.tobytes()))

    def part(self, index: int, parts: int) -> StoredEightBit:
        """Returns the dtype of one of ``parts`` equal parts of the tensor's rows."""
        if self.rows is None:
            return self
        count = len(self.rows) // parts
        return StoredEightBit(self.table, self.rows[index * count : (index + 1) * count], self.row_items)


def weights_in(holders: Mapping[str, TensorFile]) -> dict[str, TensorFile]:
    """Returns the tensors that are weights, without scales; the file of each tensor, by its name."""
    return {
        key: file for key, file in holders.items() if not key.endswith(UNUSED) and _scaled(key) not in holders
    }


def _scaled(key: str) -> str | None:
    """Returns the name of the weight that a tensor scales; None if its name is not a scale's."""
    end = next((end for end in SCALES if key.endswith(end)), None)
    return None if end is None else f"{key.removesuffix(end)}.weight"


def read_config(file: Path) -> dict[str, Any]:
    """Returns a component's config without its fields about quantized weights, which their tensors have too.

    Classes have diffusers' names.

    Raises SourceError as ``read_json``, or if the weights are in a form that is not read.
    """
    config = with_names_of_config(read_json(file))
    rest = {name: value for name, value in config.items() if name != _QUANTIZATION}
    said = config.get(_QUANTIZATION)
    if said is None:
        return rest
    form = [said.get(name) for name in ("quant_method", "quant_algo")] if isinstance(said, Mapping) else said
    if form != ["modelopt", "FP8"]:
        raise SourceError(
            "unknown_name",
            f"{file} has a {_QUANTIZATION} that is not known",
            expected="quant_method modelopt with quant_algo FP8",
            found=shown(form),
            remedy=_REMEDY,
        )
    return rest


class Scales:
    """The scales of a component's 8-bit weights, and the files' metadata of how each is quantized.

    ``holders`` has the file of each stored tensor, scales among them. The constructor raises SourceError for
    tensors of a form that is not read, or metadata that cannot be read.
    """

    def __init__(self, holders: Mapping[str, TensorFile]) -> None:
        self._holders = holders
        # Then each 8-bit weight has a scale: taken for 1, a missing one would give another model.
        self._scaled = any(key.endswith(UNUSED) or _scaled(key) in holders for key in holders)
        for key in holders:
            for end, what in OTHER_FORMS.items():
                if key.endswith(end) and (weight := f"{key.removesuffix(end)}.weight") in holders:
                    raise _unknown(weight, holders[weight], what)
        self._layers = {file.path: _layers(file) for file in set(holders.values())}

    def of(self, key: str) -> StoredEightBit | None:
        """Returns how a stored weight is restored, by its name in the file; None if it is not of 8 bits.

        Raises SourceError if its scale is missing although it is of integers or others are scaled; if the
        scale is neither one number nor one for each row, or is not positive; if a weight with a scale is not
        of 8 bits; or if it is quantized in a form that is not read.
        """
        holders = self._holders
        file, entry = holders[key], holders[key].entries[key]
        self._check_form(key, file, entry)
        names = [key.removesuffix(".weight") + end for end in SCALES] if key.endswith(".weight") else []
        name = next((name for name in names if name in holders), None)
        if entry.dtype_name not in EIGHT_BIT_DTYPES:
            if name is not None:
                raise _unknown(key, file, f"{entry.dtype_name} with {name}")
            return None
        table = np.arange(256, dtype=np.uint8).view(entry.dtype).astype(np.float32)
        items = max(entry.nbytes // max(entry.shape[0], 1), 1) if entry.shape else 1
        if name is None and (self._scaled or entry.dtype_name == "I8"):
            among = "among scaled weights" if self._scaled else "for integers"
            raise _unknown(key, file, f"no {' and no '.join(names) or 'scale'}, {among}")
        if name is None:
            return StoredEightBit(table, None, items)
        scale = _scale(holders[name], name, key, entry)
        if scale.size > 1:
            return StoredEightBit(table, scale, items)
        return StoredEightBit(table * scale, None, items, float(scale[0]))

    def _check_form(self, key: str, file: TensorFile, entry: TensorEntry) -> None:
        """Raises SourceError, naming the form, for a weight that is quantized in a form that is not read."""
        base = key.removesuffix(".weight")
        if base == key:
            return
        layer = self._said_of(base, file)
        if layer is None:
            return
        form = layer.get("format")
        if not isinstance(form, str) or form not in FORMATS:
            raise _unknown(key, file, f"the format {form if isinstance(form, str) else 'without a name'}")
        if others := sorted(name for name, value in layer.items() if value and name not in _PLAIN):
            raise _unknown(key, file, f"the format {form} with {others[0]}")
        if FORMATS[form] != entry.dtype_name:
            raise _unknown(key, file, f"the format {form} and {entry.dtype_name}")

    def _said_of(self, base: str, file: TensorFile) -> Mapping[str, Any] | None:
        """Returns a layer's metadata; empty if it is not JSON, None if there is none."""
        if (holder := self._holders.get(base + QUANT)) is not None:
            return _object(holder.text(base + QUANT))
        layers = self._layers[file.path]
        parts = base.split(".")  # the names in the metadata may lack the prefix of those in the file
        names = (".".join(parts[start:]) for start in range(len(parts)))
        found = next((layers[name] for name in names if name in layers), None)
        return found if found is None or isinstance(found, Mapping) else {}


def _layers(file: TensorFile) -> Mapping[str, Any]:
    """Returns a file's metadata of its layers, by name; empty if there are none."""
    if METADATA not in file.metadata:
        return {}
    layers = _object(file.metadata[METADATA].encode()).get("layers")
    if isinstance(layers, Mapping):
        return layers
    raise SourceError(
        "unreadable",
        f"the {METADATA} of {file.path} cannot be read",
        expected="a JSON object with layers",
        remedy=_REMEDY,
    )


def _object(text: bytes) -> Mapping[str, Any]:
    """Returns a JSON object; empty for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, Mapping) else {}


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


_REMEDY = "use the published checkpoint, or a file with bfloat16 or float16 weights"


def _unknown(key: str, file: TensorFile, found: str) -> SourceError:
    return SourceError(
        "unknown_name",
        f"{key} in {file.path} is quantized in a way that is not known",
        expected="8-bit floats or integers with one positive scale, or one for each row",
        found=found,
        remedy=_REMEDY,
    )
