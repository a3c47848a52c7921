"""Adapters' files, read through a memory mapping, and several of them combined into a program's slots.

A product with a slot of rank R computes x Wᵀ + (x Aᵀ) Bᵀ with A (R, in) and B (out, R). The matrices of
several adapters are put one behind the other along the rank; B has each adapter's strength in it.
"""

from __future__ import annotations

__all__ = ["AdapterFile", "Changes", "check_fits", "combined", "open_adapter"]

import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import ml_dtypes
import msgspec
import numpy as np

from wanrun.artifact.adapter import ADAPTER_METADATA, LORA_A, LORA_B, AdapterContent
from wanrun.artifact.manifest import Manifest
from wanrun.errors import AdapterError, UsageError
from wanrun.files import file_sha256, open_regular
from wanrun.machine.environment import usable_cores

MAX_HEADER_BYTES = 2**24
"""The longest header that is read; that of an adapter of every product has some kilobytes."""

MAX_AXES = 8
"""Of a tensor. The product of the numbers of a whole header would take hours."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of a file, as its header has it."""

    dtype: Literal["F32", "BF16"]
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_AXES)]
    data_offsets: tuple[int, int]

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype(np.float32 if self.dtype == "F32" else ml_dtypes.bfloat16)


@dataclass(frozen=True)
class AdapterFile:
    """An adapter's file.

    Attributes:
        path: where it is.
        content: what it says of itself.
        nbytes: its size.
        tensors: its arrays by name, read-only and mapped: nothing of them is read before it is used.
    """

    path: Path
    content: AdapterContent
    nbytes: int
    tensors: Mapping[str, np.ndarray]

    @cached_property
    def sha256(self) -> str:
        """The digest of the file's bytes, hexadecimal; the first use reads all of them."""
        return file_sha256(self.path)

    def of(self, expert: str) -> dict[str, np.ndarray]:
        """Returns the arrays of one transformer, by their names without it."""
        before = f"{expert}/"
        return {
            name.removeprefix(before): one for name, one in self.tensors.items() if name.startswith(before)
        }


def open_adapter(path: Path) -> AdapterFile:
    """Opens an adapter's file, and checks all of it but the values.

    Raises:
        UsageError: if it cannot be read, or is no adapter.
        AdapterError: if it is one, and damaged or of another format.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(length) if length <= min(MAX_HEADER_BYTES, size) else b""
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise UsageError(
            "unreadable", f"the adapter {path} cannot be read", found=error.strerror or error
        ) from None
    try:
        header = msgspec.json.decode(raw, type=dict[str, Any])
        text = header.pop("__metadata__")[ADAPTER_METADATA]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UsageError(
            "wrong_kind",
            f"{path} is no adapter",
            remedy="wanbuild lora --help says how one is made of a LoRA",
        ) from None
    try:
        content = msgspec.json.decode(text, type=AdapterContent)
        entries = msgspec.convert(header, dict[str, _Entry])
        tensors = dict(_mapped(mapping, entries, 8 + length))
        _check_pairs(tensors)
    except (ValueError, TypeError) as error:
        raise AdapterError(
            "damaged",
            f"the adapter {path} is damaged, or of another release: {error}",
            remedy="make it again with wanbuild lora",
        ) from None
    return AdapterFile(path, content, size, tensors)


def _mapped(
    mapping: mmap.mmap | bytes, entries: Mapping[str, _Entry], start: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a mapped file by name; raises ValueError if they do not fill it exactly."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda one: one[1].data_offsets):
        begin, after = entry.data_offsets
        count = math.prod(entry.shape)
        if begin != end or after - begin != count * entry.numpy.itemsize or min(entry.shape, default=1) < 1:
            raise ValueError(f"the place of {name} is wrong")
        end = after
        if start + end > len(mapping):
            raise ValueError(f"it is cut off: {len(mapping)} bytes")
        yield name, np.frombuffer(mapping, entry.numpy, count, start + begin).reshape(entry.shape)
    if start + end != len(mapping):
        raise ValueError(f"{len(mapping) - start - end} bytes are behind the last tensor")


def _check_pairs(tensors: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError unless each product has two matrices of one rank, and all else is float32."""
    for name, array in tensors.items():
        path, _, leaf = name.rpartition("/")
        if leaf in (LORA_A, LORA_B):
            a, b = (tensors.get(f"{path}/{one}", np.empty(())).shape for one in (LORA_A, LORA_B))
            if len(a) not in (2, 3) or len(a) != len(b) or (*a[:-2], a[-2]) != (*b[:-2], b[-1]):
                raise ValueError(f"{path} has matrices of shape {list(a)} and {list(b)}")
        elif array.dtype != np.float32:
            raise ValueError(f"{name} is {array.dtype.name}")


@dataclass(frozen=True)
class Changes:
    """What chosen adapters change in one transformer.

    Attributes:
        slots: the arrays of every slot, by name.
        deltas: what is added to small parameters, float32, by path; only of those that change.
    """

    slots: Mapping[str, np.ndarray]
    deltas: Mapping[str, np.ndarray]


def combined(
    chosen: Sequence[tuple[AdapterFile, float]],
    expert: str,
    slots: Mapping[str, tuple[int, ...]],
    dtype: np.dtype[Any],
) -> Changes:
    """Combines adapters into what one transformer's programs take.

    Args:
        chosen: adapters with their strengths for this transformer, in order. One of strength 0 changes
            nothing, and takes no rank.
        expert: the transformer.
        slots: shapes of the slots' arrays by name: ``PATH/lora_a`` (L, R, in), ``PATH/lora_b`` (L, out, R);
            without L outside the stacks.
        dtype: their dtype.

    Returns:
        The arrays. Slots that no adapter fills are zeros. With one adapter of the slots' rank and dtype at
        strength 1 they are its own mapped ones.

    Raises:
        UsageError: if the ranks sum to more than R, or one changes a product that has no slot.
    """
    parts = [(one.of(expert), strength) for one, strength in chosen if strength]
    _check_ranks([arrays for arrays, _ in parts], slots)
    deltas = dict[str, np.ndarray]()
    for arrays, strength in parts:
        for name in arrays.keys() - slots.keys():
            if _is_matrix(name):
                raise UsageError(
                    "not_built",
                    f"an adapter changes {name.rpartition('/')[0]}, for which the programs have no slot",
                    remedy="merge its LoRA at convert",
                )
            deltas[name] = deltas.get(name, np.float32(0)) + arrays[name] * np.float32(strength)

    def of_slot(name: str) -> np.ndarray:
        own = [(arrays[name], strength) for arrays, strength in parts if name in arrays]
        return _filled(own, slots[name], dtype, along=_rank_axis(name))

    with ThreadPoolExecutor(usable_cores(), thread_name_prefix="adapters") as pool:
        return Changes(dict(zip(slots, pool.map(of_slot, slots), strict=True)), deltas)


def _is_matrix(name: str) -> bool:
    return name.endswith((f"/{LORA_A}", f"/{LORA_B}"))


def _rank_axis(name: str) -> int:
    return -1 if name.endswith(f"/{LORA_B}") else -2


def _filled(
    parts: Sequence[tuple[np.ndarray, float]], shape: tuple[int, ...], dtype: np.dtype[Any], along: int
) -> np.ndarray:
    """Returns matrices one behind the other along the rank, with zeros behind; B's times the strengths."""
    if len(parts) == 1:
        ((array, strength),) = parts
        if array.shape == shape and array.dtype == dtype and (along == -2 or strength == 1):
            return array
    filled, start = np.zeros(shape, dtype), 0
    for array, strength in parts:
        stop = start + array.shape[along]
        place = filled[..., start:stop] if along == -1 else filled[..., start:stop, :]
        scaled = along == -1 and strength != 1
        place[...] = array.astype(np.float32) * np.float32(strength) if scaled else array
        start = stop
    return filled


def _check_ranks(parts: Sequence[Mapping[str, np.ndarray]], slots: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UsageError if the adapters' ranks of a slot sum to more than it has."""
    sums = {
        name: [arrays[name].shape[-2] for arrays in parts if name in arrays]
        for name in slots
        if name.endswith(f"/{LORA_A}")
    }
    name, ranks = max(sums.items(), key=lambda one: sum(one[1]), default=("", []))
    if ranks and sum(ranks) > slots[name][-2]:
        raise UsageError(
            "not_built",
            "the adapters' ranks are more than the slots of the programs have",
            expected=f"at most {slots[name][-2]}",
            found=f"{' + '.join(map(str, ranks))} = {sum(ranks)}" if len(ranks) > 1 else sum(ranks),
            remedy=f"choose fewer, or wanbuild compile --lora-rank {sum(ranks)}",
        )


def check_fits(adapter: AdapterFile, manifest: Manifest) -> None:
    """Checks that an adapter was made for a model of this layout.

    Raises:
        UsageError: if it was made for another variant, or for parameters of another shape.
    """
    remedy, model = "make it of its LoRA for this model, with wanbuild lora", manifest.model
    if adapter.content.variant != model.variant:
        raise UsageError(
            "mismatch",
            f"the adapter {adapter.path} is for another model",
            expected=model.variant,
            found=adapter.content.variant,
            remedy=remedy,
        )
    for name, array in adapter.tensors.items():
        expert, _, path = name.partition("/")
        slot = _is_matrix(name)
        component = manifest.components.get(expert)
        parameters = {} if component is None else component.parameters
        parameter = parameters.get(f"{path.rpartition('/')[0]}/weight" if slot else path)
        found, expected = list(array.shape), None if parameter is None else list(parameter.layout.shape)
        if slot and expected is not None:
            del found[_rank_axis(name)], expected[_rank_axis(name)]
        if found != expected:
            raise UsageError(
                "no_effect",
                f"the adapter {adapter.path} is for a model of another size",
                expected=f"{expected} values of {name}" if expected else f"no {name}",
                found=found,
                remedy=remedy,
            )
