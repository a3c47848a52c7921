"""``wanbuild verify`` on every file of an artifact: damage of every kind, and what does not belong there."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.damage import PROFILE, one_error
from helpers.kernels import put_attention
from helpers.refusals import refuses
from wanbuild.check import verify
from wanbuild.check.verify import check_files, check_spelling, check_unlisted
from wanbuild.cli import wanbuild
from wanbuild.staging import build_lock
from wanbuild.targets import target
from wancli.console import run
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import MANIFEST, Attested, Embedding, Manifest, Recorded, read_manifest
from wanrun.errors import ArtifactError
from wanrun.files import sha256_of
from wanrun.text.embeddings import EmbeddingFormat, encode_rows


def silent(line: str) -> None:
    del line


def stop(*_: object) -> None:
    raise AssertionError("the weights were found whole")


def check(artifact: Path) -> None:
    """What verify does before it runs anything, but for plain Orbax."""
    manifest = read_manifest(artifact)
    check_spelling(Artifact(manifest, artifact))
    check_unlisted(Artifact(manifest, artifact), silent)
    check_files(Artifact(manifest, artifact), silent)


@pytest.fixture(scope="module")
def whole(toy_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy artifact with a recorded output and an embedding: every kind of file that there is."""
    artifact = Path(shutil.copytree(toy_artifact, tmp_path_factory.mktemp("whole") / "artifact"))
    manifest = read_manifest(artifact)
    for folder in ("golden", "embeddings", "verdicts"):
        (artifact / folder).mkdir(exist_ok=True)
    golden = Recorded(file="golden/recorded.json", sha256=sha256_of(b"{}\n"))
    (artifact / golden.file).write_bytes(b"{}\n")
    told = {"target": "cpu", "profile": PROFILE, "device_kind": "cpu", "made": "2026"}
    verdict = Attested(file="verdicts/v.json", sha256=golden.sha256, **told)
    (artifact / verdict.file).write_bytes(b"{}\n")
    manifest = manifest.changed(golden={PROFILE: golden}, verdicts={"facts": verdict})
    _with_embedding(artifact, manifest).write(artifact)
    check(artifact)
    return artifact


def _with_embedding(artifact: Path, manifest: Manifest) -> Manifest:
    rows = np.ones((3, manifest.model.text_width), np.float32)
    key, data = EmbeddingFormat(manifest).key("a fox", "float32"), encode_rows(rows)
    (artifact / f"embeddings/{key}.npy").write_bytes(data)
    record = Embedding(
        file=f"embeddings/{key}.npy", sha256=sha256_of(data), prompt="a fox", dtype="float32", length=3
    )
    return manifest.changed(embeddings={key: record})


def _edit(change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)

    return edit


def _flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


DAMAGES: Mapping[str, Callable[[Path], object]] = {
    "a flipped bit": _edit(_flip),
    "cut off": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a byte more": _edit(lambda data: data.insert(len(data) // 2, 0x20)),
    "missing": lambda path: path.unlink(),
    "empty": lambda path: os.truncate(path, 0),
    "endless": lambda path: os.truncate(path, 2**40),  # to read it would take hours
    "exchanged": lambda path: path.write_bytes(b'{"content": "of another file"}'),
}


def files(artifact: Path) -> list[Path]:
    return sorted(path for path in artifact.rglob("*") if path.is_file())


def kinds_of_files(artifact: Path) -> dict[str, list[Path]]:
    """The files by what they are: no kind may be left out."""
    kinds: dict[str, list[Path]] = {}
    for path in files(artifact):
        parts = path.relative_to(artifact).parts
        inside = "chunk" if "c" in parts[:-1] else path.name
        kind = f"weights {inside}" if parts[0] == "weights" else parts[0]
        kinds.setdefault(kind, []).append(path)
    return kinds


KINDS = [
    "embeddings",
    "executables",
    "golden",
    "manifest.json",
    "programs",
    "requirements.txt",
    "tokenizer",
    "verdicts",
    "weights|_CHECKPOINT_METADATA",
    "weights|_METADATA",
    "weights|chunk",
    "weights|zarr.json",
]


@pytest.mark.slow
def test_every_file_is_opened(whole: Path) -> None:
    opened, listening = set[str](), [True]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if listening and event == "open":
            opened.add(str(arguments[0]))

    sys.addaudithook(hook)
    check(whole)
    listening.clear()  # a hook cannot be taken away
    assert {str(path) for path in files(whole)} <= opened


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_every_kind_of_file(whole: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a kind is damaged in all of the ways, others in one of them in turn: some of each component.

    ``check_files`` looks at weights first, by a function of its own, so the other half is left out each time.
    """
    check(whole)
    if kind.startswith("weights"):
        monkeypatch.setattr(verify, "check_program", stop)
    else:
        monkeypatch.setattr(verify, "check_places", lambda *_: None)
    kinds = {name.replace(" ", "|"): paths for name, paths in kinds_of_files(whole).items()}
    assert sorted(kinds) == KINDS
    ways = list(DAMAGES)
    tried = [(kinds[kind][0], way) for way in ways]
    others = kinds[kind][1:]
    some = others[:: max(1, len(others) // 9)]
    tried += [(path, ways[number % len(ways)]) for number, path in enumerate(some)]
    if kind in ("weights|chunk", "weights|zarr.json"):
        components = {path.relative_to(whole).parts[1] for path in kinds[kind]}
        assert {path.relative_to(whole).parts[1] for path, _ in tried} == components
    for path, way in tried:
        before = path.read_bytes()
        DAMAGES[way](path)
        with pytest.raises(ArtifactError) as caught:
            check(whole)
        path.write_bytes(before)
        assert caught.value.exit_code == 3, (path, way)


@pytest.mark.slow
def test_the_plain_form_of_a_program_is_checked_too(artifact_copy: Path) -> None:
    put_attention(artifact_copy)
    check(artifact_copy)
    put_attention(artifact_copy, plain=jnp.sum)
    with pytest.raises(ArtifactError, match=r"outputs\.out;.*float32\[\]"):
        check(artifact_copy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "programs/stray",
        f"programs/{PROFILE}/stray.stablehlo",
        "executables/cpu/jit_prepare-0-cache",
        "verdicts/old.json",
        "embeddings/0.npy",
        "tokenizer/special_tokens_map.json",
        "requirements-old.txt",
        "weights/stray",
        "programs/old/",
        "tokenizer/old/",
    ],
)
def test_what_does_not_belong_there(whole: Path, name: str) -> None:
    """A file or a folder; what a user puts next to the manifest is none."""
    path, licence = whole / name, whole / "LICENSE"
    licence.touch()
    check(whole)
    path.mkdir() if name.endswith("/") else path.touch()
    try:
        with refuses("mismatch", ArtifactError, what=path):
            check(whole)
    finally:
        path.rmdir() if name.endswith("/") else path.unlink()
        licence.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["programs/stray", "weights/vae/_METADATA"])
def test_the_command_finds_both(whole: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that does not belong there, and one that is damaged; before anything runs."""
    path = whole / name
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(b"{}")
    try:
        assert run(wanbuild, ["verify", "--artifact", str(whole)]) == 3
    finally:
        path.unlink() if before is None else path.write_bytes(before)
    assert f" {path} " in one_error(capsys)


def test_no_platform_is_started_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(target, "attached_platform", lambda: "cpu")
    started: list[str] = []
    monkeypatch.setattr(verify, "open_devices", lambda: started.append(jax.config.values["jax_platforms"]))
    verify.start_jax()
    assert started == ["cpu"]


@pytest.mark.slow
def test_a_manifest_that_a_build_replaces_meanwhile(whole: Path) -> None:
    manifest = read_manifest(whole)
    before = (whole / MANIFEST).read_bytes()
    manifest.changed(times={**manifest.times, "embed": "2026-11-22T00:00:00Z"}).write(whole)
    with refuses("changed", ArtifactError, what=whole / MANIFEST):
        check_spelling(Artifact(manifest, whole))
    (whole / MANIFEST).write_bytes(before)
    check_spelling(Artifact(manifest, whole))


@pytest.mark.slow
def test_what_a_build_adds_meanwhile_is_not_damage(whole: Path, tmp_path: Path) -> None:
    """It is not listed yet; a lock that nobody holds, as a killed build leaves it, is no build."""
    link, lines = tmp_path / "link", list[str]()
    link.symlink_to(whole)
    path, lock = whole / "programs" / "new", whole.with_name(f".{whole.name}.lock")
    path.touch()
    try:
        with build_lock(whole):
            for place in (whole, link):
                check_unlisted(open_artifact(place), lines.append)
        assert len(lines) == 2
        lock.touch()
        for place in (whole, link):
            with refuses("mismatch", ArtifactError, what=place / "programs" / "new"):
                check_unlisted(open_artifact(place), silent)
    finally:
        path.unlink()
        lock.unlink(missing_ok=True)


@pytest.mark.slow
def test_another_spelling_of_the_manifest(whole: Path) -> None:
    """Of the same meaning, but not what was written."""
    path = whole / "manifest.json"
    before = path.read_bytes()
    path.write_bytes(before + b" ")
    with refuses("damaged", ArtifactError, what=path, expected="sha256"):
        check(whole)
    path.write_bytes(before)
