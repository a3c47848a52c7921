"""The artifact's text encoder: it starts to load on request, and can release its memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from wanrun.artifact.programs import Program, with_role
from wanrun.files import canonical_json, sha256_of
from wanrun.opened.opened_artifact import OpenedArtifact
from wanrun.text.embedding_cache import EmbeddingCache, EmbeddingStore, made_by_jax
from wanrun.text.embeddings import TEXT_ENCODER, ArtifactEmbeddings
from wanrun.weights.bound_programs import Programs


def text_programs(programs: Mapping[str, Program]) -> dict[int, str]:
    """Returns the programs that encode text, by the number of tokens they take, smallest first.

    Raises ArtifactError if one takes no tokens.
    """
    names = with_role(programs, "text")
    return dict(sorted((math.prod(programs[name].array("ids")[1]), name) for name in names))


class ArtifactTextEncoder:
    """The artifact's own ``encode_text`` programs: one prompt per call, in the shortest program that fits it.

    Padding is masked, so a shorter program gives a prompt's rows the same values with less work. The choice
    of the program depends only on the prompt. ``environment`` is the target's, or this machine's if it
    compiles the programs.
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


def embedding_stores(opened: OpenedArtifact, encoder: ArtifactTextEncoder) -> list[EmbeddingStore]:
    """Returns the embedding stores that the artifact's policy allows, in look-up order."""
    which, stores = opened.policy.embeddings, list[EmbeddingStore]()
    if which != "none":
        stores.append(ArtifactEmbeddings(opened.artifact))
    if which == "all":
        stores.append(EmbeddingCache(opened.manifest, encoder.made_by(), warn=opened.warn))
    return stores
