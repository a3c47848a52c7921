"""Random edits of a checkpoint: other values in its configs, other tensors in its weight files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from campaign.damage import files_below
from hostile.tensor_files import join, split, tensor_names
from hostile.things import NAMES, VALUES

_VALUES: tuple[Any, ...] = (*VALUES, *NAMES, True, False, 3, -0.0, 1e-300, [0])
_DTYPES = ("F32", "F16", "BF16", "F64", "I8", "I64", "F8_E4M3", "BOOL", "U4", "", 7, None)


def edit_source(rng: random.Random, checkpoint: Path) -> str:
    """Edits a config, an index or the header of a weight file at random, and says how."""
    files = files_below(checkpoint)
    weights = [path for path in files if path.suffix == ".safetensors"]
    if rng.random() < 0.4:
        return _edit_tensors(rng, rng.choice(weights))
    return _edit_json(rng, rng.choice([path for path in files if path.suffix == ".json"]))


def _edit_json(rng: random.Random, path: Path) -> str:
    """Gives a field another value, another name, or none; at the top or one level below."""
    data = json.loads(path.read_bytes())
    if not isinstance(data, dict) or not data:
        path.write_text(json.dumps(rng.choice(_VALUES)))
        return f"{path.parent.name}/{path.name} is another value"
    key = rng.choice(sorted(data))
    parent, name = data, key
    if isinstance(data[key], dict) and data[key] and rng.random() < 0.7:
        parent, name = data[key], rng.choice(sorted(data[key]))
    elif isinstance(data[key], list) and data[key] and rng.random() < 0.5:
        data[key][rng.randrange(len(data[key]))] = rng.choice(_VALUES)
        path.write_text(json.dumps(data))
        return f"{path.parent.name}/{path.name} {key}: an item of {data[key]!r:.80}"
    what = rng.choice(("value", "value", "value", "nudge", "remove", "rename"))
    if what == "remove":
        del parent[name]
    elif what == "rename":
        parent[rng.choice((f"{name}s", "", "x\ny"))] = parent.pop(name)
    elif what == "nudge" and type(parent[name]) in (int, float):
        parent[name] = parent[name] * rng.choice((2, -1, 1000)) + rng.choice((0, 1, -1))
    else:
        parent[name] = rng.choice(_VALUES)
    path.write_text(json.dumps(data))
    return f"{path.parent.name}/{path.name} {what} {key}.{name} = {parent.get(name)!r:.80}"


def _edit_tensors(rng: random.Random, path: Path) -> str:
    """Changes an entry of a safetensors header, whose bytes stay; the header's length fits again."""
    header, rest = split(path.read_bytes())
    name = rng.choice(tensor_names(header))
    entry = header[name]
    what = rng.choice(("dtype", "shape", "offset", "name", "drop", "extra", "field", "metadata", "exchange"))
    if what == "dtype":
        entry["dtype"] = rng.choice(_DTYPES)
    elif what == "shape":
        entry["shape"] = rng.choice(
            ([], [0], [-1], [2**62, 2**62], [1, *entry["shape"]], entry["shape"][::-1], None, ["a"], [1.5])
        )
    elif what == "offset":
        entry["data_offsets"][rng.randrange(2)] += rng.choice((1, -1, 4, -4, 2**40, -(2**40), 2**64))
    elif what == "name":
        header[rng.choice(("", "x", f"{name}.x", name[:-1], "a\nb", "é" * 300))] = header.pop(name)
    elif what == "drop":
        del header[name]
    elif what == "extra":
        header["extra.weight"] = dict(entry)
    elif what == "field":
        entry[rng.choice(("x", "dtypes"))] = rng.choice(_VALUES)
    elif what == "metadata":
        header["__metadata__"] = rng.choice(_VALUES)
    else:
        other = rng.choice(tensor_names(header))
        header[name], header[other] = header[other], header[name]
    path.write_bytes(join(header, rest))
    return f"{path.parent.name}/{path.name} {what} of {name}"
