"""Broken artifacts are refused and stay as they were: every manifest by ``--list``, every file by a run."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from crc32c import crc32c

from helpers.damage import PROFILE, Declines, flip, one_error, own
from helpers.refusals import check_json, check_parts
from hostile.artifacts import FILES, MANIFESTS, Row, chunk
from hostile.refusal import check_named, first_of_each, refusal
from hostile.things import ENDLESS
from wanbuild.cli import wanbuild
from wanbuild.conversion import orbax
from wancli.console import run
from wancli.run import wanrun
from wanrun.artifact.layout import CRC_BYTES, array_folder
from wanrun.artifact.manifest import Manifest, Recorded, read_manifest
from wanrun.files import sha256_of

READERS = {
    "list": (wanrun, "--list", "--artifact"),
    "run": (wanrun, "--prompt", "a fox", "--output", "o.npy", "--artifact"),
    "allow": (wanrun, "--prompt", "a fox", "--output", "o.npy", "--allow-compile", "--artifact"),
    "inspect": (wanbuild, "inspect", "--artifact"),
    "verify": (wanbuild, "verify", "--artifact"),
    "compile": (wanbuild, "compile", "--size", "96x64", "--frames", "9", "--target", "cpu", "--artifact"),
    "embed": (wanbuild, "embed", "--prompt", "a fox", "--artifact"),
    "sbom": (wanbuild, "sbom"),
    "oci": (wanbuild, "oci", "--output", "layout"),
}
OTHERS = [name for name in READERS if name not in ("list", "allow")]


def manifest_kind(row: Row) -> tuple[str, str]:
    """The code, and the table that the row is from, or the record that it changes."""
    return row.code, row.name.partition(":")[0].partition(" at ")[0]


def file_kind(row: Row) -> str:
    """Each row but cut executables and files without an end, which are one kind each."""
    if row.name.endswith(" cut"):
        return "cut"
    thing = row.name.rpartition(": ")[2]
    return thing if thing in ENDLESS else row.name


def refused_by(name: str, row: Row, artifact: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    command, *arguments = READERS[name]
    return refusal(capsys, artifact.parent, command, [*arguments, artifact], 3)


@pytest.mark.slow
@pytest.mark.usefixtures("no_weights_are_read")
@pytest.mark.parametrize(("number", "row"), first_of_each(MANIFESTS, manifest_kind))
def test_a_broken_manifest_is_refused(
    number: int,
    row: Row,
    artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """By ``--list`` and by another reader, which is a run for the first row of each kind."""
    monkeypatch.chdir(tmp_path)
    row.change(artifact)
    thorough = request.node.get_closest_marker("thorough")
    for reader in ("list", OTHERS[number % len(OTHERS)] if thorough else "run"):
        check_named(refused_by(reader, row, artifact, capsys), row.code, (tmp_path, *row.values))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "row"), first_of_each(FILES, file_kind))
def test_a_damaged_file_is_refused(
    number: int,
    row: Row,
    artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """By a run, which reads no weights before that unless they or what is loaded with them are damaged."""
    if row.before_weights:
        request.getfixturevalue("no_weights_are_read")
    check_file_refused(("run",), row, artifact, capsys)


@pytest.mark.thorough
@pytest.mark.parametrize("row", FILES, ids=lambda row: row.name)
def test_a_damaged_file_is_refused_by_others(
    row: Row, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By ``wanbuild verify``; and with ``--allow-compile`` there is nothing sound to compile from."""
    readers = ("verify", "allow") if row.name.startswith("programs: ") else ("verify",)
    check_file_refused(readers, row, artifact, capsys)


def check_file_refused(
    readers: Sequence[str], row: Row, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = row.place(artifact) if row.place else artifact
    before = path.read_bytes() if row.rewritten else b""
    row.change(artifact)
    after = path.read_bytes() if row.rewritten else b""
    for name in readers:
        error = refused_by(name, row, artifact, capsys)
        check_named(error, row.code, (path, *row.values))
        if name == "verify" and len(before) != len(after):  # which it looks at first
            check_parts(error, expected=f"{len(before)} bytes", found=f"{len(after)} bytes")
        elif row.rewritten:
            check_parts(error, expected=sha256_of(before), found=sha256_of(after))


# --- what is damaged and is no row -----------------------------------------------------------------------


@pytest.mark.slow
def test_as_a_user_runs_it(cli: Any, artifact: Path, tmp_path: Path) -> None:
    """The same through the installed command, for the component that is restored last."""
    own(artifact, "weights")
    flip(chunk(artifact, "vae", "decoder/conv_in/weight"), 77)
    output = tmp_path / "video.mp4"
    line = cli.fails(3, "wanrun", "--artifact", artifact, "--prompt", "a fox", "--output", output)
    assert "vae/decoder/conv_in/weight" in line
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


@pytest.fixture
def layered(toy_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact without programs, with a chunk file per layer, as large parameters have."""
    monkeypatch.setattr(orbax, "SMALL_BYTES", 0)
    monkeypatch.setattr(orbax, "LARGE_BYTES", 4096)
    folder = tmp_path / "layered"
    assert run(wanbuild, ["convert", str(toy_checkpoint), "--artifact", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_chunk_files_that_are_not_where_they_were(layered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``wanbuild verify`` reads every file: swapped, truncated, missing, and a file in another's place."""

    def verify(**parts: object) -> None:
        capsys.readouterr()
        assert run(wanbuild, ["verify", "--artifact", str(layered), "--json-errors"]) == 3
        check_json(one_error(capsys), "damaged", **parts)

    def exchange(a: Path, b: Path) -> None:
        spare = layered / "spare"
        for old, new in ((a, spare), (b, a), (spare, b)):
            old.rename(new)

    weights = layered / "weights" / "transformer"
    up = weights / "blocks.ffn.up.weight" / "c"
    first, second = (up / str(layer) / "0" / "0" for layer in (0, 1))
    exchange(first, second)
    verify(message=first, expected=("crc32c", "row 0"))
    exchange(first, second)

    key, query = (weights / f"blocks.attn1.to_{name}.weight" / "c" / "2" / "0" / "0" for name in "kq")
    exchange(key, query)
    verify(expected=("crc32c", "row 2"))
    exchange(key, query)

    data = second.read_bytes()
    second.write_bytes(data[:-1])
    verify(message=second, expected=f"{len(data)} bytes", found=f"{len(data) - 1} bytes")
    second.unlink()
    verify(message=second, expected="a file", found="No such file")
    second.mkdir()
    verify(message=second, expected="a file", found="Is a directory")
    second.rmdir()

    second.write_bytes(data)
    capsys.readouterr()
    assert run(wanbuild, ["verify", "--artifact", str(layered)]) == 0  # and nothing else was wrong


def test_a_storage_error_names_the_file(
    declines: Declines, toy_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.preadv", fail)
    declines(toy_artifact, "damaged", message=("text_encoder/", "Input/output error"))


def test_a_damaged_record(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``wanbuild verify`` does not compare with a golden file that is not what was recorded."""
    (artifact / "golden").mkdir()
    file = f"golden/{PROFILE}-0.json"
    (artifact / file).write_text("{}")
    manifest = read_manifest(artifact)
    record = Recorded(file=file, sha256=sha256_of(b"{ }"))
    manifest.changed(golden={PROFILE: record}).write(artifact)
    for found in (sha256_of(b"{}"), "No such file"):
        assert run(wanbuild, ["verify", "--artifact", str(artifact), "--json-errors"]) == 3
        check_json(one_error(capsys), "damaged", message=artifact / file, found=found)
        (artifact / file).unlink(missing_ok=True)


@pytest.mark.slow
def test_latents_that_are_not_finite(
    artifact: Path, declines: Declines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN weights with matching checksums: nothing is damaged, and still no video is written."""
    own(artifact, "weights")
    write_parameter(artifact, "transformer", "proj_out/bias", np.nan)
    declines(artifact, "not_finite", code=1, message="first step", remedy="wanbuild verify")
    # And an older video is not lost, though it could have been replaced.
    older = tmp_path / "older.gif"
    older.write_bytes(b"the only copy")
    arguments = ["--artifact", artifact, "--prompt", "a fox", "--steps", 1, "--output", older, "--overwrite"]
    assert run(wanrun, [str(argument) for argument in (*arguments, "--json-errors")]) == 1
    check_json(one_error(capsys), "not_finite")
    assert older.read_bytes() == b"the only copy"


def write_parameter(artifact: Path, component: str, path: str, value: float) -> None:
    """Overwrites a parameter of one row with a value, and its checksums in the manifest."""
    manifest: Manifest = read_manifest(artifact)
    entry = manifest.components[component]
    parameter = entry.parameters[path]
    assert parameter.layout.rows == 1 and parameter.layout.dtype == "float32"
    data = np.full(parameter.layout.shape, value, np.float32).tobytes()
    checksum = crc32c(data)
    file = artifact / entry.folder / array_folder(path) / parameter.layout.chunk_file(0)
    file.write_bytes(data + checksum.to_bytes(CRC_BYTES, "little"))
    digest = hashlib.sha256(hashlib.sha256(data).digest()).hexdigest()
    changed = msgspec.structs.replace(parameter, crc32c=(f"{checksum:08x}",), sha256=digest)
    component_changed = msgspec.structs.replace(entry, parameters={**entry.parameters, path: changed})
    manifest.changed(components={**manifest.components, component: component_changed}).write(artifact)
