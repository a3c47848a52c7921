"""Reads values of fields, as JSON has them or as a form's texts: numbers, LoRAs, live videos."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from wanrun.errors import UsageError, quoted
from wanrun.request.lengths import check_live
from wanrun.request.lora import LoraChoice, parse_lora
from wanrun.request.values import OF_WHOLE_VIDEOS
from wanserve.catalog import ServedModel
from wanserve.field_names import LORA, LORA_PATHS, NO_LORA_PATH, OF_LORA, options_by_name
from wanserve.refusal import RefusedError, refused, whole
from wanserve.route import TEXT, Content
from wanserve.sizes import check_json

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

MOST_FRAMES: Final = 10**9
"""The longest live video."""


def decoded(name: str, text: str) -> Any:
    """Returns the value of a field's JSON text."""
    check_json(text.encode())
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise RefusedError(f"{name} is not JSON", param=name) from None


def mistyped(name: str, expected: str, value: Any) -> RefusedError:
    """Returns the error of a field that has another type."""
    what, found = f"{name} has the wrong type", quoted(value)
    return RefusedError(what, param=name, code="wrong_type", expected=expected, found=found)


def number_of(value: Any, kind: type[int] | type[float]) -> Any:
    """Returns a text as a number if it is one, else as it is: the record's check refuses it."""
    if not isinstance(value, str) or len(value) > 40:
        return value
    try:
        return kind(value)
    except ValueError:
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if kind is int and number.is_integer() else number


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
            raise refused(error, lambda _: name, asked=[name]) from None
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
            raise RefusedError(f"{name} has a {key}", param=name, remedy=NO_LORA_PATH)
        if own and given is not None:
            found[own] = number_of(given, float) if text and own != "name" else given
    try:
        msgspec.convert(found, LoraChoice)
    except msgspec.ValidationError as error:
        expected = "name, with strength or with high and low"
        what = f"{name} cannot be used"
        raise RefusedError(what, param=name, expected=expected, found=str(error)) from None
    return found


def is_live(value: Any) -> bool:
    """Returns the field's value, also as a form has it. Raises RefusedError for another value."""
    if value not in (True, False, "true", "false") or type(value) is int:
        raise mistyped("live", "true or false", value)
    return value in (True, "true")


def take_live(
    model: ServedModel, options: dict[str, Any], others: Sequence[str], spell: Callable[[str], str]
) -> int | None:
    """Takes the length of a live video out of the options of a request, and returns it; None for no end.

    ``others`` are given fields that a live video excludes; ``spell`` returns the client's name of an option.
    Raises RefusedError for a length that the model does not make, for a model without live videos, and for an
    option that they exclude.
    """
    if given := [*(spell(name) for name in OF_WHOLE_VIDEOS if name in options), *others]:
        what = f"live and {given[0]} exclude each other"
        raise RefusedError(what, param=given[0], code="conflict", remedy="leave one out")
    asked = options.pop("num_frames", None)
    frames = None if asked is None else whole(asked, 1, MOST_FRAMES, spell("num_frames"))
    try:
        check_live(model.manifest, frames, "num_frames", options.get("decoder"))
    except UsageError as error:
        raise refused(error, spell, asked=["live"]) from None
    return frames
