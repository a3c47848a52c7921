"""Programs and executables: checked before they are used, loaded once, called by name, and kept."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from helpers.damage import PROFILE, PROGRAMS, executable, flip, own
from helpers.kernels import put_attention
from helpers.manifests import plain_manifest, plain_program, program_set, programs_of
from helpers.opened import Opened
from helpers.refusals import check_refusal, refuses
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import ArtifactError
from wanrun.executables.compiled_here import keep, kept_file, options_here, overlay_folder, read_kept
from wanrun.executables.executables import Executables, LoadedProgram, unreadable
from wanrun.opened.policy import LoadPolicy


def test_what_was_checked_is_what_is_loaded(artifact: Path) -> None:
    """Whatever becomes of the files after the check: JAX is handed the bytes."""
    own(artifact, "executables")
    own(artifact, "programs")
    with closing(Opened(artifact)) as opened:
        profile = opened.opened.manifest.profiles[PROFILE]
        opened.executables.check(profile)
        flip(executable(artifact, "prepare"), 0)
        executable(artifact, "decode_video").unlink()
        for loading in opened.executables.request(profile, ["prepare", "decode_video"]):
            loading.result()
    assert (opened.timings.cache_hits, opened.timings.cache_misses) == (2, 0)


def test_the_name_of_an_entry_does_not_matter(artifact: Path) -> None:
    """It holds JAX's key, which nobody asks for: a level, a chip and another process load the same file."""
    own(artifact, "executables")
    file, manifest = executable(artifact, "prepare"), read_manifest(artifact)
    file.rename(file.with_name("prepare"))
    target = manifest.targets["cpu"]
    entries = {**target.executables[PROFILE]}
    entries["prepare"] = msgspec.structs.replace(entries["prepare"], file="prepare")
    target = msgspec.structs.replace(target, executables={PROFILE: entries})
    manifest.changed(targets={"cpu": target}).write(artifact)
    with closing(Opened(artifact)) as opened:
        profile = opened.opened.manifest.profiles[PROFILE]
        (loading,) = opened.executables.request(profile, ["prepare"])
        assert loading.result().inputs == programs_of(manifest, PROFILE)["prepare"].inputs


def test_arguments_are_given_by_name() -> None:
    array = jax.ShapeDtypeStruct((3,), np.float32)
    compiled = (
        jax.jit(lambda first, second: {"c": first - 2 * second}).lower(first=array, second=array).compile()
    )
    loaded = LoadedProgram(compiled, ("first", "second"))
    one, two = np.full(3, 7, np.float32), np.full(3, 2, np.float32)
    assert np.array_equal(loaded(second=two, first=one)["c"], [3, 3, 3])
    assert np.array_equal(loaded(first=two, second=one, third=None)["c"], [-12, -12, -12])
    with refuses("damaged", ArtifactError, what="takes second", remedy="wanbuild verify"):
        loaded(first=one)
    with refuses("damaged", ArtifactError, found="int32"):
        loaded(first=one, second=two.astype(np.int32))


@pytest.fixture
def opened(toy_artifact: Path) -> Iterator[Opened]:
    with closing(Opened(toy_artifact)) as opened:
        yield opened


def test_executables_are_loaded_once_for_all_who_ask(opened: Opened) -> None:
    profile = opened.opened.manifest.profiles[PROFILE]
    programs = opened.executables.check(profile)
    assert sorted(programs) == sorted(PROGRAMS)
    first, second = opened.executables.request(profile, ["prepare", "decode_video"])
    assert opened.executables.request(profile, ["decode_video", "prepare"]) == [second, first]
    assert opened.executables.check(profile) == programs  # which reads none of the two again
    assert first.result().inputs == programs["prepare"].inputs
    assert second.result().inputs == programs["decode_video"].inputs
    assert (opened.timings.cache_hits, opened.timings.cache_misses) == (2, 0)


def test_a_profile_without_executables_is_refused(opened: Opened) -> None:
    old, replace = opened.opened.manifest, msgspec.structs.replace
    other = replace(old.profiles[PROFILE], num_frames=13)
    sets = {
        key: replace(one, programs={**one.programs, other.name: one.programs[PROFILE]})
        for key, one in old.program_sets.items()
    }
    manifest = old.changed(profiles={**old.profiles, other.name: other}, program_sets=sets)
    changed = dataclasses.replace(opened.opened.artifact, manifest=manifest)
    with (
        closing(Executables(dataclasses.replace(opened.opened, artifact=changed))) as executables,
        refuses("wrong_machine", ArtifactError, what=other.name, remedy="--allow-compile"),
    ):
        executables.check(other)


def test_a_program_that_no_generation_runs(artifact_copy: Path) -> None:
    """It is read where it is asked for alone."""
    put_attention(artifact_copy, kernel=jnp.abs)
    with closing(Opened(artifact_copy)) as opened:
        profile, executables = opened.opened.manifest.profiles[PROFILE], opened.executables
        assert "attention" not in executables.check(profile)
        assert "attention" not in executables.idle(profile) and "prepare" in executables.idle(profile)
        assert list(executables.check(profile, ["attention"])) == ["attention"]


@pytest.mark.slow
def test_what_the_user_s_cache_has_no_room_for_is_compiled_and_not_kept(
    artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own(artifact, "executables")
    executable(artifact, "prepare").unlink()
    held = Opened(artifact)
    opened = held.opened
    executables = Executables(dataclasses.replace(opened, policy=LoadPolicy(allow_compile=True)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        (loading,) = executables.request(opened.manifest.profiles[PROFILE], ["prepare"])
        assert loading.result().inputs == programs_of(opened.manifest, PROFILE)["prepare"].inputs
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        executables.close()
        held.close()
    folder = overlay_folder(opened.manifest, "cpu").path
    assert list(folder.iterdir()) == [] and len(recwarn) == 0
    (line,) = capsys.readouterr().out.splitlines()  # where the opened artifact's warnings go
    kept = rf"compiled prepare in \d+\.\d s, which cannot be kept in {folder}: {os.strerror(errno.EFBIG)}: "
    assert re.match(kept, line)


def test_an_unreadable_program_names_the_versions_and_the_command() -> None:
    programs = program_set({PROFILE: {"prepare": plain_program()}})
    error = unreadable(
        Artifact(plain_manifest(), Path("my artifact")), programs, "prepare", "0.11.1", "too old"
    )
    command = "wanbuild compile 'my artifact' --again"
    assert error.exit_code == 3 and "my artifact" in error.what and "jax 0 " in error.what
    check_refusal(error, "other_release", what="prepare", expected="0.11.1", remedy=command)
    assert error.found == "too old"


# What was compiled here is found again.


def file_of(folder: Path, options: Any = None, sha256: str = "1") -> Path:
    return kept_file(folder, plain_program(sha256=sha256), options or {}, jax.devices("cpu"))


def test_an_entry(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    assert read_kept(path) is None
    keep(path, b"bytes")
    assert read_kept(path) == b"bytes"
    assert list(tmp_path.iterdir()) == [path]


def test_each_fact_has_a_file_of_its_own(tmp_path: Path) -> None:
    files = [
        file_of(tmp_path),
        file_of(tmp_path, options={"xla_x": True}),
        file_of(tmp_path, sha256="2"),
        kept_file(tmp_path, plain_program(sha256="1"), {}, 2 * jax.devices("cpu")),
    ]
    assert len(set(files)) == len(files)


def test_autotuning_is_not_turned_off_on_the_chip() -> None:
    options = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": "False", "xla_tpu_x": "true"}
    assert options_here(options) == {"xla_tpu_x": "true"}


@pytest.mark.parametrize("damage", [lambda data: b"B" + data[1:], lambda data: data[:-1], lambda data: b""])
def test_damage_is_as_if_nothing_was_kept(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path, other = file_of(tmp_path), file_of(tmp_path, sha256="2")
    keep(path, b"bytes")
    path.rename(other)  # it says of what it is
    assert read_kept(other) is None
    keep(path, b"bytes")
    path.write_bytes(damage(path.read_bytes()))
    assert read_kept(path) is None


def test_the_overlay_is_of_an_artifact_a_target_and_a_kind_of_host(
    toy_artifact: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manifest = read_manifest(toy_artifact)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = overlay_folder(manifest, "cpu")
    assert folder.make().is_dir() and folder.path.parent == tmp_path / "cache" / "wanrun" / "executables"
    assert folder.name.startswith(f"{manifest.content_digest.removeprefix('sha256:')[:16]}-cpu-")
    assert overlay_folder(manifest, "cpu") == folder
