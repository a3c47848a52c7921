"""Turns prompts into embeddings, stored ones if available, or else computed by the text encoder."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from wanrun.errors import WanError, shortened
from wanrun.text.embeddings import all_finite
from wanrun.text.tokenizer import TokenizedPrompts, clean_prompt

if TYPE_CHECKING:
    from wanrun.text.embedding_cache import EmbeddingStore

REMEMBERED = 64
"""Embeddings kept in memory: at most 4 MB each in bfloat16 at UMT5-XXL's width, 0.4 MB for 50 tokens."""

FETCHED = 32
"""Embeddings computed at a time; each takes 4 MB with padding."""

Warn = Callable[[str], None]


def silent(message: str) -> None:
    """Drops a warning."""
    del message


CUT_WORDS = 12
"""Words that a warning shows of the end of a prompt that is too long."""


def cut_warning(max_length: int, cut: str) -> str:
    """Returns the warning for a prompt that is too long."""
    words = cut.split()
    shown = shortened(" ".join(words[:CUT_WORDS]), 120)
    more = f" and {len(words) - CUT_WORDS} words more" if len(words) > CUT_WORDS else ""
    return f"the prompt is longer than {max_length} tokens; this was cut: {shown}{more}"


class PromptEncoder:
    """A thread-safe encoder of prompts, which looks into stores first.

    Stored and newly computed embeddings take the same path, so both have the same bits: a prompt's own rows,
    followed by +0.0.

    Args:
        tokenize: tokenizes cleaned prompts, like ``PromptTokenizer``; called only when needed.
        encode: encodes ids and mask, int32 (P, L), to embeddings (P, L, D) in dtype. It gets all missing
            prompts in one call, so it may batch them; it is called late, so it may load the encoder first.
        stores: stores to look in, in this order; a new embedding is put into all of them.
        length: L, tokens per prompt.
        width: D.
        remembered: the number of embeddings kept in this process.
    """

    def __init__(
        self,
        tokenize: Callable[[Sequence[str]], TokenizedPrompts],
        encode: Callable[[np.ndarray, np.ndarray], np.ndarray],
        stores: Sequence[EmbeddingStore],
        *,
        length: int,
        width: int,
        dtype: np.dtype,
        remembered: int = REMEMBERED,
    ) -> None:
        self._tokenize, self._encode, self._stores = tokenize, encode, tuple(stores)
        self._length, self._width, self._dtype = length, width, np.dtype(dtype)
        self._lock, self._capacity = threading.Lock(), remembered
        self._rows: OrderedDict[str, np.ndarray] = OrderedDict()

    def missing(self, prompts: Sequence[str]) -> list[str]:
        """Returns the prompts, as given, that the encoder would have to encode; each embedding counts once.

        Raises ArtifactError if an embedding that the artifact lists is damaged.
        """
        distinct: dict[str, str] = {}
        for prompt in prompts:
            distinct.setdefault(clean_prompt(prompt), prompt)
        return [prompt for cleaned, prompt in distinct.items() if self._find(cleaned) is None]

    def fetch(self, prompts: Sequence[str]) -> None:
        """Computes the embeddings of prompts that will be asked for later, and keeps all of them.

        Raises ArtifactError if an embedding that the artifact lists is damaged; WanError if the encoder gives
        NaN or infinity.
        """
        cleaned = list(dict.fromkeys(clean_prompt(prompt) for prompt in prompts))
        self._capacity = max(self._capacity, len(cleaned))
        missing = [prompt for prompt in cleaned if self._find(prompt) is None]
        if missing:
            tokens = self._tokenize(missing)
            for begin in range(0, len(missing), FETCHED):
                self._make(missing, tokens, range(begin, min(begin + FETCHED, len(missing))))

    def __call__(self, prompts: Sequence[str], warn: Warn = silent) -> np.ndarray:
        """Returns embeddings (P, L, D) in the compute dtype, zero past each length; warns of cut prompts.

        Raises as ``fetch``.
        """
        cleaned = [clean_prompt(prompt) for prompt in prompts]
        distinct = list(dict.fromkeys(cleaned))
        embeddings = np.zeros((len(prompts), self._length, self._width), self._dtype)
        if not distinct:
            return embeddings
        found = {prompt: self._find(prompt) for prompt in distinct}
        rows = {prompt: stored for prompt, stored in found.items() if stored is not None}
        # An embedding of a cut prompt has all L rows; a shorter embedding needs no tokenizer.
        unsure = [prompt for prompt in distinct if len(rows.get(prompt, embeddings[0])) == self._length]
        if unsure:
            tokens = self._tokenize(unsure)
            for cut in tokens.cut:
                if cut is not None:
                    warn(cut_warning(self._length, cut))
            missing = [index for index, prompt in enumerate(unsure) if prompt not in rows]
            if missing:
                rows |= self._make(unsure, tokens, missing)
        for embedding, prompt in zip(embeddings, cleaned, strict=True):
            embedding[: len(rows[prompt])] = rows[prompt]
        return embeddings

    def _find(self, cleaned: str) -> np.ndarray | None:
        """Returns a prompt's rows from memory or a store, or None."""
        with self._lock:
            if cleaned in self._rows:
                self._rows.move_to_end(cleaned)
                return self._rows[cleaned]
        for store in self._stores:
            rows = store.find(cleaned, self._dtype.name)
            if rows is not None:
                self._remember(cleaned, rows)
                return rows
        return None

    def _make(
        self, prompts: Sequence[str], tokens: TokenizedPrompts, missing: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Encodes the prompts at these indices, and stores the results."""
        made = np.asarray(self._encode(tokens.ids[missing], tokens.mask[missing]))
        expected = (len(missing), self._length, self._width)
        if made.shape != expected or made.dtype != self._dtype:
            raise ValueError(
                f"the text encoder gives {made.dtype} {made.shape}, not {self._dtype} {expected}"
            )
        rows: dict[str, np.ndarray] = {}
        for index, embedding in zip(missing, made, strict=True):
            own = np.array(embedding[: tokens.lengths[index]])  # a copy, so that the padding is freed
            if not all_finite(own):
                raise WanError(
                    # Not the prompt itself: a server's log has this line.
                    "not_finite",
                    f"the embedding of a prompt of {len(prompts[index])} characters is not finite",
                    expected="numbers",
                    found="NaN or infinity",
                    remedy="check the weights with wanbuild verify, or build with --dtype float32",
                )
            rows[prompts[index]] = own
        for prompt, own in rows.items():
            self._remember(prompt, own)
            for store in self._stores:
                store.put(prompt, own)
        return rows

    def _remember(self, cleaned: str, rows: np.ndarray) -> None:
        rows.flags.writeable = False
        with self._lock:
            self._rows[cleaned] = rows
            self._rows.move_to_end(cleaned)
            while len(self._rows) > self._capacity:
                self._rows.popitem(last=False)
