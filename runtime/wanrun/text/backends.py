"""Text encoder backends: the artifact's executables, or torch on hosts where that is faster.

A backend starts to load on request, computes embeddings, and can release its memory.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from wanrun.artifact.programs import Program, with_role
from wanrun.files import canonical_json, sha256_of
from wanrun.opened.artifact import OpenedArtifact
from wanrun.text.embedding_cache import EmbeddingCache, EmbeddingStore, made_by_jax
from wanrun.text.embeddings import TEXT_ENCODER, ArtifactEmbeddings
from wanrun.timing.clock import now
from wanrun.weights.programs import Programs

if TYPE_CHECKING:
    from wanrun.text.torch_encoder import TorchTextEncoder


def text_programs(programs: Mapping[str, Program]) -> dict[int, str]:
    """Returns the programs that encode text, by the number of tokens they take, smallest first.

    Raises:
        ArtifactError: if one takes no tokens.
    """
    names = with_role(programs, "text")
    return dict(sorted((math.prod(programs[name].array("ids")[1]), name) for name in names))


class ArtifactTextEncoder:
    """The artifact's own ``encode_text`` programs: one prompt per call, in the shortest program that fits it.

    Padding is masked, so a shorter program gives a prompt's rows the same values with less work. The choice
    of the program depends on the prompt alone.

    Args:
        programs: a profile's programs, with their weights.
        environment: the target's environment, or this machine's if it compiles the programs.
    """

    def __init__(self, programs: Programs, environment: Mapping[str, Any]) -> None:
        self._programs, self._environment = programs, environment
        self._names = text_programs(programs)

    def made_by(self) -> Mapping[str, Any]:
        """Returns, as JSON, the facts that decide an embedding's bits, besides prompt, weights and dtype."""
        digests = {name: self._programs[name].sha256 for name in self._names.values()}
        return made_by_jax(sha256_of(canonical_json(digests)), self._environment)

    def _length(self, tokens: int) -> int:
        return next(length for length in self._names if length >= tokens)

    def request(self, lengths: Iterable[int] | None = None) -> Sequence[Future[Any]]:
        """Starts to load the programs for prompts of these lengths in tokens; None: for any prompt."""
        wanted = self._names if lengths is None else sorted({self._length(n) for n in lengths})
        programs = [self._names[length] for length in wanted]
        return self._programs.request(programs=programs, components=[TEXT_ENCODER])

    def __call__(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Encodes ids and mask, int32 (P, L), to embeddings (P, L, D) in the compute dtype."""
        embeddings: list[np.ndarray] = []
        for one, keep in zip(ids, mask, strict=True):
            rows = self._encoded(self._length(int(keep.sum())), one, keep)
            padded = np.zeros((len(one), rows.shape[1]), rows.dtype)
            padded[: len(rows)] = rows
            embeddings.append(padded)
        return np.stack(embeddings)

    def _encoded(self, length: int, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        encode = self._programs.bound(self._names[length])
        return np.asarray(encode(ids=ids[None, :length], mask=mask[None, :length])["embeddings"])[0]

    def at_lengths(self, ids: np.ndarray, mask: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the embedding (length, D) of one prompt, ids and mask (L,), by each program that it fits."""
        for length in self._names:
            if length >= mask.sum():
                yield length, self._encoded(length, ids, mask)

    def warm_up(self) -> None:
        """Executes every program once."""
        for length in self._names:
            self(np.ones((1, length), np.int32), np.ones((1, length), np.int32))

    def release(self) -> None:
        """Releases the encoder's memory until the next request."""
        self._programs.weights.release(TEXT_ENCODER)


class TorchBackend:
    """transformers' text encoder, loaded in the background (``wanrun.text.torch_encoder``).

    Its methods are those of ``ArtifactTextEncoder``.

    Args:
        opened: the artifact.
        dtype: the compute dtype.

    Raises:
        UsageError: if torch or transformers is not installed, or there is no such device.
    """

    def __init__(self, opened: OpenedArtifact, dtype: str) -> None:
        from wanrun.text.torch_encoder import TorchTextEncoder, check_torch

        policy = opened.policy
        self._device, self._recorder = policy.text_encoder_device or "cpu", opened.recorder
        self._nbytes = opened.manifest.components[TEXT_ENCODER].nbytes
        check_torch(self._device)
        self._make = functools.partial(
            TorchTextEncoder,
            opened.folder,
            opened.manifest,
            dtype=dtype,
            device=self._device,
            verify=policy.verify,
            weights=policy.weights,
            clock=now,
            warn=opened.warn,
        )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._lock, self._running = threading.Lock(), threading.Lock()
        self._encoder: Future[TorchTextEncoder] | None = None

    def made_by(self) -> Mapping[str, Any]:
        from wanrun.text.torch_encoder import torch_facts

        return {"backend": "torch", **torch_facts(self._device)}

    def request(self, lengths: Iterable[int] | None = None) -> Sequence[Future[Any]]:
        with self._lock:
            if self._encoder is None:
                self._encoder = self._pool.submit(self._load)
            return [self._encoder]

    def _load(self) -> TorchTextEncoder:
        with self._recorder.phase("import", "torch"):
            encoder = self._make()
        self._recorder.add("restore", *encoder.restored, TEXT_ENCODER)
        self._recorder.count(restore_bytes=self._nbytes)
        return encoder

    def __call__(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        (encoder,) = self.request()
        with self._running:  # torch has its own threads, and compiles in the first call
            return np.asarray(encoder.result().encode(ids, mask))

    def at_lengths(self, ids: np.ndarray, mask: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        yield len(ids), self(ids[None], mask[None])[0]

    def warm_up(self) -> None:
        """Compiles the encoder's blocks."""
        self(np.ones((1, 64), np.int32), np.ones((1, 64), np.int32))

    def release(self) -> None:
        with self._lock:
            encoder, self._encoder = self._encoder, None
        if encoder is not None and not encoder.cancel() and encoder.exception() is None:
            encoder.result().close()


TextBackend = ArtifactTextEncoder | TorchBackend


def embedding_stores(opened: OpenedArtifact, backend: TextBackend) -> list[EmbeddingStore]:
    """Returns the embedding stores that the artifact's policy allows, in look-up order."""
    which, stores = opened.policy.embeddings, list[EmbeddingStore]()
    if which != "none":
        stores.append(ArtifactEmbeddings(opened.folder, opened.manifest))
    if which == "all":
        stores.append(EmbeddingCache(opened.manifest, backend.made_by(), warn=opened.warn))
    return stores
