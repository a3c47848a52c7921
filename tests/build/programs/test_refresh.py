"""``wanbuild refresh``: programs that are old, damaged, or not read by this JAX, and targets of elsewhere."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.artifacts import compiled_store
from helpers.compiled_once import compiled_once
from helpers.damage import PROFILE, PROGRAMS, Refused, edit_environment, executable, flip, one_error, program
from helpers.manifests import plain_program, programs_of, without_profiles
from wanbuild.check.verify import check_files
from wanbuild.cli import wanbuild
from wanbuild.programs.entry_compiler import EntryCompiler
from wanbuild.programs.export_age import today
from wanbuild.programs.refresh import refresh_artifact
from wancli.run import wanrun
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.errors import ArtifactError
from wanrun.files import sha256_of
from wanrun.terminal.console import run

OLD = datetime.date(2025, 1, 31)
NO_PROGRAM = b"StableHLO of a layout that no JAX knows"


@pytest.fixture(autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What another test compiled is not compiled again."""
    with compiled_once(compiled_store(tmp_path_factory)):
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


def refreshed(artifact: Path) -> tuple[Manifest, list[str]]:
    """Refreshes, and checks every file; returns the manifest and what was reported."""
    lines: list[str] = []
    manifest = refresh_artifact(artifact, lines.append)
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


def test_old_programs(
    artifact_copy: Path, tmp_path: Path, expected: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """They run, and ``inspect`` says until when newer versions read them."""
    before = read_manifest(artifact_copy)
    changed_set(artifact_copy, exported={PROFILE: OLD})
    capsys.readouterr()
    assert video(artifact_copy, tmp_path) == expected
    assert not capsys.readouterr().err
    assert run(wanbuild, ["inspect", "--artifact", str(artifact_copy)]) == 0
    assert f"on {OLD}, read by newer versions until 2025-07-31" in capsys.readouterr().out

    day = today()
    after, lines = refreshed(artifact_copy)
    assert sum("up to date" in line for line in lines) == len(PROGRAMS)
    assert "target cpu: this JAX exports what was there; a newer one's programs last longer" in lines
    (one,) = after.program_sets.values()
    assert one.exported.keys() == {PROFILE} and day <= one.exported[PROFILE] <= today()
    assert after.content_digest == before.content_digest and after.profiles == before.profiles
    capsys.readouterr()
    assert video(artifact_copy, tmp_path) == expected
    assert not capsys.readouterr().err


def test_a_program_that_this_jax_does_not_read(
    artifact_copy: Path, tmp_path: Path, expected: bytes, refused: Refused
) -> None:
    """As JAX takes one that is too old or too new: with and without --allow-compile an error of one line."""
    before = read_manifest(artifact_copy)
    replace_program(artifact_copy, "denoise_step", NO_PROGRAM)
    for option in ((), ("--allow-compile",)):
        line = refused(artifact_copy, *option)
        (one,) = read_manifest(artifact_copy).program_sets.values()
        (day,) = one.exported.values()
        origin = f"which jax {one.jax} exported on {day}, cannot be read"
        assert f"program denoise_step of {artifact_copy}, {origin}; expected one that jax {one.jax}" in line
        assert line.endswith(f"; run wanbuild refresh --artifact {artifact_copy}")
    after, lines = refreshed(artifact_copy)
    assert after.profiles == before.profiles and after.content_digest == before.content_digest
    assert not any("this JAX exports what was there" in line for line in lines)
    assert video(artifact_copy, tmp_path) == expected


def test_damaged_files(artifact_copy: Path, tmp_path: Path, expected: bytes) -> None:
    before = read_manifest(artifact_copy)
    flip(program(artifact_copy, "prepare"), 1000)
    program(artifact_copy, "encode_text").unlink()
    flip(executable(artifact_copy, "prepare"), 1000)
    executable(artifact_copy, "denoise_loop").unlink()
    (artifact_copy / "requirements.txt").unlink()
    after, lines = refreshed(artifact_copy)
    assert sum("compiled in" in line for line in lines) == 2
    assert sum("up to date" in line for line in lines) == len(PROGRAMS) - 2
    assert after.content_digest == before.content_digest
    assert video(artifact_copy, tmp_path) == expected


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
            refresh_artifact(artifact_copy, lambda line: None)
    assert read_manifest(artifact_copy) == before
    (artifact_copy / "requirements.txt").unlink()  # which edit_environment left as it was
    for name, entry in before.targets["cpu"].executables[PROFILE].items():
        path = artifact_copy / before.targets["cpu"].folder / entry.file
        assert sha256_of(path.read_bytes()) == entry.sha256, name

    after, lines = refreshed(artifact_copy)
    assert "target cpu: the environment has changed, its executables are compiled again" in lines
    assert after.targets["cpu"].environment["packages"] == packages
    assert (after.targets["cpu"].folder, after.profiles) == ("executables/cpu-2", before.profiles)
    assert (artifact_copy / "requirements.txt").is_file()
    assert not (artifact_copy / "executables" / "cpu").exists()
    assert video(artifact_copy, tmp_path) == expected


def test_a_target_of_elsewhere_is_kept(artifact_copy: Path) -> None:
    before = with_target(artifact_copy, "tpu-v9", platform="tpu")
    after, lines = refreshed(artifact_copy)
    assert any(
        line.startswith("target tpu-v9 is left as it is: target tpu-v9 is not known") for line in lines
    )
    assert after.targets["tpu-v9"] == before.targets["tpu-v9"]
    assert after.program_sets.keys() == before.program_sets.keys()


def test_a_target_of_elsewhere_without_programs_is_left_out(artifact_copy: Path) -> None:
    lone = artifact_copy / "programs" / "lone.stablehlo"
    lone.write_bytes(NO_PROGRAM)
    before = with_target(artifact_copy, "tpu-v9", platform="tpu")
    key = before.targets["tpu-v9"].program_set
    own = msgspec.structs.replace(
        before.program_sets[key],
        programs={PROFILE: {"prepare": plain_program(file="programs/lone.stablehlo", sha256="0" * 64)}},
    )
    before.changed(program_sets={**before.program_sets, key: own}).write(artifact_copy)
    after, lines = refreshed(artifact_copy)
    assert any(line.startswith("target tpu-v9: left out, its programs are gone") for line in lines)
    assert list(after.targets) == ["cpu"] and len(after.program_sets) == 1 and not lone.exists()


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
    assert run(wanbuild, ["refresh", "--artifact", str(artifact_copy)]) == 3
    line = one_error(capsys)
    assert f"no target of {artifact_copy} can be built here; found target cpu is left as it is" in line
    assert "this machine is of another kind" in line and "expected" in line
    assert read_manifest(artifact_copy) == before


def test_an_artifact_without_targets(artifact_copy: Path) -> None:
    without_profiles(read_manifest(artifact_copy)).write(artifact_copy)
    with pytest.raises(ArtifactError, match="can be built here; found no targets; run wanbuild compile"):
        refresh_artifact(artifact_copy, print)
