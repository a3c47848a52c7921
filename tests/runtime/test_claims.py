"""Which files a run may write: none twice, none that is read; what the cache removes; all can be checked."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.damage import flip
from helpers.refusals import refuses
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.claims import Claims
from wanrun.errors import ArtifactError, UsageError
from wanrun.intact import check_intact
from wanrun.user_cache import RECENT_SECONDS, CacheFolder

# --- claims ---


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    (tmp_path / "artifact").mkdir()
    return tmp_path / "artifact"


def test_files_of_their_own(artifact: Path, tmp_path: Path) -> None:
    claims = Claims(artifact)
    claims.read(tmp_path / "a.png", "line 1")
    claims.read(tmp_path / "a.png", "line 2")  # which any number of lines may read
    claims.write([tmp_path / "1.mp4", None, tmp_path / "1.npy"], "line 1")
    claims.write([None], "line 2")
    claims.write([tmp_path / "2.mp4"], "line 2")
    claims.write([artifact.with_name("artifact-2") / "3.mp4"], "line 3")


def test_none_is_written_twice(artifact: Path, tmp_path: Path) -> None:
    claims = Claims(artifact)
    claims.write([tmp_path / "a.mp4"], "line 1")
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (tmp_path / "a.mp4", tmp_path / "artifact" / ".." / "a.mp4", tmp_path / "link" / "a.mp4"):
        with refuses("exists", what=f"{path} ", remedy="{index}") as caught:
            claims.write([path], "line 2")
        assert "line 1" in caught.value.what
    with refuses("exists", what="line 2"):
        claims.write([tmp_path / "b.mp4", tmp_path / "b.mp4"], "line 2")


def test_what_was_refused_is_not_claimed(artifact: Path, tmp_path: Path) -> None:
    claims = Claims(artifact)
    with pytest.raises(UsageError):
        claims.write([tmp_path / "a.mp4", artifact / "b"], "line 1")
    claims.write([tmp_path / "a.mp4"], "line 2")


def test_a_single_prompt_is_told_its_options(artifact: Path, tmp_path: Path) -> None:
    claims = Claims(artifact)
    claims.write([tmp_path / "a"], "--timing-json")
    with refuses("exists", what="--timing-json", remedy="{index}"):
        claims.write([tmp_path / "a"], "")


def test_none_is_written_that_is_read(artifact: Path, tmp_path: Path) -> None:
    claims = Claims(artifact)
    claims.read(tmp_path / "frames", "line 1 (video)")
    claims.read(artifact / "sample.png", "line 1 (image)")  # reading there is no harm
    for path in (tmp_path / "frames", tmp_path / "frames" / "9.png"):
        with refuses("exists", what=path) as caught:
            claims.write([path], "line 2")
        assert "line 1 (video)" in caught.value.what
    claims.write([tmp_path / "frames" / "deeper" / "9.png"], "line 2")


def test_none_is_written_into_the_artifact(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(artifact)
    claims = Claims(tmp_path / "link")
    for path in (artifact / "a.mp4", tmp_path / "link" / "weights" / "a.mp4", artifact):
        with refuses("exists", what=artifact.resolve(), remedy="elsewhere"):
            claims.write([path], "line 1")


def test_none_is_written_among_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not at the place of an artifact there may belong to several."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with refuses("exists", what="artifacts", remedy="elsewhere"):
        Claims().write([tmp_path / "wanrun" / "artifacts" / "components" / "vae" / "x"], "")


# --- cached ---


def folder(name: str) -> CacheFolder:
    return CacheFolder("profiles", name, "built profiles", most=100)


def test_the_one_used_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for age, name in enumerate(["new", "held", "last", "old"]):
        path = folder(name).make()
        (path / "file").write_bytes(bytes(40))
        os.utime(path, (1000 - age, 1000 - age))
    with folder("held").held():
        folder("new").make_room()
        assert sorted(one.name for one in (tmp_path / "wanrun" / "profiles").glob("*/")) == ["held", "new"]
    folder("other").make_room()
    assert folder("new").path.is_dir() and folder("held").path.is_dir()  # 80 bytes
    (folder("new").path / "file").write_bytes(bytes(90))
    folder("held").use()  # by a process that has no lock, and reads more of it later
    folder("new").make_room()
    assert folder("held").path.is_dir()
    later = time.time() + 2 * RECENT_SECONDS
    monkeypatch.setattr(time, "time", lambda: later)
    folder("new").make_room()
    assert not folder("held").path.exists() and folder("new").path.is_dir()


def test_a_cache_that_cannot_be_written_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for use in (folder("one").make, folder("one").held().__enter__):
        with pytest.raises(UsageError, match="XDG_CACHE_HOME"):
            use()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match="XDG_CACHE_HOME") as refused:
        folder("one").make()
    assert refused.value.found == os.strerror(errno.EACCES)


# --- intact ---


COMMAND = """
import sys
sys.modules |= {"wanbuild": None, "orbax": None, "flax": None, "torch": None}
from wancli.run import wanrun
from wancli.console import run
code = run(wanrun, [sys.argv[1], "--check"])
sys.exit(code or 9 * ("jax" in sys.modules))
"""


@pytest.mark.slow
def test_a_whole_artifact(toy_artifact: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(toy_artifact)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    assert last.startswith(f"{toy_artifact} ")
    assert last.endswith(read_manifest(toy_artifact).content_digest)
    assert [line.split()[0] for line in lines[:3]] == ["text_encoder", "transformer", "vae"]
    assert lines[-1].startswith("target cpu: ")


@pytest.mark.slow
@pytest.mark.parametrize("of", ["weights/vae", "executables/cpu"])
def test_one_bit(artifact_copy: Path, of: str) -> None:
    """Of a file of each kind, tests/runtime/artifact has it."""
    files = (path for path in (artifact_copy / of).rglob("*") if path.is_file())
    path = max(files, key=lambda one: one.stat().st_size)
    flip(path, path.stat().st_size // 2)
    with refuses("damaged", ArtifactError, what=path, remedy="copy"):
        check_intact(open_artifact(artifact_copy), lambda line: None)
