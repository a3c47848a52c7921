"""The rows of a record of options, and the names that the packages export."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import pytest
from msgspec import Struct

import wanhub
import wanrun
from wanrun.generation import load, pipeline
from wanrun.generation.result import Result
from wanrun.media.inputs import Media
from wanrun.rows import ARGUMENT, option, record_of, rows_of

# --- rows ---


class Inner(Struct, frozen=True, kw_only=True):
    level: Annotated[Literal["low", "high"], option("How much.", section="Inner")] = "low"
    fast: Annotated[bool, option("At once.")] = False


class Outer(Struct, frozen=True, kw_only=True):
    file: Annotated[Path | None, option("Where to.")] = None
    inner: Inner
    count: Annotated[int, option("How many.", also="number n")] = 3
    size: Annotated[tuple[int, int] | None, option("How large.")] = None


def test_a_record_in_a_field_gives_its_rows_there() -> None:
    file, level, fast, count, size = rows_of(Outer)
    assert (file.base, file.value, file.default) == (Path, "PATH", "")
    assert (level.choices, level.value, level.default) == (("low", "high"), "low|high", "low")
    assert (level.flag, level.section, fast.section) == ("--level", "Inner", "")
    assert (fast.base, fast.default, fast.kind) == (bool, "", "True or False")
    assert (count.default, count.also, count.kind) == ("3", ("number", "n"), "an integer")
    assert size.kind.startswith("(width, height)")


class Command(Struct, frozen=True):
    place: Annotated[Path, ARGUMENT]
    target: Annotated[str, option("Which one.")]
    sizes: Annotated[Sequence[int], option("Several.", flag="--size", parse=int)] = ()
    steps: Annotated[tuple[int, ...] | None, option("Numbers.")] = None
    proxies: Annotated[bool, option("Whether.", recipe=False)] = True
    form: Annotated[
        str, option("Form.", choices=("a", "b"), commands={"other": {"help": "Another.", "choices": ("a",)}})
    ] = "a"


def test_a_row_of_a_command() -> None:
    target, sizes, steps, proxies, form = rows_of(Command)  # without the argument
    assert (target.required, sizes.required, proxies.opposite) == (True, False, True)
    assert (sizes.flag, sizes.key, sizes.many, sizes.base, sizes.numbers) == (
        "--size",
        "sizes",
        True,
        int,
        False,
    )
    assert sizes.parse is int and (steps.many, steps.numbers, steps.base) == (False, True, int)
    assert not proxies.recipe and form.recipe
    assert (form.choices, form.value) == (("a", "b"), "a|b")
    other = form.of("other")
    assert (other.help, other.choices, other.flag, other.default) == ("Another.", ("a",), "--form", "a")


def test_a_record_of_values() -> None:
    assert record_of(Outer, {}) == Outer(inner=Inner())
    expected = Outer(count=4, inner=Inner(level="high"))
    assert record_of(Outer, {"level": "high", "count": 4, "other": 5}) == expected


def test_an_option_without_a_row_is_a_mistake() -> None:
    class Bare(Struct):
        count: int = 3

    with pytest.raises(AssertionError):
        rows_of(Bare)


# --- exports ---


def test_each_name_is_what_its_module_defines() -> None:
    assert (wanrun.Pipeline, wanrun.load) == (pipeline.Pipeline, load.load)
    assert (wanrun.Media, wanrun.Result) == (Media, Result)
    for module in (wanrun, wanhub):
        assert dir(module) == sorted(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"'wanrun' .*'generate'"):
        wanrun.generate  # noqa: B018


def test_the_import_alone_loads_nothing_heavy() -> None:
    code = "import sys, wanrun; print(*{'jax', 'numpy', 'PIL', 'msgspec', 'click'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
