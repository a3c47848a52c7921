"""Programs and their executables: checked before they are used, loaded from the cache, called by name."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.export
import msgspec
import numpy as np
import pytest

from helpers.damage import PROFILE, PROGRAMS, executable, flip, own
from helpers.manifests import programs_of
from helpers.opened import Opened
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import ArtifactError
from wanrun.executables.entries import overlay_folder, read_program
from wanrun.executables.store import Executables, LoadedProgram


@pytest.mark.parametrize("damaged", [False, True])
def test_the_entry_that_jax_opens_is_the_one_that_was_checked(artifact: Path, damaged: bool) -> None:
    """JAX finds it by its own key: a record of another file must not leave it unchecked."""
    own(artifact, "executables")
    file, manifest = executable(artifact, "prepare"), read_manifest(artifact)
    other = shutil.copy(file, file.with_name("jit_prepare-0-cache"))
    target = manifest.targets["cpu"]
    entries = {**target.executables[PROFILE]}
    entries["prepare"] = msgspec.structs.replace(entries["prepare"], file=other.name)
    target = msgspec.structs.replace(target, executables={PROFILE: entries})
    manifest.changed(targets={"cpu": target}).write(artifact)
    if damaged:
        flip(file, 0)
    opened = Opened(artifact)
    try:
        profile = opened.opened.manifest.profiles[PROFILE]
        opened.executables.check(profile)
        (loading,) = opened.executables.request(profile, ["prepare"])
        with pytest.raises(ArtifactError) as caught:
            loading.result()
    finally:
        opened.close()
    assert str(caught.value) == (
        "the executable that JAX would load is not the one that the manifest lists; "
        f"expected {other.name}; found {file.name}; run wanbuild compile, or pass --allow-compile"
    )


def test_arguments_are_given_by_name() -> None:
    array = jax.ShapeDtypeStruct((3,), np.float32)
    compiled = (
        jax.jit(lambda first, second: {"c": first - 2 * second}).lower(first=array, second=array).compile()
    )
    loaded = LoadedProgram(compiled, ("first", "second"))
    one, two = np.full(3, 7, np.float32), np.full(3, 2, np.float32)
    assert np.array_equal(loaded(second=two, first=one)["c"], [3, 3, 3])
    assert np.array_equal(loaded(first=two, second=one, third=None)["c"], [-12, -12, -12])
    with pytest.raises(KeyError, match="second"):
        loaded(first=one)


@pytest.fixture
def opened(toy_artifact: Path) -> Iterator[Opened]:
    opened = Opened(toy_artifact)
    yield opened
    opened.close()


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
    other = msgspec.structs.replace(opened.opened.manifest.profiles[PROFILE], num_frames=13)
    old = opened.opened.manifest
    sets = {
        key: msgspec.structs.replace(
            old_set,
            programs={**old_set.programs, other.name: old_set.programs[PROFILE]},
            exported={**old_set.exported, other.name: old_set.exported[PROFILE]},
        )
        for key, old_set in old.program_sets.items()
    }
    manifest = old.changed(profiles={**old.profiles, other.name: other}, program_sets=sets)
    executables = Executables(dataclasses.replace(opened.opened, manifest=manifest))
    with pytest.raises(ArtifactError, match=rf"profile {other.name} has no executable of .*--allow-compile"):
        executables.check(other)
    executables.close()


def test_what_the_user_s_cache_has_no_room_for_is_compiled_and_not_kept(
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    programs = programs_of(opened.opened.manifest, PROFILE)
    data = read_program(opened.opened.folder, "prepare", programs["prepare"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        compiled = opened.executables._from_overlay("prepare", data, programs["prepare"], "it is another CPU")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    folder = overlay_folder(opened.opened.manifest, "cpu")
    assert compiled.memory_analysis() is not None
    assert list(folder.iterdir()) == [] and len(recwarn) == 0
    (line,) = capsys.readouterr().out.splitlines()  # where the fixture's warnings go
    assert re.fullmatch(
        rf"compiled prepare in \d+\.\d s, which cannot be kept in {folder}: {os.strerror(errno.EFBIG)}: "
        "it is another CPU",
        line,
    )
