"""Formats before today's: what an older release wrote is read where only records have changed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from helpers.damage import resealed
from wanrun import __version__
from wanrun.artifact.formats import FORMAT_VERSION
from wanrun.artifact.manifest import MANIFEST, Manifest, digests_of, read_manifest, runs_here, spelled
from wanrun.errors import ArtifactError, OtherReleaseError

FORMAT_3 = Path(__file__).with_name("format-3.json.gz")
"""As wanbuild 0.1.0 wrote it (the commit before 91a937a1) of the toy of Wan 2.1 I2V."""

FORMAT_4 = Path(__file__).with_name("format-4.json.gz")
"""As the commit 5924f97c wrote it of the toy of Wan 2.1 T2V, with guidance."""

ROLES = {
    "encode_text_64": ("text", 0),
    "encode_text_128": ("text", 1),
    "encode_text_256": ("text", 2),
    "encode_text": ("text", 3),
    "encode_image": ("once", 0),
    "encode_video": ("window", 0),
    "prepare": ("prepare", 0),
    "denoise_step": ("step", 0),
    "denoise_loop": ("scan", 0),
    "decode_video": ("decode", 0),
}


@pytest.fixture
def old() -> dict[str, Any]:
    """A manifest of format 3 as JSON."""
    content: dict[str, Any] = json.loads(gzip.decompress(FORMAT_3.read_bytes()))
    return content


def written(folder: Path, content: dict[str, Any]) -> Path:
    """Writes a manifest with digests that fit."""
    (folder / MANIFEST).write_bytes(spelled(resealed(content)))
    return folder


def test_a_stored_manifest_of_format_3(tmp_path: Path, old: dict[str, Any]) -> None:
    """It keeps its digests; what is made of it is of today's format, and read like any other."""
    (tmp_path / MANIFEST).write_bytes(spelled(old))
    manifest = read_manifest(tmp_path, again=True)
    (programs,) = (one for own in manifest.program_sets.values() for one in own.programs.values())
    assert {name: (one.role, one.place) for name, one in programs.items()} == ROLES
    assert {one.options.vae_precision for one in manifest.profiles.values()} == {"highest"}
    assert manifest.digests["content digest"] == old["content_digest"]
    assert manifest.digests["manifest digest"] == old["manifest_digest"]
    assert manifest.written_by == "wanbuild 0.1.0" and not runs_here(tmp_path)

    new = manifest.changed()
    assert new.written_by == f"wanbuild {__version__}"
    assert new.content_digest != manifest.content_digest
    assert manifest.renewed() == new and new.renewed() is new
    for one in (manifest, new):
        one.write(tmp_path)
        assert json.loads((tmp_path / MANIFEST).read_bytes())["format_version"] == FORMAT_VERSION
        assert read_manifest(tmp_path).program_sets == new.program_sets
    assert read_manifest(tmp_path) == new


@pytest.mark.slow
def test_a_stored_manifest_of_format_4(tmp_path: Path) -> None:
    """Its records are today's; its programs, with a doubled batch, do not run."""
    old: dict[str, Any] = json.loads(gzip.decompress(FORMAT_4.read_bytes()))
    (tmp_path / MANIFEST).write_bytes(spelled(old))
    with pytest.raises(OtherReleaseError):
        read_manifest(tmp_path)
    manifest = read_manifest(tmp_path, again=True)
    assert old["format_version"] == 4 and not runs_here(tmp_path)
    assert [profile.guidance for profile in manifest.profiles.values()] == [True]
    assert manifest.digests["manifest digest"] == old["manifest_digest"]


def test_a_change_of_an_older_manifest_is_noticed(tmp_path: Path, old: dict[str, Any]) -> None:
    old["model"]["variant"] = "wan2.1-t2v"
    (tmp_path / MANIFEST).write_bytes(spelled(old))
    with pytest.raises(ArtifactError) as caught:
        read_manifest(tmp_path, again=True)
    assert caught.value.expected == f"content_digest {old['content_digest']}"


@pytest.mark.slow
@pytest.mark.parametrize("field", ["model", "program_sets", "profiles", "source"])
@pytest.mark.parametrize("value", [None, [], {}, 3, {"a": None}])
def test_other_records_than_the_format_has(
    tmp_path: Path, old: dict[str, Any], field: str, value: object
) -> None:
    (tmp_path / MANIFEST).write_bytes(spelled({**old, field: value}))
    with pytest.raises(ArtifactError, match=MANIFEST):
        read_manifest(tmp_path, again=True)


def test_a_field_that_was_added_means_its_default(tmp_path: Path, toy_artifact: Path) -> None:
    """Format 4 was written without ``vae_precision`` at first."""
    content = json.loads((toy_artifact / MANIFEST).read_bytes())
    (profile,) = content["profiles"].values()
    del profile["options"]["vae_precision"]
    manifest = read_manifest(written(tmp_path, content))
    assert {one.options.vae_precision for one in manifest.profiles.values()} == {"highest"}
    assert manifest.content_digest == digests_of(content)["content_digest"]
    assert manifest.changed().content_digest != manifest.content_digest


def refusal(folder: Path, content: dict[str, Any]) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        read_manifest(written(folder, content))
    return caught.value


@pytest.mark.parametrize("version", [1, 2, FORMAT_VERSION + 1, "4", None, True, -1, 10**12])
def test_a_format_that_is_not_read(tmp_path: Path, old: dict[str, Any], version: object) -> None:
    error = refusal(tmp_path, {**old, "format_version": version})
    assert isinstance(error, OtherReleaseError) and error.exit_code == 3
    assert "0.1.0" in str(error.found) and __version__ in str(error.expected)
    assert "--again" not in str(error.remedy)


def test_programs_that_do_not_run(tmp_path: Path, old: dict[str, Any]) -> None:
    """One command makes those of today: it reads the rest."""
    error = refusal(tmp_path, old)
    assert isinstance(error, OtherReleaseError)
    assert error.remedy == f"run wanbuild compile {tmp_path} --again"
    assert isinstance(read_manifest(tmp_path, again=True), Manifest) and not runs_here(tmp_path)


@pytest.mark.parametrize(("version", "other"), [("99.0.0", True), (__version__, False), ("", False)])
def test_records_of_another_release(tmp_path: Path, toy_artifact: Path, version: str, other: bool) -> None:
    """A field that is not known is no damage where another release may have written it."""
    content = json.loads((toy_artifact / MANIFEST).read_bytes())
    content |= {"tool": {"name": "wanbuild", "version": version}}
    content["model"]["something_new"] = 1
    assert isinstance(refusal(tmp_path, content), OtherReleaseError) is other
