"""What to make: one prompt of the command line, or the lines of a prompts file.

A prompts file is UTF-8 text, and blank lines are skipped. It is either one prompt a line, or JSON lines: one
object a line, where the file's name ends in ``.jsonl`` or the first line starts with ``{``.

| key | type | replaces |
|---|---|---|
| prompt | string, required | |
| negative_prompt | string | --negative-prompt |
| seed, steps | integer | --seed, --steps |
| guidance_scale, guidance_scale_2 | number | --guidance-scale, --guidance-scale-2 |
| boundary, flow_shift, fps | number | --boundary, --flow-shift, --fps |
| solver | string | --solver |
| output | string, may hold fields | --output |
| image, last_image | file | --image, --last-image |
| video, mask | file or folder | --video, --mask |
| reference_image | file, or list of files | --reference-image |
| pose_video, face_video, background_video, mask_video | file or folder | --pose-video and so on |
| mode | string | --mode |
| conditioning_scale | number | --conditioning-scale |
| segment_overlap | integer | --segment-overlap |

Files are relative to the working directory. What a line leaves out is the command line's: so all lines have
its --seed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanrun.errors import UsageError, field
from wanrun.media.types import MEDIA_KINDS, OVERLAPS, Media

_MAX_BYTES = 64 << 20  # a prompts file of this size is something else


@dataclass(frozen=True)
class Request:
    """One prompt and its options; None where the artifact's default is asked for.

    Attributes:
        where: file and line, for messages; empty for a prompt of the command line.
        index: which of the file's prompts it is, from 1. Lines that cannot be used count too, so that
            correcting one does not rename the others' outputs.
        total: how many prompts the file has.
        output: the line's own output name; None where it is --output's.
        image: a file; this, the next eight and mode are the media that the video is made from.
    """

    prompt: str
    negative_prompt: str | None = None
    seed: int = 0
    steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    boundary: float | None = None
    flow_shift: float | None = None
    solver: str | None = None
    fps: float | None = None
    output: str | None = None
    image: str | None = None
    last_image: str | None = None
    video: str | None = None
    mask: str | None = None
    reference_image: tuple[str, ...] = ()
    pose_video: str | None = None
    face_video: str | None = None
    background_video: str | None = None
    mask_video: str | None = None
    mode: str | None = None
    conditioning_scale: float | None = None
    segment_overlap: int | None = None
    where: str = ""
    index: int = 1
    total: int = 1

    @property
    def media(self) -> Media:
        """What the video is made from besides the prompt."""
        files = {name: Path(path) for name in _FILES if (path := getattr(self, name)) is not None}
        references = tuple(map(Path, self.reference_image))
        overlap = self.segment_overlap or OVERLAPS[0]
        return Media(**files, reference_image=references, mode=self.mode, segment_overlap=overlap)

    @property
    def media_files(self) -> Iterator[tuple[str, Path]]:
        """What the media are read from, with the names of the options."""
        for name in _FILES:
            if getattr(self, name) is not None:
                yield name, Path(getattr(self, name))
        for path in self.reference_image:
            yield "reference_image", Path(path)


_FILES = tuple(name for name in MEDIA_KINDS if name != "reference_image")
"""The media of which there is one each."""

_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "prompt": ((str,), "a string"),
        "negative_prompt": ((str,), "a string"),
        "seed": ((int,), "an integer"),
        "steps": ((int,), "an integer"),
        "guidance_scale": ((int, float), "a number"),
        "guidance_scale_2": ((int, float), "a number"),
        "boundary": ((int, float), "a number"),
        "flow_shift": ((int, float), "a number"),
        "solver": ((str,), "a string"),
        "fps": ((int, float), "a number"),
        "output": ((str,), "a string"),
        **dict.fromkeys(_FILES, ((str,), "a string")),
        "reference_image": ((str, list), "a string or a list of strings"),
        "mode": ((str,), "a string"),
        "conditioning_scale": ((int, float), "a number"),
        "segment_overlap": ((int,), "an integer"),
    }
)

_PROFILE = ("one profile", "--size, --frames and --num-videos")
_RUN_KEYS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("size", "width", "height", "frames", "num_frames", "num_videos"), _PROFILE),
        "loop": ("one form of the loop", "--loop"),
    }
)
"""What a whole run has one of, and the options that set it."""


def request_from_options(options: Mapping[str, Any], prompt: str) -> Request:
    """A prompt with the command line's options.

    Raises:
        UsageError: for a file of no name.
    """
    shared = {name: options[name] for name in _KINDS if name not in ("prompt", "output")}
    for name in MEDIA_KINDS:
        for problem in _bad_names(field(name), shared[name]):
            raise problem
    return Request(prompt, **{**shared, "reference_image": tuple(shared["reference_image"])})


def have_media_of(shared: Request, requests: Sequence[Request]) -> bool:
    """Whether there are requests, and all have the media of ``shared``, the command line's."""
    return bool(requests) and all(request.media == shared.media for request in requests)


def read_requests(path: Path, options: Mapping[str, Any]) -> tuple[list[Request], dict[int, UsageError]]:
    """Reads a prompts file.

    Args:
        path: the file, or ``-`` for standard input. A pipe will do.
        options: the command line's options by name: what a line leaves out.

    Returns:
        The requests, and by index what is wrong with the other lines.

    Raises:
        UsageError: if the file cannot be read, is no text in UTF-8, or has no prompt.
    """
    name, data = _read(path)
    lines = [(number, line.strip()) for number, line in enumerate(data.split(b"\n"), 1)]
    filled = [(number, line) for number, line in lines if line]
    if not filled:
        raise UsageError(f"the prompts file {name} has no prompt", remedy="write one prompt a line")
    as_json = path.suffix.lower() == ".jsonl" or filled[0][1].startswith(b"{")
    requests, failures = [], {}
    for index, (number, line) in enumerate(filled, 1):
        where = f"{name}:{number}"
        try:
            values = _decode_json(line) if as_json else {"prompt": _decode(line)}
        except UsageError as error:
            failures[index] = error.located(where)
            continue
        base = request_from_options(options, "")
        requests.append(dataclasses.replace(base, **values, where=where, index=index, total=len(filled)))
    return requests, failures


def _read(path: Path) -> tuple[str, bytes]:
    """The name for messages and the content, without a byte order mark."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        if str(path) == "-":
            data = b"" if sys.stdin is None else sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"the prompts file {name} cannot be read", found=reason) from None
    if len(data) > _MAX_BYTES:
        raise UsageError(f"the prompts file {name} is too large", expected=f"at most {_MAX_BYTES >> 20} MiB")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"the prompts file {name} is UTF-16", remedy="save it as UTF-8")
    return name, data.removeprefix(b"\xef\xbb\xbf")


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            "the line is not UTF-8", found=f"byte 0x{line[error.start]:02x}", remedy="save the file as UTF-8"
        ) from None


def _decode_json(line: bytes) -> dict[str, Any]:
    """The values of one JSON line; all that is wrong with it is one error."""
    text = _decode(line)
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"the line is not JSON ({error})",
            expected='an object such as {"prompt": "a fox"}',
            found=_short(text),
        ) from None
    if not isinstance(pairs, _Pairs):
        raise UsageError("the line is not a JSON object", expected='{"prompt": "..."}', found=_short(text))
    values: dict[str, Any] = {}
    problems = []
    for key, value in pairs:
        if key in values:
            problems.append(UsageError(f"{key} is given twice"))
        values[key] = value
        problems += _problems(key, value)
    if "prompt" not in values:
        problems.append(UsageError("there is no prompt", expected='"prompt": "..."'))
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise UsageError("; ".join(problem.text for problem in problems))
    return {key: _value(key, value) for key, value in values.items()}


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as it is written: a dict would hide that a key is there twice."""


def _problems(key: str, value: Any) -> Iterator[UsageError]:
    if key in _RUN_KEYS:
        what, options = _RUN_KEYS[key]
        yield UsageError(
            f"{_short(key)} cannot be set by line: a run has {what}",
            remedy=f"pass {options}, and run wanrun again for another",
        )
    elif key not in _KINDS:
        yield UsageError(f"unknown key {_short(key)}", expected="one of " + ", ".join(_KINDS))
    else:
        types, kind = _KINDS[key]
        wrong = type(value) not in types  # not isinstance: True is an int
        if wrong or (type(value) is list and any(type(item) is not str for item in value)):
            found = "an object" if isinstance(value, _Pairs) else _cut(json.dumps(value))
            yield UsageError(f"{field(key)} has the wrong type", expected=kind, found=found)
        elif key == "output" and not (value and value.isprintable()):
            yield UsageError("output is no file name", found=_cut(json.dumps(value)))
        elif key in MEDIA_KINDS:
            yield from _bad_names(field(key), value)


def _bad_names(key: str, value: str | Sequence[str] | None) -> Iterator[UsageError]:
    """What of this is no name that a file can have. An empty one would be the working directory."""
    names = [value] if isinstance(value, str) else value or ()
    for name in names:
        try:
            bad = not name or b"\0" in os.fsencode(name)
        except UnicodeEncodeError:  # half of a surrogate pair
            bad = True
        if bad:
            yield UsageError(f"{key} is no file name", found=_cut(json.dumps(name)))


def _value(key: str, value: Any) -> Any:
    """A JSON value as a request holds it."""
    if key == "reference_image":
        return (value,) if isinstance(value, str) else tuple(value)
    return _number(value) if float in _KINDS[key][0] else value


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return float("inf") if value > 0 else float("-inf")


def _cut(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[:limit] + "..."


def _short(text: str) -> str:
    """A quotation for a message."""
    return repr(_cut(text))
