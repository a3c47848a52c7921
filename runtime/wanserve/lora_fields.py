"""The LoRAs of a request, in the fields of every server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from wanrun.errors import UsageError
from wanrun.request.lora import LoraChoice, parse_lora
from wanserve.names import LORA, LORA_PATHS, NO_LORA_PATH, OF_LORA, options_by_name
from wanserve.refusal import RefusedError
from wanserve.route import TEXT, Content
from wanserve.values import decoded, mistyped, number_of

_TEXTS: Final[Mapping[str, Any]] = {"type": "array", "items": TEXT}
LORAS: Final = Content(
    {
        "type": "object",
        "properties": {
            "object": {"const": "list"},
            "data": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "object": {"const": "lora"},
                        "name": TEXT,
                        "rank": {"type": "integer"},
                        "experts": _TEXTS,
                        "defaults": {"type": "object"},
                        "sha256": TEXT,
                        "models": _TEXTS,
                    },
                },
            },
        },
    }
)
"""The answer of the route that lists LoRAs."""


def single_lora(given: dict[str, Any]) -> tuple[list[dict[str, Any]], str] | None:
    """Takes the fields out that describe a single LoRA, as other servers have them; texts may be a form's.

    Returns the LoRA, or several if they are lists, as of ``read_loras``, and the field with the name; None
    without one. Raises RefusedError for a strength without a name, or for LoRAs in our own field too.
    """
    told = {name: given.pop(name) for name in LORA if name in given}
    if not (told := {name: value for name, value in told.items() if value is not None}):
        return None
    if (named := next((name for name in told if LORA[name] == "name"), None)) is None:
        raise RefusedError(f"{next(iter(told))} is given without lora_name", param=next(iter(told)))
    if (other := next((name for name in given if options_by_name().get(name) == "lora"), None)) is not None:
        raise RefusedError(f"{named} is given twice, also as {other}", param=named, code="conflict")
    # SGLang's clients send lists; a form only has texts.
    lists = {name: value if isinstance(value, list) else [value] for name, value in told.items()}
    if len({len(each) for each in lists.values()}) > 1:
        raise RefusedError(f"{' and '.join(told)} are lists of different lengths", param=named)
    several = [dict(zip(lists, each, strict=True)) for each in zip(*lists.values(), strict=True)]
    return [_lora(one, named, True) for one in several], named


def read_loras(value: Any, name: str, text: bool) -> list[dict[str, Any]]:
    """Returns LoRAs that are given as texts or objects, or as the JSON text of these.

    Each is an object from which a ``LoraChoice`` is converted. ``text`` says whether numbers may be a form's
    texts. Raises RefusedError for anything else, or for the name of a file.
    """
    if isinstance(value, str) and value[:1] in ("[", "{"):
        value = decoded(name, value)
    return [_lora(one, name, text) for one in (value if isinstance(value, list) else [value])]


def _lora(value: Any, name: str, text: bool) -> dict[str, Any]:
    """Returns a LoRA by the names of our own fields."""
    if isinstance(value, str):
        try:
            choice = parse_lora(value, files=False)
        except UsageError as error:
            raise RefusedError(str(error), param=name) from None
        return {key: one for key, one in msgspec.structs.asdict(choice).items() if one is not None}
    if not isinstance(value, dict):
        raise mistyped(
            name, "the name of a LoRA, an object with name and strength, or a list of these", value
        )
    found = dict[str, Any]()
    for key, given in value.items():
        if (own := OF_LORA.get(key, key)) in found:
            raise RefusedError(
                f"{own} of {name} is given twice, also as {key[:60]!r}", param=name, code="conflict"
            )
        if key in LORA_PATHS:
            raise RefusedError(f"{name} has a {key}; {NO_LORA_PATH}", param=name)
        if own and given is not None:
            found[own] = number_of(given, float) if text and own != "name" else given
    try:
        msgspec.convert(found, LoraChoice)
    except msgspec.ValidationError as error:
        what = f"{name} cannot be used; expected name, with strength or with high and low; found {error}"
        raise RefusedError(what, param=name) from None
    return found
