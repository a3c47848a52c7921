"""Checkpoints whose files are no files, or whose indexes do not fit their shards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hostile.changes import (
    INDEX,
    JSON_FILES,
    SECOND,
    SHARD,
    SHARDS,
    WEIGHTS,
    Change,
    Checkpoint,
    Row,
    becomes,
    fields,
    json_of,
    one_more,
    renamed,
    tensors,
    text,
)
from hostile.refusal import edit_json
from hostile.tensor_files import split, tensor_names
from hostile.things import TEXTS, THINGS

_FIRST, _LAST = Path(SHARDS[0]).name, Path(SHARDS[2]).name
_MIDDLE = Path(SHARD).name
_OUTSIDE: tuple[Any, ...] = (
    *("../vae/diffusion_pytorch_model.safetensors", f"../transformer/{_MIDDLE}", f"./{_MIDDLE}"),
    *("/etc/passwd", "//etc/passwd", "a/b.safetensors", "a\\b.safetensors", "C:\\x.safetensors", "..", "."),
    *("", " ", ".hidden.safetensors", "a\0b.safetensors", "a\nb.safetensors", "\x1b[2J.safetensors"),
    *("\ud800.safetensors", "file:///etc/passwd", "~/x.safetensors", "x.safetensors/", "x" * 5000 + "/y"),
    *(None, 3, 1.5, True, [], ["a.safetensors"], {"file": "a.safetensors"}),
)


def _mapped(value: Any) -> Change:
    """The index says that one tensor, drawn at random, lies in this file."""

    def change(checkpoint: Checkpoint) -> None:
        def edit(data: dict[str, Any]) -> None:
            keys = sorted(data["weight_map"])
            data["weight_map"][keys[checkpoint.draw.integers(len(keys))]] = value

        edit_json(checkpoint.folder / INDEX, edit)

    return change


def _map(edit: Callable[[dict[str, Any]], object]) -> Change:
    return json_of(INDEX, lambda data: edit(data["weight_map"]))


def _twice(checkpoint: Checkpoint) -> None:
    raw = (checkpoint.folder / INDEX).read_text()
    key = sorted(json.loads(raw)["weight_map"])[0]
    checkpoint.write(INDEX, raw.replace('"weight_map": {', f'"weight_map": {{"{key}": "{_FIRST}",').encode())


def _in_two_shards(checkpoint: Checkpoint) -> None:
    header, data = split((checkpoint.folder / SHARD).read_bytes())
    key = tensor_names(header)[0]
    begin, end = header[key]["data_offsets"]
    tensor = (header[key]["dtype"], tuple(header[key]["shape"]), data[begin:end])
    tensors(SHARDS[2], lambda found, _: found.update({key: tensor}))(checkpoint)


def _swapped(checkpoint: Checkpoint) -> None:
    first, second, aside = (checkpoint.folder / name for name in (SHARDS[0], SHARD, "aside"))
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def _indexes() -> Iterator[Row]:
    for value in _OUTSIDE:
        yield Row(f"a shard {str(value)[:40]!r}", _mapped(value), "untrusted", ("index.json",), "sharded")
    for name, change, code, *values in (
        ("a shard that is not there", _mapped("x.safetensors"), "missing_file", "x.safetensors"),
        ("a shard that is missing", becomes(SHARD), "missing_file", _MIDDLE),
        ("a shard with a very long name", _mapped("x" * 5000), "unreadable"),
        ("the index as a shard", _mapped(Path(INDEX).name), "unreadable", Path(INDEX).name),
        ("the config as a shard", _mapped("config.json"), "unreadable", "config.json"),
        ("a pickle as a shard", _mapped("weights.bin"), "untrusted", "weights.bin"),
        ("a tensor in another shard", _map(lambda d: d.update({min(d): _LAST})), "mismatch"),
        ("two shards swapped", _swapped, "mismatch", "more"),
        ("a tensor twice in the index", _twice, "unreadable"),
        ("a tensor in two shards", _in_two_shards, "mismatch", _MIDDLE, _LAST),
        ("a tensor that is nowhere", _map(lambda d: d.update(other=_FIRST)), "mismatch", "other", _FIRST),
        (
            "a thousand tensors that are nowhere",
            _map(lambda d: d.update({f"o{i}": _FIRST for i in range(1000)})),
            *("mismatch", "o0 ", 995),
        ),
        ("an escape sequence for a tensor", _map(lambda d: d.update({"\x1b]0;x": _FIRST})), "unreadable"),
        ("no tensor of a shard", _map(lambda d: d.pop(sorted(d)[5])), "mismatch"),
        (
            "a shard that is not listed",
            _map(lambda d: [d.pop(key) for key in [key for key in d if d[key] == _MIDDLE]]),
            "mismatch",
        ),
        ("one tensor more in a shard", tensors(SHARD, one_more), "mismatch", "extra", _MIDDLE),
        ("no weight_map", fields(INDEX, weight_map=...), "unreadable", "weight_map"),
        (
            "a file and an index",
            lambda c: shutil.copy(c.folder / SHARD, c.folder / WEIGHTS["transformer"]),
            *("wrong_kind", "diffusion_pytorch_model.safetensors"),
        ),
    ):
        yield Row(name, change, code, tuple(values), "sharded")
    for value in (None, {}, [], "a", 1, [["a", "b"]], ["a"]):
        yield Row(f"a weight_map {value!r}", fields(INDEX, weight_map=value), "unreadable", (), "sharded")
    for name, raw in {**TEXTS, "two weight_maps": b'{"weight_map": {"a": "b"}, "weight_map": {}}'}.items():
        yield Row(f"an index of {name}", text(INDEX, raw), "unreadable", ("index.json",), "sharded")


# --- what is no file, or no folder --------------------------------------------------------------------------

_PLACES = {
    **dict.fromkeys((*JSON_FILES, WEIGHTS["vae"], "transformer", "scheduler", "tokenizer"), "float32"),
    **dict.fromkeys((SHARD, INDEX), "sharded"),
    **dict.fromkeys(("transformer_2", "transformer_2/config.json", SECOND), "experts"),
}
_WEIGHT_CODES = {
    "a link to nothing": "missing_file",
    "an empty file": "damaged",
    **dict.fromkeys(("a socket", "a terabyte", "a link to itself", "a loop of two links"), "unreadable"),
}


def _code_of(place: str, thing: str) -> str:
    if place.endswith(".safetensors"):
        return _WEIGHT_CODES.get(thing, "wrong_kind")
    absent = {"a link to nothing"}
    if place == "model_index.json":
        absent |= {"a link to itself", "a loop of two links"}
    if place in ("scheduler", "tokenizer"):
        absent |= {"a folder", "a link to its folder"}
    if place in ("transformer", "transformer_2"):
        absent |= THINGS.keys()
    return "missing_file" if thing in absent else "unreadable"


def _places() -> Iterator[Row]:
    for place, base in _PLACES.items():
        named = (place.partition("/")[0],)
        for thing, make in THINGS.items():
            if place.endswith("tokenizer_config.json") and thing == "a link to nothing":
                continue  # it may be absent
            yield Row(f"{place} is {thing}", becomes(place, make), _code_of(place, thing), named, base)
    for place in ("transformer", "transformer_2", "transformer_2/config.json", SECOND):
        named = (place.partition("/")[0],)
        yield Row(f"no {place}", becomes(place), "missing_file", named, "experts")
    for place in (WEIGHTS["vae"], WEIGHTS["text_encoder"], *JSON_FILES[:3], *JSON_FILES[4:]):
        yield Row(f"no {place}", becomes(place), "missing_file", (place.partition("/")[0],))
    for component, suffix in (("vae", ".bin"), ("transformer", ".bin"), ("transformer", ".pth")):
        weights = WEIGHTS[component]
        change = renamed(weights, str(Path(weights).with_suffix(suffix)))
        yield Row(f"pickled {component}{suffix}", change, "untrusted", (f"model{suffix}",))


ROWS: tuple[Row, ...] = (*_indexes(), *_places())
