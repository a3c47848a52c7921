"""``wanrun serve`` takes addresses; a model is called by the last name of one."""

from __future__ import annotations

from pathlib import Path

import pytest

import wanhub
from helpers.hub_uploads import UploadHub
from wancli.serve import named
from wanrun.errors import UsageError


def test_addresses_have_names(published: UploadHub, two_targets: Path) -> None:
    folder = wanhub.find("hf://me/wan")
    assert named(("hf://me/wan",)) == {"wan": folder}
    assert named(("other=hf://me/wan@main", str(two_targets))) == {"other": folder, "two": two_targets}
    file = f"file://{two_targets}?key=a"
    assert named((file,)) == {"two": folder}  # the same manifest
    with pytest.raises(UsageError, match="has no name"):
        named(("=hf://me/wan",))
