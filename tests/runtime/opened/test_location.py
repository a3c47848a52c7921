"""Where weights lie that are not in the artifact."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from wanrun.errors import UsageError
from wanrun.opened.location import component_location
from wanrun.opened.policy import LoadPolicy
from wanrun.weights.tensorstore_reader import TensorStoreReader


def test_locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    for weights in (str(folder), f"{folder}/", "a folder", f"file://{tmp_path}/a%20folder"):
        assert component_location(weights, "weights/vae") == folder / "vae"
    for weights, expected in {
        "gs://bucket/dir": "gs://bucket/dir/vae",
        "s3://bucket": "s3://bucket/vae",
        "https://host:8000/a//?key=x": "https://host:8000/a/vae?key=x",
    }.items():
        assert component_location(weights, "weights/vae") == expected
        assert "key" not in TensorStoreReader(expected, "vae").location


@pytest.mark.parametrize(
    "weights",
    [
        *("", "missing", "a\0", "\ud800", "file:///missing", "file://host/x", "ftp://host/x", "http://"),
        "http://[::1/x",
    ],
)
def test_locations_that_cannot_be_used(weights: str) -> None:
    with pytest.raises(UsageError, match="check --weights"):
        component_location(weights, "weights/vae")


def test_an_address_that_only_tensorstore_understands() -> None:
    location = component_location("gs://A/x", "weights/vae")
    with pytest.raises(UsageError, match=r"cannot be read from 'gs://A/x/vae'; found .*; check --weights"):
        TensorStoreReader(location, "vae")


def test_weights_are_looked_at_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """``load`` begins with its options: a wrong address costs nothing."""
    for weights in ("missing", "ftp://host/x"):
        with pytest.raises(UsageError, match="check --weights"):
            LoadPolicy(weights=weights).check()
    LoadPolicy(weights="gs://bucket/a").check()
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(UsageError, match=r"weights at 's3://bucket' .* pip install tensorstore"):
        LoadPolicy(weights="s3://bucket?key=x").check()
    with pytest.raises(UsageError, match="pip install tensorstore"):
        TensorStoreReader("s3://bucket/vae", "vae")
    LoadPolicy(weights="/").check()  # chunk files are read without it
