"""Prompts to embeddings: what is stored is used, what is not is encoded once and kept."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.refusals import refuses
from wanrun.errors import ArtifactError, WanError
from wanrun.text.encoder import PromptEncoder
from wanrun.text.tokenizer import PromptTokenizer, TokenizedPrompts
from wanrun.weights.buffers import DTYPES

LENGTH, WIDTH = 24, 8


@pytest.fixture(scope="module")
def tokenizer(toy_checkpoint: Path) -> PromptTokenizer:
    return PromptTokenizer(toy_checkpoint / "tokenizer" / "tokenizer.json", LENGTH)


class Store:
    """A store in memory that keeps what it is given, unless it takes nothing."""

    def __init__(self, takes: bool = True) -> None:
        self.rows: dict[tuple[str, str], np.ndarray] = {}
        self.takes = takes
        self.asked: list[str] = []

    def find(self, cleaned_prompt: str, dtype: str) -> np.ndarray | None:
        self.asked.append(cleaned_prompt)
        return self.rows.get((cleaned_prompt, dtype))

    def put(self, cleaned_prompt: str, rows: np.ndarray) -> None:
        if self.takes:
            self.rows[cleaned_prompt, rows.dtype.name] = rows.copy()


class Encoder:
    """A PromptEncoder over an encoder whose output depends on the ids, and counts its calls."""

    def __init__(
        self, tokenizer: Any, *stores: Store, dtype: str = "float32", change: Any = np.asarray, **options: Any
    ) -> None:
        self.batches: list[int] = []
        self.warnings: list[str] = []
        self.dtype, self._change = DTYPES[dtype], change
        sizes = {"length": LENGTH, "width": WIDTH, "dtype": self.dtype}
        self.prompts = PromptEncoder(tokenizer, self.encode, stores, **sizes, **options)

    def encode(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        assert ids.dtype == mask.dtype == np.int32
        self.batches.append(len(ids))
        rows = [
            np.random.default_rng(one[keep > 0]).standard_normal((LENGTH, WIDTH))
            for one, keep in zip(ids, mask, strict=True)
        ]
        # What lies past a prompt's length may be negative zero, as products with a mask are.
        made = np.where(mask[..., None] > 0, np.array(rows), -0.0).astype(self.dtype)
        return self._change(made)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hit_has_the_bits_of_a_miss(tokenizer: PromptTokenizer, dtype: str) -> None:
    store, prompts = Store(), ["a red fox", "", "snow at dawn"]
    first = Encoder(tokenizer, store, dtype=dtype)
    made = first.prompts(prompts)
    assert first.batches == [3] and made.shape == (3, LENGTH, WIDTH) and made.dtype == DTYPES[dtype]
    tokens = tokenizer(prompts)
    expected = first.encode(tokens.ids, tokens.mask)
    for embedding, reference, length in zip(made, expected, tokens.lengths, strict=True):
        assert embedding[:length].tobytes() == reference[:length].tobytes()
        assert embedding[length:].tobytes() == bytes(embedding[length:].nbytes)
        assert np.count_nonzero(embedding[:length]) == length * WIDTH

    second = Encoder(tokenizer, store, dtype=dtype)
    found = second.prompts(prompts)
    assert second.batches == []
    assert found.tobytes() == made.tobytes() and found.dtype == made.dtype
    assert first.prompts(prompts).tobytes() == made.tobytes()  # what is remembered, too
    assert sorted(rows.shape[0] for rows in store.rows.values()) == sorted(tokens.lengths)


def test_what_is_missing_is_encoded_in_one_call(tokenizer: PromptTokenizer) -> None:
    encoder = Encoder(tokenizer, Store())
    encoder.prompts(["snow"])
    together = encoder.prompts(["fox", "snow", " fox\n", "dawn", "fox"])
    assert encoder.batches == [1, 2]
    assert together[0].tobytes() == together[2].tobytes() == together[4].tobytes()
    assert len({embedding.tobytes() for embedding in together}) == 3
    alone = Encoder(tokenizer).prompts
    for embedding, prompt in zip(together, ("fox", "snow", "fox", "dawn", "fox"), strict=True):
        assert embedding.tobytes() == alone([prompt])[0].tobytes()
    assert encoder.prompts([]).shape == (0, LENGTH, WIDTH)
    assert encoder.batches == [1, 2]


def test_spellings_that_clean_to_one_prompt_share_an_entry(tokenizer: PromptTokenizer) -> None:
    store, cleaned = Store(), "tom & a fox"
    encoder = Encoder(tokenizer, store)
    made = encoder.prompts(["tom &amp; a   fox"])
    for spelling in (" tom & a fox", "tom &amp;amp; a\n\tfox  ", "tom & a\u00a0fox"):
        assert Encoder(tokenizer, store).prompts.missing([spelling]) == []
        assert encoder.prompts([spelling]).tobytes() == made.tobytes()
    assert encoder.batches == [1] and list(store.rows) == [(cleaned, "float32")]


def test_missing(tokenizer: PromptTokenizer) -> None:
    first, second = Store(takes=False), Store()
    encoder = Encoder(tokenizer, first, second)
    encoder.prompts(["fox"])
    assert (list(first.rows), list(second.rows)) == ([], [("fox", "float32")])
    prompts = ["snow", "fox", "  snow ", "", "dawn"]
    for other in (encoder, Encoder(tokenizer, first, second), Encoder(tokenizer, second)):
        assert other.prompts.missing(prompts) == ["snow", "", "dawn"]
        assert other.prompts.missing(["fox"]) == other.prompts.missing([]) == []
    assert Encoder(tokenizer, first).prompts.missing(["fox"]) == ["fox"]
    assert Encoder(tokenizer, second, dtype="bfloat16").prompts.missing(["fox"]) == ["fox"]
    assert encoder.batches == [1]
    # What was found once is not looked for again.
    asked = len(second.asked)
    other = Encoder(tokenizer, second)
    for _ in range(3):
        assert other.prompts.missing(["fox"]) == []
        other.prompts(["fox"])
    assert len(second.asked) == asked + 1


def test_the_first_store_that_has_it(tokenizer: PromptTokenizer) -> None:
    stores = Store(), Store()
    encoder = Encoder(tokenizer, *stores)
    expected = encoder.prompts(["fox"])
    stores[1].rows["fox", "float32"] = stores[1].rows["fox", "float32"] + 1
    assert Encoder(tokenizer, *stores).prompts(["fox"]).tobytes() == expected.tobytes()
    assert Encoder(tokenizer, *reversed(stores)).prompts(["fox"]).tobytes() != expected.tobytes()


def test_no_tokenizer_where_all_is_at_hand(tokenizer: PromptTokenizer) -> None:
    """Loading a tokenizer of 256 000 pieces takes a second; only a prompt that may have been cut needs it."""

    def refuse(texts: Sequence[str]) -> TokenizedPrompts:
        raise AssertionError(f"{texts} are tokenized")

    store, long = Store(), "snow " * LENGTH
    expected = Encoder(tokenizer, store).prompts(["a red fox", "", long])
    encoder = Encoder(refuse, store)
    assert encoder.prompts.missing(["a red fox", "", long]) == []
    assert encoder.prompts(["a red fox", ""]).tobytes() == expected[:2].tobytes()
    with pytest.raises(AssertionError, match="are tokenized"):
        encoder.prompts([long])


def test_a_cut_prompt_is_warned_about_every_time(tokenizer: PromptTokenizer) -> None:
    store, long = Store(), "snow " * LENGTH + "fox"
    encoder = Encoder(tokenizer, store)
    for count in (1, 2):
        encoder.prompts([long, "fox", long], encoder.warnings.append)
        assert len(encoder.warnings) == count
    assert encoder.prompts.missing([long]) == []
    other = Encoder(tokenizer, store)
    other.prompts([long], other.warnings.append)
    assert other.batches == [] and len(encoder.warnings) == 2
    for line in (*encoder.warnings, *other.warnings):
        assert f" {LENGTH} tokens" in line and line.endswith("snow fox'")


def test_only_so_many_are_remembered(tokenizer: PromptTokenizer) -> None:
    encoder = Encoder(tokenizer, remembered=2)
    for prompts, batches in (
        (["fox"], [1]),
        (["snow"], [1, 1]),
        (["fox"], [1, 1]),
        (["dawn"], [1, 1, 1]),  # snow was used longest ago
        (["fox"], [1, 1, 1]),
        (["snow"], [1, 1, 1, 1]),
        (["a", "red", "fox", "runs"], [1, 1, 1, 1, 3]),  # more than are remembered
    ):
        assert encoder.prompts(prompts).shape[0] == len(prompts)
        assert encoder.batches == batches


def test_the_result_may_be_changed(tokenizer: PromptTokenizer) -> None:
    encoder = Encoder(tokenizer, Store())
    first = encoder.prompts(["fox"])
    before = first.copy()
    first[...] = 7
    assert encoder.prompts(["fox"]).tobytes() == before.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_encoder_that_gives_no_numbers(tokenizer: PromptTokenizer, value: float) -> None:
    def change(embeddings: np.ndarray) -> np.ndarray:
        embeddings[-1, 0, 0] = value
        return embeddings

    store = Store()
    encoder = Encoder(tokenizer, store, change=change)
    with refuses("not_finite", WanError, what="3 characters", remedy="wanbuild verify"):
        encoder.prompts(["snow", "fox"])
    assert store.rows == {} and encoder.prompts.missing(["fox", "snow"]) == ["fox", "snow"]


@pytest.mark.parametrize(
    "change", [lambda e: e[:, 1:], lambda e: e.astype(np.float64), lambda e: np.repeat(e, 2, 0)]
)
def test_an_encoder_that_gives_something_else(tokenizer: PromptTokenizer, change: Any) -> None:
    with pytest.raises(ValueError, match="text encoder"):
        Encoder(tokenizer, change=change).prompts(["fox"])


def test_a_damaged_store_is_not_passed_over(tokenizer: PromptTokenizer) -> None:
    class Damaged(Store):
        def find(self, cleaned_prompt: str, dtype: str) -> np.ndarray | None:
            raise ArtifactError("damaged", "damaged")

    encoder = Encoder(tokenizer, Damaged())
    for call in (encoder.prompts, encoder.prompts.missing):
        with pytest.raises(ArtifactError, match="damaged"):
            call(["fox"])
    assert encoder.batches == []


def test_threads(tokenizer: PromptTokenizer) -> None:
    """More prompts than are remembered, asked for by several threads in other orders."""
    prompts = [f"fox number {number}" for number in range(8)]
    expected = {prompt: Encoder(tokenizer).prompts([prompt])[0].tobytes() for prompt in prompts}
    encoder = Encoder(tokenizer, Store(), remembered=3)

    def ask(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(100):
            chosen = [prompts[index] for index in random.integers(0, len(prompts), 3)]
            assert [one.tobytes() for one in encoder.prompts(chosen)] == [expected[one] for one in chosen]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))
    assert sum(encoder.batches) >= len(prompts)


def test_many_prompts_are_fetched_in_batches_and_tokenized_once(
    tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def tokenize(texts: Sequence[str]) -> TokenizedPrompts:
        calls.append(list(texts))
        return tokenizer(texts)

    monkeypatch.setattr("wanrun.text.encoder.FETCHED", 3)
    encoder = Encoder(tokenize, remembered=2)
    prompts = [f"fox number {number}" for number in range(7)]
    encoder.prompts.fetch([*prompts, prompts[0]])
    assert encoder.batches == [3, 3, 1] and calls == [prompts]
    expected = Encoder(tokenizer).prompts(prompts)
    assert encoder.prompts(prompts).tobytes() == expected.tobytes()  # all of them are remembered
    assert encoder.batches == [3, 3, 1] and len(calls) == 1
