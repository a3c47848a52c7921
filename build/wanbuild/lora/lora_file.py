"""Matches one LoRA file with the parameters of a model.

Layouts are those of ``mapping.lora_keys``. The scale of a pair of matrices is alpha / rank, with alpha from
the file's ``.alpha`` tensor or the adapter's configuration (``lora.scale``), or 1 if neither states it. The
bias of an up matrix has the same scale; a full delta has none. The LoRA's own scale multiplies all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from wanbuild.lora.deltas import FullDelta, LowRankDelta
from wanbuild.lora.scale import PEFT_CONFIG, PEFT_FILE, read_adapter_config
from wanbuild.mapping.engine import describe_problems
from wanbuild.mapping.lora_keys import LoraKey, LoraRole, Parameters, of_adapter, parse_key, unsupported
from wanbuild.mapping.original import LISTED
from wanbuild.source.checkpoint_parts import OPTIONS
from wanbuild.source.recognise import recognised
from wanbuild.source.safetensors import WEIGHT_DTYPES, TensorFile
from wanrun.errors import SourceError
from wanrun.files import open_regular

_ALPHA_DTYPES = WEIGHT_DTYPES | {"F64", "I64", "I32"}
_BLOCK_ITEMS = 2**18


@dataclass
class _Group:
    """The tensors of one file that change one parameter: role -> key and its parsed part."""

    parts: dict[LoraRole, tuple[str, LoraKey]] = field(default_factory=dict)

    def key(self, role: LoraRole) -> str:
        return self.parts[role][0]

    def __contains__(self, role: LoraRole) -> bool:
        return role in self.parts


@dataclass(frozen=True)
class Match:
    """The changes that one file makes in one model.

    ``deltas`` are by the model's key, and incomplete if there are ``problems``, for which the file cannot be
    used. ``left_out`` are tensors of layers that the model lacks or that are unknown.
    """

    deltas: Mapping[str, Sequence[LowRankDelta | FullDelta]]
    left_out: Sequence[str]
    problems: Sequence[str]


@dataclass
class _Found:
    """The tensors of one file by the parameter that each changes, and those that change none."""

    groups: dict[str, _Group] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class _MisfitError(ValueError):
    """A change of another shape than the parameter has."""

    def __init__(self, key: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        super().__init__(key, found, expected)
        self.key, self.found, self.expected = key, found, expected


class LoraFile:
    """One LoRA file, to be matched with models; ``scale`` is the factor of its deltas.

    The constructor raises SourceError if the file is something else, such as a checkpoint; if it holds no
    tensors, quantized tensors, or NaN or infinity; or if its configuration is not that of a plain LoRA.
    """

    def __init__(self, file: TensorFile, scale: float) -> None:
        _check_kind(file)
        self._file, self._scale = file, scale
        self._config = read_adapter_config(file)
        _check_contents(file)

    def match(
        self, parameters: Parameters, shapes: Mapping[str, tuple[int, ...]], strict: bool = False
    ) -> Match:
        """Returns what the file changes in a model; its keys' shapes are ``shapes``.

        With ``strict`` a tensor of a layer that the model lacks is a problem.
        """
        found = self._group(parameters)
        if strict and found.left_out:
            found.problems.append(f"{_of_lacking(found.left_out)}; without --strict the rest is taken")
        deltas: dict[str, list[LowRankDelta | FullDelta]] = {}
        misfits: list[_MisfitError] = []
        for key, group in found.groups.items():
            try:
                deltas[key] = list(self._deltas(key, group, found.groups, shapes[key]))
            except _MisfitError as error:
                misfits.append(error)
            except ValueError as error:
                found.problems.append(str(error))
        if misfits:
            found.problems.append(_of_another_size(misfits, len(found.groups)))
        return Match({key: parts for key, parts in deltas.items() if parts}, found.left_out, found.problems)

    def _group(self, parameters: Parameters) -> _Found:
        """Groups the file's tensors by the parameter that each changes."""
        found = _Found()
        kinds: dict[str, list[str]] = {}
        for key in self._file.entries:
            if kind := unsupported(key):
                kinds.setdefault(kind, []).append(key)
                continue
            part = parse_key(key)
            target = None if part is None else parameters.find(part)
            if part is None or target is None:
                found.left_out.append(key)
                continue
            group = found.groups.setdefault(target, _Group())
            if part.role in group:
                found.problems.append(
                    f"{group.key(part.role)} and {key} are both the {part.role.value} of {target}"
                )
            group.parts[part.role] = key, part
        if kinds:
            # The rest of such a file is useless by itself.
            problems = [
                f"it holds {kind} ({shortly(keys, 3)}): merge it with the tool that made it, "
                "or extract a plain LoRA of the transformer"
                for kind, keys in kinds.items()
            ]
            return _Found(problems=problems)
        if found.left_out and not found.groups:
            found.problems.append(f"it changes nothing: {_of_lacking(found.left_out)}")
        found.problems += _lonely_alphas(found.left_out)
        if self._file.path.name == PEFT_FILE and self._config is None:
            alphas = any(LoraRole.ALPHA in group for group in found.groups.values())
            if not alphas and any(key.startswith("base_model.") for key in self._file.entries):
                found.problems.append(f"its alpha is in {PEFT_CONFIG}, which is not next to it")
        return found

    def _deltas(
        self, key: str, group: _Group, groups: Mapping[str, _Group], shape: tuple[int, ...]
    ) -> Iterator[LowRankDelta | FullDelta]:
        """Yields the deltas of one file for one parameter; raises ValueError if they do not fit."""
        pair = LoraRole.DOWN in group, LoraRole.UP in group
        if any(pair):
            if not all(pair):
                there, missing = (LoraRole.DOWN, LoraRole.UP) if pair[0] else (LoraRole.UP, LoraRole.DOWN)
                raise ValueError(f"{group.key(there)} is there, and the {missing.value} is not")
            down, up = group.key(LoraRole.DOWN), group.key(LoraRole.UP)
            self._check_matrices(key, down, up, shape)
            yield LowRankDelta(self._file, up, down, self._factor(down, self._rank_scale(group)))
        elif LoraRole.ALPHA in group:
            raise ValueError(f"{group.key(LoraRole.ALPHA)} is there, and the matrices are not")
        if LoraRole.UP_BIAS in group:
            matrices = groups.get(f"{key.removesuffix('.bias')}.weight")
            if matrices is None or LoraRole.UP not in matrices or LoraRole.DOWN not in matrices:
                raise ValueError(f"{group.key(LoraRole.UP_BIAS)} is there, and the matrices are not")
            yield self._full(key, group.key(LoraRole.UP_BIAS), shape, self._rank_scale(matrices))
        for role in (LoraRole.WEIGHT, LoraRole.BIAS):
            if role in group:
                yield self._full(key, group.key(role), shape, 1.0)

    def _full(self, key: str, delta: str, shape: tuple[int, ...], factor: float) -> FullDelta:
        found = self._file.entries[delta].shape
        flattened = (*shape[:1], math.prod(shape[1:]))
        if _squeezed(found) != _squeezed(shape) and found != flattened:
            raise _MisfitError(key, found, shape)
        return FullDelta(self._file, delta, self._factor(delta, factor))

    def _factor(self, key: str, scale: float) -> float:
        """Returns the LoRA's scale times a tensor's own; ValueError if float64 cannot hold the product."""
        factor = self._scale * scale
        if factor and not 1e-60 < abs(factor) < 1e60:
            raise ValueError(f"{key} would be scaled by {factor:g}")
        return factor

    def _check_matrices(self, key: str, down: str, up: str, shape: tuple[int, ...]) -> None:
        """Raises ValueError unless up @ down has the parameter's shape."""
        a, b = self._file.entries[down].shape, self._file.entries[up].shape
        rank = a[0] if a else 0
        if len(a) == len(b) == len(shape) == 2 and b[1] == rank > 0 and (b[0], a[1]) != shape:
            raise _MisfitError(key, (b[0], a[1]), shape)
        fits = (
            rank > 0
            and b[:2] == (shape[0], rank)
            and math.prod(b[2:]) == 1
            # A convolution's kernel or a flat matrix; a linear layer's may end in 1 x 1.
            and (a[1:] == shape[1:] or _stripped(a[1:]) == (math.prod(shape[1:]),))
        )
        if not fits or len(shape) < 2:
            raise ValueError(
                f"{down} {list(a)} and {up.rpartition('.')[0].rpartition('.')[2]} {list(b)} do not make "
                f"{key}, which has shape {list(shape)}"
            )

    def _rank_scale(self, group: _Group) -> float:
        """Returns alpha / rank of a pair of matrices; raises ValueError if the file contradicts itself."""
        down, part = group.parts[LoraRole.DOWN]
        rank = self._file.entries[down].shape[0]
        stated = None if self._config is None else self._config.scale(part.module, rank)
        if LoraRole.ALPHA not in group:
            return 1.0 if stated is None else stated
        scale = self._alpha(group.key(LoraRole.ALPHA)) / rank
        if stated is not None and not math.isclose(stated, scale, rel_tol=1e-3):
            raise ValueError(
                f"{group.key(LoraRole.ALPHA)} makes the scale {scale:g}, and the configuration {stated:g}"
            )
        return scale

    def _alpha(self, key: str) -> float:
        entry = self._file.entries[key]
        if math.prod(entry.shape) != 1 or entry.dtype_name not in _ALPHA_DTYPES:
            raise ValueError(f"{key} is {entry.dtype_name} {list(entry.shape)}, and not one number")
        with open_regular(self._file.path) as file:
            file.seek(entry.offset)
            alpha = float(np.frombuffer(file.read(entry.nbytes), entry.dtype)[0])
        if not math.isfinite(alpha) or alpha == 0:
            raise ValueError(f"{key} is {alpha}")
        return alpha


def _check_kind(file: TensorFile) -> None:
    """Raises SourceError for a file of whole weights, which is not read to the end."""
    if any(map(of_adapter, file.entries)):
        return
    kind, component = recognised(file.entries)
    if component:
        raise SourceError(
            "wrong_kind",
            f"{file.path.name} is {kind}, not a LoRA",
            remedy=f"give it as {OPTIONS[component]}",
        )


def _check_contents(file: TensorFile) -> None:
    """Raises SourceError with every problem if the file is empty, or a tensor is quantized or not finite."""
    problems = [] if file.entries else ["it holds no tensors"]
    for key, entry in file.entries.items():
        part = parse_key(key)
        if part is not None and part.role is LoraRole.ALPHA:
            continue
        if entry.dtype_name not in WEIGHT_DTYPES:
            problems.append(f"{key} is {entry.dtype_name}, not {' or '.join(sorted(WEIGHT_DTYPES))}")
        elif not _is_finite(file, key):
            problems.append(f"{key} has NaN or infinity")
    if problems:
        raise SourceError("unsupported", f"{file.path.name} is not usable: {describe_problems(problems)}")


def _is_finite(file: TensorFile, key: str) -> bool:
    entry = file.entries[key]
    items = math.prod(entry.shape)
    buffer = np.empty(min(items, _BLOCK_ITEMS), entry.dtype)
    for start in range(0, items, _BLOCK_ITEMS):
        block = buffer[: items - start]
        file.read(key, start * block.itemsize, block.view(np.uint8))
        if not np.isfinite(block).all():
            return False
    return True


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _stripped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Removes ones from the end of a shape, but keeps the first dimension."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def shortly(texts: Sequence[str], count: int) -> str:
    """Returns the first texts of a list, and how many more there are."""
    more = f" and {len(texts) - count} more" if len(texts) > count else ""
    return ", ".join(texts[:count]) + more


def lora_layers(keys: Sequence[str]) -> tuple[str, ...]:
    """Returns the layers that tensors belong to, with a * for every number."""
    return tuple(dict.fromkeys(re.sub(r"\d+", "*", _module(key)) for key in keys))


def _module(key: str) -> str:
    part = parse_key(key)
    return key if part is None else part.module


def _of_lacking(keys: Sequence[str]) -> str:
    count = "1 tensor is" if len(keys) == 1 else f"{len(keys)} tensors are"
    return f"{count} of layers that this model lacks: {shortly(lora_layers(keys), LISTED)}"


def _lonely_alphas(keys: Sequence[str]) -> Iterator[str]:
    """Yields a problem for each alpha without matrices: they probably have another name."""
    parts = {key: part for key in keys if (part := parse_key(key)) is not None}
    modules = {part.module for part in parts.values() if part.role is not LoraRole.ALPHA}
    for key, part in parts.items():
        if part.role is LoraRole.ALPHA and part.module not in modules:
            yield f"{key} is there, and the matrices are not"


def _of_another_size(misfits: Sequence[_MisfitError], count: int) -> str:
    """Says in one line that a LoRA is for a model of another width."""
    one = next((one for one in misfits if one.key.endswith("attn1.to_q.weight")), misfits[0])
    widths = ""
    if len(one.found) == 2 and one.key.endswith("attn1.to_q.weight"):
        widths = f"it is for a model that is {one.found[1]} wide, and this one is {one.expected[1]} wide: "
    return (
        f"{widths}{len(misfits)} of the {count} weights that it changes have another shape, such as "
        f"{one.key}, {list(one.expected)} and not {list(one.found)}"
    )
