"""The user's cache of prompt embeddings: what is found is whole, and what goes wrong is a warning."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers import UNPRIVILEGED
from helpers.small_disk import small_disk
from helpers.texts import PROMPT, random_rows, same
from wanrun.artifact.manifest import Manifest
from wanrun.machine.environment import host_environment
from wanrun.text.embedding_cache import EmbeddingCache, made_by_jax
from wanrun.text.embeddings import encode_rows


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


class Cache:
    """A cache in a folder, its entry of PROMPT, and its warnings."""

    def __init__(self, manifest: Manifest, folder: Path, **options: Any) -> None:
        self.warnings: list[str] = []
        self.cache = EmbeddingCache(
            manifest, {"made": "here"}, folder=folder, warn=self.warnings.append, **options
        )
        self.path = folder / self.cache.name(PROMPT, "float32")
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
    assert {*cache.path.parent.iterdir()} == {cache.path}
    with cache.path.open("rb") as file:
        assert np.load(file, allow_pickle=False).tobytes() == cache.rows.tobytes()
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
    (line,) = warnings
    assert "Not a directory" in line and "XDG_CACHE_HOME" in line


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
        _change(lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:]),
        _change(lambda data: data + bytes(10_000_000)),
        _change(lambda data: encode_rows(random_rows(5, 32, seed=1))),
        _fifo,
    ],
)
def test_a_damaged_entry_is_made_again(cache: Cache, damage: Callable[[Path], None]) -> None:
    cache.cache.put(PROMPT, cache.rows)
    damage(cache.path)
    assert cache.cache.find(PROMPT, "float32") is None
    (line,) = cache.warnings
    assert f"{cache.path} " in line and "\n" not in line
    cache.cache.put(PROMPT, cache.rows)
    assert same(cache.cache.find(PROMPT, "float32"), cache.rows)
    assert len(cache.warnings) == 1


def test_entries_of_something_else(cache: Cache) -> None:
    """Whole ones: of another prompt or dtype, and not of this text encoder."""
    for prompt, dtype in (("another", "float32"), (PROMPT, "bfloat16")):
        cache.cache.put(PROMPT, cache.rows)
        cache.path.rename(cache.path.with_name(cache.cache.name(prompt, dtype)))
        assert cache.cache.find(prompt, dtype) is None
    assert len(cache.warnings) == 2 and all("digest" in line for line in cache.warnings)
    for rows in (random_rows(5, 31), random_rows(513, 32), np.full((5, 32), np.nan, np.float32)):
        cache.cache.put(PROMPT, rows)
        assert cache.cache.find(PROMPT, "float32") is None
    assert len(cache.warnings) == 5 and all(f"{cache.path} " in line for line in cache.warnings[2:])


def check_unusable(cache: Cache, reason: str) -> None:
    """One warning, whatever is asked of the cache and however often."""
    for number in range(3):
        assert cache.cache.find(PROMPT, "float32") is None
        cache.cache.put(PROMPT, cache.rows + number)
    (line,) = cache.warnings
    assert f"{cache.path.parent}: {reason}" in line
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
    with small_disk(tmp_path, 4096):
        (tmp_path / "filler").write_bytes(bytes(4096))
        cache = Cache(manifest, tmp_path)
        check_unusable(cache, "No space left on device")
        assert [path.name for path in tmp_path.iterdir()] == ["filler"]  # nor a part of an entry


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
from wanrun.text.embedding_cache import EmbeddingCache
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
    denied, large = os.strerror(errno.EACCES), os.strerror(errno.EFBIG)
    assert f"{closed}: {denied}" in first[0] and f"{unreadable}: {denied}" in second[0]
    assert f"{small}: {large}" in third[0]
    assert list(small.iterdir()) == [] and len(list(closed.iterdir())) == 1


def file_of(cache: EmbeddingCache, folder: Path, number: int) -> Path:
    return folder / cache.name(f"prompt {number}", "float32")


def test_the_oldest_entries_are_removed(manifest: Manifest, tmp_path: Path) -> None:
    """With those of older versions, and what a killed run has left; never what is somebody else's."""
    first = Cache(manifest, tmp_path).cache
    first.put("prompt 0", random_rows(5, 32))
    size = file_of(first, tmp_path, 0).stat().st_size
    limited = Cache(manifest, tmp_path, max_bytes=4 * size).cache
    now = time.time()
    for number in range(4):
        limited.put(f"prompt {number}", random_rows(5, 32, seed=number))
        os.utime(file_of(limited, tmp_path, number), (now - 100 + number, now - 100 + number))
    assert limited.find("prompt 0", "float32") is not None  # now it was used last
    others = [tmp_path / name for name in ("notes.txt", "mine.json", ".wan-00000000-1-0000cdef.tmp")]
    gone = [
        tmp_path / name for name in (f"{'0' * 64}.npy", f"{'0' * 64}.json", ".wan-00000000-1-0000abcd.tmp")
    ]
    for path in (*others, *gone):
        path.write_bytes(bytes(900))
        if path != others[-1]:  # which is being written
            os.utime(path, (now - 2 * 86400,) * 2)
    for number in (4, 5):
        limited.put(f"prompt {number}", random_rows(5, 32, seed=number))
    left = [number for number in range(6) if limited.find(f"prompt {number}", "float32") is not None]
    assert left == [0, 3, 4, 5]
    assert {*tmp_path.iterdir()} == {file_of(limited, tmp_path, number) for number in left} | {*others}


CONCURRENT = """
import sys
from pathlib import Path
import numpy as np
from wanrun.text.embedding_cache import EmbeddingCache
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


@pytest.mark.slow
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
    assert all(path.suffix == ".embedding" for path in (tmp_path / "cache").iterdir())


def test_every_number_of_bfloat16(manifest: Manifest, tmp_path: Path) -> None:
    """Every finite bit pattern of bfloat16 comes back, subnormal numbers and negative zero too."""
    bits = np.arange(2**16, dtype=np.uint16)
    every = bits[bits & 0x7F80 != 0x7F80].view(ml_dtypes.bfloat16)
    rows = every[: len(every) // 32 * 32].reshape(-1, 32)
    cache = Cache(manifest, tmp_path).cache
    for start in range(0, len(rows), 512):
        cache.put(f"part {start}", rows[start : start + 512])
        assert same(cache.find(f"part {start}", "bfloat16"), rows[start : start + 512])
