"""The manifest: what is written is read back, and what was damaged or made up is refused in one line."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from helpers.damage import resealed
from helpers.manifests import full_manifest, without_profiles
from helpers.refusals import refuses
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import MANIFEST, MAX_BYTES, Manifest, read_manifest
from wanrun.artifact.parameters import Parameter
from wanrun.codes import ErrorCode
from wanrun.errors import ArtifactError


@pytest.fixture(scope="module")
def written(toy_artifact: Path) -> dict[str, Any]:
    """The toy artifact's manifest as JSON. Not to be changed."""
    return json.loads((toy_artifact / MANIFEST).read_text())


def write(folder: Path, data: Any, reseal: bool = False) -> Path:
    """Writes a manifest; with reseal its digests are made to fit."""
    (folder / MANIFEST).write_text(json.dumps(resealed(data) if reseal else data))
    return folder


def changed(data: dict[str, Any], keys: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with the value at these keys replaced."""
    data = copy.deepcopy(data)
    node = data
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    return data


def test_what_is_written_is_read_back(toy_artifact: Path, tmp_path: Path, written: dict[str, Any]) -> None:
    manifest = read_manifest(toy_artifact)
    manifest.write(tmp_path)
    assert (tmp_path / MANIFEST).read_bytes() == (toy_artifact / MANIFEST).read_bytes()
    assert read_manifest(tmp_path) == manifest
    assert json.loads(json.dumps(manifest.as_json())) == written
    assert list(tmp_path.iterdir()) == [tmp_path / MANIFEST]


def test_no_slots_leave_no_trace(toy_artifact: Path) -> None:
    """An artifact without slots has the digests of one that was written before there were any."""
    manifest = read_manifest(toy_artifact)
    (name, profile), *_ = manifest.profiles.items()
    assert profile.options.lora_rank == 0
    assert "lora_rank" not in manifest.as_json()["profiles"][name]["options"]
    options = msgspec.structs.replace(profile.options, lora_rank=8)
    slots = manifest.changed(profiles={name: msgspec.structs.replace(profile, options=options)})
    written = slots.as_json()
    assert written["profiles"][name]["options"]["lora_rank"] == 8
    assert slots.content_digest != manifest.content_digest
    assert msgspec.convert(written, Manifest) == slots


def test_a_program_without_a_plain_form_leaves_it_out() -> None:
    ((_, programs),) = full_manifest().as_json()["program_sets"].items()
    (profile,) = programs["programs"].values()
    assert "plain" not in profile["denoise_step"]
    assert profile["attention"]["plain"] == {"file": "programs/a-plain", "sha256": "0"}
    names = [one.name for one in Artifact(full_manifest(), Path()).named()]
    assert names.count("programs/a-plain") == names.count("programs/a") == 1


def test_times_are_not_part_of_the_digest(toy_artifact: Path) -> None:
    manifest = read_manifest(toy_artifact)
    assert manifest.times
    assert (
        manifest.changed(times={}, tool={}, targets={}, golden={}).content_digest == manifest.content_digest
    )
    assert manifest.changed(dtypes={}).content_digest != manifest.content_digest
    assert without_profiles(manifest).content_digest != manifest.content_digest
    assert manifest.changed(targets={}).manifest_digest != manifest.manifest_digest


def test_days_of_export_of_an_older_artifact_are_read(tmp_path: Path) -> None:
    old = full_manifest()
    ((key, programs),) = old.program_sets.items()
    new = old.changed(program_sets={key: msgspec.structs.replace(programs, exported={})})
    old.write(tmp_path)
    assert read_manifest(tmp_path) == old
    assert old.content_digest == new.content_digest and old.manifest_digest != new.manifest_digest
    assert "exported" not in new.as_json()["program_sets"][key]


def test_keys_are_sorted(toy_artifact: Path, written: dict[str, Any]) -> None:
    text = (toy_artifact / MANIFEST).read_text()
    assert text == json.dumps(written, sort_keys=True, indent=1) + "\n"


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
    for path, found in ((tmp_path / "nothing", "no such folder"), (tmp_path / "file", "a file")):
        with refuses("wrong_kind", ArtifactError, what=path, found=found):
            read_manifest(path)


PARAMETER = ("components", "vae", "parameters", "decoder/conv_out/bias")


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("model", "vae_spatial"), 16),
        (("dtypes", "vae", "weights"), "bfloat16"),
        (("configs", "transformer", "eps"), 1e-5),
        ((*PARAMETER, "crc32c"), ["00000000"]),
        ((*PARAMETER, "axes"), ["heads"]),
        ((*PARAMETER, "sha256"), "0" * 64),
        (("tokenizer", "sha256"), "0" * 64),
        (("content_digest",), "sha256:" + "0" * 64),
    ],
)
def test_a_change_is_noticed(
    tmp_path: Path, written: dict[str, Any], keys: tuple[str, ...], value: Any
) -> None:
    write(tmp_path, written)
    read_manifest(tmp_path)
    write(tmp_path, changed(written, keys, value))
    with refuses("changed", ArtifactError, expected="content_digest"):
        read_manifest(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../weights", "a/../../b", "", ".", "a//b", "a/./b", "C:/x", "a\\b", "a\nb", 7, None],
)
def test_a_name_that_leads_outside_is_refused(tmp_path: Path, written: dict[str, Any], name: Any) -> None:
    (profile,) = written["profiles"]
    (key,) = written["program_sets"]
    program = ("program_sets", key, "programs", profile, "decode_video", "file")
    target = ("targets", next(iter(written["targets"])))
    executable = (*target, "executables", profile, "decode_video", "file")
    tokenizer = ("tokenizer", "file")
    code: ErrorCode = "untrusted" if isinstance(name, str) else "damaged"
    places = (("components", "vae", "folder"), program, (*target, "folder"), executable, tokenizer)
    for keys in places:
        write(tmp_path, changed(written, keys, name))
        with refuses(code, ArtifactError):
            read_manifest(tmp_path)
    parameters = written["components"]["vae"]["parameters"]
    if isinstance(name, str):
        hostile = {**parameters, name: parameters[PARAMETER[-1]]}
        write(tmp_path, changed(written, ("components", "vae", "parameters"), hostile))
        with refuses("untrusted", ArtifactError, what="a parameter", found=repr(name)):
            read_manifest(tmp_path)
        components = {**written["components"], name: written["components"]["vae"]}
        write(tmp_path, changed(written, ("components",), components))
        with refuses("untrusted", ArtifactError, what="a component's name", found=repr(name)):
            read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shape", []),
        ("shape", [0]),
        ("shape", [-3]),
        ("shape", [3.0]),
        ("shape", ["3"]),
        ("shape", None),
        ("dtype", "object"),
        ("dtype", []),
        ("rows", 2),
        ("rows", 0),
        ("rows", "1"),
        ("rows", True),
        ("chunks", 5),
        ("crc32c", []),
        ("crc32c", ["00000000", "11111111"]),
        ("crc32c", 3),
        ("axes", []),
        ("axes", [None, None]),
        ("axes", [7]),
    ],
)
def test_a_parameter_that_makes_no_sense_is_refused(
    tmp_path: Path, written: dict[str, Any], name: str, value: Any
) -> None:
    node = written["components"]["vae"]["parameters"][PARAMETER[-1]]
    assert msgspec.json.decode(msgspec.json.encode(msgspec.convert(node, Parameter))) == node
    place = (*PARAMETER, name) if name in ("crc32c", "axes") else (*PARAMETER, "layout", name)
    write(tmp_path, changed(written, place, value), reseal=True)
    with refuses("damaged", ArtifactError):
        read_manifest(tmp_path)


@pytest.mark.parametrize("field", ["components", "configs", "dtypes"])
@pytest.mark.parametrize("name", ["text_encoder", "transformer", "vae"])
def test_what_every_model_has(tmp_path: Path, written: dict[str, Any], field: str, name: str) -> None:
    rest = {key: value for key, value in written[field].items() if key != name}
    write(tmp_path, changed(written, (field,), rest), reseal=True)
    with refuses("damaged", ArtifactError, what=field, expected="text_encoder, transformer, vae"):
        read_manifest(tmp_path)


def test_a_profile_with_reference_images(toy_artifact: Path, tmp_path: Path) -> None:
    manifest = read_manifest(toy_artifact)
    ((name, plain),) = manifest.profiles.items()
    assert plain.num_references == 0
    with_two = msgspec.structs.replace(plain, num_references=2)
    assert with_two.name == f"{name}-r2"
    both = manifest.changed(profiles={name: plain, with_two.name: with_two})
    both.write(tmp_path)
    assert read_manifest(tmp_path) == both
    for bad in (-1, 1.0, "2", None, True, [2]):
        write(tmp_path, changed(both.as_json(), ("profiles", with_two.name, "num_references"), bad))
        with refuses("damaged", ArtifactError, what="num_references"):
            read_manifest(tmp_path)
    write(tmp_path, changed(both.as_json(), ("profiles", with_two.name, "num_references"), 3))
    with refuses("damaged", ArtifactError, what=f"{name}-r3"):
        read_manifest(tmp_path)


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
def test_no_field_can_be_changed_unnoticed(tmp_path: Path) -> None:
    """Of any record, whoever adds one: every value of a manifest, and every name, is under a digest."""
    full_manifest().write(tmp_path)
    assert read_manifest(tmp_path) == full_manifest()
    data = json.loads((tmp_path / MANIFEST).read_text())
    filled = {keys[-1] for keys in nodes(data) if at(data, keys) not in (None, {}, [])}
    fields = {field.encode_name for one in records(Manifest) for field in msgspec.structs.fields(one)}
    assert not fields - filled, "give the new field a value in full_manifest"
    edited = 0
    for keys in nodes(data):
        value = at(data, keys)
        if not isinstance(value, dict | list | None):
            write(tmp_path, changed(data, keys, another(value)))
            with pytest.raises(ArtifactError) as caught:
                read_manifest(tmp_path)
            assert caught.value.exit_code == 3 and "\n" not in str(caught.value)
            edited += 1
        write(tmp_path, removed(data, keys))
        try:
            assert read_manifest(tmp_path) == full_manifest(), keys  # a default that is left out is the same
        except ArtifactError as error:
            assert error.exit_code == 3 and "\n" not in str(error)
    assert edited > 100


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
def test_random_damage_is_an_artifact_error_or_harmless(tmp_path: Path, written: dict[str, Any]) -> None:
    """No node's value, whatever it is, ends in an error of another kind, with the digest made to fit too."""
    generator = random.Random(0)
    small = copy.deepcopy(written)
    for component in small["components"].values():
        component["parameters"] = dict(list(component["parameters"].items())[:2])
    read_manifest(write(tmp_path, small, reseal=True))
    junk = [None, True, -1, 0, 1.5, 10**30, "x", "", [], ["x"], {}, {"x": None}, "../x", float("nan")]
    refused = 0
    for keys in nodes(small):
        data = changed(small, keys, generator.choice(junk))
        write(tmp_path, data, reseal=True)
        try:
            manifest = read_manifest(tmp_path)
            assert all(
                component.nbytes > 0 for component in manifest.components.values() if component.parameters
            )
        except ArtifactError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 50
