"""``wanbuild compile --again``: programs that are damaged or unread by this JAX, and targets of elsewhere."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.artifacts import compiled_store
from helpers.compiling import compiled_once, exported_once
from helpers.damage import PROFILE, Refused, edit_environment, executable, flip, program, resealed
from helpers.manifests import programs_of, without_profiles
from helpers.refusals import json_error, refuses
from wanbuild import again
from wanbuild.again import compile_again, like_profile
from wanbuild.build import compile_artifact
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.check.verify import check_files
from wanbuild.cli import wanbuild
from wanbuild.programs.entry_compiler import EntryCompiler
from wanbuild.targets.target import resolve_target
from wancli.console import run
from wancli.run import wanrun
from wanrun import open_artifact
from wanrun.artifact import formats
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.formats import FORMAT_VERSION, Older
from wanrun.artifact.manifest import MANIFEST, Manifest, read_manifest, spelled
from wanrun.errors import ArtifactError
from wanrun.files import sha256_of

NO_PROGRAM = b"StableHLO of a layout that no JAX knows"


@pytest.fixture(autouse=True, scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What another test exported or compiled is not made again."""
    with compiled_once(compiled_store(tmp_path_factory)), exported_once():
        yield


@pytest.fixture(scope="module")
def expected(toy_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The video of the artifact as it was built."""
    return video(toy_artifact, tmp_path_factory.mktemp("expected"))


def video(artifact: Path, folder: Path) -> bytes:
    """The bytes of a video that wanrun makes."""
    output = folder / "fox.npy"
    arguments = ["--artifact", artifact, "--prompt", "a fox", "--steps", 2, "--output", output, "--overwrite"]
    assert run(wanrun, [str(argument) for argument in arguments]) == 0
    return output.read_bytes()


def built_again(artifact: Path) -> tuple[Manifest, list[str]]:
    """Builds again, and checks every file; returns the manifest and what was reported."""
    lines: list[str] = []
    manifest = compile_again(artifact, lines.append)
    assert manifest == read_manifest(artifact)
    check_files(Artifact(manifest, artifact), lambda line: None)
    return manifest, lines


def changed_set(artifact: Path, **fields: Any) -> None:
    """Changes the artifact's only program set."""
    manifest = read_manifest(artifact)
    (one,) = manifest.program_sets.values()
    changed = msgspec.structs.replace(one, **fields)
    manifest.changed(program_sets={changed.key: changed}).write(artifact)


def replace_program(artifact: Path, name: str, data: bytes) -> None:
    """Has the manifest list other bytes as a program."""
    path = program(artifact, name)
    path.write_bytes(data)
    programs = dict(programs_of(read_manifest(artifact), PROFILE))
    programs[name] = msgspec.structs.replace(programs[name], sha256=sha256_of(data))
    changed_set(artifact, programs={PROFILE: programs})


def with_target(artifact: Path, name: str, **environment: Any) -> Manifest:
    """Lists another target, with the executables of this machine's and programs of its own platform."""
    manifest = read_manifest(artifact)
    (one,), target = manifest.program_sets.values(), manifest.targets["cpu"]
    own = msgspec.structs.replace(one, platform=environment["platform"])
    other = msgspec.structs.replace(
        target, program_set=own.key, environment={**target.environment, **environment}
    )
    changed = manifest.changed(
        program_sets={one.key: one, own.key: own}, targets={**manifest.targets, name: other}
    )
    changed.write(artifact)
    return changed


@pytest.mark.thorough
def test_damaged_files_of_two_profiles(artifact_copy: Path, tmp_path: Path, expected: bytes) -> None:
    """Each is built with its own options, and only what is damaged is compiled."""
    options = BuildOptions(dtype="float32", loop="step", vae_decode_chunk=2)
    compile_artifact(CompileRequest(artifact_copy, ["cpu"], [(64, 32)], [1], [False], options=options), print)
    before = read_manifest(artifact_copy)
    assert len(before.profiles) == 2
    flip(program(artifact_copy, "prepare"), 1000)
    for path in artifact_copy.glob("programs/64x32x1-b1-nocfg/*"):
        path.unlink()
    flip(executable(artifact_copy, "prepare"), 1000)
    executable(artifact_copy, "denoise_loop").unlink()
    (artifact_copy / "requirements.txt").unlink()
    after, lines = built_again(artifact_copy)
    assert sum("compiled in" in line for line in lines) == 2
    assert sum("up to date" in line for line in lines) == len(lines) - 2
    assert after.content_digest == before.content_digest
    built, own = after.targets["cpu"], before.targets["cpu"]
    assert built == msgspec.structs.replace(own, executables=built.executables)
    assert [*built.executables] == [*own.executables] == [*before.profiles]
    assert video(artifact_copy, tmp_path) == expected


@pytest.mark.thorough
def test_targets_that_share_programs_keep_their_profiles(
    artifact_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs that change with the first target are the second one's too."""
    shutil.copytree(artifact_copy / "executables/cpu", artifact_copy / "executables/cpu-9")
    built = read_manifest(artifact_copy)
    other = msgspec.structs.replace(built.targets["cpu"], folder="executables/cpu-9")
    before = built.changed(targets={"cpu": built.targets["cpu"], "cpu-9": other})
    before.write(artifact_copy)
    replace_program(artifact_copy, "prepare", NO_PROGRAM)
    here = resolve_target("cpu", {})
    monkeypatch.setattr(again, "resolve_target", lambda name, mesh: dataclasses.replace(here, name=name))
    after, _ = built_again(artifact_copy)
    assert after.content_digest == before.content_digest and after.targets.keys() == before.targets.keys()
    for name, target in after.targets.items():
        assert target.executables[PROFILE].keys() == before.targets[name].executables[PROFILE].keys()


def test_what_is_built_is_recorded_and_not_given(
    artifact_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(wanbuild, ["compile", str(artifact_copy), "--again", "--frames", "5", "--json-errors"]) == 2
    error = json_error(capsys.readouterr().err)
    assert error["code"] == "conflict" and "--again and --frames" in error["message"]


@pytest.mark.thorough
def test_a_program_that_this_jax_does_not_read(
    artifact_copy: Path, tmp_path: Path, expected: bytes, refused: Refused
) -> None:
    """As JAX takes one that is too old or too new: with and without --allow-compile an error of one line."""
    before = read_manifest(artifact_copy)
    replace_program(artifact_copy, "denoise_step", NO_PROGRAM)
    for option in ((), ("--allow-compile",)):
        line = refused(artifact_copy, *option)
        (one,) = read_manifest(artifact_copy).program_sets.values()
        assert f"denoise_step of {artifact_copy}," in line and line.count(f"jax {one.jax}") >= 2
        assert line.endswith(f" wanbuild compile {artifact_copy} --again")
    assert run(wanbuild, ["compile", str(artifact_copy), "--again"]) == 0
    after = read_manifest(artifact_copy)
    assert after.profiles == before.profiles and after.content_digest == before.content_digest
    assert video(artifact_copy, tmp_path) == expected


@pytest.mark.thorough
def test_other_packages_and_a_kill_in_the_middle(
    artifact_copy: Path, tmp_path: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is compiled again beside what is there; what was listed stays whole until the end."""
    packages = read_manifest(artifact_copy).targets["cpu"].environment["packages"]
    edit_environment(artifact_copy, packages={**packages, "jaxlib": "0.4.1"})
    before = read_manifest(artifact_copy)
    compile_program, calls = EntryCompiler.compile, list[str]()

    def killed(self: Any, name: str, *arguments: Any) -> Any:
        calls.append(name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compile_program(self, name, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(EntryCompiler, "compile", killed)
        with pytest.raises(KeyboardInterrupt):
            compile_again(artifact_copy, lambda line: None)
    assert read_manifest(artifact_copy) == before
    (artifact_copy / "requirements.txt").unlink()  # which edit_environment left as it was
    for name, entry in before.targets["cpu"].executables[PROFILE].items():
        path = artifact_copy / before.targets["cpu"].folder / entry.file
        assert sha256_of(path.read_bytes()) == entry.sha256, name

    after, lines = built_again(artifact_copy)
    assert any(line.startswith("target cpu: ") for line in lines)
    assert after.targets["cpu"].environment["packages"] == packages
    assert (after.targets["cpu"].folder, after.profiles) == ("executables/cpu-2", before.profiles)
    assert (artifact_copy / "requirements.txt").is_file()
    assert not (artifact_copy / "executables" / "cpu").exists()
    assert video(artifact_copy, tmp_path) == expected


@pytest.mark.slow
def test_programs_of_an_older_format_are_built_again(
    artifact_copy: Path, tmp_path: Path, expected: bytes, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then nothing runs them, and a target that cannot be built here goes."""
    before = with_target(artifact_copy, "tpu-v9", platform="tpu")
    content = {**before.as_json(), "format_version": FORMAT_VERSION - 1}
    (artifact_copy / MANIFEST).write_bytes(spelled(resealed(content)))
    older = Older(lambda content: None, runs=False)
    monkeypatch.setattr(formats, "OLDER", {FORMAT_VERSION - 1: older})
    assert refused(artifact_copy).endswith(f"; run wanbuild compile {artifact_copy} --again")
    after, lines = built_again(artifact_copy)
    assert after.targets.keys() == {"cpu"} and sum("tpu-v9" in line for line in lines) == 1
    assert after.components == before.components and len(after.program_sets) == 1
    assert video(artifact_copy, tmp_path) == expected


@pytest.mark.slow
def test_a_target_of_elsewhere_is_kept(artifact_copy: Path) -> None:
    before = with_target(artifact_copy, "tpu-v9", platform="tpu")
    after, lines = built_again(artifact_copy)
    assert any(
        line.startswith("target tpu-v9 is left as it is: target tpu-v9 is not known") for line in lines
    )
    assert after.targets["tpu-v9"] == before.targets["tpu-v9"]
    assert after.program_sets.keys() == before.program_sets.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "facts", [{"machine": "riscv64"}, {"device_kind": "TPU v9"}, {"variables": {"XLA_FLAGS": "--xla_x=1"}}]
)
def test_another_kind_of_machine_builds_nothing(
    artifact_copy: Path, capsys: pytest.CaptureFixture[str], facts: dict[str, Any]
) -> None:
    """A target for an ARM host is not made one for this host, nor one with flags one without."""
    edit_environment(artifact_copy, **facts)
    before = read_manifest(artifact_copy)
    capsys.readouterr()
    assert run(wanbuild, ["compile", "--artifact", str(artifact_copy), "--again", "--json-errors"]) == 3
    error = json_error(capsys.readouterr().err)
    assert error["code"] == "wrong_machine" and str(artifact_copy) in error["message"]
    assert error["found"].startswith("target cpu ")
    assert read_manifest(artifact_copy) == before


def test_an_artifact_without_targets(artifact_copy: Path) -> None:
    without_profiles(read_manifest(artifact_copy)).write(artifact_copy)
    with refuses("not_built", ArtifactError, what=artifact_copy, remedy="wanbuild compile"):
        compile_again(artifact_copy, print)


def test_a_profile_s_options_are_taken_where_none_is_given(toy_artifact: Path) -> None:
    (name,) = open_artifact(toy_artifact).manifest.profiles
    found = like_profile(toy_artifact, name, {"targets": ("cpu",), "loop": "step"})
    assert (found["dtype"], found["loop"], found["targets"]) == ("float32", "step", ("cpu",))
