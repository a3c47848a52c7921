"""The manifest's file: what is written is read back; damage, other releases and other files are refused."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from helpers.damage import resealed
from helpers.manifests import full_manifest
from helpers.refusals import refuses
from wanrun import __version__
from wanrun.artifact.formats import FORMAT_VERSION
from wanrun.artifact.manifest import (
    MANIFEST,
    MAX_BYTES,
    Manifest,
    digests_of,
    manifest_of,
    read_manifest,
    runs_here,
    spelled,
)
from wanrun.artifact.wrong_path import wrong_path
from wanrun.codes import ErrorCode
from wanrun.errors import ArtifactError, OtherReleaseError

# --- manifest ---


def read(data: Any, reseal: bool = False) -> Manifest:
    """Reads a manifest with this content; with reseal its digests are made to fit."""
    return manifest_of(json.dumps(resealed(data) if reseal else data).encode(), Path(MANIFEST))


def changed(data: dict[str, Any], keys: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with the value at these keys replaced."""
    data = copy.deepcopy(data)
    node = data
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    return data


def test_what_is_written_is_read_back(toy_artifact: Path, tmp_path: Path) -> None:
    manifest, content = read_manifest(toy_artifact), (toy_artifact / MANIFEST).read_bytes()
    manifest.write(tmp_path)
    assert (tmp_path / MANIFEST).read_bytes() == content
    assert read_manifest(tmp_path) == manifest
    assert json.loads(json.dumps(manifest.as_json())) == json.loads(content)
    assert content.decode() == json.dumps(json.loads(content), sort_keys=True, indent=1) + "\n"
    assert list(tmp_path.iterdir()) == [tmp_path / MANIFEST]


def test_what_is_no_small_file_is_refused(tmp_path: Path) -> None:
    """A pipe would wait for a writer, and a large file fill the memory."""
    os.mkfifo(tmp_path / MANIFEST)
    with refuses("unreadable", ArtifactError, what=tmp_path / MANIFEST):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).unlink()
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with refuses("unreadable", ArtifactError, what=MAX_BYTES):
        read_manifest(tmp_path)


def test_no_folder_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    codes: dict[str, ErrorCode] = {"no": "missing_file", "no/more": "missing_file", "file": "wrong_kind"}
    for name, code in codes.items():
        with refuses(code, ArtifactError, what=tmp_path / name):
            read_manifest(tmp_path / name)


@pytest.mark.parametrize("field", ["components", "configs", "dtypes"])
@pytest.mark.parametrize("name", ["text_encoder", "transformer", "vae"])
def test_what_every_model_has(field: str, name: str) -> None:
    data = full_manifest().as_json()
    del data[field][name]
    with refuses("damaged", ArtifactError, what=field, expected="text_encoder, transformer, vae"):
        read(data, reseal=True)


def nodes(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every node below the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*keys, key)
        yield from nodes(item, (*keys, key))


def records(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The records of a manifest, by their annotations."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from records(hint)
    for item in get_args(kind):
        yield from records(item)


def another(value: Any) -> Any:
    """A value of the same type."""
    if isinstance(value, bool):
        return not value
    return value + ("x" if isinstance(value, str) else 1)


@pytest.mark.slow
def test_no_field_can_be_changed_unnoticed() -> None:
    """Of any record, whoever adds one: every value of a manifest, and every name, is under a digest."""
    data = json.loads(full_manifest().encoded())
    assert read(data) == full_manifest()
    filled = {keys[-1] for keys in nodes(data) if at(data, keys) not in (None, {}, [])}
    fields = {field.encode_name for one in records(Manifest) for field in msgspec.structs.fields(one)}
    assert not fields - filled, "give the new field a value in full_manifest"
    codes = Counter[str]()
    for keys in nodes(data):
        value = at(data, keys)
        if not isinstance(value, dict | list | None):
            with pytest.raises(ArtifactError) as caught:
                read(changed(data, keys, another(value)))
            assert caught.value.exit_code == 3 and "\n" not in str(caught.value)
            codes[caught.value.code] += 1
        try:
            assert read(removed(data, keys)) == full_manifest(), (
                keys
            )  # a default that is left out is the same
        except ArtifactError as error:
            assert error.exit_code == 3 and "\n" not in str(error)
    assert codes["changed"] > 100


def at(data: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        data = data[key]
    return data


def removed(data: dict[str, Any], keys: tuple[Any, ...]) -> dict[str, Any]:
    """A copy without what is at these keys."""
    data = copy.deepcopy(data)
    del at(data, keys[:-1])[keys[-1]]
    return data


@pytest.mark.slow
def test_random_damage_is_an_artifact_error_or_harmless() -> None:
    """No node's value, whatever it is, ends in an error of another kind, with the digest made to fit too."""
    generator, data = random.Random(0), full_manifest().as_json()
    junk = [None, True, -1, 0, 1.5, 10**30, "x", "", [], ["x"], {}, {"x": None}, "../x", float("nan")]
    refused = 0
    for keys in nodes(data):
        try:
            manifest = read(changed(data, keys, generator.choice(junk)), reseal=True)
            assert all(one.nbytes > 0 for one in manifest.components.values() if one.parameters)
        except ArtifactError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 50


# --- formats ---


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
    with pytest.raises(OtherReleaseError) as caught:
        read_manifest(tmp_path)
    assert caught.value.remedy == f"run wanbuild compile {tmp_path} --again"  # which reads the rest
    manifest = read_manifest(tmp_path, again=True)
    assert old["format_version"] == 4 and not runs_here(tmp_path)
    assert [profile.guidance for profile in manifest.profiles.values()] == [True]
    assert manifest.digests["manifest digest"] == old["manifest_digest"]


@pytest.mark.slow
@pytest.mark.parametrize("field", ["model", "program_sets", "profiles", "source"])
@pytest.mark.parametrize("value", [None, [], {}, 3, {"a": None}])
def test_other_records_than_the_format_has(old: dict[str, Any], field: str, value: object) -> None:
    with pytest.raises(ArtifactError, match=MANIFEST):
        manifest_of(spelled({**old, field: value}), Path(MANIFEST), again=True)
    old["model"]["variant"] = "wan2.1-t2v"
    with refuses("changed", ArtifactError, expected=f"content_digest {old['content_digest']}"):
        manifest_of(spelled(old), Path(MANIFEST), again=True)


def test_a_field_that_was_added_means_its_default() -> None:
    """Format 4 was written without ``vae_precision`` at first."""
    content = full_manifest().as_json()
    (profile,) = content["profiles"].values()
    del profile["options"]["vae_precision"]
    manifest = read(content, reseal=True)
    assert {one.options.vae_precision for one in manifest.profiles.values()} == {"highest"}
    assert manifest.content_digest == digests_of(content)["content_digest"]
    assert manifest.changed().content_digest != manifest.content_digest


@pytest.mark.parametrize("version", [1, 2, 3, FORMAT_VERSION + 1, "4", None, True, -1, 10**12])
def test_a_format_that_is_not_read(old: dict[str, Any], version: object) -> None:
    with refuses("other_release", OtherReleaseError, found="0.1.0", expected=__version__) as caught:
        read({**old, "format_version": version}, reseal=True)
    assert caught.value.exit_code == 3
    assert ("--again" in str(caught.value.remedy)) == (version == 3)


@pytest.mark.parametrize(("version", "other"), [("99.0.0", True), (__version__, False), ("", False)])
def test_records_of_another_release(version: str, other: bool) -> None:
    """A field that is not known is no damage where another release may have written it."""
    content = full_manifest().as_json() | {"tool": {"name": "wanbuild", "version": version}}
    content["model"]["something_new"] = 1
    with pytest.raises(ArtifactError) as caught:
        read(content, reseal=True)
    assert isinstance(caught.value, OtherReleaseError) is other


# --- header ---


@pytest.mark.parametrize(
    ("content", "code", "found"),
    [
        (b"", "damaged", None),
        (b"\xff\xfe", "unreadable", None),
        (b'{"format": ', "unreadable", None),
        (b'{"configs": ' + b"[" * 100_000, "unreadable", None),
        (b'{"format": "wan-artifact", "format_version": 5, "model": NaN}', "unreadable", None),
        (b"[" * 100_000, "wrong_kind", "no JSON object"),
        (b"[]", "wrong_kind", "no JSON object"),
        (b'{"format": "other"}', "wrong_kind", "other"),
        (b'{"format": "wan-artifact", "format_version": 5}', "damaged", None),
    ],
)
def test_something_else_is_refused(content: bytes, code: ErrorCode, found: str | None) -> None:
    with refuses(code, ArtifactError, what=MANIFEST, found=found) as caught:
        manifest_of(content, Path(MANIFEST))
    assert caught.value.exit_code == 3


# --- wrong path ---


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


CONVERT, TO = "wanbuild convert", "--artifact DIR"


@pytest.mark.parametrize(
    ("name", "make", "found", "remedy"),
    [
        ("a", lambda path: None, "no such folder", "wanbuild convert"),
        ("a", Path.mkdir, MANIFEST, "wanbuild convert"),
        ("a", lambda path: touch(path / "model_index.json"), "checkpoint", f"{CONVERT} a {TO}"),
        ("a", lambda path: touch(path / "x.safetensors"), "folder of weights", f"{CONVERT} CHECKPOINT {TO}"),
        ("x.safetensors", touch, "file of weights", f"{CONVERT} CHECKPOINT {TO}"),
        ("a.toml", touch, "recipe", "wanbuild build a.toml"),
        ("a.mp4", touch, "a file", "wanbuild convert"),
        ("Wan-AI/Wan2.1", lambda path: None, "hub id", f"{CONVERT} Wan-AI/Wan2.1 {TO}"),
        ("Wan-AI/Wan2.1", lambda path: None, "no such folder", "hf://Wan-AI/Wan2.1"),
    ],
)
def test_what_it_is_and_what_to_do(
    name: str,
    make: Callable[[Path], object],
    found: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path(name))
    code: ErrorCode = "wrong_kind" if Path(name).exists() else "missing_file"
    with refuses(code, ArtifactError, what=name, found=found, remedy=remedy) as refused:
        read_manifest(Path(name))
    assert wrong_path(Path(name), MANIFEST) == (refused.value.found, refused.value.remedy)
