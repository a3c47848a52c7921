"""Embedding files, the artifact's embeddings and the user's cache of them."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers import UNPRIVILEGED
from wanrun.artifact.environment import host_environment
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.errors import ArtifactError
from wanrun.files import sha256_of
from wanrun.text import embeddings as module
from wanrun.text.embeddings import (
    ArtifactEmbeddings,
    EmbeddingCache,
    decode_file,
    embedding_file,
    embedding_key,
    encode_file,
    made_by_jax,
)

PROMPT = "a fox — “quoted” 猫 \U0001f98a"
KEY = "0" * 64


def random_rows(length: int, width: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((length, width)).astype(module.DTYPES[dtype])


def same(first: np.ndarray | None, second: np.ndarray) -> bool:
    """Equal in dtype, shape and every bit."""
    return (
        first is not None
        and first.dtype == second.dtype
        and first.shape == second.shape
        and first.tobytes() == second.tobytes()
    )


# --- the file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 32), (512, 33)])
def test_a_file_holds_the_bits(dtype: str, shape: tuple[int, int]) -> None:
    rows = random_rows(*shape, dtype)
    rows[0, 0] = -0.0
    data = encode_file(rows, KEY, PROMPT)
    assert same(decode_file(data, KEY, PROMPT, dtype, 512, shape[1]), rows)
    assert data == encode_file(rows.copy(order="F"), KEY, PROMPT)
    assert len(data) < rows.nbytes + 6 * len(PROMPT) + module.OVERHEAD_BYTES / 8
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        stored = archive["rows"]
        assert json.loads(archive["facts.json"])["prompt"] == PROMPT
    assert stored.tobytes() == rows.tobytes()
    assert stored.dtype == (np.uint16 if dtype == "bfloat16" else np.float32)


@pytest.mark.parametrize("shape", [(1, 1), (3, 4096), (512, 4096), (99, 12345)])
def test_the_header_is_numpys(shape: tuple[int, int]) -> None:
    for dtype, stored in module.STORED.items():
        file = io.BytesIO()
        np.lib.format.write_array(file, np.empty(shape, stored), (1, 0), allow_pickle=False)
        header = module._npy_header(dtype, *shape)
        assert file.getvalue()[: len(header)] == header
        assert file.tell() == len(header) + shape[0] * shape[1] * stored.itemsize


def test_a_damaged_file_is_refused() -> None:
    """Cut off anywhere, or with any bit flipped: a ValueError, or, where the bit says nothing, the same."""
    rows = random_rows(3, 4)
    data = encode_file(rows, KEY, "a fox")
    for length in range(len(data)):
        with pytest.raises(ValueError):
            decode_file(data[:length], KEY, "a fox", "float32", 512, 4)
    refused = 0
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found = decode_file(bytes(damaged), KEY, "a fox", "float32", 512, 4)
        except ValueError:
            refused += 1
        else:
            assert same(found, rows)
    assert refused > 6 * len(data)  # the rest are times and attributes of the archive's members


def test_random_damage_is_refused() -> None:
    random = np.random.default_rng(1)
    rows = random_rows(3, 4)
    data = np.frombuffer(encode_file(rows, KEY, "a fox"), np.uint8)
    for _ in range(2000):
        damaged = data.copy()
        count = int(random.integers(1, 40))
        damaged[random.integers(0, len(data), count)] = random.integers(0, 256, count)
        start, end = sorted(random.integers(0, len(data), 2))
        cut = np.delete(damaged, slice(start, end)) if random.random() < 0.5 else damaged
        try:
            found = decode_file(cut.tobytes(), KEY, "a fox", "float32", 512, 4)
        except ValueError:
            continue
        assert same(found, rows)


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in members.items():
            file.writestr(zipfile.ZipInfo(name), data, compression)
    return buffer.getvalue()


def sound_members(rows: np.ndarray) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(encode_file(rows, KEY, "a fox"))) as file:
        return {name: file.read(name) for name in file.namelist()}


FACTS = {"key": KEY, "prompt": "a fox", "dtype": "float32", "length": 3, "width": 4}


@pytest.mark.parametrize(
    "facts",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"[" * 5000,
        *(
            json.dumps({**FACTS, **change}).encode()
            for change in (
                {"key": "1" * 64},
                {"prompt": "another fox"},
                {"dtype": "bfloat16"},
                {"dtype": "object"},
                {"length": 0},
                {"length": 513},
                {"length": 2**62},
                {"length": -3},
                {"length": 3.0},
                {"length": True},
                {"length": "3"},
                {"length": None},
                {"length": 2},
                {"width": 5},
                {"extra": 1},
            )
        ),
    ],
)
def test_facts_that_do_not_fit(facts: bytes) -> None:
    with pytest.raises(ValueError):
        decode_file(archive({**sound_members(random_rows(3, 4)), "facts.json": facts}), **_asked())


def _asked() -> dict[str, Any]:
    return {"key": KEY, "cleaned_prompt": "a fox", "dtype": "float32", "max_length": 512, "width": 4}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_not_numbers(dtype: str, value: float) -> None:
    rows = random_rows(3, 4, dtype)
    rows[1, 2] = value
    with pytest.raises(ValueError, match="not all rows are numbers"):
        decode_file(encode_file(rows, KEY, "a fox"), **{**_asked(), "dtype": dtype})


def test_what_is_a_number_in_bfloat16() -> None:
    """NumPy's isfinite would warn of a signalling NaN."""
    bits = np.arange(2**16, dtype=np.uint16)
    wide = (bits.astype(np.uint32) << 16).view(np.float32)
    assert [module.all_finite(one.view(ml_dtypes.bfloat16)) for one in bits] == np.isfinite(wide).tolist()


def npy(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


def test_archives_that_do_not_fit() -> None:
    rows = random_rows(3, 4)
    sound = sound_members(rows)
    assert same(decode_file(archive(sound), **_asked()), rows)
    huge = module._npy_header("float32", 2**40, 2**20)
    for data in (
        b"",
        b"PK",
        npy(rows),
        archive({}),
        archive({"rows.npy": sound["rows.npy"]}),
        archive({**sound, "more": b""}),
        archive({"../rows.npy": sound["rows.npy"], "facts.json": sound["facts.json"]}),
        archive({**sound, "rows.npy": b""}),
        archive({**sound, "rows.npy": huge}),
        archive({**sound, "rows.npy": sound["rows.npy"] + b"\0"}),
        archive({**sound, "rows.npy": sound["rows.npy"][:-1]}),
        archive({**sound, "rows.npy": npy(rows.T)}),
        archive({**sound, "rows.npy": npy(rows.astype(np.float64))}),
        archive({**sound, "rows.npy": npy(np.array([{}], object), allow_pickle=True)}),
        archive({**sound, "facts.json": b" " * 50_000_000}, zipfile.ZIP_DEFLATED),  # 50 kB that unfold
    ):
        with pytest.raises(ValueError):
            decode_file(data, **_asked())


# --- keys ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The toy's, converted and not compiled."""
    from wanbuild.conversion.convert import ConvertRequest, convert

    return convert(ConvertRequest(toy_checkpoint, tmp_path_factory.mktemp("converted") / "artifact"))


def with_text_encoder(manifest: Manifest, **parameter: Any) -> Manifest:
    """With one parameter of the text encoder changed."""
    component = manifest.components["text_encoder"]
    path = "final_norm/weight"
    changed = dataclasses.replace(component.parameters[path], **parameter)
    parameters = {**component.parameters, path: changed}
    components = {
        **manifest.components,
        "text_encoder": dataclasses.replace(component, parameters=parameters),
    }
    return manifest.changed(components=components)


def test_what_a_key_depends_on(manifest: Manifest, tmp_path: Path) -> None:
    """Of the artifact's embeddings, and so of the cache's."""
    config = {**manifest.configs, "text_encoder": {**manifest.configs["text_encoder"], "num_heads": 3}}
    others = [
        with_text_encoder(manifest, crc32c=("00000001",)),
        with_text_encoder(manifest, sha256="0" * 64),
        manifest.changed(configs=config),
        manifest.changed(tokenizer={**manifest.tokenizer, "sha256": "0" * 64}),
        manifest.changed(tokenizer={**manifest.tokenizer, "max_length": 256}),
        manifest.changed(tokenizer={**manifest.tokenizer, "pad_id": 1}),
    ]
    keys = {embedding_key(other, "a fox", "float32") for other in (manifest, *others)}
    keys |= {embedding_key(manifest, "a fox.", "float32"), embedding_key(manifest, "a fox", "bfloat16")}
    assert len(keys) == len(others) + 3
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key in keys)

    same_key = manifest.changed(
        loras=({"file": "x"},), times={"converted": "now"}, model={}, source={"files": {}}
    )
    assert embedding_key(same_key, "a fox", "float32") in keys
    cached = {EmbeddingCache(other, {}, folder=tmp_path).key("a fox", "float32") for other in others}
    assert len(cached) == len(others) and not cached & keys


def test_what_a_cached_embedding_depends_on(manifest: Manifest, tmp_path: Path) -> None:
    environment = {**host_environment("cpu"), "device_kind": "cpu", "device_count": 1}
    makers = [
        made_by_jax("0" * 64, environment),
        made_by_jax("1" * 64, environment),
        made_by_jax("0" * 64, {**environment, "device_kind": "another"}),
        made_by_jax("0" * 64, {**environment, "packages": {"jaxlib": "0.0.1"}}),
        {"backend": "torch", "device": "cpu"},
        {"backend": "torch", "device": "cuda"},
    ]
    rows = random_rows(5, manifest.configs["text_encoder"]["d_model"])
    for number, maker in enumerate(makers):
        cache = EmbeddingCache(manifest, maker, folder=tmp_path)
        assert cache.find("a fox", "float32") is None
        cache.put("a fox", rows + number)
    assert len(list(tmp_path.iterdir())) == len(makers)
    for number, maker in enumerate(makers):
        cache = EmbeddingCache(manifest, maker, folder=tmp_path)
        assert same(cache.find("a fox", "float32"), rows + number)
        assert cache.find("a fox", "bfloat16") is None


# --- the artifact's -----------------------------------------------------------------------------------------


@pytest.fixture
def listed(manifest: Manifest, tmp_path: Path) -> tuple[Path, Manifest, np.ndarray]:
    """An artifact that has one embedding, and the embedding."""
    rows = random_rows(5, manifest.configs["text_encoder"]["d_model"], "bfloat16")
    key = embedding_key(manifest, PROMPT, "bfloat16")
    data = encode_file(rows, key, PROMPT)
    path = tmp_path / embedding_file(key)
    path.parent.mkdir()
    path.write_bytes(data)
    record = {
        "file": embedding_file(key),
        "sha256": sha256_of(data),
        "prompt": PROMPT,
        "dtype": "bfloat16",
        "length": 5,
    }
    changed = manifest.changed(embeddings={key: record})
    changed.write(tmp_path)
    return tmp_path, read_manifest(tmp_path), rows


def test_the_artifacts_embeddings(listed: tuple[Path, Manifest, np.ndarray]) -> None:
    artifact, manifest, rows = listed
    assert manifest.content_digest == manifest.changed(embeddings={}).content_digest
    store = ArtifactEmbeddings(artifact, manifest)
    assert same(store.find(PROMPT, "bfloat16"), rows)
    assert store.find(PROMPT, "float32") is None
    assert store.find(PROMPT + ".", "bfloat16") is None
    store.put("another", rows)
    assert store.find("another", "bfloat16") is None
    other = with_text_encoder(manifest, sha256="0" * 64)
    assert ArtifactEmbeddings(artifact, other).find(PROMPT, "bfloat16") is None


def test_a_damaged_embedding_of_the_artifact(listed: tuple[Path, Manifest, np.ndarray]) -> None:
    artifact, manifest, rows = listed
    ((key, record),) = manifest.embeddings.items()
    path = artifact / record["file"]
    data = path.read_bytes()
    store = ArtifactEmbeddings(artifact, manifest)

    def refused(*parts: str) -> None:
        with pytest.raises(ArtifactError) as caught:
            store.find(PROMPT, "bfloat16")
        message = str(caught.value)
        assert f"the prompt embedding {path} is damaged" in message and "run wanbuild embed" in message
        assert "\n" not in message
        for part in parts:
            assert part in message

    for offset in range(0, len(data), 37):
        damaged = bytearray(data)
        damaged[offset] ^= 1
        path.write_bytes(damaged)
        refused(f"expected sha256 {record['sha256']}", f"found {sha256_of(bytes(damaged))}")
    path.write_bytes(data[:-1])
    refused("expected sha256")
    path.write_bytes(data + bytes(10_000_000))
    refused("it is larger than")
    path.unlink()
    refused("found No such file or directory")
    os.mkfifo(path)  # and the run does not wait for somebody to write into it
    refused("it is not a file")
    path.unlink()
    path.mkdir()
    refused("Is a directory")
    path.rmdir()

    # Files that are what the manifest says, and are not the embedding of this prompt.
    width = rows.shape[1]
    for content in (
        b"",
        encode_file(rows, key, "another prompt"),
        encode_file(rows, KEY, PROMPT),
        encode_file(rows.astype(np.float32), key, PROMPT),
        encode_file(rows[:4], key, PROMPT),
        encode_file(random_rows(5, width + 1, "bfloat16"), key, PROMPT),
    ):
        path.write_bytes(content)
        changed = {key: {**record, "sha256": sha256_of(content)}}
        store = ArtifactEmbeddings(artifact, manifest.changed(embeddings=changed))
        refused()


# --- the cache ----------------------------------------------------------------------------------------------


class Cache:
    """A cache in a folder, its entry of PROMPT, and its warnings."""

    def __init__(self, manifest: Manifest, folder: Path, **options: Any) -> None:
        self.warnings: list[str] = []
        self.cache = EmbeddingCache(
            manifest, {"made": "here"}, folder=folder, warn=self.warnings.append, **options
        )
        self.path = folder / f"{self.cache.key(PROMPT, 'float32')}.npz"
        self.rows = random_rows(5, manifest.configs["text_encoder"]["d_model"])


@pytest.fixture
def cache(manifest: Manifest, tmp_path: Path) -> Cache:
    return Cache(manifest, tmp_path / "deep" / "cache")


def test_the_cache(cache: Cache, manifest: Manifest) -> None:
    assert cache.cache.find(PROMPT, "float32") is None
    assert not cache.path.parent.exists()
    cache.cache.put(PROMPT, cache.rows)
    assert same(cache.cache.find(PROMPT, "float32"), cache.rows)
    assert same(Cache(manifest, cache.path.parent).cache.find(PROMPT, "float32"), cache.rows)
    assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name]
    assert cache.warnings == []
    # Prompts are private.
    assert stat.S_IMODE(cache.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o600


def test_where_the_cache_is(manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(5, manifest.configs["text_encoder"]["d_model"])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable, folder in (("", "home/.cache"), (str(tmp_path / "xdg"), "xdg")):
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
        EmbeddingCache(manifest, {}).put(PROMPT, rows)
        assert len(list((tmp_path / folder / "wanrun" / "embeddings").iterdir())) == 1


def test_without_a_home(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", _no_home)
    warnings: list[str] = []
    cache = EmbeddingCache(manifest, {}, warn=warnings.append)
    cache.put(PROMPT, random_rows(5, 32))
    assert cache.find(PROMPT, "float32") is None
    assert len(warnings) == 1 and "Could not determine home directory" in warnings[0]


def _no_home(path: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _change(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(change(path.read_bytes())), None)[1]


@pytest.mark.parametrize(
    "damage",
    [
        _change(lambda data: b""),
        _change(lambda data: data[:-1]),
        _change(lambda data: data[: len(data) // 2]),
        _change(lambda data: bytes(len(data))),
        _change(lambda data: data[:300] + bytes([data[300] ^ 1]) + data[301:]),
        _change(lambda data: data + bytes(10_000_000)),
        _change(lambda data: encode_file(random_rows(5, 32), KEY, PROMPT)),
        _fifo,
    ],
)
def test_a_damaged_entry_is_made_again(cache: Cache, damage: Callable[[Path], None]) -> None:
    cache.cache.put(PROMPT, cache.rows)
    damage(cache.path)
    assert cache.cache.find(PROMPT, "float32") is None
    (line,) = cache.warnings
    assert f"{cache.path} is damaged and is made again" in line
    cache.cache.put(PROMPT, cache.rows)
    assert same(cache.cache.find(PROMPT, "float32"), cache.rows)
    assert len(cache.warnings) == 1


def check_unusable(cache: Cache, reason: str) -> None:
    """One warning, whatever is asked of the cache and however often."""
    for number in range(3):
        assert cache.cache.find(PROMPT, "float32") is None
        cache.cache.put(PROMPT, cache.rows + number)
    (line,) = cache.warnings
    assert f"prompt embeddings cannot be cached in {cache.path.parent}: {reason}" in line
    assert "--no-embedding-cache" in line and "\n" not in line


def test_a_folder_that_is_a_file(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    check_unusable(Cache(manifest, tmp_path / "file"), "Not a directory")
    check_unusable(Cache(manifest, tmp_path / "file" / "cache"), "Not a directory")
    (tmp_path / "loop").symlink_to("loop")
    check_unusable(Cache(manifest, tmp_path / "loop"), "Too many levels of symbolic links")
    (tmp_path / "dangling").symlink_to("nowhere/else")
    check_unusable(Cache(manifest, tmp_path / "dangling"), "File exists")


def test_a_disk_that_is_full(manifest: Manifest, tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=4096", "none", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can be mounted by root only")
    try:
        (tmp_path / "filler").write_bytes(bytes(4096))
        cache = Cache(manifest, tmp_path)
        check_unusable(cache, "No space left on device")
        assert [path.name for path in tmp_path.iterdir()] == ["filler"]  # nor a part of an entry
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_disk_that_fails(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "replace", fail)
    check_unusable(cache, "Input/output error")
    assert list(cache.path.parent.iterdir()) == []


READ_ONLY_CACHE = """
import json, resource, sys
from pathlib import Path
import numpy as np
from wanrun.text.embeddings import EmbeddingCache
from wanrun.artifact.manifest import read_manifest

artifact, closed, unreadable, small = map(Path, sys.argv[1:])
manifest = read_manifest(artifact)
rows = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)
found = []
for folder in (closed, unreadable, small):
    if folder == small:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    warnings = []
    cache = EmbeddingCache(manifest, {}, folder=folder, warn=warnings.append)
    for _ in range(3):
        hit = cache.find("a fox", "float32")
        cache.put("a fox", rows)
    found.append([hit is not None and hit.tobytes() == rows.tobytes(), warnings])
print(json.dumps(found))
"""


def test_without_rights(manifest: Manifest, tmp_path: Path) -> None:
    """A read-only cache still serves; one that cannot be read or written is done without."""
    manifest.write(tmp_path)
    closed, unreadable, small = (tmp_path / name for name in ("closed", "unreadable", "small"))
    for folder in (closed, unreadable, small):
        folder.mkdir()
    EmbeddingCache(manifest, {}, folder=closed).put("a fox", random_rows(5, 32))
    closed.chmod(0o555)
    unreadable.chmod(0)
    command = [sys.executable, UNPRIVILEGED, sys.executable, "-c", READ_ONLY_CACHE]
    done = subprocess.run(
        [*command, tmp_path, closed, unreadable, small],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    closed.chmod(0o755)
    unreadable.chmod(0o755)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    (hit, first), (no_hit, second), (nothing, third) = json.loads(done.stdout)
    assert (hit, no_hit, nothing) == (True, False, False)
    assert len(first) == len(second) == len(third) == 1
    assert f"{closed}: Permission denied" in first[0] and f"{unreadable}: Permission denied" in second[0]
    assert f"{small}: File too large" in third[0]
    assert list(small.iterdir()) == [] and len(list(closed.iterdir())) == 1


def test_the_oldest_entries_are_removed(manifest: Manifest, tmp_path: Path) -> None:
    size = len(encode_file(random_rows(5, 32), KEY, "prompt 0"))
    limited = Cache(manifest, tmp_path, max_bytes=4 * size).cache
    now = time.time()
    for number in range(4):
        limited.put(f"prompt {number}", random_rows(5, 32, seed=number))
        path = tmp_path / f"{limited.key(f'prompt {number}', 'float32')}.npz"
        os.utime(path, (now - 100 + number, now - 100 + number))
    assert limited.find("prompt 0", "float32") is not None  # now it was used last
    (tmp_path / "notes.txt").write_text("somebody else's")
    (tmp_path / ".wan-old.tmp").write_text("of a killed run")
    os.utime(tmp_path / ".wan-old.tmp", (now - 7200, now - 7200))
    (tmp_path / ".wan-new.tmp").write_text("being written")
    for number in (4, 5):
        limited.put(f"prompt {number}", random_rows(5, 32, seed=number))
    left = [number for number in range(6) if limited.find(f"prompt {number}", "float32") is not None]
    assert left == [0, 3, 4, 5]
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".npz") == [".wan-new.tmp", "notes.txt"]


CONCURRENT = """
import sys
from pathlib import Path
import numpy as np
from wanrun.text.embeddings import EmbeddingCache
from wanrun.artifact.manifest import read_manifest

artifact, folder, number = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
manifest = read_manifest(artifact)

def fail(message):
    raise SystemExit(message)

# So small that they remove each other's entries while they read and write them.
cache = EmbeddingCache(manifest, {}, folder=folder, warn=fail, max_bytes=400_000)
random = np.random.default_rng(number)
hits = 0
for _ in range(400):
    index = int(random.integers(8))
    rows = np.random.default_rng(index).standard_normal((400, 32)).astype(np.float32)
    found = cache.find(f"prompt {index}", "float32")
    if found is None:
        cache.put(f"prompt {index}", rows)
    else:
        hits += 1
        assert found.tobytes() == rows.tobytes()
    if random.random() < 0.3:
        cache.put(f"prompt {index}", rows)
assert hits > 50, hits
"""


def test_processes_that_write_at_once(manifest: Manifest, tmp_path: Path) -> None:
    """What is found is whole, and nobody is warned of anything."""
    manifest.write(tmp_path)
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", CONCURRENT, tmp_path, tmp_path / "cache", str(number)],
            stderr=subprocess.PIPE,
        )
        for number in range(2)
    ]
    for run in runs:
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 0 and errors == b"", errors.decode()
    assert all(path.suffix == ".npz" for path in (tmp_path / "cache").iterdir())


def test_every_number_of_bfloat16(manifest: Manifest, tmp_path: Path) -> None:
    """Every finite bit pattern of bfloat16 comes back, subnormal numbers and negative zero too."""
    bits = np.arange(2**16, dtype=np.uint16)
    every = bits[bits & 0x7F80 != 0x7F80].view(ml_dtypes.bfloat16)
    rows = every[: len(every) // 32 * 32].reshape(-1, 32)
    cache = Cache(manifest, tmp_path).cache
    for start in range(0, len(rows), 512):
        cache.put(f"part {start}", rows[start : start + 512])
        assert same(cache.find(f"part {start}", "bfloat16"), rows[start : start + 512])
