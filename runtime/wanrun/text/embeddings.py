"""Stored prompt embeddings: those of an artifact, and a cache of the user's.

An embedding is what ``encode_text`` gives for one prompt: (length, D), the prompt's own rows alone. All
that it depends on is in its key: the text encoder's checksums and config, the tokenizer, the cleaned prompt
and the compute dtype. The cache's key also covers what made it, so that a hit has the bits of a miss; the
artifact's embeddings were made once, by its builder, and are the same wherever it runs.

A file is an .npz of two uncompressed members, which ``numpy.load(..., allow_pickle=False)`` reads:
``rows.npy``, float32 or the bits of bfloat16 as uint16, and ``facts.json``. Equal content gives equal bytes,
and the archive has a CRC of each member.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import struct
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wanrun.artifact.environment import host_environment, usable_cores
from wanrun.artifact.manifest import Manifest
from wanrun.errors import ArtifactError
from wanrun.files import canonical_json, check_digest, sha256_of, user_cache
from wanrun.loading.buffers import DTYPES

TEXT_ENCODER = "text_encoder"
"""The component whose embeddings these are."""

STORED: Mapping[str, np.dtype] = {"bfloat16": np.dtype("<u2"), "float32": np.dtype("<f4")}
"""The dtypes that an embedding may have, and what NumPy's own format holds for each."""

FACTS, ROWS = "facts.json", "rows.npy"
OVERHEAD_BYTES = 8 * 1024
"""More than an embedding's file has beside its rows and its prompt."""

CACHE_BYTES = 2**30
"""Where the user's cache stops growing: some 2500 prompts of 50 tokens in bfloat16 at UMT5-XXL's width."""

ABANDONED_SECONDS = 3600
"""Age of a temporary file that no run can still be writing."""

Warn = Callable[[str], None]


def text_digest(manifest: Manifest) -> str:
    """sha256 of what turns a cleaned prompt into numbers: tokenizer, the encoder's config and weights."""
    parameters = manifest.components[TEXT_ENCODER].as_json()["parameters"]
    content = {
        "parameters": parameters,
        "config": manifest.configs[TEXT_ENCODER],
        "tokenizer": manifest.tokenizer,
    }
    return sha256_of(canonical_json(content))


def embedding_key(manifest: Manifest, cleaned_prompt: str, dtype: str) -> str:
    """Hexadecimal name of a prompt's embedding.

    Args:
        manifest: the artifact's manifest.
        cleaned_prompt: the prompt, through ``clean_prompt``.
        dtype: name of the compute dtype.
    """
    return _key(text_digest(manifest), cleaned_prompt, dtype)


def _key(text: str, cleaned_prompt: str, dtype: str) -> str:
    return sha256_of(canonical_json({"text": text, "prompt": cleaned_prompt, "dtype": dtype}))


def embedding_file(key: str) -> str:
    """Where an artifact keeps the embedding of a key, relative to its folder."""
    return f"embeddings/{key}.npz"


def made_by_jax(program_sha256: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    """What the bits of an embedding depend on beside its key, where ``encode_text`` made it.

    Args:
        program_sha256: digest of the exported program.
        environment: of the target whose executable ran, or of this machine where it was compiled here.
    """
    return {
        "backend": "jax",
        "program": program_sha256,
        "environment": dict(environment),
        # A CPU executable calls kernels that look at the CPU and the number of its cores.
        "host": host_environment(environment["platform"]),
        "cores": usable_cores(),
    }


def all_finite(rows: np.ndarray) -> bool:
    """Whether no value is NaN or infinite; np.isfinite warns of a signalling NaN in bfloat16."""
    if rows.dtype == DTYPES["bfloat16"]:
        return bool((rows.view(np.uint16) & 0x7F80 != 0x7F80).all())
    return bool(np.isfinite(rows).all())


def encode_file(rows: np.ndarray, key: str, cleaned_prompt: str) -> bytes:
    """The file of an embedding: (length, D), bfloat16 or float32."""
    dtype = rows.dtype.name
    length, width = rows.shape
    facts = {"key": key, "prompt": cleaned_prompt, "dtype": dtype, "length": length, "width": width}
    array = _npy_header(dtype, length, width) + np.ascontiguousarray(rows).view(STORED[dtype]).tobytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in ((FACTS, canonical_json(facts)), (ROWS, array)):
            member = zipfile.ZipInfo(name)  # of a constant date
            member.create_system = 3  # and the same on every system
            archive.writestr(member, data)
    return buffer.getvalue()


def decode_file(
    data: bytes, key: str, cleaned_prompt: str, dtype: str, max_length: int, width: int
) -> np.ndarray:
    """The embedding (length, D) in dtype from a file's bytes; nothing larger than they are is allocated.

    Args:
        data: the file.
        key: the key it should be of.
        cleaned_prompt: the prompt it should be of.
        dtype: name of the dtype it should have.
        max_length: rows that it may have at most.
        width: D.

    Raises:
        ValueError: if it is anything else, or damaged.
    """
    try:
        members = _members(data)
        facts = json.loads(members[FACTS])
        length = facts["length"]
        expected = {"key": key, "prompt": cleaned_prompt, "dtype": dtype, "length": length, "width": width}
        if type(length) is not int or not 1 <= length <= max_length or facts != expected:
            raise ValueError("it is not of this prompt")
        header, array = _npy_header(dtype, length, width), members[ROWS]
        nbytes = length * width * STORED[dtype].itemsize
        if not array.startswith(header) or len(array) != len(header) + nbytes:
            raise ValueError("its rows are of another kind")
    except (KeyError, TypeError, EOFError, struct.error, zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    except RuntimeError as error:  # zipfile: it is encrypted or of a later version; json: nested too deeply
        raise ValueError(f"{type(error).__name__}: {error}") from None
    rows = np.frombuffer(array, STORED[dtype], offset=len(header)).reshape(length, width).view(DTYPES[dtype])
    if not all_finite(rows):
        raise ValueError("not all rows are numbers")
    return rows


def _npy_header(dtype: str, length: int, width: int) -> bytes:
    """The header that NumPy writes (format 1.0). Made here, so that a reader need not parse any other."""
    shape = f"({length}, {width})"
    text = f"{{'descr': {STORED[dtype].str!r}, 'fortran_order': False, 'shape': {shape}, }}"
    before = 10  # magic, version and the length of what follows
    padded = -(-(before + len(text) + 1) // 64) * 64 - before
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", padded) + text.ljust(padded - 1).encode("ascii") + b"\n"


def _members(data: bytes) -> dict[str, bytes]:
    """The two members of a file, whose CRCs are checked."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if sorted(member.filename for member in members) != [FACTS, ROWS]:
            raise ValueError("it is not an embedding")
        # So a member is a part of the data, and cannot unfold to more.
        if any(m.compress_type != zipfile.ZIP_STORED or m.file_size > len(data) for m in members):
            raise ValueError("it is compressed")
        return {member.filename: archive.read(member) for member in members}


def _read_bounded(path: Path, limit: int, touch: bool = False) -> bytes:
    """Reads a regular file of at most limit bytes.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is something else, or larger.
    """
    # A FIFO of that name must not make the run wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:  # noqa: PTH123
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a file")
        data = file.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"it is larger than {limit} bytes")
        if touch:
            with contextlib.suppress(OSError):  # of another user, or on a medium that cannot be written
                os.utime(descriptor)
        return data


class _Format:
    """What the files of one artifact's text encoder look like."""

    def __init__(self, manifest: Manifest) -> None:
        self.text = text_digest(manifest)
        self.max_length: int = manifest.tokenizer["max_length"]
        self.width: int = manifest.configs[TEXT_ENCODER]["d_model"]

    def limit(self, cleaned_prompt: str) -> int:
        """Bytes that the file of a prompt has at most."""
        rows = self.max_length * self.width * DTYPES["float32"].itemsize
        return rows + len(canonical_json(cleaned_prompt)) + OVERHEAD_BYTES

    def decode(self, data: bytes, key: str, cleaned_prompt: str, dtype: str) -> np.ndarray:
        return decode_file(data, key, cleaned_prompt, dtype, self.max_length, self.width)


class ArtifactEmbeddings:
    """The embeddings that an artifact lists.

    Args:
        artifact: the artifact's folder.
        manifest: its manifest.
    """

    def __init__(self, artifact: Path, manifest: Manifest) -> None:
        self._artifact, self._listed = artifact, manifest.embeddings
        self._format = _Format(manifest)

    def find(self, cleaned_prompt: str, dtype: str) -> np.ndarray | None:
        """The prompt's embedding (length, D) in dtype, or None if it is not listed.

        Raises:
            ArtifactError: if it is listed, and missing or damaged.
        """
        key = _key(self._format.text, cleaned_prompt, dtype)
        return self.read(key) if key in self._listed else None

    def read(self, key: str) -> np.ndarray:
        """A listed embedding (length, D).

        Raises:
            ArtifactError: if it is missing or damaged.
        """
        record = self._listed[key]
        path, prompt, dtype = self._artifact / record["file"], record["prompt"], record["dtype"]
        expected, remedy = f"sha256 {record['sha256']}", "copy the artifact again, or run wanbuild embed"
        what = f"the prompt embedding {path} is damaged"
        try:
            data = _read_bounded(path, self._format.limit(prompt))
        except OSError as error:
            raise ArtifactError(
                what, expected=expected, found=error.strerror or error, remedy=remedy
            ) from None
        except ValueError as error:
            raise ArtifactError(f"{what}: {error}", expected=expected, remedy=remedy) from None
        check_digest(sha256_of(data), record["sha256"], what, remedy)
        try:
            if key != _key(self._format.text, prompt, dtype):
                raise ValueError("its key is of another prompt or text encoder")
            rows = self._format.decode(data, key, prompt, dtype)
            if len(rows) != record["length"]:
                raise ValueError(f"it has {len(rows)} rows, not {record['length']}")
        except ValueError as error:
            raise ArtifactError(f"{what}: {error}", remedy=remedy) from None
        return rows

    def put(self, cleaned_prompt: str, rows: np.ndarray) -> None:
        """Does nothing: an artifact is changed by ``wanbuild embed`` alone."""


class EmbeddingCache:
    """The user's cache of embeddings, safe for concurrent processes and threads.

    What goes wrong with the file system is warned about once, and the run goes on without the cache. When it
    is over its size, the entries that were used longest ago are removed. Prompts are private: the folder is
    made for its owner alone.

    Args:
        manifest: the artifact's manifest.
        made_by: what the bits depend on beside the key, as JSON: ``made_by_jax``, or another backend's facts.
        folder: where it is; $XDG_CACHE_HOME/wanrun/embeddings where None.
        warn: told what went wrong.
        max_bytes: bytes of all entries.
    """

    def __init__(
        self,
        manifest: Manifest,
        made_by: Mapping[str, Any],
        *,
        folder: Path | None = None,
        warn: Warn = lambda message: None,
        max_bytes: int = CACHE_BYTES,
    ) -> None:
        self._format, self._made_by = _Format(manifest), dict(made_by)
        self._warn, self._max_bytes = warn, max_bytes
        self._lock, self._warned = threading.Lock(), False
        self._folder = folder
        if folder is None:
            try:
                self._folder = user_cache() / "embeddings"
            except RuntimeError as error:  # a user without a home
                self._unusable(error)

    def key(self, cleaned_prompt: str, dtype: str) -> str:
        """Hexadecimal name of an entry."""
        embedding = _key(self._format.text, cleaned_prompt, dtype)
        return sha256_of(canonical_json({"embedding": embedding, "made_by": self._made_by}))

    def find(self, cleaned_prompt: str, dtype: str) -> np.ndarray | None:
        """The prompt's embedding (length, D) in dtype, or None if there is no sound one."""
        if self._folder is None:
            return None
        key = self.key(cleaned_prompt, dtype)
        path = self._folder / f"{key}.npz"
        try:
            data = _read_bounded(path, self._format.limit(cleaned_prompt), touch=True)
            return self._format.decode(data, key, cleaned_prompt, dtype)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._unusable(error)
            return None
        except ValueError as error:
            self._warn(f"the cached prompt embedding {path} is damaged and is made again: {error}")
            return None

    def put(self, cleaned_prompt: str, rows: np.ndarray) -> None:
        """Keeps an embedding (length, D), atomically; after a power failure an entry may be damaged."""
        if self._folder is None:
            return
        key = self.key(cleaned_prompt, rows.dtype.name)
        data = encode_file(rows, key, cleaned_prompt)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(self._folder / f"{key}.npz", data)
            self._trim(self._folder)
        except OSError as error:
            self._unusable(error)

    def _write(self, path: Path, data: bytes) -> None:
        descriptor, name = tempfile.mkstemp(".tmp", ".wan-", path.parent)  # readable by the user alone
        try:
            with open(descriptor, "wb") as file:  # noqa: PTH123
                file.write(data)
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise

    def _trim(self, folder: Path) -> None:
        """Removes the entries used longest ago until the rest fits, and what killed runs left."""
        entries: list[tuple[float, int, str]] = []
        with os.scandir(folder) as found:
            for entry in found:
                with contextlib.suppress(OSError):  # another process removed it
                    facts = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(".npz"):
                        entries.append((facts.st_mtime, facts.st_size, entry.path))
                    elif entry.name.startswith(".wan-") and facts.st_mtime < time.time() - ABANDONED_SECONDS:
                        Path(entry.path).unlink()
        excess = sum(size for _, size, _ in entries) - self._max_bytes
        for _, size, name in sorted(entries):
            if excess <= 0:
                break
            with contextlib.suppress(OSError):
                Path(name).unlink()
            excess -= size

    def _unusable(self, error: Exception) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            reason = getattr(error, "strerror", None) or error
            where = "" if self._folder is None else f" in {self._folder}"
            self._warn(
                f"prompt embeddings cannot be cached{where}: {reason}; "
                "set XDG_CACHE_HOME to a folder that can be written, or pass --no-embedding-cache"
            )
