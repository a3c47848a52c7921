"""Weights of 8 bits: as a program takes them, and what they stand for."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from wanbuild.conversion.quantise import Quantiser
from wanbuild.models.eight_bit import linear_layers
from wanbuild.models.params import LAYERS
from wanrun import EIGHT_BITS
from wanrun.artifact.layout import BITS
from wanrun.artifact.parameters import flat, nest


def rounded(state: dict[str, np.ndarray], keys: list[str], form: str) -> dict[str, np.ndarray]:
    """A state whose matrices of these names have the values of rows in 8 bits."""
    values = dict(state)
    for key in keys:
        rows = Quantiser(state[key].size)(state[key], form)
        stored = rows.stored.view(jnp.dtype(EIGHT_BITS[form].dtype)).astype(np.float32)
        scales = rows.scales.reshape(len(stored), -1).astype(np.float32)
        values[key] = stored * np.repeat(scales, stored.shape[1] // scales.shape[1], axis=1)
    return values


def stored(params: dict[str, Any], layers: dict[str, str], bits: bool) -> dict[str, Any]:
    """Parameters as a program takes them: rows of 8 bits, and the scale of each."""
    arrays = flat(params)
    for path, form in layers.items():
        weight, dtype = arrays[f"{path}/weight"], EIGHT_BITS[form].dtype
        found = [Quantiser(matrix.size)(matrix, form) for matrix in weight]
        values, scales = np.stack([one.stored for one in found]), np.stack([one.scales for one in found])
        arrays[f"{path}/weight"] = values if bits and dtype in BITS else values.view(jnp.dtype(dtype))
        arrays[f"{path}/scale"] = scales
    return nest(arrays)


def layers_of(module: Any, form: str) -> dict[str, str]:
    """The linear layers of all blocks, each with the format."""
    linear = linear_layers(module)
    return {path: form for path, one in linear.items() if one.weight.get_metadata()["axes"][0] == LAYERS}
