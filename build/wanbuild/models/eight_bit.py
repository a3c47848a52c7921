"""Layers whose weights are stored in 8 bits.

A weight (out, in) becomes ``weight`` of an 8-bit dtype and ``scale``, float32 (out,): value = weight x scale.
A layer multiplies with the stored values, which bfloat16 holds exactly, and scales the product. So weights
stay 8 bits wide in memory, and no more of them is widened at a time than is being multiplied. A target of
W8A8 rounds activations to 8 bits too, and widens nothing (``models.products``).

In GGUF's Q8_0 each block of 32 inputs has a scale, float16 (out, in / 32). Blocks are widened and scaled
before they are multiplied (``models.products.in_blocks``), on a target of W8A8 too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from wanbuild.models.layers import Linear
from wanbuild.models.params import param
from wanrun import EIGHT_BITS


def linear_layers(module: nnx.Module) -> dict[str, Linear]:
    """Returns every ``Linear`` of a module by its path, sorted."""
    modules = (("/".join(map(str, path)), layer) for path, layer in nnx.iter_modules(module))
    return {path: layer for path, layer in sorted(modules) if isinstance(layer, Linear)}


def store_in_eight_bits(module: Any, layers: Mapping[str, str]) -> Any:
    """Declares 8-bit weights and their scales for layers of an abstract module, which it changes and returns.

    ``layers`` has the form of each layer's weight, one of ``EIGHT_BITS``, by the layer's path; a path that
    the module does not have raises KeyError.
    """
    found = linear_layers(module) if layers else {}
    for path, form in layers.items():
        layer, own = found[path], EIGHT_BITS[form]
        shape, axes = layer.weight.shape, layer.weight.get_metadata()["axes"]
        scales = own.scale_shape(shape)
        layer.weight = param(shape, jnp.dtype(own.dtype), axes)
        layer.scale = param(scales, jnp.dtype(own.scale_dtype), axes[: len(scales)])
        layer.has_scale, layer.has_blocks = not own.block, own.block > 0
    return module
