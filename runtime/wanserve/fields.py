"""Reads the body of a request as options of the record: every server's names, sizes, seconds and files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import wanrun
from wanrun.errors import UsageError, quoted
from wanrun.request.elsewhere import ALIKE, nearest
from wanrun.request.lengths import length_of
from wanrun.request.written import parse_size
from wanserve.catalog import Catalog, ServedModel
from wanserve.field_names import (
    INSTEAD,
    LORA,
    MEDIA,
    MERGED,
    NO_EFFECT,
    ROLES,
    USELESS,
    files,
    options_by_name,
)
from wanserve.field_values import decoded, is_live, mistyped, number_of, read_loras, single_lora, take_live
from wanserve.forms import MAX_FILES, RequestBody
from wanserve.refusal import RefusedError, unknown, whole
from wanserve.request_media import (
    Source,
    check_file,
    decoded_text,
    head_of,
    kind_of,
    safe_name,
    stored_upload,
)
from wanserve.route import FORMATS
from wanserve.settings import Settings
from wanserve.sizes import MAX_ITEMS
from wanserve.video import LiveState, Upload

MAX_NAME = 200
"""Characters of a field's name."""

OWN = ("model", "live", "seeds", "seconds", "width", "height", "format", "output_format")
"""Fields besides the options of the record."""

MOST_SEEDS = 100
"""Videos of one request."""


@dataclass
class Body:
    """What the body of a request asks for.

    Attributes:
        options: values by the options' Python names, without images and videos.
        media: the images and videos, which are stored.
        format: suffix of the videos.
        spelled: the client's name of each option that was given.
        seeds: that of each video; None for one video with the option ``seed``.
        frames: those of a live video; None for no end.
    """

    model: ServedModel
    options: dict[str, Any] = field(default_factory=dict)
    media: list[Upload] = field(default_factory=list)
    format: str = "mp4"
    spelled: dict[str, str] = field(default_factory=dict)
    seeds: list[int] | None = None
    live: bool = False
    frames: int | None = None

    def spell(self, option: str) -> str:
        """Returns the client's name of an option."""
        return self.spelled.get(option, option)

    def live_state(self, settings: Settings, client_seconds: float | None, fps: float) -> LiveState | None:
        """Returns the state of a live video, None for another; raises RefusedError for one that is too long.

        ``client_seconds`` are the client's own limit, None for none.
        """
        if not self.live:
            return None
        most = settings.max_live_seconds
        if client_seconds is not None:
            most = min(most, float(client_seconds))
        if self.frames is not None and self.frames - 1 > most * fps:  # one more ends the last second
            raise RefusedError(
                "the live video is too long",
                param=self.spell("num_frames"),
                code="out_of_range",
                expected=f"at most {most:g} seconds, {int(most * fps)} frames",
                found=f"{self.frames} frames",
                remedy="ask for fewer",
            )
        return LiveState(frames=self.frames, seconds=most, bytes=settings.live_bytes)

    def fingerprint(self) -> str:
        """Returns a digest that is equal for equal requests."""
        facts: list[Any] = [
            *((["live", self.frames],) if self.live else ()),
            self.model.name,
            self.options,
            self.format,
            [(one.option, one.digest) for one in self.media],
        ]
        if self.seeds is not None:
            facts.append(self.seeds)
        return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()


def read_body(
    form: RequestBody, catalog: Catalog, folder: Path, model: str | None = None, live: bool = False
) -> Body:
    """Reads what a client asks for; whether the artifact can make it is for ``ServedModel.resolve``.

    It may decode and write megabytes: a thread's work. Files are stored in ``folder``, which is made for the
    first one. Where the request does not say them, ``model`` (None for the only one) and ``live`` count.
    Raises RefusedError for a field that is unknown, mistyped, given twice or without a meaning here.
    """
    given = dict(_flat(form.fields))
    named = given.pop("model", model)
    if not isinstance(named, str | None):
        raise mistyped("model", "a string", named)
    body = Body(catalog.find(named))
    body.live = is_live(given.pop("live", live))
    if (suffix := _format(given)) is not None:
        body.format, body.spelled["format"] = suffix, "format"
    seconds, seeds = given.pop("seconds", None), given.pop("seeds", None)
    _take_size(given, body)
    if (lora := single_lora(given)) is not None:
        body.options["lora"], body.spelled["lora"] = lora
    arrived = list[_File]()
    for name, file in form.files:
        option = _option_of(name)
        check_file(file, name)
        arrived.append(_File(name, option, safe_name(file.filename), file))
    for name, value in given.items():
        if name in MEDIA or options_by_name().get(name) in files():
            if value not in (None, ""):
                arrived += _files_of(name, value)
        else:
            _take_option(name, value, name in form.fields, body)
    if seconds is not None:
        _take_seconds(seconds, body)
    _take_seeds(seeds, body)
    if body.live:
        others = ["seeds"] * (body.seeds is not None) + ["format"] * (body.format != "mp4")
        body.frames = take_live(body.model, body.options, others, body.spell)
    if len(arrived) > MAX_FILES:
        expected, found = f"at most {MAX_FILES}", str(len(arrived))
        what = "the request has too many files"
        raise RefusedError(what, code="too_many_files", expected=expected, found=found)
    for one in arrived:
        _take_file(one, folder, body)
    return body


def _flat(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the fields, with the entries of `MERGED` objects as fields; refuses one that is given twice."""
    seen = set[str]()
    for name, value in fields.items():
        inner = [(name, value)]
        if name in MERGED:
            inner = list(_flat(_object(name, value)))
        for key, item in inner:
            if len(key) > MAX_NAME:
                raise unknown(key)
            if key in seen:
                raise RefusedError(f"{key} is given twice", param=key, code="conflict")
            seen.add(key)
            yield key, item


def _object(name: str, value: Any) -> Mapping[str, Any]:
    """Returns a field that is an object, or the JSON text of one."""
    if isinstance(value, str):
        value = decoded(name, value or "{}")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise mistyped(name, "an object", value)
    return value


def _format(given: dict[str, Any]) -> str | None:
    """Takes the suffix of the videos out of the fields; None if it is not given."""
    values = [given.pop(name) for name in ("format", "output_format") if name in given]
    value = next((one for one in values if one is not None), None)
    if value is not None and (not isinstance(value, str) or value not in FORMATS):
        raise RefusedError(
            f"format cannot be {quoted(value)}", param="format", expected=f"one of {', '.join(FORMATS)}"
        )
    return value


def _take_size(given: dict[str, Any], body: Body) -> None:
    """Makes a size of width and height."""
    width, height = given.pop("width", None), given.pop("height", None)
    if width is None and height is None:
        return
    sizes = list[int]()
    for name, value in (("width", width), ("height", height)):
        if value is None:
            raise RefusedError(f"{name} is missing: width and height go together", param=name)
        sizes.append(whole(value, 1, 99_999, name))
    if any(options_by_name().get(name) == "size" for name in given):
        raise RefusedError(
            "size is given twice: as size, and as width and height", param="size", code="conflict"
        )
    body.options["size"], body.spelled["size"] = "x".join(map(str, sizes)), "size"


def _take_option(name: str, value: Any, text: bool, body: Body) -> None:
    """Takes the value of an option; ``text`` says that it may be a form's string for another type."""
    if name in NO_EFFECT:
        if NO_EFFECT[name] and value is not None and value not in NO_EFFECT[name]:
            allowed = " or ".join(dict.fromkeys(str(one).lower() for one in NO_EFFECT[name]))
            raise RefusedError(
                f"{name} cannot be {quoted(value)}", param=name, expected=allowed, remedy=USELESS.get(name)
            )
        return
    option = options_by_name().get(name)
    if option is None:
        raise _unknown(name, body)
    if value is None:
        return
    if option in body.options:
        other = body.spell(option)
        raise RefusedError(
            f"{name} is given twice" + (f", also as {other}" * (other != name)), param=name, code="conflict"
        )
    row = next(row for row in wanrun.options() if row.name == option)
    body.options[option], body.spelled[option] = _typed(row, value, text, name), name
    if option == "size":
        _check_size(value, name, body.model)


def _check_size(value: Any, name: str, model: ServedModel) -> None:
    """Refuses a text that is not a size, such as ``480p``, with the sizes that the model has."""
    try:
        if isinstance(value, str):
            parse_size(value)
    except UsageError:
        built = ", ".join(dict.fromkeys(shape["size"] for shape in model.shapes()))
        what = f"{name} cannot be {quoted(value)}"
        raise RefusedError(what, param=name, expected=f"one of {built}") from None


def _unknown(name: str, body: Body) -> RefusedError:
    """Returns the error of a field that has no meaning here."""
    known = [*(row.name for row in wanrun.options()), *options_by_name(), *OWN, *MEDIA, *LORA]
    meant = name if name in INSTEAD else nearest(name, [*known, *INSTEAD])
    if meant in known:
        return unknown(name, remedy=f"use {meant}")
    error = UsageError("invalid_value", "", remedy=INSTEAD.get(meant or ""))
    if meant is not None and set(error.fields) <= body.model.options.keys():  # which this model has
        return unknown(name, remedy=error.words(body.spell).get("remedy"))
    like = nearest(name, [*body.model.options, *OWN], ALIKE)
    such = "" if like is None else f", such as {like}"
    return unknown(name, f"an option that v1/models/{body.model.name} lists{such}")


def _typed(row: Any, value: Any, text: bool, name: str) -> Any:
    """Returns the value of a form's string where the option is a number, or a list of numbers."""
    if row.record:
        return read_loras(value, name, text)
    if row.name == "seed" and isinstance(value, list) and len(value) == 1:
        value = value[0]  # SGLang's clients send a list
    if not text:
        return tuple(value) if row.numbers and isinstance(value, list) else value
    if row.numbers:
        items = value.strip("[] ").split(",", MAX_ITEMS) if isinstance(value, str) else value
        return tuple(number_of(item, row.base) for item in items) if isinstance(items, list) else items
    if isinstance(value, list):
        each = "send a request for each" if row.name == "prompt" else None
        what = f"{name} is given {len(value)} times"
        raise RefusedError(what, param=name, expected="one", remedy=each)
    if row.base in (int, float) and value != "random":
        return number_of(value, row.base)
    return value


def _take_seconds(value: Any, body: Body) -> None:
    """Chooses the number of frames that makes so many seconds; a given one has to agree."""
    number = number_of(value, float)
    if type(number) not in (int, float):
        raise mistyped("seconds", "a positive number", value)
    if not 0 < number < 1e5:
        what, expected = "seconds is out of range", "more than 0, less than 100000"
        raise RefusedError(what, param="seconds", code="out_of_range", expected=expected, found=quoted(value))
    fps = body.options.get("fps", body.model.manifest.model.defaults.fps)
    rate = float(fps) if type(fps) in (int, float) and fps > 0 else 16.0
    frames = length_of(body.model.manifest.model, number, rate)
    if (given := body.options.get("num_frames")) is not None:
        if type(given) is int and given != frames:  # the record refuses other types
            raise RefusedError(
                f"seconds and {body.spell('num_frames')} contradict each other",
                param="seconds",
                expected=f"{frames} frames",
                found=quoted(given),
                remedy="leave one out",
            )
        return
    built = sorted({shape["num_frames"] for shape in body.model.shapes()})
    if frames not in built and not body.model.live:
        lengths = ", ".join(f"{frames / rate:.4g} ({frames} frames)" for frames in built)
        raise RefusedError(
            f"no video of {number:g} seconds is built",
            param="seconds",
            expected=f"one of {lengths}",
            code="not_built",
        )
    body.options["num_frames"], body.spelled["num_frames"] = frames, "seconds"


def _take_seeds(value: Any, body: Body) -> None:
    """Takes the seeds of several videos: a list, or a text such as ``1,2,3``."""
    if value in (None, ""):
        return
    if "seed" in body.options:
        what = f"{body.spell('seed')} and seeds exclude each other"
        raise RefusedError(what, param="seeds", code="conflict", remedy="leave one out")
    items = value.strip("[] ").split(",", MOST_SEEDS) if isinstance(value, str) else value
    seeds = [number_of(item, int) for item in items] if isinstance(items, list) else []
    if not 1 <= len(seeds) <= MOST_SEEDS or any(type(one) is not int for one in seeds):
        raise mistyped("seeds", f"1 to {MOST_SEEDS} whole numbers", value)
    body.seeds, body.spelled["seed"] = seeds, "seeds"


def _option_of(name: str) -> str:
    """Returns the option of a field with a file; empty where its content decides."""
    bare = name.removesuffix("[]")
    option = options_by_name().get(bare, MEDIA.get(bare))
    if option is None or (option and option not in files()):
        taken = [row.name for row in wanrun.options() if row.name in files()]
        raise RefusedError(
            f"the field {bare[:60]!r} takes no file",
            param=bare[:60],
            expected=f"one of {', '.join([*taken, *MEDIA])}",
            code="unknown_parameter",
        )
    return option


class _File(NamedTuple):
    """An image or a video of a form: the field, the option or "" if its kind decides, and its name."""

    field: str
    option: str
    name: str
    source: Source


def _files_of(name: str, value: Any) -> Iterator[_File]:
    """Yields the images or videos of a field without a file."""
    if isinstance(value, str) and value[:1] in "[{":
        value = decoded(name, value)
    for one in value if isinstance(value, list) else [value]:
        option = _option_of(name)
        if isinstance(one, dict) and (role := one.get("role")) is not None:
            if not isinstance(role, str) or role not in ROLES:
                expected = f"one of {', '.join(ROLES)}"
                raise RefusedError(f"{name} has the role {quoted(role)}", param=name, expected=expected)
            option = ROLES[role]
        yield _File(name, option, "data", decoded_text(one, name))


def _take_file(file: _File, folder: Path, body: Body) -> None:
    """Stores an image or a video for the option that it belongs to."""
    inputs = {option: (kind, many) for option, kind, _, many in body.model.inputs}
    name, option = file.field, file.option
    if option not in inputs and name in MEDIA:  # a name that stands for any input
        _, kind = kind_of(head_of(file.source))
        option = next((one for one, (takes, _) in inputs.items() if takes == kind), "")
    if option not in inputs:
        taken = f"images or videos only as {', '.join(inputs)}" if inputs else "no images or videos"
        raise RefusedError(
            f"{name} cannot be used: {body.model.name} takes {taken}", param=name, code="unsupported"
        )
    if not inputs[option][1] and any(other.option == option for other in body.media):
        raise RefusedError(f"{option} is given twice", param=name, code="conflict")
    body.spelled.setdefault(option, name.removesuffix("[]"))
    number = len(body.media)
    body.media.append(stored_upload(file.source, option, file.name, folder, number))
