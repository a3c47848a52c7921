"""One component of a checkpoint: its config, and its tensors under diffusers' and transformers' names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from wanbuild.config import class_name_of
from wanbuild.mapping.original_parts import NAMES
from wanbuild.mapping.prefixes import plain_names
from wanbuild.source.all_in_one import prefix_of_part
from wanbuild.source.configs import given_config
from wanbuild.source.derived import class_of, classes_of, derived_config
from wanbuild.source.gguf_file import weight_file
from wanbuild.source.original_config import derive_config, is_original
from wanbuild.source.recognise import check_kind
from wanbuild.source.safetensors import (
    READABLE_DTYPES,
    TensorEntry,
    TensorFile,
    not_a_weight,
)
from wanbuild.source.scales import Scales, StoredEightBit, read_config, weights_in
from wanbuild.source.shards import (
    WEIGHT_NAMES,
    check_shards,
    find_weights,
    missing_shard,
    read_weight_map,
    weights_at,
)
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.errors import SourceError


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a component: a stored tensor, or one of equal parts of its rows.

    The tensor ``stored`` has ``begin`` bytes in front of this one. ``eight_bit`` is how 8-bit values are
    restored, None for a plain dtype. ``blocks`` is the place of the values as blocks of 8 bits, where
    ``entry`` has the values in float32; None if its file has no blocks.
    """

    file: TensorFile
    stored: str
    entry: TensorEntry
    begin: int = 0
    eight_bit: StoredEightBit | None = None
    blocks: TensorEntry | None = None

    @property
    def quantised(self) -> bool:
        """Whether its file stores it in 8 bits, or quantised in GGUF."""
        values = self.file.entries[self.stored].nbytes
        return self.eight_bit is not None or self.file.stored_bytes(self.stored) < values

    @property
    def form(self) -> str:
        """The form of ``EIGHT_BITS`` in which its file stores it; empty for any other."""
        if self.blocks is not None:
            return "q8_0"
        return "" if self.eight_bit is None else self.entry.dtype.name


@dataclass(frozen=True)
class SourceComponent:
    """One component with weights.

    Attributes:
        class_name: its class in model_index.json, without the library.
        config: the content of its config.json, not yet interpreted; derived from the weights if they have
            none.
        config_file: the source of the config: config.json, or the weight file it was derived from.
        files: its weight files, ordered by name.
        tensors: its tensors by key, in key order. Keys are diffusers' and transformers'.
        index: the index file of a sharded component, or None.
    """

    name: str
    class_name: str
    config: Mapping[str, Any]
    config_file: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, SourceTensor]
    index: Path | None

    @property
    def renamed(self) -> bool:
        """Whether a tensor has another name in its file, or is a part of a stored one."""
        return _renamed(self.tensors)

    @property
    def weights(self) -> Path:
        """Its weight file, or the index of its shards."""
        return self.index or self.files[0]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by key."""
        return _shapes(self.tensors)

    @property
    def recorded_config(self) -> dict[str, Any]:
        """The config for a manifest; a transformer's names its class, which programs depend on."""
        named = {"_class_name": self.class_name} if self.name in TRANSFORMERS else {}
        return {**self.config, **named}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.entry.nbytes for tensor in self.tensors.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors in their files, where some are quantised."""
        stored = {(tensor.file.path, tensor.stored): tensor.file for tensor in self.tensors.values()}
        return sum(file.stored_bytes(name) for (_, name), file in stored.items())

    @property
    def quantised(self) -> bool:
        """Whether some of its tensors are quantised."""
        return any(tensor.quantised for tensor in self.tensors.values())

    def entry(self, key: str) -> TensorEntry:
        """Returns shape, dtype and place of a tensor; KeyError if there is no such tensor."""
        return self.tensors[key].entry

    def eight_bit(self, key: str) -> StoredEightBit | None:
        """Returns how the values of an 8-bit tensor are restored; None for a plain dtype."""
        return self.tensors[key].eight_bit

    def blocks(self, key: str) -> TensorEntry | None:
        """Returns the shape of a tensor that is stored as blocks of 8 bits; None for any other."""
        return self.tensors[key].blocks

    def read_blocks(self, key: str, begin: int, out: np.ndarray) -> None:
        """Reads the blocks of such a tensor, from byte ``begin`` on; raises like ``read``."""
        tensor = self.tensors[key]
        if tensor.blocks is None or begin + out.nbytes > tensor.blocks.nbytes:
            raise ValueError(f"{begin + out.nbytes} bytes of the blocks of {key}")
        tensor.file.read_at(tensor.blocks.offset + begin, out)

    def array(self, key: str) -> np.ndarray:
        """Reads a whole tensor, as stored, into new memory; raises like ``read``."""
        entry = self.entry(key)
        values = np.empty(entry.shape, entry.dtype)
        self.read(key, 0, values.reshape(-1).view(np.uint8))
        return values

    def read(self, key: str, begin: int, out: np.ndarray) -> None:
        """Reads a tensor's stored bytes, from its byte ``begin`` on, until ``out`` is full.

        Raises KeyError if there is no such tensor, ValueError if the range ends after the tensor or the file
        is closed, and SourceError if the file has become unreadable.
        """
        tensor = self.tensors[key]
        if begin + out.nbytes > tensor.entry.nbytes:
            raise ValueError(f"{begin + out.nbytes} bytes of {key}, which has {tensor.entry.nbytes}")
        tensor.file.read(tensor.stored, tensor.begin + begin, out)


def _renamed(tensors: Mapping[str, SourceTensor]) -> bool:
    return any(tensor.stored != key for key, tensor in tensors.items())


def _shapes(tensors: Mapping[str, SourceTensor]) -> dict[str, tuple[int, ...]]:
    return {key: tensor.entry.shape for key, tensor in tensors.items()}


def open_component(
    name: str,
    pair: tuple[str, str],
    folder: Path,
    beside: Path | None,
    stack: ExitStack,
    given: Path | None = None,
) -> SourceComponent:
    """Opens the component in a folder; ``stack`` closes the files.

    ``pair`` is library and class of its entry in model_index.json. A transformer's weights may also be in
    ``beside``. ``given`` is a config.json that replaces the folder's.
    """
    library, class_name = pair
    weights = find_weights(folder, WEIGHT_NAMES[library], beside if name in TRANSFORMERS else None)
    holders, index = _holders(weights, stack)
    tensors = _tensors(name, holders, weights)
    if given is None:
        config_file, config = _read_config(name, class_name, folder, weights, tensors)
    else:
        config_file = given
        config = given_config(name, class_name, _shapes(tensors), given, str(weights))
    return _component(name, class_name, config, config_file, holders, tensors, index)


def open_part(
    name: str,
    class_name: str | None,
    place: Path,
    config_file: Path | None,
    stack: ExitStack,
    given: Path | None = None,
) -> SourceComponent:
    """Opens a component from the place that the user gives; ``stack`` closes the files.

    Args:
        class_name: its class; None: the weights show it.
        place: its weight file, their folder or their index; of an all-in-one file only this component is
            read.
        config_file: a config.json that describes it; None: derived from the weights.
        given: a config.json that replaces either of these, or None.
    """
    weights = weights_at(name, place)
    holders, index = _holders(weights, stack)
    if prefix := prefix_of_part(holders, name, weights):
        for file in set(holders.values()):
            file.keep(prefix)
        holders = {key: file for file in set(holders.values()) for key in file.entries}
    tensors = _tensors(name, holders, weights)
    shapes = _shapes(tensors)
    class_name = class_name or class_of(name, shapes, str(weights))
    if given is not None:
        config = given_config(name, class_name, shapes, given, str(weights))
    else:
        config = read_config(config_file) if config_file else derived_config(name, shapes, str(weights))
    return _component(name, class_name, config, given or config_file or weights, holders, tensors, index)


def _component(
    name: str,
    class_name: str,
    config: Mapping[str, Any],
    config_file: Path,
    holders: Mapping[str, TensorFile],
    tensors: Mapping[str, SourceTensor],
    index: Path | None,
) -> SourceComponent:
    files = tuple(sorted({file.path for file in holders.values()}))
    if (stated := class_name_of(config)) in classes_of(class_name):
        class_name = stated
    return SourceComponent(
        name, class_name, config, config_file, files, MappingProxyType(dict(tensors)), index
    )


def _holders(weights: Path, stack: ExitStack) -> tuple[dict[str, TensorFile], Path | None]:
    """Returns the file of each stored tensor, and the index if there is one; the stack closes the files."""
    if weights.suffix != ".json":
        file = stack.enter_context(weight_file(weights))
        if not file.entries:
            raise file.damaged("no tensors")
        return dict.fromkeys(file.entries, file), None
    weight_map = read_weight_map(weights)
    names = sorted(set(weight_map.values()))
    files = {shard: stack.enter_context(TensorFile(weights.parent / shard, missing_shard)) for shard in names}
    check_shards(weights, weight_map, files)
    return {key: files[shard] for key, shard in weight_map.items()}, weights


def _tensors(name: str, holders: Mapping[str, TensorFile], where: Path) -> dict[str, SourceTensor]:
    """Returns a component's tensors by diffusers' and transformers' key, sorted."""
    check_kind(name, holders, where)
    weights, scales = weights_in(holders), Scales(holders)
    if name in TRANSFORMERS:
        _refuse_quantized(weights)
    names_of, fused_of = NAMES[name]
    stored_as = {plain: stored for stored, plain in plain_names(sorted(weights), str(where)).items()}
    found = dict[str, SourceTensor]()
    for plain, new in names_of(stored_as, str(where)).items():
        found[new] = _stored_tensor(stored_as[plain], holders, scales)
    for plain, parts in fused_of(stored_as).items():
        whole = _stored_tensor(stored_as[plain], holders, scales)
        for number, new in enumerate(parts):
            found[new] = _rows(whole, number, len(parts))
    if set(_TIED) <= found.keys():
        _check_tied(*(found[key] for key in _TIED))
        del found[_TIED[1]]
    return dict(sorted(found.items()))


_TIED = ("shared.weight", "encoder.embed_tokens.weight")
"""The two names of a text encoder's embedding; torch's own saving writes both."""

_TIED_BYTES = 2**22
"""Bytes compared at a time."""


def _check_tied(one: SourceTensor, other: SourceTensor) -> None:
    """Raises SourceError unless two tensors hold the same values in the same form."""
    digests = [None if each.eight_bit is None else each.eight_bit.digest for each in (one, other)]
    forms = [(each.entry.dtype, each.entry.shape) for each in (one, other)]
    same = forms[0] == forms[1] and digests[0] == digests[1]
    size = one.entry.nbytes
    first, second = (np.empty(min(size, _TIED_BYTES), np.uint8) for _ in range(2))
    for begin in range(0, size if same else 0, _TIED_BYTES):
        blocks = first[: size - begin], second[: size - begin]
        for each, block in zip((one, other), blocks, strict=True):
            each.file.read(each.stored, each.begin + begin, block)
        same = same and np.array_equal(*blocks)
    if not same:
        raise SourceError(
            "mismatch",
            f"{one.stored} and {other.stored} in {one.file.path} are not equal",
            expected="one embedding of the text encoder, under one name or under both",
            remedy="use the file as published",
        )


def _stored_tensor(stored: str, holders: Mapping[str, TensorFile], scales: Scales) -> SourceTensor:
    file, eight_bit = holders[stored], scales.of(stored)
    return SourceTensor(file, stored, file.entries[stored], 0, eight_bit, file.blocks(stored))


def _rows(whole: SourceTensor, number: int, parts: int) -> SourceTensor:
    """Returns one of the equal parts of a tensor's rows."""
    # Rows left over are lost, so that the mapping finds a wrong shape.
    part = _part(whole.entry, parts)
    eight_bit = None if whole.eight_bit is None else whole.eight_bit.part(number, parts)
    blocks = whole.blocks
    if blocks is not None:
        blocks = _part(blocks, parts)
        blocks = dataclasses.replace(blocks, offset=blocks.offset + number * blocks.nbytes)
    return dataclasses.replace(
        whole, entry=part, begin=number * part.nbytes, eight_bit=eight_bit, blocks=blocks
    )


def _part(entry: TensorEntry, parts: int) -> TensorEntry:
    """Returns the first one of the equal parts of a tensor's rows."""
    rows = entry.shape[0] // parts if entry.shape else 0
    nbytes = entry.nbytes // max(entry.shape[0], 1) * rows if entry.shape else 0
    return dataclasses.replace(entry, shape=(rows, *entry.shape[1:]), nbytes=nbytes)


def _refuse_quantized(weights: Mapping[str, TensorFile]) -> None:
    """Refuses weights of other dtypes, before their scales are reported as unknown keys."""
    for key, file in weights.items():
        entry = file.entries[key]
        if entry.dtype_name not in READABLE_DTYPES:
            raise not_a_weight(key, file.path, entry)


def _read_config(
    name: str, class_name: str, folder: Path, weights: Path, tensors: Mapping[str, SourceTensor]
) -> tuple[Path, dict[str, Any]]:
    """Returns the file of a component's config, and the config."""
    places = dict.fromkeys((folder / "config.json", weights.with_name("config.json")))
    place = next((path for path in places if os.path.lexists(path)), None)
    if name not in TRANSFORMERS or not _renamed(tensors):
        place = place or folder / "config.json"
        return place, read_config(place)
    shapes = _shapes(tensors)
    if place is None:
        return weights, derive_config(class_name, shapes, str(weights))
    config = read_config(place)
    if is_original(config):
        config = derive_config(class_name, shapes, str(weights), config, str(place))
    return place, config
