"""Where weights lie that are not in the artifact."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.refusals import refuses
from wanrun.opened.policy import LoadPolicy, weights_folder


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for weights in (str(folder), f"{folder}/", "a folder", "~/a folder"):
        assert weights_folder(weights) == folder


@pytest.mark.parametrize("weights", ["", "missing", "a\0", "\ud800", "~nobody/x"])
def test_what_is_no_folder(weights: str) -> None:
    """``load`` begins with its options: a wrong folder costs nothing."""
    with refuses("missing_file", expected="a folder", remedy="--weights"):
        LoadPolicy(weights=weights).check()


def test_an_address_is_the_artifacts() -> None:
    with refuses("missing_file", what="'https://host/weights'", remedy="address") as caught:
        weights_folder("https://host/weights?key=hush")
    assert "hush" not in str(caught.value)
