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
    Refused,
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
from wanbuild.programs import compiler
from wancli.console import run
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.files import sha256_of


def test_not_an_artifact(refused: Refused, tmp_path: Path, toy_checkpoint: Path) -> None:
    (tmp_path / "file").write_text("x")
    convert = f"convert it: wanbuild convert {toy_checkpoint} --artifact DIR"
    for folder, found, remedy in (
        (tmp_path / "missing", "found no such folder", "make one with wanbuild convert"),
        (tmp_path / "file", "found a file", "make one with wanbuild convert"),
        (toy_checkpoint, "found a checkpoint", convert),
    ):
        for options in ((), ("--list",)):
            line = refused(folder, *options)
            assert f"{folder} is not an artifact" in line and found in line and remedy in line


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "manifest.json is empty; build the artifact again"),
        (b'{"format": "wan-art', "cannot be read"),
        (b"\xff\x00\x80", "cannot be read"),
        (b'{"a": ' + b"[" * 100_000, "cannot be read"),
        (b"[1, 2]", "expected format wan-artifact; found no JSON object"),
        (b"{}", "expected format wan-artifact"),
        (b'{"format": "other", "format_version": 1}', "found other"),
        (b'{"format": "wan-artifact", "format_version": 1}', "has another format"),
        (b'{"format": "wan-artifact", "format_version": 5}', "is damaged"),
    ],
)
def test_a_manifest_that_cannot_be_used(refused: Refused, tmp_path: Path, content: bytes, part: str) -> None:
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "manifest.json").write_bytes(content)
    line = refused(tmp_path / "artifact")
    assert str(tmp_path / "artifact") in line and part in line


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
    refused: Refused, artifact: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    edit(artifact, change)
    line = refused(artifact)
    assert f"{artifact / 'manifest.json'} was changed after it was written" in line
    assert "expected content_digest sha256:" in line and "found sha256:" in line


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
    refused: Refused, artifact: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    edit(artifact, change)
    line = refused(artifact)
    assert f"{artifact / 'manifest.json'} was changed after it was written; expected manifest_digest" in line


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
    refused: Refused, artifact: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    edit(artifact, change)
    line = refused(artifact)
    assert f"{artifact / 'manifest.json'} is damaged" in line and "build the artifact again" in line


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
    toy_artifact: Path, refused: Refused, tmp_path: Path, place: Callable[..., Any]
) -> None:
    data = json.loads((toy_artifact / "manifest.json").read_text())
    record, key = place(data)
    folder = tmp_path / "artifact"
    folder.mkdir()
    for name in ("../x", "/etc/passwd", "a/../../x", "a//b", "", "c:x", "a\\b", "a\nb", 7):
        record[key] = name
        (folder / "manifest.json").write_text(json.dumps(data))
        line = refused(folder)
        assert str(folder) in line
        if isinstance(name, str):
            assert "names a path outside the artifact" in line and f"found {name!r}" in line
        else:
            assert "is damaged: Expected `str`, got `int` - at `$." in line


def test_a_parameter_that_reaches_outside(artifact: Path, refused: Refused) -> None:
    def change(data: dict[str, Any]) -> None:
        parameters = data["components"]["vae"]["parameters"]
        parameters["../../x"] = parameters.pop("decoder/conv_out/bias")

    edit(artifact, change)
    assert "a parameter names a path outside the artifact" in refused(artifact)


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
    refused: Refused, toy_artifact: Path, options: list[str], wanted: str
) -> None:
    line = refused(toy_artifact, *options)
    assert "no profile is built for" in line and wanted in line
    assert f"expected one of {PROFILE}" in line and "wanbuild compile" in line


@pytest.mark.usefixtures("no_weights_are_read")
def test_no_frames_at_all(refused: Refused, toy_artifact: Path) -> None:
    """Out of range for every artifact, and so the command line's fault."""
    line = refused(toy_artifact, "--frames", "0", code=2)
    assert "--frames is out of range; expected an integer, at least 1; found 0" in line


def test_no_profile_at_all(refused: Refused, toy_artifact: Path, tmp_path: Path) -> None:
    manifest, folder = read_manifest(toy_artifact), tmp_path / "empty"
    folder.mkdir()
    without_profiles(manifest).write(folder)
    assert f"{folder} has no profiles; run wanbuild compile" in refused(folder)
    manifest.changed(targets={}).write(folder)
    assert f"profile {PROFILE} has no executables for any target" in refused(folder)


@pytest.mark.usefixtures("no_weights_are_read")
def test_a_target_that_is_not_built(refused: Refused, toy_artifact: Path) -> None:
    line = refused(toy_artifact, "--target", "tpu7x:2x2x1")
    assert "target tpu7x:2x2x1 is not built; expected one of cpu; run wanbuild compile --size" in line
    line = refused(toy_artifact, "--target", "tpu")
    command = f"wanbuild compile --size 96x64 --frames 9 --guidance --target v6e --artifact {toy_artifact}"
    assert f"expected one of cpu; targets are chips (docs/targets.md): run {command}" in line


# Programs, executables and the tokenizer.


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("no_weights_are_read")
def test_an_executable_that_is_not_whole(refused: Refused, artifact: Path, name: str) -> None:
    own(artifact, "executables")
    path = executable(artifact, name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    line = refused(artifact)
    assert f"the executable {path} is damaged; expected sha256" in line
    path.unlink()
    line = refused(artifact)
    assert f"the executable {path} is damaged" in line and "found No such file" in line


@pytest.mark.usefixtures("no_weights_are_read")
def test_a_missing_folder_of_executables(refused: Refused, artifact: Path) -> None:
    own(artifact, "executables")
    shutil.rmtree(artifact / "executables")
    assert "found No such file" in refused(artifact)


@pytest.mark.parametrize("name", ["decode_video", "prepare"])
def test_an_executable_with_a_flipped_bit_is_never_loaded(
    refused: Refused, artifact: Path, name: str
) -> None:
    own(artifact, "executables")
    path = executable(artifact, name)
    flip(path, path.stat().st_size // 2)
    line = refused(artifact)
    assert f"the executable {path} is damaged" in line
    assert (
        f"expected sha256 {read_manifest(artifact).targets['cpu'].executables[PROFILE][name].sha256}" in line
    )
    assert f"found {sha256_of(path.read_bytes())}" in line and "wanbuild compile" in line


@pytest.mark.parametrize("allow", [(), ("--allow-compile",)])
def test_a_damaged_program(refused: Refused, artifact: Path, allow: tuple[str, ...]) -> None:
    """Also with --allow-compile: there is nothing sound to compile from."""
    own(artifact, "programs")
    path = program(artifact, "decode_video")
    flip(path, 1000)
    line = refused(artifact, *allow)
    assert f"the program {path} is damaged" in line and "copy the artifact again" in line
    path.unlink()
    line = refused(artifact, *allow)
    assert f"the program {path} is damaged" in line and "found No such file" in line


@pytest.mark.usefixtures("no_weights_are_read")
def test_another_tokenizer(refused: Refused, artifact: Path) -> None:
    own(artifact, "tokenizer")
    path = artifact / "tokenizer" / "tokenizer.json"
    flip(path, 4000)
    line = refused(artifact)
    assert f"the tokenizer {path} is damaged" in line and "expected sha256" in line
    path.unlink()
    assert "found No such file or directory" in refused(artifact)
    path.mkdir()
    assert "found Is a directory" in refused(artifact)


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
    monkeypatch.setattr(compiler, "lower", lower)
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
