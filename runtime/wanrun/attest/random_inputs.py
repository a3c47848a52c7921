"""Drawn inputs of programs: of a kernel of the attention, and slots of LoRAs.

Axes: B batch, S queries, P prompts, T keys, N heads, K head dimension.
"""

from __future__ import annotations

__all__ = ["attention_inputs", "drawn_lora"]

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wanrun.artifact.programs import aval
from wanrun.artifact.slots import Slot
from wanrun.denoising.state import zeros
from wanrun.replay.random_steps import PERIOD
from wanrun.weights.adapters import AdapterFile
from wanrun.weights.buffers import DTYPES
from wanrun.weights.loras import AppliedLora

ROWS = 1021
"""Heads that are drawn where the values of a head are not alike; prime, for the same reason."""

SPREAD = 3.0
"""The standard deviation of logits: few keys have most of the weight, and a scale 5 % off shows."""

LOW = -20.0
"""Logits of keys whose sum a key of zeros exceeds, which has the logit 0: e^-20 of 75 600 keys are 2e-4."""

HIGH = 16.0
"""The logit of a key that has nearly all of the weight among 75 600 of small ones."""

BORDER = 64
"""Blocks of keys end at multiples of it."""


def attention_inputs(avals: Mapping[str, Any]) -> Iterator[dict[str, np.ndarray]]:
    """Yields inputs of a program of role ``attention``, each of which shows other faults; always the same.

    First random logits, in which few keys have most of the weight: a scale, a rotation, or tokens in another
    place. Then logits that are all low: a key of padding that is not masked has all of the weight, and of the
    others each has as much, so that a lost block shows. Last, each query has one key with nearly all of the
    weight, next to where blocks may end: a key that is lost there. A mask leaves out other
    keys each time.

    Args:
        avals: the program's inputs, as the manifest describes them.
    """
    for number, (drawn, rest) in enumerate(((_random, 0.25), (_low, 0.0), (_borders, 0.125))):
        random = np.random.default_rng(number)
        keys = aval(avals["k"])[1][1]
        count = keys
        given: dict[str, np.ndarray] = {}
        if "mask" in avals:
            count = max(1, keys - 1 - int(rest * keys))
            given["mask"] = np.arange(keys) < count
        q, k = drawn(random, avals, count)
        k[:, count:] = 0
        v = _repeated(random.standard_normal(PERIOD), avals["v"])
        yield {**given, "q": q, "k": k, "v": v, **_rotation(random, avals, plain=number > 0)}


def _random(
    random: np.random.Generator, avals: Mapping[str, Any], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns queries and keys whose logits have the deviation ``SPREAD``."""
    del count
    q, k = (_repeated(random.standard_normal(PERIOD) * math.sqrt(SPREAD), avals[name]) for name in ("q", "k"))
    return q, k


def _low(random: np.random.Generator, avals: Mapping[str, Any], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns queries and keys whose logits are all about ``LOW``."""
    del count
    width = aval(avals["q"])[1][-1]
    size = math.sqrt(-LOW / math.sqrt(width))
    common = size * random.choice([-1.0, 1.0], width)
    q, k = (
        _repeated((sign * common + 0.3 * random.standard_normal((ROWS, width))).ravel(), avals[name])
        for name, sign in (("q", 1), ("k", -1))
    )
    return q, k


def _borders(
    random: np.random.Generator, avals: Mapping[str, Any], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns queries of which each has one key at a border, and these keys among many small ones."""
    (batch, queries, *_), width = aval(avals["q"])[1], aval(avals["q"])[1][-1]
    k = _repeated(random.standard_normal(PERIOD) / 2, avals["k"])
    borders = np.arange(0, count + 1, BORDER)
    chosen = np.unique(np.clip([*borders, *(borders - 1), count - 1], 0, count - 1))
    size = math.sqrt(HIGH / math.sqrt(width))
    found = np.where(k[:, chosen].astype(np.float32) < 0, -size, size)
    k[:, chosen] = found
    # Neighbours in a tile of queries have other keys, and each key is that of many queries.
    own = np.arange(queries) * _stride(len(chosen)) % len(chosen)
    q = k[:, chosen[own]]
    return np.repeat(q, batch // len(q), axis=0) if batch != len(q) else q, k


def _stride(count: int) -> int:
    """Returns a number near 0.6 of a count, with which steps around it visit all."""
    return next(step for step in range(max(1, count * 3 // 5), count + 1) if math.gcd(step, count) == 1)


def _repeated(values: np.ndarray, text: str) -> np.ndarray:
    """Returns values again and again, in an array's shape and dtype."""
    shape = aval(text)[1]
    empty = zeros(text.partition("[")[0] + "[]")
    return np.resize(values.astype(empty.dtype), shape)


def _rotation(random: np.random.Generator, avals: Mapping[str, Any], plain: bool) -> dict[str, np.ndarray]:
    """Returns the factors and angles of queries and keys, for a program that takes them; plain: no change."""
    if "cos" not in avals:
        return {}
    angles = np.resize(random.uniform(-math.pi, math.pi, PERIOD), aval(avals["cos"])[1]) * (not plain)
    factors = {
        name: np.exp(
            np.resize(random.standard_normal(PERIOD), aval(avals[name])[1]) * (0.0 if plain else 0.2)
        )
        for name in ("inverse", "weight")
    }
    given = {**factors, "cos": np.cos(angles), "sin": np.sin(angles)}
    return {name: one.astype(np.float32) for name, one in given.items()}


LORA_SHARE = 0.2
"""The size that slots add to a product of size 1: enough that a wrong one shows among all the rest."""


class _DrawnAdapter(AdapterFile):
    """An adapter that is in no file."""

    sha256 = "drawn"


def drawn_lora(slots: Mapping[str, Slot], dtype: str, experts: Sequence[str]) -> AppliedLora:
    """Returns a LoRA that fills all slots of each transformer with random values; always the same.

    Args:
        slots: the slots of a transformer, by path.
        dtype: what they hold.
        experts: the transformers.
    """
    random, arrays = np.random.default_rng(0), dict[str, np.ndarray]()
    for path, slot in slots.items():
        scale = (1.0 if path.endswith("lora_a") else LORA_SHARE) / math.sqrt(slot.shape[-1])
        values = (scale * random.standard_normal(PERIOD)).astype(DTYPES[dtype])
        arrays[path] = np.resize(values, slot.shape)
    tensors = {f"{expert}/{path}": array for expert in experts for path, array in arrays.items()}
    content: Any = None
    return AppliedLora(_DrawnAdapter(Path(), content, 0, tensors), dict.fromkeys(experts, 1.0))
