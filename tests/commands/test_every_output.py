"""Every output of every command: not in an artifact, not an input, not twice, not over a file of the user.

The artifact has the first line of a manifest alone: a command that opened it before the check would say so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import pytest

from helpers.damage import one_error
from helpers.refusals import check_json
from wanbuild.check import check_commands as checking
from wanbuild.check.reference import Check
from wanbuild.cli import wanbuild
from wancli.command import Checked, InputPath, OutputPath
from wancli.console import run
from wancli.jobs.output_names import write_timings
from wancli.run import wanrun
from wancli.serve import serve
from wanrun.claims import REPORT, TIMINGS
from wanrun.timing.timings import Timings

Refused = Callable[..., dict[str, Any]]
COMMANDS = {"wanrun": wanrun, "wanrun serve": serve, **wanbuild.commands}

ARGUMENTS = {
    "wanrun": ["art", "--prompt", "a fox"],
    "wanrun serve": ["art"],
    "lora": ["a.safetensors", "--artifact", "art"],
    "oci": ["art", "--output", "layout"],
    "pull": ["hf://owner/name"],
    "sbom": ["art"],
    "toy": [],
    "verify": ["art"],
}
"""What each command needs beside the output that is tried; a new one with outputs needs a row."""

SUFFIXES = {"output": ".mp4", "save_latents": ".npy"}


def options(kind: type[click.ParamType]) -> Iterator[tuple[str, click.Parameter]]:
    """The options and arguments of a type, with their commands."""
    for name, command in COMMANDS.items():
        for param in command.params:
            if isinstance(param.type, kind):
                yield name, param


def given(param: click.Parameter, value: object) -> list[str]:
    return [*(param.opts[:1] if isinstance(param, click.Option) else ()), str(value)]


OUTPUTS = list(options(OutputPath))
FILES = [(name, param) for name, param in OUTPUTS if param.type.place.kind == "file"]
READ = [
    (name, output, read) for name, output in OUTPUTS for other, read in options(InputPath) if other == name
]
PAIRS = [
    (name, one, two) for name, one in OUTPUTS for other, two in OUTPUTS if name == other and one is not two
]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command, which has to fail with one error and to leave all as it is; returns the error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "art" / "weights").mkdir(parents=True)
    (tmp_path / "art" / "manifest.json").write_text('{\n "format": "wan-artifact",\n')
    (tmp_path / "art" / "model.sig").write_text("a signature")
    (tmp_path / "notes.txt").write_text("mine")

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def call(name: str, error: str, *arguments: str, **parts: object) -> dict[str, Any]:
        before, command = files(), COMMANDS[name]
        words = [*ARGUMENTS.get(name, ()), *arguments, "--json-errors"]
        assert run(command, words) == 2
        assert files() == before
        return check_json(one_error(capsys), error, **parts)

    return call


def test_what_is_declared_is_checked() -> None:
    """A path is read or written; what writes says so by its type, and each command checks it."""
    for name, command in COMMANDS.items():
        assert isinstance(command, Checked), name
        for param in command.params:
            assert not isinstance(param.type, click.Path | click.File) or isinstance(param.type, InputPath), (
                param
            )
            if (getattr(param, "help", "") or "").startswith("Write "):
                assert isinstance(param.type, OutputPath) or param.is_flag, (name, param.name)
    named = {(name, param.name) for name, param in OUTPUTS}
    assert named == {
        *(("wanrun", name) for name in ("output", "save_latents", "timing_json", "report")),
        *(("wanrun serve", "data"), ("oci", "output"), ("pull", "output"), ("sbom", "output")),
        ("lora", "output"),
        *(("toy", "directory"), ("verify", "json_file"), ("verify", "page")),
    }


@pytest.mark.parametrize(("name", "param"), OUTPUTS)
def test_none_is_written_into_an_artifact(
    refused: Refused, tmp_path: Path, name: str, param: click.Parameter
) -> None:
    (tmp_path / "link").symlink_to("art/weights")
    (tmp_path / "art" / "weights" / "shared").symlink_to("../..")  # as those of a copy
    inside = ("manifest.json", "model.sig", "new", "weights/new/x", "weights/shared/x")
    for place in (*(f"art/{name}" for name in inside), "link/x"):
        words = given(param, f"{place}{SUFFIXES.get(param.name or '', '')}")
        refused(name, "exists", *words, message=tmp_path / "art", remedy="elsewhere")


@pytest.mark.parametrize(("name", "param"), OUTPUTS)
def test_a_place_that_no_output_has(refused: Refused, name: str, param: click.Parameter) -> None:
    """An address, save where one is taken; and so many folders that Python cannot make them."""
    suffix = SUFFIXES.get(param.name or "", "")
    if (name, param.name) != ("wanrun", "output"):
        for url in ("s3://bucket/x", "file:///tmp/x"):
            refused(name, "invalid_value", *given(param, url + suffix), message=url + suffix)
    told = refused(name, "out_of_range", *given(param, "d/" * 1900 + f"x{suffix}"), expected=500)
    assert len(told["message"]) < 300, told


@pytest.mark.slow
@pytest.mark.parametrize(("name", "param", "read"), READ)
def test_none_is_written_that_is_read(
    refused: Refused, tmp_path: Path, name: str, param: click.Parameter, read: click.Parameter
) -> None:
    parts = ("notes.txt", max(read.opts, key=len))
    refused(name, "exists", *given(param, tmp_path / "notes.txt"), *given(read, "notes.txt"), message=parts)
    if read.type.tree:
        parts = ("folder/deep/x", max(read.opts, key=len))
        refused(name, "exists", *given(param, "folder/deep/x"), *given(read, "folder"), message=parts)


@pytest.mark.parametrize(("name", "one", "two"), PAIRS)
def test_none_is_written_twice(
    refused: Refused, tmp_path: Path, name: str, one: click.Parameter, two: click.Parameter
) -> None:
    words = *given(one, "new.mp4"), *given(two, tmp_path / "new.mp4")
    refused(name, "exists", *words, message=("new.mp4", "--"), remedy="name")


@pytest.mark.parametrize(("name", "param"), FILES)
def test_no_file_of_the_user_is_replaced(
    refused: Refused,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    param: click.Parameter,
) -> None:
    words, option = given(param, "notes.txt"), max(param.opts, key=len)
    refused(name, "exists", *words, message=("notes.txt", option), remedy="--overwrite")
    os.mkfifo(tmp_path / "pipe")  # a device, such as /dev/null, would be replaced too
    for place in ("no/where", "pipe", "art/.."):
        refused(name, "unwritable", *given(param, place), message=place, remedy="writable folder")
    for more in (["--overwrite"], []):  # an empty file holds nothing that could be lost
        assert run(COMMANDS[name], [*ARGUMENTS[name], *words, *more]) == 3
        assert "manifest.json" in one_error(capsys)
        (tmp_path / "notes.txt").write_bytes(b"")


def test_a_folder_of_something_else_is_left(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_text("a cat")
    for name, *words in (("oci", "-o"), ("pull", "-o"), ("toy",)):
        refused(name, "exists", *words, "photos", message="photos")
    for name, *words in (("oci", "-o"), ("pull", "-o"), ("toy",), ("wanrun serve", "--data")):
        refused(name, "wrong_kind", *words, "notes.txt", message="notes.txt", remedy="another")


def test_an_artifact_is_not_made_inside_another(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('source = "nothing"\nartifact = "art/weights/new"\n')
    for words in (["convert", "nothing", "art/weights/new"], ["build", "r.toml"]):
        refused(words[0], "exists", *words[1:], message=tmp_path / "art")


def test_an_address_is_an_artifact_too(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "art" / ".partial-copy.json").write_text(
        json.dumps({"address": "s3://bucket/art@3", "url": "s3://bucket/art@3"})
    )
    output = "s3://bucket/art/{index}.mp4"
    refused("wanrun", "exists", "-o", output, message=(f"--output {output}", " s3://bucket/art"))
    refused("wanrun", "exists", "-o", f"file://{tmp_path}/art/{{index}}.mp4", message=f" {tmp_path / 'art'}")


def test_what_the_option_has_written_is_replaced(
    refused: Refused,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same command may be given again, without another option."""
    from wanreport.page import now, write_report
    from wanreport.report import Report

    write_timings(Timings(), tmp_path / "t.json")
    write_report(tmp_path / "r.html", Report("Report of a run", "A run", "made", True, now()))
    assert TIMINGS.made(tmp_path / "t.json") and REPORT.made(tmp_path / "r.html")
    assert not TIMINGS.made(tmp_path / "r.html") and not REPORT.made(tmp_path / "t.json")
    replayed = {"profiles": {"96x64x9-b1-cfg": "digests equal"}}
    compared = {"vae": asdict(Check("vae", 0.1, 0.2)), "final latents": asdict(Check("final latents", 0, 1))}
    for outcome in (replayed, {"profiles": {}}, {"recorded": True}, compared, replayed):
        monkeypatch.setattr(checking, "_outcome", lambda *_, outcome=outcome: outcome)
        assert run(wanbuild, ["verify", "art", "--json", "o.json"]) == 0
        assert json.loads((tmp_path / "o.json").read_text()) == outcome
    (tmp_path / "o.json").write_text('{\n  "profiles": {\n    "mine": {}\n  }\n}\n')
    refused("verify", "exists", "--json", "o.json", message="o.json")
