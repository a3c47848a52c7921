"""The rows of a request, and the JSON schema that derives from them."""

from __future__ import annotations

__all__ = ["aliases", "rows"]

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgspec

from wanrun.request.request import PROMPTS, Request
from wanrun.rows import Row, rows_of


def rows(kind: type[Request] = Request) -> tuple[Row, ...]:
    """Returns the options of a request, or of a subclass with more options, in the order of the help."""
    return tuple(sorted(rows_of(kind), key=lambda row: row.section != PROMPTS))


@lru_cache
def aliases(kind: type[Request] = Request) -> Mapping[str, str]:
    """Returns the further names that are understood, with the Python name of the option that each means."""
    return MappingProxyType({other: row.name for row in rows(kind) for other in row.also})


def schema() -> dict[str, Any]:
    """Returns the JSON schema of a request; a missing option has its default, and null is not a value."""
    parts = msgspec.json.schema(Request)["$defs"]
    whole = parts[Request.__name__]
    for item in whole["properties"].values():
        _drop_null(item)
        if "$ref" in item.get("items", {}):  # a record, or a text that stands for one
            record = parts[item["items"]["$ref"].rpartition("/")[2]]
            for one in record["properties"].values():
                _drop_null(one)
            told = {name: value for name, value in record.items() if name not in ("title", "description")}
            item["items"] = {"anyOf": [{"type": "string"}, told]}
    return dict(whole)


def _drop_null(item: dict[str, Any]) -> None:
    """Changes the schema of a value to one that null has no part in."""
    kinds = [kind for kind in item.pop("anyOf", ()) if kind != {"type": "null"}]
    if item.get("default") is None:
        item.pop("default", None)
    item |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {}
