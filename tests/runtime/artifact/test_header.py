"""Files that are no manifest, or one of another release, are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanrun.artifact.manifest import MANIFEST, read_manifest
from wanrun.errors import ArtifactError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not an artifact; found no manifest.json in it"),
        (b"", "manifest.json is empty"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"format": ', "cannot be read"),
        (b'{"configs": ' + b"[" * 100_000, "cannot be read"),
        (b'{"format": "wan-artifact", "format_version": 5, "model": NaN}', "cannot be read"),
        (b"[" * 100_000, "is not a Wan artifact"),
        (b"[]", "is not a Wan artifact; expected format wan-artifact; found no JSON object"),
        (b'{"format": "other"}', "is not a Wan artifact; expected format wan-artifact; found other"),
        (b'{"format": "wan-artifact", "format_version": 1}', "has another format"),
        (b'{"format": "wan-artifact", "format_version": 4}', "has another format"),
        (b'{"format": "wan-artifact", "format_version": 6}', "has another format"),
        (b'{"format": "wan-artifact", "format_version": 5}', "is damaged: Object missing required field"),
    ],
)
def test_something_else_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        read_manifest(tmp_path)
    assert message in str(caught.value)
    assert caught.value.exit_code == 3
