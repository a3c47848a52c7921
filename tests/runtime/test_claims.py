"""No file is written twice, none is written that is read, and none is written into the artifact."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.refusals import refuses
from wanrun.claims import Claims
from wanrun.errors import UsageError


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
