"""A damaged or foreign artifact: one clear line, exit code 3, no output and the artifact left as it was."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import wanbuild.compile as compilation
from wanbuild.cli import wanbuild
from wanrun import layout, pipeline
from wanrun.cli import wanrun
from wanrun.console import run
from wanrun.executables import check_entry
from wanrun.files import sha256_of
from wanrun.manifest import Manifest, read_manifest

PROFILE = "96x64x9-b1-cfg"
PROGRAMS = ("decode_video", "denoise_step", "encode_text", "prepare")

Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs wanrun here, which has to fail with one line and write nothing; returns the line."""

    def call(artifact: Path, *options: object, code: int = 3) -> str:
        output = tmp_path / "output"
        output.mkdir(exist_ok=True)
        arguments = ["--artifact", artifact, "--prompt", "a fox", "--steps", 2, "--output", output / "o.npy"]
        capsys.readouterr()
        assert run(wanrun, [str(argument) for argument in (*arguments, *options)]) == code
        assert list(output.iterdir()) == []
        return one_error(capsys)

    return call


@pytest.fixture
def artifact(toy_artifact: Path, tmp_path: Path) -> Path:
    """The toy artifact with a manifest of its own; its folders are links until a test calls ``own``."""
    folder = tmp_path / "artifact"
    folder.mkdir()
    for entry in toy_artifact.iterdir():
        if entry.is_dir():
            (folder / entry.name).symlink_to(entry)
        else:
            shutil.copy(entry, folder)
    return folder


def own(artifact: Path, folder: str) -> None:
    """Copies a folder that was a link, so that the test may damage what is in it."""
    path = artifact / folder
    if path.is_symlink():
        original = path.resolve()
        path.unlink()
        shutil.copytree(original, path)


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith("error: ") and "internal error" not in line
    assert not any(text.startswith("wrote") for text in output.out.splitlines())
    return line


@pytest.fixture
def no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a run goes as far as reading weights."""

    def read(*arguments: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(pipeline, "Restore", read)


def flip(path: Path, offset: int) -> None:
    """Flips one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def edit(artifact: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edits manifest.json as text, so that its digest is that of the content before."""
    path = artifact / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_environment(artifact: Path, **facts: Any) -> None:
    """Changes what the manifest says that its target was built with, as if it had been built there."""
    manifest = read_manifest(artifact)
    target = manifest.targets["cpu"]
    changed = dataclasses.replace(target, environment={**target.environment, **facts})
    manifest.changed(targets={"cpu": changed}).write(artifact)


def executable(artifact: Path, name: str) -> Path:
    target = read_manifest(artifact).targets["cpu"]
    return artifact / target.folder / target.executables[PROFILE][name].file


def program(artifact: Path, name: str) -> Path:
    return artifact / read_manifest(artifact).profiles[PROFILE].programs["cpu"][name].file


# The manifest.


def test_not_an_artifact(refused: Refused, tmp_path: Path, toy_checkpoint: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder, found in (
        (tmp_path / "missing", "found no such folder"),
        (tmp_path / "file", "found no such folder"),
        (toy_checkpoint, "found no manifest.json in it"),
    ):
        for options in ((), ("--list",)):
            line = refused(folder, *options)
            assert f"{folder} is not an artifact" in line and found in line
            assert "make one with wanbuild convert" in line


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "cannot be read"),
        (b'{"format": "wan-art', "cannot be read"),
        (b"\xff\x00\x80", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[1, 2]", "expected format wan-artifact; found list"),
        (b"{}", "expected format wan-artifact"),
        (b'{"format": "other", "format_version": 1}', "found other"),
        (b'{"format": "wan-artifact", "format_version": 2}', "expected 1; found 2; build it again"),
        (b'{"format": "wan-artifact", "format_version": 1}', "is damaged"),
    ],
)
def test_a_manifest_that_cannot_be_used(refused: Refused, tmp_path: Path, content: bytes, part: str) -> None:
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "manifest.json").write_bytes(content)
    line = refused(tmp_path / "artifact")
    assert str(tmp_path / "artifact") in line and part in line


def _first(data: dict[str, Any]) -> Any:
    return data["components"]["vae"]["parameters"]["decoder/conv_out/bias"]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["model"]["defaults"].update(guidance_scale=1.5),
        lambda data: data["source"]["files"].pop("model_index.json"),
        lambda data: _first(data)["crc32c"].__setitem__(0, "00000000"),
        lambda data: _first(data).update(dtype="bfloat16"),
        lambda data: data["tokenizer"].update(pad_id=1),
        lambda data: data["profiles"][PROFILE]["programs"]["cpu"]["prepare"].update(donate=[0]),
        lambda data: data["profiles"][PROFILE]["programs"]["cpu"]["prepare"].update(sha256="0" * 64),
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
        lambda data: data.pop("components"),
        lambda data: data.update(profiles=[]),
        lambda data: data["profiles"][PROFILE].update(width=112),  # not what its name says
        lambda data: data["profiles"][PROFILE].update(height=-64),
        lambda data: _first(data).update(shape=[0]),
        lambda data: _first(data).update(chunks=2),
        lambda data: _first(data).update(crc32c=[]),
        lambda data: data["targets"]["cpu"]["environment"].pop("machine"),
        lambda data: data["targets"]["cpu"]["environment"].update(packages="jax"),
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
        lambda data: (data["profiles"][PROFILE]["programs"]["cpu"]["prepare"], "file"),
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
    for name in ("../x", "/etc/passwd", "a/../../x", "a//b", "", "c:x", "a\\b", "a\nb", 7):
        record[key] = name
        (tmp_path / "manifest.json").write_text(json.dumps(data))
        line = refused(tmp_path)
        assert "names a path outside the artifact" in line and f"found {name!r}" in line


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
        (["--frames", "0"], "0 frames"),
        (["--num-videos", "2"], "2 video(s)"),
        (["--guidance-scale", "1"], "guidance off"),
    ],
)
@pytest.mark.usefixtures("no_weights_are_read")
def test_a_profile_that_is_not_built(
    refused: Refused, toy_artifact: Path, options: list[str], wanted: str
) -> None:
    line = refused(toy_artifact, *options)
    assert "no profile is built for" in line and wanted in line
    assert f"expected one of {PROFILE}" in line and "wanbuild compile" in line


def test_no_profile_at_all(refused: Refused, toy_artifact: Path, tmp_path: Path) -> None:
    manifest = read_manifest(toy_artifact)
    manifest.changed(profiles={}, targets={}).write(tmp_path)
    assert f"{tmp_path} has no profiles; run wanbuild compile" in refused(tmp_path)
    manifest.changed(targets={}).write(tmp_path)
    assert f"profile {PROFILE} has no executables for any target" in refused(tmp_path)


@pytest.mark.usefixtures("no_weights_are_read")
def test_a_target_that_is_not_built(refused: Refused, toy_artifact: Path) -> None:
    line = refused(toy_artifact, "--target", "tpu7x:2x2x1")
    assert "target tpu7x:2x2x1 is not built; expected one of cpu; run wanbuild compile --target" in line


# Programs, executables and the tokenizer.


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("no_weights_are_read")
def test_an_executable_that_is_not_whole(refused: Refused, artifact: Path, name: str) -> None:
    own(artifact, "executables")
    path = executable(artifact, name)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    line = refused(artifact)
    assert f"the executable of {name} for profile {PROFILE} is damaged: {path}" in line
    assert f"expected {size} bytes; found {size // 2} bytes" in line and "wanbuild compile" in line
    path.unlink()
    line = refused(artifact)
    assert f"the executable of {name} for profile {PROFILE} is missing: {path}" in line


@pytest.mark.usefixtures("no_weights_are_read")
def test_a_missing_folder_of_executables(refused: Refused, artifact: Path) -> None:
    own(artifact, "executables")
    shutil.rmtree(artifact / "executables")
    assert "is missing" in refused(artifact)


@pytest.mark.parametrize("name", ["decode_video", "prepare"])
def test_an_executable_with_a_flipped_bit_is_never_loaded(
    refused: Refused, artifact: Path, name: str
) -> None:
    own(artifact, "executables")
    path = executable(artifact, name)
    flip(path, path.stat().st_size // 2)
    line = refused(artifact)
    assert f"the executable of {name} is damaged: {path}" in line
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
    assert f"program decode_video is damaged: {path}" in line and "copy the artifact again" in line
    path.unlink()
    line = refused(artifact, *allow)
    assert f"program decode_video cannot be read: {path}: No such file" in line


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
    flip(program(artifact, "decode_video"), 1000)
    before = (artifact / "manifest.json").read_bytes()
    arguments = ["--artifact", artifact, "--target", "cpu", "--size", "32x32", "--frames", "1"]
    assert run(wanbuild, ["compile", *map(str, arguments)]) == 3
    assert "program decode_video is damaged" in one_error(capsys)
    assert (artifact / "manifest.json").read_bytes() == before
    check_executables(artifact)


def check_executables(artifact: Path) -> None:
    """Checks that every executable that the manifest lists is there and whole."""
    target = read_manifest(artifact).targets["cpu"]
    for name, entry in target.executables[PROFILE].items():
        check_entry(artifact, target, name, entry)


def test_a_compilation_cut_short_keeps_the_old_executables(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a changed environment that gives the same cache keys, so that entries have the same names."""
    lowered: list[str] = []

    def lower(data: bytes, name: str, *rest: object) -> Any:
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
    monkeypatch.setattr(compilation, "lower", lower)
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


@pytest.mark.parametrize(
    ("component", "parameter"),
    [
        ("text_encoder", "shared"),
        ("text_encoder", "final_norm/weight"),
        ("transformer", "blocks/ffn/up/weight"),
        ("transformer", "proj_out/bias"),
        ("vae", "decoder/mid_block/resnets/0/conv1/weight"),
        ("vae", "decoder/conv_out/bias"),
    ],
)
def test_a_flipped_bit_in_the_weights(
    refused: Refused, artifact: Path, component: str, parameter: str
) -> None:
    own(artifact, "weights")
    manifest = read_manifest(artifact)
    place = manifest.components[component].parameters[parameter].layout
    path = artifact / "weights" / component / layout.array_folder(parameter) / place.chunk_file(0)
    flip(path, place.nbytes // 2)
    line = refused(artifact)
    assert f"weights are damaged: {component}/{parameter}" in line and str(path) in line
    assert (
        "has the wrong crc32c" in line
        and "; expected " in line
        and "found" in line
        and "copy the artifact again" in line
    )


def test_as_a_user_runs_it(cli: Any, artifact: Path, tmp_path: Path) -> None:
    """The same through the installed command, for the component that is restored last."""
    own(artifact, "weights")
    flip(artifact / "weights/vae/decoder.conv_in.weight/c/0/0/0/0/0", 77)
    output = tmp_path / "video.mp4"
    line = cli.fails(3, "wanrun", "--artifact", artifact, "--prompt", "a fox", "--output", output)
    assert "weights are damaged: vae/decoder/conv_in/weight" in line
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


@pytest.fixture
def layered(toy_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact without programs, with a chunk file per layer, as large parameters have."""
    monkeypatch.setattr(layout, "SMALL_BYTES", 0)
    monkeypatch.setattr(layout, "LARGE_BYTES", 4096)
    folder = tmp_path / "layered"
    assert run(wanbuild, ["convert", str(toy_checkpoint), "--artifact", str(folder)]) == 0
    return folder


def test_chunk_files_that_are_not_where_they_were(layered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``wanbuild verify`` reads every file: swapped, truncated, missing, and a file in another's place."""

    def verify() -> str:
        capsys.readouterr()
        assert run(wanbuild, ["verify", "--artifact", str(layered)]) == 3
        return one_error(capsys)

    def exchange(a: Path, b: Path) -> None:
        spare = layered / "spare"
        for old, new in ((a, spare), (b, a), (spare, b)):
            old.rename(new)

    weights = layered / "weights" / "transformer"
    up = weights / "blocks.ffn.up.weight" / "c"
    first, second = (up / str(layer) / "0" / "0" for layer in (0, 1))
    exchange(first, second)
    line = verify()
    assert "transformer/blocks/ffn/up/weight, row 0 has the wrong crc32c" in line and str(first) in line
    exchange(first, second)

    key, query = (weights / f"blocks.attn1.to_{name}.weight" / "c" / "2" / "0" / "0" for name in "kq")
    exchange(key, query)
    assert "row 2 has the wrong crc32c" in verify()
    exchange(key, query)

    data = second.read_bytes()
    second.write_bytes(data[:-1])
    line = verify()
    assert f"the file has the wrong size in {second}; expected {len(data)}; found {len(data) - 1}" in line
    second.unlink()
    line = verify()
    assert f"the file cannot be read (No such file or directory) in {second}" in line
    second.mkdir()
    assert "the file has the wrong size" in verify()
    second.rmdir()

    second.write_bytes(data)
    capsys.readouterr()
    assert run(wanbuild, ["verify", "--artifact", str(layered)]) == 0  # and nothing else was wrong


def test_a_storage_error_names_the_file(
    refused: Refused, toy_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.preadv", fail)
    line = refused(toy_artifact)
    assert "weights are damaged: text_encoder/" in line and "reading failed (Input/output error)" in line


def test_a_damaged_record(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``wanbuild verify`` does not compare with a golden file that is not what was recorded."""
    (artifact / "golden").mkdir()
    file = f"golden/{PROFILE}-0.json"
    (artifact / file).write_text("{}")
    manifest = read_manifest(artifact)
    manifest.changed(golden={PROFILE: {"file": file, "sha256": sha256_of(b"{ }")}}).write(artifact)
    for found in (sha256_of(b"{}"), "No such file or directory"):
        assert run(wanbuild, ["verify", "--artifact", str(artifact)]) == 3
        line = one_error(capsys)
        assert f"{artifact / file} is damaged" in line and f"found {found}" in line
        (artifact / file).unlink(missing_ok=True)


# Another machine.


@pytest.mark.parametrize(
    ("facts", "mismatch"),
    [
        ({"machine": "riscv64"}, "machine: expected riscv64, found"),
        ({"platform_version": "axon"}, "platform version: expected axon, found"),
        ({"device_kind": "TPU v9"}, "device kind: expected TPU v9, found cpu (run on that device"),
        ({"device_count": 8}, "device count: expected 8, found 1 (make as many devices visible"),
        (
            {"cpu_features": ["avx", "warp_drive"]},
            "CPU features: expected warp_drive, found a CPU without them (run wanbuild compile on this CPU)",
        ),
        ({"variables": {"XLA_FLAGS": "--xla_x=1"}}, "variable XLA_FLAGS: expected '--xla_x=1', found ''"),
        ({"zstandard": False}, "package zstandard: expected False, found True"),
    ],
)
@pytest.mark.usefixtures("no_weights_are_read")
def test_one_fact_that_differs(
    refused: Refused, artifact: Path, facts: dict[str, Any], mismatch: str
) -> None:
    edit_environment(artifact, **facts)
    line = refused(artifact)
    assert f"target cpu was not built for this machine: {mismatch}" in line
    assert line.count("expected") == 1  # and nothing else


@pytest.mark.usefixtures("no_weights_are_read")
def test_every_fact_that_differs_is_in_one_line(refused: Refused, artifact: Path) -> None:
    packages = read_manifest(artifact).targets["cpu"].environment["packages"]
    edit_environment(
        artifact,
        packages={**packages, "jaxlib": "0.4.1", "libtpu": "0.0.1"},
        cpu_features=["warp_drive"],
        device_kind="TPU v9",
        device_count=8,
    )
    line = refused(artifact)
    for mismatch in (
        f"package jaxlib: expected 0.4.1, found {packages['jaxlib']} (pip install jaxlib==0.4.1, or run",
        "package libtpu: expected 0.0.1, found None (pip install libtpu==0.0.1, or run wanbuild compile)",
        "CPU features: expected warp_drive, found a CPU without them",
        "device kind: expected TPU v9, found cpu",
        "device count: expected 8, found 1",
    ):
        assert mismatch in line


@pytest.mark.parametrize(
    ("flags", "mismatches"),
    [
        # One that XLA does not know would end the process, were it started.
        ("--xla_warp_drive=1", ["variable XLA_FLAGS: expected '', found '--xla_warp_drive=1'"]),
        (
            "--xla_force_host_platform_device_count=2",
            [
                "variable XLA_FLAGS: expected '', found '--xla_force_host_platform_device_count=2'",
                "device count: expected 1, found 2",
                "package jaxlib: expected 0.4.1",
            ],
        ),
    ],
)
def test_drifted_flags(cli: Any, artifact: Path, tmp_path: Path, flags: str, mismatches: list[str]) -> None:
    if len(mismatches) > 1:
        packages = read_manifest(artifact).targets["cpu"].environment["packages"]
        edit_environment(artifact, packages={**packages, "jaxlib": "0.4.1"})
    output = tmp_path / "o.npy"
    command = ("wanrun", "--artifact", artifact, "--prompt", "a fox", "--output", output)
    line = cli.fails(3, *command, XLA_FLAGS=flags)
    assert line.count("expected") == len(mismatches)
    assert all(mismatch in line for mismatch in mismatches), line


def test_flags_in_the_arguments(
    refused: Refused, toy_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["server.py", "--xla_warp_drive=1"])
    line = refused(toy_artifact)
    assert (
        "this process's arguments: expected none for XLA, found --xla_warp_drive=1 (leave them out)" in line
    )


def test_no_such_platform(cli: Any, toy_artifact: Path, tmp_path: Path) -> None:
    command = ("wanrun", "--artifact", toy_artifact, "--prompt", "a fox", "--output", tmp_path / "o.npy")
    line = cli.fails(3, *command, JAX_PLATFORMS="tpu")
    assert "there is no cpu device" in line and "tpu" in line


# --allow-compile.


def _generate(
    artifact: Path, output: Path, capsys: pytest.CaptureFixture[str], *options: object
) -> tuple[list[str], dict[str, Any]]:
    """Runs wanrun here, which has to succeed; returns its warnings and timings."""
    arguments = ["--artifact", artifact, "--prompt", "a fox", "--steps", 2, "--output", output]
    timing = output.with_suffix(".json")
    capsys.readouterr()
    assert run(wanrun, [str(a) for a in (*arguments, "--timing-json", timing, *options)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("warning: ") for line in lines), lines
    return lines, json.loads(timing.read_text())


def test_a_mismatch_may_be_compiled_around(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own(artifact, "executables")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    strict, _ = tmp_path / "strict.npy", _generate(artifact, tmp_path / "strict.npy", capsys)
    # The slowest program is in the overlay already, so that this test compiles only the others.
    decode = executable(artifact, "decode_video")
    edit_environment(artifact, cpu_features=["warp_drive"])
    overlay = pipeline.overlay_folder(read_manifest(artifact), "cpu")
    shutil.copy(decode, overlay / decode.name)
    before = sorted(path for path in artifact.rglob("*"))

    warnings, timings = _generate(artifact, tmp_path / "first.npy", capsys, "--allow-compile")
    assert (timings["cache_hits"], timings["cache_misses"]) == (1, 3)
    assert len(warnings) == 4
    assert "CPU features: expected warp_drive" in warnings[0]
    for name, line in zip(("denoise_step", "encode_text", "prepare"), warnings[1:], strict=True):
        assert f"compiled {name}, kept in {overlay}" in line

    warnings, timings = _generate(artifact, tmp_path / "second.npy", capsys, "--allow-compile")
    assert (timings["cache_hits"], timings["cache_misses"]) == (4, 0)
    assert len(warnings) == 1 and "CPU features: expected warp_drive" in warnings[0]

    assert sorted(path for path in artifact.rglob("*")) == before
    for name in ("first.npy", "second.npy"):
        assert (tmp_path / name).read_bytes() == strict.read_bytes()


def test_a_damaged_executable_may_be_compiled_again(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own(artifact, "executables")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = executable(artifact, "prepare")
    flip(path, 1000)
    warnings, timings = _generate(artifact, tmp_path / "o.npy", capsys, "--allow-compile")
    assert (timings["cache_hits"], timings["cache_misses"]) == (3, 1)
    (line,) = warnings
    assert "compiled prepare" in line and f"the executable of prepare is damaged: {path}" in line
    path.unlink()
    warnings, timings = _generate(artifact, tmp_path / "p.npy", capsys, "--allow-compile")
    assert (timings["cache_hits"], timings["cache_misses"]) == (4, 0)
    assert warnings == []


def test_an_overlay_that_cannot_be_written(
    refused: Refused, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    edit_environment(artifact, cpu_features=["warp_drive"])
    manifest = read_manifest(artifact)
    with pytest.raises(pipeline.UsageError, match="set XDG_CACHE_HOME"):
        pipeline.overlay_folder(manifest, "cpu")


# Weights that are what was built, and no good.


def test_latents_that_are_not_finite(
    artifact: Path, refused: Refused, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN weights with matching checksums: nothing is damaged, and still no video is written."""
    own(artifact, "weights")
    write_parameter(artifact, "transformer", "proj_out/bias", np.nan)
    line = refused(artifact, code=1)
    assert "the final latents are not finite" in line and "NaN or infinite of" in line
    assert "wanbuild verify" in line
    # And an older video is not lost, though it could have been replaced.
    older = tmp_path / "older.gif"
    older.write_bytes(b"the only copy")
    arguments = ["--artifact", artifact, "--prompt", "a fox", "--steps", 1, "--output", older, "--overwrite"]
    assert run(wanrun, [str(argument) for argument in arguments]) == 1
    assert "the final latents are not finite" in one_error(capsys)
    assert older.read_bytes() == b"the only copy"


def write_parameter(artifact: Path, component: str, path: str, value: float) -> None:
    """Overwrites a parameter of one row with a value, and its checksums in the manifest."""
    import hashlib

    from crc32c import crc32c

    manifest: Manifest = read_manifest(artifact)
    entry = manifest.components[component]
    parameter = entry.parameters[path]
    assert parameter.layout.rows == 1 and parameter.layout.dtype == "float32"
    data = np.full(parameter.layout.shape, value, np.float32).tobytes()
    checksum = crc32c(data)
    file = artifact / entry.folder / layout.array_folder(path) / parameter.layout.chunk_file(0)
    file.write_bytes(data + checksum.to_bytes(layout.CRC_BYTES, "little"))
    digest = hashlib.sha256(hashlib.sha256(data).digest()).hexdigest()
    changed = dataclasses.replace(parameter, crc32c=(f"{checksum:08x}",), sha256=digest)
    component_changed = dataclasses.replace(entry, parameters={**entry.parameters, path: changed})
    manifest.changed(components={**manifest.components, component: component_changed}).write(artifact)
