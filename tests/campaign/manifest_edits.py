"""Random edits of a manifest, by a grammar: other types, other ranges, other names, exchanged values."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hostile.things import NAMES, VALUES
from wanrun.artifact.manifest import MANIFEST, digests_of

_VALUES: tuple[Any, ...] = (*VALUES, *NAMES, True, False, -0.0, 1e-300, "0", [0, 0, 0, 0, 0])


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place below a JSON value, as keys and indices."""
    items: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, item in items:
        yield (*path, key)
        yield from _places(item, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def edit_manifest(rng: random.Random, artifact: Path) -> tuple[str, bool]:
    """Edits an artifact's manifest at random.

    Returns:
        The edit in words; and whether the digests were made anew, so that it is what its maker says.
    """
    path = artifact / MANIFEST
    data = json.loads(path.read_bytes())
    sections = [key for key in data if key not in ("format", "components")]
    section = rng.choice([*sections, "components"])
    inside = [(section, *place) for place in _places(data[section])] or [(section,)]
    place = rng.choice([(section,), *rng.choices(inside, k=6)])
    parent, key = _at(data, place[:-1]), place[-1]
    what = rng.choice(("value", "value", "value", "value", "remove", "rename", "exchange", "nudge"))
    if what == "remove":
        del parent[key]
    elif what == "rename" and isinstance(parent, dict):
        parent[rng.choice(("x", f"{key}s", ""))] = parent.pop(key)
    elif what == "exchange":
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    elif what == "nudge" and type(parent[key]) in (int, float):
        parent[key] = parent[key] * rng.choice((2, -1, 1000)) + rng.choice((0, 1, -1))
    else:
        parent[key] = rng.choice(_VALUES)
    signed = rng.random() < 0.8 and _sign(data)
    path.write_text(json.dumps(data))
    return f"{what} {'.'.join(map(str, place))[:80]}", signed


def _sign(data: dict[str, Any]) -> bool:
    """Makes the digests anew, where the edited manifest is one at all."""
    try:
        data.update(digests_of(data))
    except Exception:
        return False
    return True
