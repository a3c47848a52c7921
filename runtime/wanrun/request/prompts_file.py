"""The requests of a run: one prompt of the command line, or the lines of a prompts file.

A prompts file is UTF-8 text; blank lines are skipped. Each line is a prompt, or in a file of JSON lines an
object. A file has JSON lines if its name ends in ``.jsonl`` or its first line starts with ``{``. The members
of an object are the options of ``Line``, by their JSON keys or Python names. The command line's options apply
to a line that does not give them.
"""

from __future__ import annotations

__all__ = ["SEEDS", "Entry", "Line", "Seeds", "key_of", "numbered", "read_entries", "read_line"]

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, structs

from wanrun.errors import UsageError, field, quoted, shortened
from wanrun.request.media import media_files
from wanrun.request.reading import is_drawn, read_request
from wanrun.request.request import PROMPTS, RANDOM, Request
from wanrun.request.schema import aliases, rows
from wanrun.request.values import Seed
from wanrun.request.written import parse_whole_numbers
from wanrun.rows import option

_MAX_BYTES = 64 << 20  # a larger file is not a prompts file


Seeds = Annotated[tuple[Seed, ...], Meta(min_length=1, max_length=10_000)]

SEEDS = option(
    "Seeds instead of --seed: each makes one video.",
    value="N,N,...",
    section=PROMPTS,
    parse=parse_whole_numbers,
)
"""The texts about several seeds, which the command has too."""


class Line(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt of a run: a request, and the name of its video; None for that of --output."""

    seeds: Annotated[Seeds | None, SEEDS] = None
    output: Annotated[
        str | None,
        option(
            "Name of the video; may hold fields.",
            default="--output",
            also="out outfile output_file output_file_name output_path save_file save_path save_result_path",
        ),
    ] = None


@dataclass(frozen=True)
class Entry:
    """A line of a run, and its place.

    Attributes:
        where: file and line, for messages; empty for a prompt of the command line.
        index: the number of the prompt in the file, from 1; a prompt with several seeds has as many numbers.
            Unusable lines count too, so a corrected line does not rename the outputs of the others.
        total: the number of prompts in the file.
    """

    line: Line
    where: str = ""
    index: int = 1
    total: int = 1
    drawn: bool = False

    @property
    def each(self) -> list[Entry]:
        """It, or with several seeds an entry for each of them."""
        if self.line.seeds is None:
            return [self]
        place = f"{self.where}, " if self.where else ""
        return [
            replace(self, line=structs.replace(self.line, seed=seed, seeds=None), where=f"{place}seed {seed}")
            for seed in self.line.seeds
        ]

    @property
    def media_files(self) -> Iterator[tuple[str, Path]]:
        """The files of the media, with the names of their options."""
        for row, paths in media_files(self.line):
            yield from ((row.name, path) for path in paths)


def key_of(name: str) -> str:
    """Returns an option's key in JSON lines, for ``WanError.spelled``."""
    return {row.name: row.key for row in rows(Line)}.get(name, name)


def read_entries(
    path: Path, shared: Line, random_seed: bool = False
) -> tuple[list[Entry], dict[int, UsageError]]:
    """Reads a prompts file: returns its entries, and the errors of the other lines by index.

    Args:
        path: the file, which may be a pipe, or ``-`` for standard input.
        shared: the command line's options, for lines that do not give them.
        random_seed: whether a line without a seed draws one.

    Raises:
        UsageError: if the file cannot be read, is larger than 64 MiB, is UTF-16, or has no prompt.
    """
    name, data = _read(path)
    lines = [(number, line.strip()) for number, line in enumerate(data.split(b"\n"), 1)]
    filled = [(number, line) for number, line in lines if line]
    if not filled:
        raise UsageError(
            "missing_parameter", f"the prompts file {name} has no prompt", remedy="write one prompt a line"
        )
    as_json = path.suffix.lower() == ".jsonl" or filled[0][1].startswith(b"{")
    entries, failures, index = list[Entry](), dict[int, UsageError](), 1
    for number, text in filled:
        where = f"{name}:{number}"
        try:
            own = list(_decode_json(text)) if as_json else [("prompt", _decode(text))]
            given = {aliases(Line).get(name, name) for name, _ in own}
            if random_seed and not given & {"seed", "seeds"}:
                own.append(("seed", RANDOM))
            drawn = any(aliases(Line).get(name, name) == "seed" and is_drawn(value) for name, value in own)
            line = read_line(own, structs.replace(shared, seeds=None) if "seed" in given else shared)
            entries += numbered(Entry(line, where, drawn=drawn).each, index)
            index = entries[-1].index + 1
        except UsageError as error:
            failures[index] = error.located(where)
            index += 1
    return [replace(entry, total=index - 1) for entry in entries], failures


def read_line(given: Sequence[tuple[str, Any]], shared: Line | None = None) -> Line:
    """Reads the values of a prompt, by their names; other arguments and errors as of ``read_request``.

    Raises:
        UsageError: for a seed together with seeds, too.
    """
    names = {aliases(Line).get(name, name) for name, _ in given}
    if {"seed", "seeds"} <= names:
        what = f"{field('seed')} and {field('seeds')} exclude each other"
        raise UsageError("conflict", what, remedy=f"give all of them as {field('seeds')}")
    return read_request(given, Line, shared)


def numbered(entries: Sequence[Entry], first: int = 1) -> list[Entry]:
    """Returns entries with numbers from the first one on."""
    return [replace(entry, index=index) for index, entry in enumerate(entries, first)]


def _read(path: Path) -> tuple[str, bytes]:
    """Returns the file's name for messages and its content, without a byte order mark."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        if str(path) == "-":
            data = b"" if sys.stdin is None else sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        reason = getattr(error, "strerror", None) or error
        raise UsageError("unreadable", f"the prompts file {name} cannot be read", found=reason) from None
    if len(data) > _MAX_BYTES:
        raise UsageError(
            "too_large",
            f"the prompts file {name} is too large",
            expected=f"at most {_MAX_BYTES >> 20} MiB",
        )
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError("unreadable", f"the prompts file {name} is UTF-16", remedy="save it as UTF-8")
    return name, data.removeprefix(b"\xef\xbb\xbf")


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            "unreadable",
            "the line is not UTF-8",
            found=f"byte 0x{line[error.start]:02x}",
            remedy="save the file as UTF-8",
        ) from None


class _Pairs(list[tuple[str, Any]]):
    """The members of a JSON object in order: a dict would hide a key that occurs twice."""


def _decode_json(line: bytes) -> Iterator[tuple[str, Any]]:
    """Yields the values of one JSON line by their keys, in the written order."""
    text = _decode(line)
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "unreadable",
            f"the line is not JSON ({error})",
            expected='an object such as {"prompt": "a fox"}',
            found=shortened(text),
        ) from None
    if not isinstance(pairs, _Pairs):
        raise UsageError(
            "wrong_type", "the line is not a JSON object", expected='{"prompt": "..."}', found=shortened(text)
        )
    for key, value in pairs:
        if (
            aliases(Line).get(key, key) == "output"
            and isinstance(value, str)
            and not (value and value.isprintable())
        ):
            raise UsageError("invalid_value", f"{field(key)} is no file name", found=quoted(value))
        yield key, list(map(_as_dict, value)) if type(value) is list else _as_dict(value)


def _as_dict(value: Any) -> Any:
    return dict(value) if isinstance(value, _Pairs) else value
