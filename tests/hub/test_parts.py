"""Addresses, the lock file, files that a manifest lists, and signatures."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import subprocess
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from crc32c import crc32c
from msgspec.structs import replace

import wancli.command
import wancli.serve
import wanhub
from helpers.damage import flip, linked, own
from helpers.hub_uploads import UploadHub
from helpers.manifests import plain_manifest
from helpers.refusals import check_refusal, refuses
from wanbuild.cli import wanbuild
from wancli.run import wanrun as wanrun_command
from wancli.serve import named
from wanhub import copy
from wanhub.address import parse_address
from wanhub.marker import MARKER
from wanhub.origin import Origin, mark
from wanhub.pins import VARIABLE, Pin, lock_file, pin, read_pins
from wanhub.remote_files import resolved
from wanhub.signature import KEY_PASSWORD, MAX_MANIFEST_BYTES, SIGNATURE, check_signature, is_signed, signer
from wanrun.artifact.artifact import Artifact, groups, named_weights, open_artifact
from wanrun.artifact.layout import ArrayLayout
from wanrun.artifact.manifest import MAX_BYTES, read_manifest
from wanrun.artifact.named import Named
from wanrun.artifact.parameters import Component, Parameter
from wanrun.errors import ArtifactError, UsageError
from wanserve.settings import Settings

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_addresses() -> None:
    plain, tagged = parse_address("hf://me/wan"), parse_address("hf://me/wan@v1.0")
    assert (plain.repository, plain.revision, plain.fixed) == ("me/wan", "", False)
    assert (tagged.repository, tagged.revision, tagged.fixed) == ("me/wan", "v1.0", False)
    fixed = plain.at(COMMIT)
    assert fixed == parse_address(f"hf://me/wan@{COMMIT}") and fixed.fixed and resolved(fixed) is fixed
    url = parse_address("https://me:password@host/a/b/?key=secret#part")
    assert (url.text, url.repository) == ("https://host/a/b", "")
    assert url.url == "https://me:password@host/a/b?key=secret"
    assert parse_address("file:///a/b").url == "file:///a/b" and resolved(url) is url


@pytest.mark.parametrize(
    "text",
    [
        "hf://wan",
        "hf://me/wan/more",
        "hf://me/wan@",
        "hf://me/wan@a/../b",
        "hf:///x",
        "ftp://host/a",
        "http://",
        "://",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with refuses("invalid_value", what=text):
        parse_address(text)


def test_the_lock_file_keeps_all_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lock_file(tmp_path) == tmp_path / "lock.json"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "own" / "wan.lock"))
    lock = lock_file(tmp_path)
    assert lock == tmp_path / "own" / "wan.lock" and read_pins(lock) == {}
    pins = {f"hf://me/{number}": Pin(COMMIT, f"sha256:{number:064}") for number in range(20)}
    threads = [threading.Thread(target=pin, args=(lock, *one)) for one in pins.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_pins(lock) == pins
    digest = "sha256:" + "0" * 64
    for text in ("{", '{"a": 1}', f'{{"a": {{"revision": "", "manifest_digest": "{digest}", "more": 1}}}}'):
        lock.write_text(text)
        with refuses("unreadable", what=lock, remedy=VARIABLE):
            read_pins(lock)
    for revision, manifest in (("main", digest), ("../x", digest), ("", f"{digest}0"), ("", "/a/folder")):
        lock.write_text(f'{{"a": {{"revision": "{revision}", "manifest_digest": "{manifest}"}}}}')
        with refuses("unreadable", what=lock, found="Expected `str`"):
            read_pins(lock)
    for place in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        if not place.exists():
            os.mkfifo(place)
        with refuses("unreadable", what=place):
            read_pins(place)


def test_nothing_else_lies_among_weights(two_targets: Path) -> None:
    """Copies share them, so a manifest could change another artifact's."""
    artifact = open_artifact(two_targets)
    manifest = artifact.manifest
    vae, golden = manifest.components["vae"], manifest.golden
    (name,) = golden
    for changed in (
        {"golden": {name: replace(golden[name], file=f"{vae.folder}/x/c/0")}},
        {"golden": {name: replace(golden[name], file=vae.folder)}},
        {"golden": {name: replace(golden[name], file=MARKER)}},
        {"components": {**manifest.components, "vae": replace(vae, folder="weights/transformer/a")}},
        {"components": {**manifest.components, "vae": replace(vae, folder="weights/transformer")}},
    ):
        with refuses("untrusted", ArtifactError):
            copy.check_places(artifact.changed(**changed))


def test_a_parameter_of_many_files_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, data = ArrayLayout((8, 16), "float32", 8, 8), [bytes([row]) * 64 for row in range(8)]
    digests = b"".join(hashlib.sha256(row).digest() for row in data)
    parameter = Parameter(
        layout=layout,
        axes=(None, None),
        crc32c=tuple(f"{crc32c(row):08x}" for row in data),
        sha256=hashlib.sha256(digests).hexdigest(),
    )
    component = Component("weights", {"w": parameter})
    artifact = Artifact(plain_manifest(components={"vae": component}), tmp_path)
    listed = list(named_weights("vae", component))
    names = [one.name for one in listed]
    for name, row in zip(names, data, strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(row + crc32c(row).to_bytes(4, "little"))
    read = list[Path]()
    own_check = Named.check
    monkeypatch.setattr(
        Named, "check", lambda one, path, *rest: (read.append(path), own_check(one, path, *rest))[1]
    )
    part = copy.Copy.__new__(copy.Copy)
    part.artifact, part._origin = artifact, Origin("file:///a", "file:///a")
    (group,) = groups(reversed(listed))
    part.discard_damaged(group)
    artifact.check(group)
    assert len(read) == 16 and group == listed
    (tmp_path / names[3]).write_bytes((tmp_path / names[4]).read_bytes())  # its own crc32c fits
    with refuses("damaged", ArtifactError, expected=" row 3"):
        artifact.check(group)
    (tmp_path / names[3]).write_bytes(data[3] + crc32c(data[3]).to_bytes(4, "little"))
    flip(tmp_path / names[5], 3)
    part.discard_damaged(group)
    assert [(tmp_path / name).exists() for name in names] == [index != 5 for index in range(8)]
    (tmp_path / names[5]).write_bytes(data[5] + crc32c(data[5]).to_bytes(4, "little"))
    part.discard_damaged(group)
    artifact.check(group)
    other = [dataclasses.replace(one, parameter=replace(parameter, sha256="0" * 64)) for one in group]
    with refuses("damaged", ArtifactError, what="w ", expected="sha256 0"):
        artifact.check(other)
    part.discard_damaged(other)
    assert not any((tmp_path / name).exists() for name in names)


def test_both_packages_agree() -> None:
    assert VARIABLE == wancli.command.LOCK
    assert MAX_MANIFEST_BYTES == MAX_BYTES  # of wanrun, which exports none of these


def require_signature(artifact: Path, key: Path) -> None:
    """What ``wanrun --require-signature`` does before anything else."""
    result = CliRunner().invoke(wanrun_command, [str(artifact), "--list", "--require-signature", str(key)])
    if result.exception is not None:
        raise result.exception


@pytest.fixture
def signed(two_targets: Path, keys: Path, tmp_path: Path) -> Path:
    """A signed artifact, whose folders are links until ``own``."""
    artifact = linked(two_targets, tmp_path / "signed")
    signer(keys / "a.pem")(artifact)
    return artifact


@pytest.mark.slow
def test_what_was_signed_is_accepted_wherever_it_lies(signed: Path, keys: Path, tmp_path: Path) -> None:
    """But with another key, or a rewritten manifest whose digests fit."""
    require_signature(signed, keys / "a.pub")
    moved = signed.rename(tmp_path / "another name")
    require_signature(moved, keys / "a.pub")
    with refuses("untrusted", ArtifactError, expected=keys / "b.pub", found="Key mismatch"):
        require_signature(moved, keys / "b.pub")
    manifest = read_manifest(moved)
    assert is_signed(moved)
    manifest.changed(tool={**manifest.tool, "version": "9"}).write(moved)
    assert not is_signed(moved)
    with refuses("untrusted", ArtifactError, expected=keys / "a.pub", found="another manifest"):
        require_signature(moved, keys / "a.pub")


@pytest.mark.slow
def test_one_byte_changed_anywhere_is_refused(signed: Path, keys: Path) -> None:
    """Of weights, a program, an executable, a recorded result, the tokenizer, manifest and signature."""
    names = [one.name for one in open_artifact(signed).named()]
    kinds = (
        "weights/transformer",
        "weights/vae",
        "programs",
        "executables/cpu",
        "golden",
        "tokenizer",
        "requirements",
    )
    changed = [next(name for name in sorted(names) if name.startswith(kind)) for kind in kinds]
    for folder in ("weights", "programs", "executables", "golden", "tokenizer"):
        own(signed, folder)
    for name in (*changed, "manifest.json", SIGNATURE):
        for offset in (0, (signed / name).stat().st_size - 1):
            flip(signed / name, offset)
            with pytest.raises(ArtifactError):
                require_signature(signed, keys / "a.pub")
            flip(signed / name, offset)
    # A folder that says that it is a partial copy is not believed.
    mark(signed, Origin("file:///x", "file:///x"))
    require_signature(signed, keys / "a.pub")
    for name in changed:
        flip(signed / name, 9)
        with refuses("damaged", ArtifactError):
            require_signature(signed, keys / "a.pub")
        flip(signed / name, 9)
    (signed / MARKER).unlink()
    (signed / changed[0]).rename(signed / "gone")
    with refuses("damaged", ArtifactError, what=changed[0], found=os.strerror(errno.ENOENT)):
        require_signature(signed, keys / "a.pub")
    (signed / "gone").rename(signed / changed[0])
    require_signature(signed, keys / "a.pub")


def test_the_server_requires_a_signature_before_it_starts(
    signed: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[Settings]()
    monkeypatch.setattr(wancli.serve, "_started", started.append)
    monkeypatch.setattr(wancli.serve, "_serve", lambda *_: 0)
    for key in "ba":
        options = [str(signed), "--require-signature", str(keys / f"{key}.pub")]
        result = CliRunner().invoke(wancli.serve.serve, options)
        assert (key == "b") == isinstance(result.exception, ArtifactError), result.output
    (settings,) = started
    assert settings.loading["verify"] == "sha256"


def test_keys_and_signatures_that_are_none(signed: Path, keys: Path, tmp_path: Path) -> None:
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo")
    with refuses("unsupported", what="public key", remedy="openssl"):
        check_signature(signed, signed / SIGNATURE)
    with refuses("unsupported", what="private key", remedy="openssl"):
        signer(signed / SIGNATURE)
    for key, found in (
        (keys / "none.pub", os.strerror(errno.ENOENT)),
        (keys, os.strerror(errno.EISDIR)),
        (tmp_path / "zero", "not a file"),
        (tmp_path / "fifo", "not a file"),
    ):
        with refuses("unreadable", what=f"public key {key} ", found=found):
            check_signature(signed, key)
        with refuses("unreadable", what=f"private key {key} ", found=found):
            signer(key)
    (signed / SIGNATURE).write_bytes(b"[" * 100_000)
    assert not is_signed(signed)
    (signed / SIGNATURE).unlink()
    for make in (lambda: None, lambda: os.mkfifo(signed / SIGNATURE)):
        make()
        with refuses("untrusted", ArtifactError, what=signed, expected=SIGNATURE):
            check_signature(signed, keys / "a.pub")
        assert not is_signed(signed)


@pytest.mark.slow
def test_kinds_of_keys(signed: Path, keys: Path) -> None:
    """One with a password, and those that this format does not have; before the artifact is read."""
    for command in (
        "openssl ec -in a.pem -aes256 -passout pass:secret -out locked.pem",
        "openssl genpkey -algorithm rsa -pkeyopt rsa_keygen_bits:1024 -out rsa.pem",
        "openssl genpkey -algorithm ed25519 -out ed.pem",
        "openssl pkey -in rsa.pem -pubout -out rsa.pub",
        "openssl pkey -in ed.pem -pubout -out ed.pub",
        "openssl ecparam -genkey -name secp256k1 -noout -out koblitz.pem",
    ):
        subprocess.run(command.split(), cwd=keys, check=True, capture_output=True)
    signer(keys / "locked.pem", "secret")(signed)
    require_signature(signed, keys / "a.pub")
    (signed / "manifest.json").unlink()
    for name, password, found, remedy in (
        ("locked", "", "Password was not given", f"set {KEY_PASSWORD}"),
        ("locked", "another", "Incorrect password", f"set {KEY_PASSWORD} "),
        ("a", "secret", "not encrypted", f"unset {KEY_PASSWORD}"),
        ("rsa", "", "another kind", "key.pub"),
        ("ed", "", "another kind", "key.pub"),
        ("koblitz", "", "Unsupported key", "key.pub"),
    ):
        result = CliRunner().invoke(
            wanbuild,
            ["sign", str(signed), "--key", str(keys / f"{name}.pem")],
            env={KEY_PASSWORD: password},
        )
        assert isinstance(result.exception, UsageError)
        check_refusal(result.exception, "unsupported", what=f"{name}.pem", found=found, remedy=remedy)
    for name in ("rsa", "ed"):
        with refuses("unsupported", what=f"{name}.pub", found="another kind"):
            check_signature(signed, keys / f"{name}.pub")


def test_a_served_model_is_called_by_the_last_name_of_its_address(
    published: UploadHub, two_targets: Path
) -> None:
    folder = wanhub.find("hf://me/wan")
    assert named(("hf://me/wan",)) == {"wan": folder}
    assert named(("other=hf://me/wan@main", str(two_targets))) == {"other": folder, "two": two_targets}
    file = f"file://{two_targets}?key=a"
    assert named((file,)) == {"two": folder}  # the same manifest
    with refuses("missing_parameter", expected="NAME="):
        named(("=hf://me/wan",))
