"""The user's cache of prompt embeddings.

An entry is a file, ``<key>.embedding``: an .npy file of the rows, and a digest behind it. The key is the
embedding's key combined with the facts about its encoder, so a cache hit has the same bits as a miss.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wanrun.artifact.manifest import Manifest
from wanrun.files import SEAL_BYTES, canonical_json, read_bounded, sealed, sha256_of, unsealed, user_cache
from wanrun.machine.environment import host_environment, usable_cores
from wanrun.temporary import temporary_path
from wanrun.text.embeddings import ArtifactEmbeddings, EmbeddingFormat, encode_rows

CACHE_BYTES = 2**30
"""Size limit of the user's cache: some 2500 prompts of 50 tokens in bfloat16 at UMT5-XXL's width."""

SUFFIX = ".embedding"

REMOVED = re.compile(rf"[0-9a-f]{{64}}(\{SUFFIX}|\.npy|\.json)")
"""Names of the files that are removed where the cache is full: those of older versions too."""

Warn = Callable[[str], None]


def made_by_jax(program_sha256: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that decide the bits of an embedding of ``encode_text``, besides its key.

    The environment is that of the target whose executable ran, or of this machine if it compiled.
    """
    return {
        "backend": "jax",
        "program": program_sha256,
        "environment": dict(environment),
        # A CPU executable calls kernels that depend on the CPU model and the number of cores.
        "host": host_environment(environment["platform"]),
        "cores": usable_cores(),
    }


class EmbeddingCache:
    """The user's cache of embeddings, safe for concurrent processes and threads.

    A file system error is reported once as a warning, and the run continues without the cache. Above the size
    limit, the least recently used entries are removed. Prompts are private: only its owner can read the
    folder. ``made_by`` are the facts that decide the bits besides the key, as JSON, such as ``made_by_jax``;
    the default folder is $XDG_CACHE_HOME/wanrun/embeddings.
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
        self._format, self._made_by = EmbeddingFormat(manifest), dict(made_by)
        self._warn, self._max_bytes = warn, max_bytes
        self._lock, self._warned = threading.Lock(), False
        self._folder = user_cache() / "embeddings" if folder is None else folder

    def name(self, cleaned_prompt: str, dtype: str) -> str:
        """Returns the name of an entry."""
        embedding = self._format.key(cleaned_prompt, dtype)
        return sha256_of(canonical_json({"embedding": embedding, "made_by": self._made_by})) + SUFFIX

    def find(self, cleaned_prompt: str, dtype: str) -> np.ndarray | None:
        """Returns the prompt's embedding (length, D) in dtype; None if there is no intact entry."""
        path = self._folder / self.name(cleaned_prompt, dtype)
        try:
            content = read_bounded(path, self._format.limit + SEAL_BYTES, touch=True)
            return self._format.decode(unsealed(path.name, content), dtype)
        except FileNotFoundError:
            return None
        except ValueError as error:
            self._warn(f"the cached prompt embedding {path} is damaged and is made again: {error}")
            return None
        except OSError as error:
            self._unusable(error)
            return None

    def put(self, cleaned_prompt: str, rows: np.ndarray) -> None:
        """Stores an embedding (length, D) atomically; a power failure may leave a damaged entry."""
        path = self._folder / self.name(cleaned_prompt, rows.dtype.name)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with temporary_path(path) as temporary:
                # Prompts are private: readable only by their owner.
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with open(descriptor, "wb") as file:  # noqa: PTH123
                    file.write(sealed(path.name, encode_rows(rows)))
                temporary.replace(path)
            self._trim(self._folder)
        except OSError as error:
            self._unusable(error)

    def _trim(self, folder: Path) -> None:
        """Removes the least recently used entries until the rest fits."""
        entries = list[tuple[float, int, str]]()
        with os.scandir(folder) as found:
            for file in found:
                with contextlib.suppress(OSError):  # another process removed it
                    if REMOVED.fullmatch(file.name):
                        status = file.stat(follow_symlinks=False)
                        entries.append((status.st_mtime, status.st_size, file.path))
        excess = sum(size for _, size, _ in entries) - self._max_bytes
        for _, size, path in sorted(entries):
            if excess <= 0:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - a name, not a path
            excess -= size

    def _unusable(self, error: OSError) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            self._warn(
                f"prompt embeddings cannot be cached in {self._folder}: {error.strerror}; "
                "set XDG_CACHE_HOME to a folder that can be written, or pass --no-embedding-cache"
            )


EmbeddingStore = ArtifactEmbeddings | EmbeddingCache
"""The places where an embedding may be found before it is made."""
