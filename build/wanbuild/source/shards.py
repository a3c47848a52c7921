"""Finds a part's weights, a file or the index of shards, and checks shards against their index."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from wanbuild.config import read_json
from wanbuild.source.safetensors import PICKLED_SUFFIXES, TensorFile, refuse_pickle
from wanrun.errors import SourceError

WEIGHT_NAMES: Mapping[str, str] = MappingProxyType(
    {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
)
"""Each library's name for its weight file, without the suffix."""

_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
_INDEX = ".safetensors.index.json"


def list_folder(folder: Path) -> list[str] | None:
    """Returns the names in a folder, sorted; None if there is no folder."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None


def _weight_candidates(names: Sequence[str], base: str) -> list[str]:
    """Returns the plain weight file and index if they exist, else those of a named variant (fp16, ...)."""
    plain = [name for name in (f"{base}.safetensors", f"{base}.safetensors.index.json") if name in names]
    if plain:
        return plain
    single = re.compile(re.escape(base) + r"\.[\w-]+\.safetensors")
    index = re.compile(re.escape(base) + r"\.safetensors\.index\.[\w-]+\.json")
    return [
        name
        for name in names
        if index.fullmatch(name) or (single.fullmatch(name) and not _SHARD.fullmatch(name))
    ]


def _other_candidates(names: Sequence[str]) -> list[str]:
    """Returns weight files and indexes of any other name; shards are found by their index."""
    ends = (".safetensors", ".gguf", _INDEX)
    return [name for name in names if name.endswith(ends) and not _SHARD.fullmatch(name)]


def find_weights(
    folder: Path,
    base: str,
    beside: Path | None = None,
    names_in: Callable[[Path], Sequence[str] | None] = list_folder,
) -> Path:
    """Returns the weight file or index of a component.

    It is the plain one, else the only named variant's, else the only safetensors file. ``base`` is the
    library's name for weights, from ``WEIGHT_NAMES``. ``beside`` is a second folder to look in, if the first
    is missing or has no weights. ``names_in`` lists a folder, which may be on the hub. Raises SourceError if
    there are no weights, several candidates, or only a pickled checkpoint.
    """
    for place in (folder, beside):
        names = None if place is None else names_in(place)
        if place is None or names is None:
            continue
        candidates = _weight_candidates(names, base) or _other_candidates(names)
        if len(candidates) == 1:
            return place / candidates[0]
        if candidates:
            raise SourceError(
                "wrong_kind",
                f"{place} holds more than one set of weights",
                expected="one",
                found=", ".join(candidates),
                remedy="keep the one to convert, in a folder of your own",
            )
    names, again = names_in(folder), "use a complete checkpoint, or download it again"
    if names is None:
        raise SourceError("missing_file", f"{folder} is missing", expected="a folder", remedy=again)
    for name in names:
        if Path(name).suffix in PICKLED_SUFFIXES:
            refuse_pickle(folder / name)
    raise SourceError(
        "missing_file",
        f"{folder} holds no weights",
        expected=f"{base}.safetensors or its index",
        remedy=again,
    )


def weights_at(name: str, place: Path) -> Path:
    """Returns the weight file or the index that the user gives for a part: a file, an index or a folder.

    In a checkpoint's folder it is the part's. Raises SourceError for one of several shards, or as
    ``find_weights``.
    """
    if place.is_dir():
        own = place / name if is_checkpoint(place) else place
        return find_weights(own, WEIGHT_NAMES["transformers" if name.endswith("encoder") else "diffusers"])
    if is_shard(place):
        raise SourceError(
            "wrong_kind",
            f"{place} is one of several shards",
            expected="their index, or their folder",
            remedy=f"give {place.parent}, with the {_INDEX[1:]} that was published with them in it",
        )
    return place


def is_checkpoint(folder: Path) -> bool:
    """Returns whether a folder is a whole checkpoint, of which parts have a folder each."""
    return (folder / "model_index.json").exists()


def is_shard(path: Path) -> bool:
    """Returns whether a file is one of several shards, by its name."""
    return _SHARD.fullmatch(path.name) is not None


def read_weight_map(index: Path) -> dict[str, str]:
    """Returns tensor name -> shard name; raises SourceError unless every shard is a plain file name."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError("unreadable", f"{index} has no weight_map", remedy="download it again")
    for name in weight_map.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*", name):
            raise SourceError(
                "untrusted",
                f"{index} refers to a file outside its folder",
                expected="a plain file name",
                found=repr(name)[:80],
                remedy="do not use this checkpoint",
            )
        refuse_pickle(index.parent / name)
    return weight_map


def missing_shard(path: Path) -> SourceError:
    """Returns the error of a file that an index names and that is not there."""
    return SourceError(
        "missing_file", f"{path} is missing", remedy="download it again; check the folder is complete"
    )


def check_shards(index: Path, weight_map: Mapping[str, str], files: Mapping[str, TensorFile]) -> None:
    """Raises SourceError unless each tensor is in the shard that the index names, and in no other."""
    problems = [
        f"{key} is not in {shard}" for key, shard in weight_map.items() if key not in files[shard].entries
    ]
    for shard, file in files.items():
        for key in file.entries:
            if key not in weight_map:
                problems.append(f"{key} in {shard} is not in the index")
            elif weight_map[key] != shard:
                problems.append(f"{key} is in {shard} too, not only in {weight_map[key]}")
    if problems:
        shown = ", ".join(problems[:5]) + (f" and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise SourceError(
            "mismatch", f"{index} does not fit its shards: {shown}", remedy="download the folder again"
        )
