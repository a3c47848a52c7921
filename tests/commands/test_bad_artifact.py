"""A damaged or foreign artifact: one clear line, exit code 3, no output and the artifact left as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from helpers.compiled_once import exported_once
from helpers.damage import (
    PROFILE,
    PROGRAMS,
    Declines,
    edit,
    edit_environment,
    executable,
    flip,
    one_error,
    own,
    program,
)
from helpers.manifests import without_profiles
from wanbuild.cli import wanbuild
from wanbuild.programs import xla
from wancli.console import run
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.files import sha256_of


def test_not_an_artifact(declines: Declines, tmp_path: Path, toy_checkpoint: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder, code, found, remedy in (
        (tmp_path / "missing", "missing_file", "no such folder", "wanbuild convert"),
        (tmp_path / "file", "wrong_kind", "a file", "wanbuild convert"),
        (toy_checkpoint, "wrong_kind", "a checkpoint", f"wanbuild convert {toy_checkpoint} --artifact"),
    ):
        for options in ((), ("--list",)):
            declines(folder, code, *options, message=folder, found=found, remedy=remedy)


@pytest.mark.parametrize(
    ("content", "error", "parts"),
    [
        (b"", "damaged", {"message": "empty"}),
        (b'{"format": "wan-art', "unreadable", {}),
        (b"\xff\x00\x80", "unreadable", {}),
        (b'{"a": ' + b"[" * 100_000, "unreadable", {}),
        (b"[1, 2]", "wrong_kind", {"expected": "wan-artifact", "found": "JSON"}),
        (b"{}", "wrong_kind", {"expected": "wan-artifact"}),
        (b'{"format": "other", "format_version": 1}', "wrong_kind", {"found": "other"}),
        (b'{"format": "wan-artifact", "format_version": 1}', "other_release", {"found": 1}),
        (b'{"format": "wan-artifact", "format_version": 5}', "damaged", {"remedy": "build"}),
    ],
)
def test_a_manifest_that_cannot_be_used(
    declines: Declines, tmp_path: Path, content: bytes, error: str, parts: dict[str, object]
) -> None:
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "manifest.json").write_bytes(content)
    told = declines(tmp_path / "artifact", error, **parts)
    assert str(tmp_path / "artifact") in told["message"]


def _set(data: dict[str, Any]) -> Any:
    (program_set,) = data["program_sets"].values()
    return program_set


def _programs(data: dict[str, Any]) -> Any:
    return _set(data)["programs"][PROFILE]


def _target(data: dict[str, Any]) -> Any:
    return data["targets"]["cpu"]


def _first(data: dict[str, Any]) -> Any:
    return data["components"]["vae"]["parameters"]["decoder/conv_out/bias"]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["model"]["defaults"].update(guidance_scale=1.5),
        lambda data: data["source"]["files"].pop("model_index.json"),
        lambda data: _first(data)["crc32c"].__setitem__(0, "00000000"),
        lambda data: _first(data)["layout"].update(dtype="bfloat16"),
        lambda data: data["tokenizer"].update(pad_id=1),
        lambda data: _programs(data)["prepare"].update(donate=[0]),
        lambda data: _programs(data)["prepare"].update(sha256="0" * 64),
        lambda data: data["profiles"][PROFILE]["options"].update(dtype="bfloat16"),
        lambda data: data.update(content_digest="sha256:" + "0" * 64),
    ],
)
def test_an_edited_manifest(
    declines: Declines, artifact: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    edit(artifact, change)
    expected = "content_digest sha256:"
    declines(artifact, "changed", message=artifact / "manifest.json", expected=expected, found="sha256:")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: _target(data)["environment"].update(device_kind="another"),
        lambda data: _target(data)["executables"][PROFILE]["prepare"].update(sha256="0" * 64),
        lambda data: _target(data)["statistics"][PROFILE]["prepare"].update(temporary_bytes=1),
        lambda data: _target(data).update(folder="executables/other"),
        lambda data: data.update(manifest_digest="sha256:" + "0" * 64),
        lambda data: data.pop("manifest_digest"),
    ],
)
def test_an_edited_target(
    declines: Declines, artifact: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    edit(artifact, change)
    declines(artifact, "changed", message=artifact / "manifest.json", expected="manifest_digest")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("components"),
        lambda data: data.pop("program_sets"),
        lambda data: data.update(surprise=1),
        lambda data: _set(data).update(platform="tpu"),  # not what its key says
        lambda data: _set(data)["kernels"].update(image_multiple=128),
        lambda data: _set(data)["mesh"].update(data=0),
        lambda data: _set(data)["programs"].update(other=_programs(data)),
        lambda data: _target(data).update(program_set="cpu-00000000"),
        lambda data: _target(data)["environment"].update(platform="tpu"),
        lambda data: _target(data)["executables"].update(other={}),
        lambda data: data.update(profiles=[]),
        lambda data: data["profiles"][PROFILE].update(width=112),  # not what its name says
        lambda data: data["profiles"][PROFILE].update(height=-64),
        lambda data: _first(data)["layout"].update(shape=[0]),
        lambda data: _first(data)["layout"].update(chunks=2),
        lambda data: _first(data).update(crc32c=[]),
        lambda data: data["targets"]["cpu"]["environment"].pop("machine"),
        lambda data: data["targets"]["cpu"]["environment"].update(packages="jax"),
        lambda data: data["targets"]["cpu"]["environment"].update(cpu_features=[["avx"]]),
        lambda data: data["targets"]["cpu"].update(executables=None),
    ],
)
def test_a_malformed_manifest(
    declines: Declines, artifact: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    edit(artifact, change)
    told = declines(artifact, "damaged", message=artifact / "manifest.json", remedy="build")
    assert "digest" not in told.get("expected", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        lambda data: (data["components"]["vae"], "folder"),
        lambda data: (_programs(data)["prepare"], "file"),
        lambda data: (data["targets"]["cpu"], "folder"),
        lambda data: (data["targets"]["cpu"]["executables"][PROFILE]["prepare"], "file"),
        lambda data: (data["tokenizer"], "file"),
        lambda data: (data["golden"].setdefault(PROFILE, {"sha256": "0" * 64}), "file"),
    ],
)
def test_a_path_that_reaches_outside(
    toy_artifact: Path, declines: Declines, tmp_path: Path, place: Callable[..., Any]
) -> None:
    data = json.loads((toy_artifact / "manifest.json").read_text())
    record, key = place(data)
    folder = tmp_path / "artifact"
    folder.mkdir()
    for name in ("../x", "/etc/passwd", "a/../../x", "a//b", "", "c:x", "a\\b", "a\nb", 7):
        record[key] = name
        (folder / "manifest.json").write_text(json.dumps(data))
        if isinstance(name, str):
            declines(folder, "untrusted", message=folder, found=repr(name))
        else:
            declines(folder, "damaged", message=(folder, "`str`", "`int`", "`$."))


def test_a_parameter_that_reaches_outside(artifact: Path, declines: Declines) -> None:
    def change(data: dict[str, Any]) -> None:
        parameters = data["components"]["vae"]["parameters"]
        parameters["../../x"] = parameters.pop("decoder/conv_out/bias")

    edit(artifact, change)
    declines(artifact, "untrusted", message="parameter", found="../../x")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--size", "832x480"], "832x480"),
        (["--frames", "13"], "13 frames"),
        (["--num-videos", "2"], "2 video(s)"),
    ],
)
@pytest.mark.usefixtures("no_weights_are_read")
def test_a_profile_that_is_not_built(
    declines: Declines, toy_artifact: Path, options: list[str], wanted: str
) -> None:
    declines(toy_artifact, "not_built", *options, message=wanted, expected=PROFILE, remedy="wanbuild compile")


@pytest.mark.usefixtures("no_weights_are_read")
def test_no_frames_at_all(declines: Declines, toy_artifact: Path) -> None:
    """Out of range for every artifact, and so the command line's fault."""
    told = declines(toy_artifact, "out_of_range", "--frames", "0", code=2, expected=1, found=0)
    assert told["options"] == ["--frames"]


def test_no_profile_at_all(declines: Declines, toy_artifact: Path, tmp_path: Path) -> None:
    manifest, folder = read_manifest(toy_artifact), tmp_path / "empty"
    folder.mkdir()
    without_profiles(manifest).write(folder)
    declines(folder, "not_built", message=folder, remedy="wanbuild compile")
    manifest.changed(targets={}).write(folder)
    declines(folder, "not_built", message=PROFILE)


@pytest.mark.usefixtures("no_weights_are_read")
def test_a_target_that_is_not_built(declines: Declines, toy_artifact: Path) -> None:
    command, target = "wanbuild compile --size", ("--target", "tpu7x:2x2x1")
    declines(toy_artifact, "not_built", *target, message=target[1], expected="cpu", remedy=command)
    told = declines(toy_artifact, "not_built", "--target", "tpu", expected="cpu", remedy="docs/targets.md")
    command += f" 96x64 --frames 9 --guidance --target v6e --artifact {toy_artifact}"
    assert command in told["remedy"]


# Programs, executables and the tokenizer.


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("no_weights_are_read")
def test_an_executable_that_is_not_whole(declines: Declines, artifact: Path, name: str) -> None:
    own(artifact, "executables")
    path = executable(artifact, name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    declines(artifact, "damaged", message=path, expected="sha256")
    path.unlink()
    declines(artifact, "damaged", message=path, found="No such file")


@pytest.mark.usefixtures("no_weights_are_read")
def test_a_missing_folder_of_executables(declines: Declines, artifact: Path) -> None:
    own(artifact, "executables")
    shutil.rmtree(artifact / "executables")
    declines(artifact, "damaged", found="No such file")


@pytest.mark.parametrize("name", ["decode_video", "prepare"])
def test_an_executable_with_a_flipped_bit_is_never_loaded(
    declines: Declines, artifact: Path, name: str
) -> None:
    own(artifact, "executables")
    path = executable(artifact, name)
    flip(path, path.stat().st_size // 2)
    expected = read_manifest(artifact).targets["cpu"].executables[PROFILE][name].sha256
    told = declines(artifact, "damaged", message=path, expected=expected, remedy="wanbuild compile")
    assert told["found"] == sha256_of(path.read_bytes())


@pytest.mark.parametrize("allow", [(), ("--allow-compile",)])
def test_a_damaged_program(declines: Declines, artifact: Path, allow: tuple[str, ...]) -> None:
    """Also with --allow-compile: there is nothing sound to compile from."""
    own(artifact, "programs")
    path = program(artifact, "decode_video")
    flip(path, 1000)
    declines(artifact, "damaged", *allow, message=path, remedy="copy")
    path.unlink()
    declines(artifact, "damaged", *allow, message=path, found="No such file")


@pytest.mark.usefixtures("no_weights_are_read")
def test_another_tokenizer(declines: Declines, artifact: Path) -> None:
    own(artifact, "tokenizer")
    path = artifact / "tokenizer" / "tokenizer.json"
    flip(path, 4000)
    declines(artifact, "damaged", message=path, expected="sha256")
    path.unlink()
    declines(artifact, "damaged", message=path, found="No such file")
    path.mkdir()
    declines(artifact, "damaged", message=path, found="Is a directory")


@pytest.mark.thorough
def test_compile_does_not_use_a_damaged_program(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A target that has to be compiled again refuses StableHLO which is not what was exported."""
    own(artifact, "programs")
    own(artifact, "executables")
    edit_environment(artifact, device_count=9)
    flip(program(artifact, "decode_first"), 1000)
    before = (artifact / "manifest.json").read_bytes()
    arguments = ["--artifact", artifact, "--target", "cpu", "--size", "32x32", "--frames", "1"]
    assert run(wanbuild, ["compile", *map(str, arguments)]) == 3
    assert "/decode_first-" in one_error(capsys)
    assert (artifact / "manifest.json").read_bytes() == before
    check_executables(artifact)


def check_executables(artifact: Path) -> None:
    """Checks that every executable that the manifest lists is there and whole."""
    opened = open_artifact(artifact)
    target = opened.manifest.targets["cpu"]
    for entry in target.executables[PROFILE].values():
        opened.executable(target, entry)


@pytest.fixture
def programs_are_exported_once() -> Iterator[None]:
    with exported_once():
        yield


@pytest.mark.thorough
@pytest.mark.usefixtures("programs_are_exported_once")
def test_a_compilation_cut_short_keeps_the_old_executables(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a changed environment that gives the same cache keys, so that entries have the same names."""
    lowered: list[str] = []

    def lower(data: bytes, name: str, *rest: object, **options: object) -> Any:
        """A small program of its name: what is compiled does not matter here."""
        lowered.append(name)
        if len(lowered) == interrupt_at:
            raise KeyboardInterrupt

        def call(x: jax.Array) -> jax.Array:
            return x + len(name)

        call.__name__ = call.__qualname__ = name
        return jax.jit(call).lower(jax.ShapeDtypeStruct((3,), np.float32))

    def compile_again() -> int:
        arguments = ["--artifact", artifact, "--target", "cpu", "--size", "96x64", "--frames", "9"]
        return run(wanbuild, ["compile", *map(str, arguments), "--dtype", "float32"])

    own(artifact, "programs")
    own(artifact, "executables")
    monkeypatch.setattr(xla, "lower", lower)
    interrupt_at = 0
    edit_environment(artifact, device_count=9)
    assert compile_again() == 0
    assert sorted(lowered) == list(PROGRAMS)
    edit_environment(artifact, device_count=7)
    folder = artifact / read_manifest(artifact).targets["cpu"].folder
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    interrupt_at, lowered[:] = 3, []
    assert compile_again() == 130
    assert len(lowered) == 3
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()} == before
    check_executables(artifact)

    interrupt_at, lowered[:] = 0, []
    assert compile_again() == 0
    check_executables(artifact)
    target = read_manifest(artifact).targets["cpu"]
    assert [path.name for path in (artifact / "executables").iterdir()] == [Path(target.folder).name]
    assert {path.name for path in (artifact / target.folder).iterdir()} == set(before)


# Weights.
