"""Options of a command that are made of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import click
import pytest
from click.testing import CliRunner
from msgspec import Meta, Struct

from wancli.click_options import click_option, given, made_options
from wancli.run import wanrun
from wanrun.request.written import parse_size
from wanrun.rows import ARGUMENT, option, rows_of

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Made(Struct, frozen=True):
    """A record of options of every kind."""

    place: Annotated[str, ARGUMENT]
    target: Annotated[str, option("Where.", value="CHIP")]
    sizes: Annotated[Sequence[tuple[int, int]], option("", flag="--size", value="WxH", parse=parse_size)] = ()
    frames: Annotated[Sequence[Count], option("How long.", default="as published")] = ()
    guidance: Annotated[Sequence[bool], option("Whether guided.")] = ()
    proxies: Annotated[bool, option("Whether there are proxies.", default="proxies")] = True
    form: Annotated[str, option("Which form.", choices=("step", "q8_0"), short="-f")] = "step"
    share: Annotated[Annotated[float, Meta(ge=0, le=1)], option("How much.")] = 0.5
    force: Annotated[bool, option("Replace it.")] = False


@click.command(params=list(made_options(rows_of(Made))))
@click.pass_context
def made(context: click.Context, **options: Any) -> None:
    context.obj.append(given(options))


def called(*arguments: str) -> Any:
    found: list[Any] = []
    outcome = CliRunner().invoke(made, ["--target", "h200", *arguments], obj=found)
    return found[0] if outcome.exit_code == 0 else outcome.output


def test_values_are_those_of_the_record() -> None:
    assert called() == {"target": "h200", "force": False}
    words = "--size 8x4 --size 4x8 --frames 5 --no-guidance --no-proxies -f q8-0 --share 0.1 --force"
    assert called(*words.split()) == {
        "target": "h200",
        "sizes": ((8, 4), (4, 8)),
        "frames": (5,),
        "guidance": (False,),
        "proxies": False,
        "form": "q8_0",
        "share": 0.1,
        "force": True,
    }


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--frames", "0"), "--frames"),
        (("--share", "nan"), "--share"),
        (("--share", "2"), "--share"),
        (("--form", "stream"), "--form"),
        (("--size", "8"), "--size"),
    ],
)
def test_values_out_of_range_are_refused(arguments: tuple[str, ...], option: str) -> None:
    assert f"for '{option}'" in called(*arguments).replace("' / '-f'", "'")


def test_the_help_has_defaults_and_ranges() -> None:
    text = CliRunner().invoke(made, ["--help"]).output
    for line in ("CHIP", "[required]", "--size WxH", "[default: as published]", "[x>=1]", "--no-proxies"):
        assert line in text
    assert "[x>=1]" not in CliRunner().invoke(unchecked, ["--help"]).output


@click.command()
@click_option(next(row for row in rows_of(Made) if row.name == "frames"), "Length")
def unchecked(**_: Any) -> None:
    """Whose values the record's reader checks."""


def test_a_seed_is_a_number_or_any() -> None:
    (seed,) = (param.type for param in wanrun.params if param.name == "seed")
    assert seed.convert("7", None, None) == 7
    assert seed.convert("random", None, None) == "random"
    with pytest.raises(click.BadParameter, match="nor random"):
        seed.convert("rand", None, None)
