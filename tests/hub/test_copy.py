"""Partial copies: what is read is fetched, checked and kept, whatever becomes of the connection."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from crc32c import crc32c

import wanhub
import wanrun
from helpers.damage import flip, linked
from helpers.hub_server import Repository, read_folder
from helpers.hub_uploads import UploadHub
from helpers.refusals import check_refusal, refuses
from wanbuild.build import convert
from wanbuild.cli import wanbuild
from wanbuild.conversion.convert_request import ConvertRequest
from wancli.run import wanrun as command
from wanhub import url_reader
from wanhub.copy import Copy
from wanhub.opening import open_copy, open_newest
from wanhub.pins import VARIABLE, Pin, read_pins
from wanhub.signature import SIGNATURE
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.errors import ArtifactError, OtherReleaseError
from wanrun.files import user_cache
from wanrun.media.write_video import read_metadata

ADDRESS = "hf://me/wan"


def quiet(line: str) -> None:
    pass


def newest_copy(address: str, cache: Path) -> Path:
    """Moves the pin."""
    opened = open_newest(address, cache)
    opened.pin(quiet)
    return opened.folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def repository(published: UploadHub) -> Repository:
    return published.repositories["me/wan"]


@pytest.fixture
def copy(published: UploadHub, cache: Path) -> Copy:
    """A copy of the published artifact; requests are counted from here."""
    opened = Copy(wanhub.open_artifact(open_copy(ADDRESS, cache, quiet)))
    published.forget()
    return opened


def weight(manifest: Manifest) -> str:
    """A chunk file of the transformer."""
    names = sorted(_names(manifest))
    return next(name for name in names if name.startswith("weights/transformer/blocks.attn1.to_q.weight"))


def _names(manifest: Manifest) -> list[str]:
    return [one.name for one in Artifact(manifest, Path()).named()]


def fetch(copy: Copy, name: str) -> bool:
    """Fetches a file, with all others of its parameter; returns whether it is there."""
    wanted = next(one for one in copy.artifact.named() if one.name == name)
    copy.fetch(one for one in copy.artifact.named() if one.group == wanted.group)
    return (copy.artifact.folder / name).is_file()


@pytest.mark.slow
def test_a_run_fetches_what_it_reads_and_later_runs_work_offline(
    published: UploadHub, tmp_path: Path
) -> None:
    published.forget()
    options = ["--prompt", "a cat", "--steps", "1", "--explain"]
    result = CliRunner().invoke(command, [ADDRESS, *options, "-o", str(tmp_path / "a.npy")])
    assert result.exit_code == 0, result.output
    commit = published.head("me/wan")
    assert f"{ADDRESS}@{commit}, manifest sha256:" in result.output and "pinned in" in result.output
    assert "96x64x9-b1-cfg  cpu: taken" in result.output
    assert published.listings == 1
    tokens = {request.at_content: request.token for request in published.requests}
    assert tokens == {False: "Bearer secret", True: None}  # a token stays with the hub
    folder = wanhub.find(ADDRESS)
    manifest = read_manifest(folder)
    names = {name for name in published.names if name not in ("manifest.json", "model.sig")}
    assert not any(
        name.startswith(("golden", "requirements", "verdicts")) or "-elsewhere-" in name for name in names
    )
    weights = {name for name in _names(manifest) if name.startswith("weights")}
    asked = [request.name for request in published.requests if not request.at_content]
    assert weights <= names and len(asked) == len(names) + 2  # each once
    assert published.sent < 0.9 * sum(map(len, published.files("me/wan").values()))
    metadata = read_metadata(tmp_path / "a.npy")
    assert (
        metadata["artifact"] == f"{ADDRESS}@{commit}"
        and wanhub.open_artifact(ADDRESS).origin == metadata["artifact"]
    )

    published.silent = True
    published.forget()
    result = CliRunner().invoke(command, [ADDRESS, *options, "-o", str(tmp_path / "b.npy")])
    assert result.exit_code == 0 and published.requests == [], result.output
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


@pytest.mark.slow
def test_the_text_encoder_stays_where_it_is_if_embeddings_suffice(
    published: UploadHub, repository: Repository, two_targets: Path, tmp_path: Path
) -> None:
    artifact = Path(shutil.copytree(two_targets, tmp_path / "embedded"))
    texts = [text for prompt in ("a cat", "") for text in ("--prompt", prompt)]
    assert CliRunner().invoke(wanbuild, ["embed", str(artifact), *texts]).exit_code == 0
    repository.commit(read_folder(artifact))
    published.forget()
    options = ["--prompt", "a cat", "--negative-prompt", "", "--steps", "1", "-o", str(tmp_path / "a.npy")]
    result = CliRunner().invoke(command, [ADDRESS, *options])
    assert result.exit_code == 0, result.output
    assert not any("text_encoder" in name for name in published.names)


def test_the_pin_stays_until_a_pull_moves_it(
    published: UploadHub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_copy(ADDRESS, cache, quiet)
    commit = published.head("me/wan")
    files = published.files("me/wan")
    manifest = json.loads(files["manifest.json"])
    changed = read_manifest(first).changed(tool={"name": "wanbuild", "version": "9"})
    published.repositories["me/wan"].commit({**files, "manifest.json": changed.encoded()})
    assert open_copy(ADDRESS, cache, quiet) == first
    # On another machine with the same lock file, the same revision.
    monkeypatch.setenv(VARIABLE, str(cache / "lock.json"))
    elsewhere = open_copy(ADDRESS, tmp_path / "other", quiet)
    assert read_manifest(elsewhere).manifest_digest == manifest["manifest_digest"]
    newest = newest_copy(ADDRESS, cache)
    assert newest != first and open_copy(ADDRESS, cache, quiet) == newest
    pinned = read_pins(cache / "lock.json")[ADDRESS]
    assert pinned == Pin(published.head("me/wan"), changed.manifest_digest) and pinned.revision != commit
    # A revision of a newer release is refused, and moves nothing.
    newer = json.dumps({**changed.as_json(), "format_version": 99}).encode()
    published.repositories["me/wan"].commit({**files, "manifest.json": newer})
    with pytest.raises(OtherReleaseError) as caught:
        newest_copy(ADDRESS, cache)
    assert str(cache) not in str(caught.value) and "release" in str(caught.value.remedy)
    assert open_copy(ADDRESS, cache, quiet) == newest
    # Equal components are on disk once.
    copies = [Copy(wanhub.open_artifact(folder)) for folder in (first, newest)]
    name = weight(copies[0].artifact.manifest)
    assert fetch(copies[0], name) and (newest / name).is_file()


def test_a_turned_bit_is_found_and_not_kept(published: UploadHub, repository: Repository, copy: Copy) -> None:
    folder = copy.artifact.folder
    entry = next(name for name in _names(copy.artifact.manifest) if name.startswith("executables/cpu"))
    for name, offset in (
        (weight(copy.artifact.manifest), 3),
        (entry, 100),
        (copy.artifact.manifest.tokenizer.file, 50),
    ):
        repository.faults[name] = [("damage", offset)]
        with refuses("damaged", ArtifactError, what=name) as raised:
            fetch(copy, name)
        assert str(raised.value.expected).startswith(("sha256 ", "crc32c "))
        assert not (folder / name).exists()
        assert fetch(copy, name) and (folder / name).read_bytes() == published.files("me/wan")[name]


def test_rows_in_another_order_are_found(published: UploadHub, repository: Repository, copy: Copy) -> None:
    """The file's own crc32c fits; those of the rows do not."""
    name = weight(copy.artifact.manifest)
    files = published.files("me/wan")
    rows = files[name][:-4]
    half = len(rows) // 2
    turned = rows[half:] + rows[:half]
    files[name] = turned + crc32c(turned).to_bytes(4, "little")
    repository.commits[published.head("me/wan")] = files
    with refuses("damaged", ArtifactError, expected=" row 0"):
        fetch(copy, name)
    assert not (copy.artifact.folder / name).exists()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "reset", "status"])
def test_a_cut_connection_resumes(
    published: UploadHub, repository: Repository, copy: Copy, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wanhub.copy.RANGE_BYTES", 1000)
    monkeypatch.setattr(url_reader, "RETRY_SECONDS", (0.01, 0.01))
    name = weight(copy.artifact.manifest)
    failing = (fault, 503 if fault == "status" else 400)
    repository.faults[name] = [failing]
    assert fetch(copy, name)
    assert (copy.artifact.folder / name).read_bytes() == published.files("me/wan")[name]
    size = len(published.files("me/wan")[name])
    assert len(published.requests) == -(-size // 1000) + 1  # one range came twice
    repository.faults[name] = [failing] * 3
    (copy.artifact.folder / name).unlink()
    with pytest.raises(ArtifactError) as raised:
        fetch(copy, name)
    assert raised.value.code == "unreachable" and raised.value.found
    assert raised.value.exit_code == 1  # it may answer later


@pytest.mark.slow
def test_a_killed_process_leaves_what_came(
    published: UploadHub, repository: Repository, copy: Copy, two_targets: Path
) -> None:
    name = copy.artifact.manifest.tokenizer.file
    repository.faults[name] = [("slow", 2000)]
    code = (
        "import wanhub\nfrom wanhub import copy\ncopy.RANGE_BYTES = 2000\n"
        f"one = copy.Copy(wanhub.open_artifact({str(copy.artifact.folder)!r}))\n"
        f"one.fetch(named for named in one.artifact.named() if named.name == {name!r})"
    )
    part = (copy.artifact.folder / name).with_name(f".{Path(name).name}.part")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_ENDPOINT": published.url}
    child = subprocess.Popen([sys.executable, "-c", code], env={**environment, "HF_HUB_OFFLINE": "0"})
    deadline = time.monotonic() + 20
    while (not part.exists() or part.stat().st_size < 4000) and time.monotonic() < deadline:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    came = part.stat().st_size
    if not (copy.artifact.folder / name).exists():
        published.forget()
        assert came >= 4000 and fetch(copy, name)
        assert published.ranges(name)[0] == f"bytes={came}-{came + 2**23 - 1}"
    assert (copy.artifact.folder / name).read_bytes() == (two_targets / name).read_bytes()


def test_threads_and_processes_fetch_a_file_once(published: UploadHub, copy: Copy) -> None:
    name = weight(copy.artifact.manifest)
    copies = [copy, Copy(copy.artifact)] * 4
    threads = [threading.Thread(target=fetch, args=(one, name)) for one in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(published.requests) == 1
    assert [path.name for path in (copy.artifact.folder / name).parent.iterdir()] == [Path(name).name]


def test_what_the_hub_refuses(published: UploadHub, repository: Repository, copy: Copy, cache: Path) -> None:
    with refuses("not_found", ArtifactError, what="hf://me/none,", found="HTTP 404"):
        open_copy("hf://me/none", cache, quiet)
    published.repositories["me/empty"] = Repository()
    published.repositories["me/empty"].commit({"README.md": b"nothing"})
    with refuses("wrong_kind", ArtifactError, what="hf://me/empty", found="manifest.json"):
        open_copy("hf://me/empty", cache, quiet)
    name = weight(copy.artifact.manifest)
    files = published.files("me/wan")
    del files[name]
    repository.commits[published.head("me/wan")] = files
    with refuses("missing_file", ArtifactError, what=f"{name} is not at {ADDRESS}@"):
        fetch(copy, name)


def test_an_address_that_changes_is_not_what_was_pinned(
    two_targets: Path, tmp_path: Path, cache: Path
) -> None:
    """An artifact at a file:// address is another one than the lock file says."""
    artifact = linked(two_targets, tmp_path / "moving")
    address = f"file://{artifact}"
    folder = open_copy(address, cache, quiet)
    assert fetch(Copy(wanhub.open_artifact(folder)), "tokenizer/tokenizer.json")
    assert (folder / "tokenizer/tokenizer.json").read_bytes() == (
        two_targets / "tokenizer/tokenizer.json"
    ).read_bytes()
    manifest = read_manifest(artifact)
    manifest.changed(tool={**manifest.tool, "version": "9"}).write(artifact)
    assert open_copy(address, cache, quiet) == folder
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() or path.is_symlink() else path.rmdir()
    folder.rmdir()
    with refuses("changed", ArtifactError, what=address, remedy="wanbuild pull"):
        open_copy(address, cache, quiet)


@pytest.mark.slow
def test_a_pin_is_compared_with_the_copy_that_is_there(
    two_targets: Path, tmp_path: Path, cache: Path
) -> None:
    """Whoever could write the cache, or the lock file, would choose what runs."""
    address = f"file://{two_targets}"
    folder = open_copy(address, cache, quiet)
    pinned = read_pins(cache / "lock.json")[address].manifest_digest
    manifest = (folder / "manifest.json").read_bytes()
    changed = read_manifest(folder).changed(tool={"name": "wanbuild", "version": "9"})
    changed.write(folder)
    with refuses("changed", ArtifactError, what=folder, expected=pinned, remedy=folder):
        open_copy(address, cache, quiet)
    for damage in (manifest[:-9], manifest.replace(b"sha256:", b"sha256:0", 1), b"[" * 100_000):
        (folder / "manifest.json").write_bytes(damage)
        with pytest.raises(ArtifactError) as raised:
            open_copy(address, cache, quiet)
        assert raised.value.what.startswith("manifest.json ") and str(folder) in raised.value.what
        assert str(folder) in str(raised.value.remedy) and "build" not in str(raised.value.remedy)
    (folder / "manifest.json").unlink()
    with refuses("wrong_kind", ArtifactError, found="manifest.json", remedy=folder):
        open_copy(address, cache, quiet)
    lock = cache / "lock.json"
    lock.write_text(lock.read_text().replace(pinned, str(two_targets)))
    with refuses("unreadable", what=lock):
        open_copy(address, cache, quiet)


def test_a_copy_follows_its_address(two_targets: Path, tmp_path: Path, cache: Path) -> None:
    """The artifact is signed later, and moves."""
    artifact = linked(two_targets, tmp_path / "one")
    folder = open_copy(f"file://{artifact}", cache, quiet)
    assert (
        fetch(Copy(wanhub.open_artifact(folder)), "tokenizer/tokenizer.json")
        and not (folder / SIGNATURE).exists()
    )
    (artifact / SIGNATURE).write_bytes(b"signed")
    assert newest_copy(f"file://{artifact}", cache) == folder
    assert (folder / SIGNATURE).read_bytes() == b"signed"
    moved = artifact.rename(tmp_path / "two")
    (moved / SIGNATURE).unlink()
    assert open_copy(f"file://{moved}", cache, quiet) == folder and not (folder / SIGNATURE).exists()
    assert wanhub.open_artifact(folder).origin == f"file://{moved}"
    assert fetch(Copy(wanhub.open_artifact(folder)), weight(read_manifest(folder)))
    assert open_copy(f"file://{artifact}", cache, quiet) == folder  # pinned: nothing is asked for
    assert wanhub.open_artifact(folder).origin == f"file://{artifact}"


@pytest.mark.slow
def test_what_is_damaged_is_fetched_again(published: UploadHub, copy: Copy) -> None:
    came = list[int]()
    names = list(copy.artifact.named())
    copy.fetch(names, came.append)
    assert sum(came) == sum({one.name: copy.artifact.path(one).stat().st_size for one in names}.values())
    assert copy.missing(names) == []
    flip(copy.artifact.folder / weight(copy.artifact.manifest), 5)
    copy.discard_damaged(names)
    published.forget()
    copy.fetch(copy.missing(names), came.append)
    assert [request.name for request in published.requests] == [weight(copy.artifact.manifest)]


@pytest.mark.slow
def test_a_parameter_of_which_a_file_is_there(
    toy_checkpoint: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a fetch leaves it that was killed; toys have one file of each."""
    monkeypatch.setattr("wanbuild.conversion.orbax.SMALL_BYTES", 0)
    convert(ConvertRequest(toy_checkpoint, tmp_path / "a"))
    artifact = wanhub.open_artifact(open_copy((tmp_path / "a").as_uri(), cache, quiet))
    group = max(wanrun.groups(artifact.named()), key=len)
    assert len(group) > 1
    wanhub.fetch(artifact, group)
    artifact.path(group[0]).unlink()
    wanhub.fetch(artifact, group)
    artifact.check(group)
    artifact.path(group[0]).unlink()
    artifact.path(group[1]).write_bytes(artifact.path(group[-1]).read_bytes())  # another file than it was
    with refuses("damaged", ArtifactError):
        wanhub.fetch(artifact, group)
    wanhub.fetch(artifact, group)
    artifact.check(group)


def test_a_copy_is_not_changed_by_a_build(published: UploadHub, cache: Path) -> None:
    folder = open_copy(ADDRESS, cache, quiet)
    result = CliRunner().invoke(wanbuild, ["embed", str(folder), "--prompt", "a"])
    assert isinstance(result.exception, ArtifactError)
    check_refusal(result.exception, "damaged", what=folder, remedy="wanbuild pull")


@pytest.mark.slow
def test_python_takes_an_address(published: UploadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses("wrong_kind", what=f"'{ADDRESS}'", remedy="wanhub.load"):
        wanrun.load(ADDRESS)
    with wanhub.load(ADDRESS, prompts=["a cat"]) as pipeline:
        result = pipeline.generate("a cat", steps=1)
    assert result.options["artifact"].startswith(f"{ADDRESS}@")
    assert wanhub.find("a/b") == Path("a/b")
    monkeypatch.setitem(sys.modules, "wanhub.opening", None)
    with refuses("not_installed", what="wanhub.opening", remedy="pip install"):
        wanhub.find(ADDRESS)
    assert user_cache().is_dir()
