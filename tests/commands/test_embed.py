"""``wanbuild embed``: what it adds, that it has the encoder's bits, and who looks after it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.artifacts import shared
from helpers.damage import edit_environment, flip, linked, one_error, own
from helpers.manifests import programs_of, with_model, without_profiles
from helpers.refusals import check_json
from wanbuild.build import compile_artifact, convert
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.check import embed, verify
from wanbuild.check.embed import embed_prompts, open_profile
from wanbuild.cli import wanbuild
from wanbuild.conversion.convert_request import ConvertRequest
from wancli.console import run
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import Embedding, Manifest, read_manifest
from wanrun.files import sha256_of
from wanrun.text.embedding_cache import EmbeddingCache, made_by_jax
from wanrun.text.embeddings import (
    DTYPES,
    ArtifactEmbeddings,
    EmbeddingFormat,
    encode_rows,
)
from wanrun.text.encoder import PromptEncoder
from wanrun.text.tokenizer import PromptTokenizer

pytestmark = pytest.mark.slow

PROMPTS = ["a red fox", "", "tom &amp; jerry — “猫”"]
CLEANED = ["a red fox", "", 'tom & jerry — "猫"']
NEGATIVE = ""
"""The toy's default negative prompt."""


@pytest.fixture(scope="session")
def two_dtypes(toy_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy artifact with a second, smaller profile that computes in bfloat16. Not to be changed."""
    options = BuildOptions(dtype="bfloat16", loop="step")

    def build(folder: Path) -> None:
        shutil.copytree(toy_artifact, folder)
        compile_artifact(CompileRequest(folder, ["cpu"], [(32, 32)], [1], [False], options=options), print)

    return shared(tmp_path_factory, "two-dtypes-artifact", build)


@pytest.fixture
def two(two_dtypes: Path, tmp_path: Path) -> Path:
    """The same with a manifest of its own; its folders are links."""
    return linked(two_dtypes, tmp_path / "two")


class FakePipeline:
    """Gives embeddings that depend on the prompt, and counts what is encoded."""

    def __init__(self, encoded: list[str], width: int, length: int, dtype: str) -> None:
        self._encoded, self._shape, self._dtype = encoded, (length, width), DTYPES[dtype]

    def encode_prompts(self, prompts: list[str]) -> np.ndarray:
        self._encoded.extend(prompts)
        rows = [
            np.random.default_rng(list(prompt.encode())).standard_normal(self._shape) for prompt in prompts
        ]
        return np.array(rows).astype(self._dtype)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Prompts that were encoded, by a stand-in for the pipeline."""
    prompts: list[str] = []

    def open_fake(artifact: Artifact, profile: Any, lazy: bool = False) -> Any:
        manifest = artifact.manifest
        width, length = manifest.configs["text_encoder"]["d_model"], manifest.tokenizer.max_length
        return contextlib.nullcontext(FakePipeline(prompts, width, length, profile.options.dtype))

    monkeypatch.setattr(embed, "open_profile", open_fake)
    return prompts


def command(*arguments: object) -> int:
    """Runs it with errors as JSON."""
    return run(wanbuild, ["embed", *map(str, arguments), "--json-errors"])


def files(artifact: Path) -> set[str]:
    folder = artifact / "embeddings"
    return {path.relative_to(artifact).as_posix() for path in folder.iterdir()} if folder.exists() else set()


def check_whole(artifact: Path) -> Manifest:
    """Every listed embedding is sound, and there is no other file."""
    manifest = read_manifest(artifact)
    stored = ArtifactEmbeddings(Artifact(manifest, artifact))
    for key in manifest.embeddings:
        stored.read(key)
    assert files(artifact) == {record.file for record in manifest.embeddings.values()}
    return manifest


# --- what is added ------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_hit_has_the_bits_of_a_miss(two: Path, tmp_path: Path) -> None:
    """For float32 and bfloat16, from the artifact and from the cache, with the real encoder."""
    lines: list[str] = []
    before = read_manifest(two)
    manifest = embed_prompts(two, PROMPTS, lines.append)
    assert len(lines) == 6 and all(re.search(r"tokens? embedded", line) for line in lines)
    assert manifest.content_digest == before.content_digest
    assert check_whole(two) == manifest and len(manifest.embeddings) == 6

    record = manifest.tokenizer
    tokenizer = PromptTokenizer(two / record.file, record.max_length, record.pad_id)
    tokens = tokenizer(CLEANED)

    def encoder(dtype: str, encode: Callable[..., np.ndarray], *stores: Any) -> PromptEncoder:
        width = manifest.configs["text_encoder"]["d_model"]
        return PromptEncoder(tokenizer, encode, stores, length=512, width=width, dtype=DTYPES[dtype])

    def never(*arguments: object) -> np.ndarray:
        raise AssertionError("the encoder is called")

    for profile in manifest.profiles.values():
        dtype = profile.options.dtype
        with open_profile(open_artifact(two), profile) as pipeline:
            miss = pipeline.encode_prompts(PROMPTS)
        assert miss.dtype == DTYPES[dtype] and np.count_nonzero(miss[0, : tokens.lengths[0]])
        artifacts = ArtifactEmbeddings(Artifact(manifest, two))
        for prompt, embedding, length in zip(CLEANED, miss, tokens.lengths, strict=True):
            rows = artifacts.find(prompt, dtype)
            assert rows is not None and rows.tobytes() == embedding[:length].tobytes()
        hit = encoder(dtype, never, artifacts)
        assert hit.missing(PROMPTS) == []
        assert hit(PROMPTS).tobytes() == miss.tobytes()

        target = manifest.targets["cpu"]
        maker = made_by_jax(programs_of(manifest, profile.name)["encode_text"].sha256, target.environment)
        cache = EmbeddingCache(manifest, maker, folder=tmp_path / "cache")
        encode = encoder(dtype, lambda ids, mask, miss=miss: miss, cache)
        assert encode(PROMPTS).tobytes() == miss.tobytes()
        assert encoder(dtype, never, cache)(PROMPTS).tobytes() == miss.tobytes()


def test_what_is_there_is_not_encoded_again(
    two: Path, encoded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--artifact", two) == 0
    assert encoded == [NEGATIVE, NEGATIVE]
    first, second, last = capsys.readouterr().out.splitlines()
    assert "float32, 1 token" in first and "bfloat16, 1 token" in second
    assert str(two) in last and " 2 " in last
    manifest = (two / "manifest.json").read_bytes()
    assert command("--artifact", two, "--prompt", "  ") == 0
    assert encoded == [NEGATIVE, NEGATIVE] and (two / "manifest.json").read_bytes() == manifest
    first, second, _ = capsys.readouterr().out.splitlines()
    assert "float32" in first and "bfloat16" in second and "token" not in first + second
    assert command("--artifact", two, "--prompt", " a  fox", "--prompt", "", "--prompt", "a fox ") == 0
    assert encoded[2:] == ["a fox", "a fox"]
    whole, dtypes = check_whole(two), ["bfloat16", "float32"]
    records = [whole.embeddings[EmbeddingFormat(whole).key("a fox", dtype)] for dtype in dtypes]
    assert [record.dtype for record in records] == dtypes
    assert all(record.prompt == "a fox" and record.length > 2 for record in records)


def test_a_prompt_that_is_cut(two: Path, encoded: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("embedded", "up to date"):
        assert command("--artifact", two, "--prompt", "snow " * 600 + "fox") == 0
        output = capsys.readouterr()
        (line,) = output.err.splitlines()
        assert line.startswith("warning: ") and " 512 " in line and "'snow" in line
        assert output.out.count(text) == 2
    assert {record.length for record in check_whole(two).embeddings.values()} == {512}
    assert len(encoded) == 2


def test_nothing_that_can_run_here(
    two: Path, tmp_path: Path, encoded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = read_manifest(two)
    empty = tmp_path / "empty"
    empty.mkdir()
    without_profiles(manifest).write(empty)
    edit_environment(two, machine="riscv64")
    for artifact in (empty, two):
        assert command("--artifact", artifact, "--prompt", "a fox") == 3
        line = one_error(capsys)
        check_json(line, "not_built", message=artifact, remedy="wanbuild compile")
    check_json(line, "not_built", found="riscv64")
    assert command("--artifact", tmp_path / "missing") == 3
    check_json(one_error(capsys), "missing_file", message=tmp_path / "missing")
    assert encoded == [] and files(two) == set()


def test_an_artifact_that_cannot_be_written(
    two: Path, encoded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (two / "embeddings").write_text("in the way")
    before = (two / "manifest.json").read_bytes()
    assert command("--artifact", two) == 2
    check_json(one_error(capsys), "unwritable", message=two, found=os.strerror(errno.EEXIST))
    assert (two / "manifest.json").read_bytes() == before


def test_inspect_shows_them(two: Path, encoded: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    embed_prompts(two, ["a fox", "x" * 200], lambda line: None)
    capsys.readouterr()
    assert run(wanbuild, ["inspect", "--artifact", str(two)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["float32", "6", "'a", "fox'"] in [line.split() for line in lines]
    assert any(line.startswith("bfloat16") and line.endswith(f"{'x' * 77}...'") for line in lines)
    assert run(wanbuild, ["inspect", "--artifact", str(two), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["embeddings"]
    assert {"prompt": "a fox", "dtype": "bfloat16", "length": 6} in listed and len(listed) == 4


# --- what looks after them ----------------------------------------------------------------------------------


@pytest.fixture
def listed(two: Path, encoded: list[str]) -> Path:
    """An artifact with the embeddings of 'a fox'."""
    embed_prompts(two, ["a fox"], lambda line: None)
    return two


@pytest.mark.parametrize(
    "damage",
    [lambda path: flip(path, path.stat().st_size // 2), lambda path: os.truncate(path, 10), Path.unlink],
    ids=["flipped", "cut", "gone"],
)
def test_damage_is_repaired(listed: Path, encoded: list[str], damage: Callable[[Path], object]) -> None:
    """``tests/build/check/test_verify.py`` has who notices it."""
    manifest = read_manifest(listed)
    path = listed / manifest.embeddings[EmbeddingFormat(manifest).key("a fox", "bfloat16")].file
    sound = path.read_bytes()
    damage(path)
    encoded.clear()
    embed_prompts(listed, ["a fox"], lambda line: None)
    assert encoded == ["a fox"]
    assert path.read_bytes() == sound and check_whole(listed) == manifest


def test_record_embeds_the_negative_prompt(
    listed: Path, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = verify.Golden("0" * 64, "1" * 64, (0.5,), {}, 1e-4, (0,))
    monkeypatch.setattr(verify, "_run", lambda *arguments: golden)
    manifest = read_manifest(listed)
    with_model(manifest, {"negative_prompt": "blurry, dark"}).write(listed)
    encoded.clear()
    verify.record(listed, lambda line: None)
    assert encoded == ["blurry, dark"] * 2
    recorded = check_whole(listed)
    assert len(recorded.golden) == 2 and len(recorded.embeddings) == 4
    assert {record.prompt for record in recorded.embeddings.values()} == {"a fox", "blurry, dark"}


@pytest.mark.thorough
def test_compile_keeps_what_is_listed(listed: Path) -> None:
    for folder in ("programs", "executables"):
        own(listed, folder)
    before = check_whole(listed)
    (listed / "embeddings" / f"{'0' * 64}.npy").write_bytes(b"of a killed run")
    (listed / "embeddings" / ".wan-01234567-1-89abcdef.tmp").write_bytes(b"of a killed run")
    request = CompileRequest(listed, ["cpu"], [(32, 16)], [1], [False], options=BuildOptions(loop="step"))
    after = compile_artifact(request, lambda line: None)
    assert len(after.profiles) == len(before.profiles) + 1
    assert check_whole(listed) == after and after.embeddings == before.embeddings


@pytest.fixture
def converted(toy_checkpoint: Path, tmp_path: Path) -> Path:
    """The toy, converted, with embeddings of random bits."""
    artifact = tmp_path / "converted"
    manifest = convert(ConvertRequest(toy_checkpoint, artifact))
    (artifact / "embeddings").mkdir()
    listed = {}
    for prompt in ("a fox", "snow"):
        rows = np.random.default_rng(len(prompt)).standard_normal((3, 32)).astype(np.float32)
        key = EmbeddingFormat(manifest).key(prompt, "float32")
        data = encode_rows(rows)
        (artifact / f"embeddings/{key}.npy").write_bytes(data)
        listed[key] = Embedding(
            file=f"embeddings/{key}.npy", sha256=sha256_of(data), prompt=prompt, dtype="float32", length=3
        )
    manifest.changed(embeddings=listed).write(artifact)
    return artifact


def test_convert_takes_over_what_fits(converted: Path, toy_checkpoint: Path) -> None:
    before = check_whole(converted)
    inodes = {path.name: path.stat().st_ino for path in (converted / "embeddings").iterdir()}
    # Another transformer and another default prompt: the text encoder is the same.
    request = ConvertRequest(
        toy_checkpoint, converted, {"transformer": "float32"}, negative_prompt="blurry", force=True
    )
    convert(request)
    after = check_whole(converted)
    assert after.embeddings == before.embeddings and after.content_digest != before.content_digest
    assert {path.name: path.stat().st_ino for path in (converted / "embeddings").iterdir()} == inodes

    key = EmbeddingFormat(before).key("snow", "float32")
    flip(converted / before.embeddings[key].file, 200)
    convert(request)
    assert list(check_whole(converted).embeddings) == [EmbeddingFormat(before).key("a fox", "float32")]

    convert(ConvertRequest(toy_checkpoint, converted, {"text_encoder": "float32"}, force=True))
    assert check_whole(converted).embeddings == {} and not (converted / "embeddings").exists()


# --- kills --------------------------------------------------------------------------------------------------

KILLS = """
import contextlib, os, shutil, signal, sys
from pathlib import Path
import numpy as np
from wanbuild.check import embed
from wanrun.artifact.artifact import open_artifact
from wanrun.text.embeddings import ArtifactEmbeddings
from wanrun.artifact.manifest import Embedding, read_manifest

artifact = Path(sys.argv[1])
manifest = read_manifest(artifact)
shape = manifest.tokenizer.max_length, manifest.configs["text_encoder"]["d_model"]
lives = 0

class Pipeline:
    def encode_prompts(self, prompts):
        # Other bits each time, as another machine would give.
        return np.random.default_rng(lives).standard_normal((len(prompts), *shape)).astype(np.float32)

embed.open_profile = lambda *arguments, **options: contextlib.nullcontext(Pipeline())

def work():
    embed.embed_prompts(artifact, ["a fox", "snow"], lambda line: None)

def counted(stop):
    '''Runs with every change to the file system counted; killed before the event of this number.'''
    events = 0
    def count(name):
        original = getattr(os, name)
        def wrapper(*arguments, **options):
            nonlocal events
            if events == stop:
                os.kill(os.getpid(), signal.SIGKILL)
            events += 1
            return original(*arguments, **options)
        setattr(os, name, wrapper)
    for name in ("rename", "replace", "unlink", "mkdir", "fsync"):
        count(name)
    work()
    return events

def child(function):
    process = os.fork()
    if process == 0:
        os._exit(function())
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

def reset():
    shutil.rmtree(artifact / "embeddings", ignore_errors=True)
    (artifact / "embeddings").mkdir()
    (artifact / "embeddings" / "stray.npy").write_bytes(b"of an earlier run")
    manifest.write(artifact)

def listed():
    '''Prompts of the artifact, whose embeddings are sound.'''
    opened = open_artifact(artifact)
    found, stored = opened.manifest, ArtifactEmbeddings(opened)
    for key in found.embeddings:
        stored.read(key)
    return sorted(record.prompt for record in found.embeddings.values())

reset()
events = child(lambda: counted(None))
assert listed() == ["a fox", "snow"]
seen = set()
for stop in range(events):
    reset()
    assert child(lambda: counted(stop)) == -signal.SIGKILL, stop
    seen.add(tuple(listed()))
    assert listed() in ([], ["a fox", "snow"]), stop
    lives += 1
    work()  # the next one succeeds, and cleans up
    assert listed() == ["a fox", "snow"]
    files = {path.name for path in (artifact / "embeddings").iterdir()}
    assert files == {f"{key}.npy" for key in read_manifest(artifact).embeddings}, files
    assert sorted(path.name for path in artifact.parent.iterdir()) == [artifact.name]
assert len(seen) == 2, seen
print(events)
"""


def test_a_killed_embed(toy_artifact: Path, tmp_path: Path) -> None:
    """There is the old artifact or the new one, before whichever change to the file system it was killed."""
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    (artifact / "tokenizer").symlink_to(toy_artifact / "tokenizer")
    shutil.copy(toy_artifact / "manifest.json", artifact)
    done = subprocess.run(
        [sys.executable, "-c", KILLS, artifact], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 12
