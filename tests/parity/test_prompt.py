"""Cleaning and tokenizing prompts, against diffusers and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import T5TokenizerFast  # type: ignore[attr-defined]

from helpers.texts import PROMPTS, RECORDED, small_tokenizer
from wanrun.text.tokenizer import PromptTokenizer, TokenizedPrompts, clean_prompt


@pytest.fixture(scope="module")
def reference() -> Any:
    """A small tokenizer, wrapped by transformers.

    It is not reloaded: from_pretrained of transformers 5 puts T5's own pre-tokenizer and unknown id in place
    of those in tokenizer.json, which transformers 4 and ``tokenizers`` follow, drops every normalizer but a
    compiled one, and switches byte fallback off.
    """
    return T5TokenizerFast(tokenizer_object=small_tokenizer(), extra_ids=0)


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    reference.save_pretrained(path)
    return path


@pytest.mark.parametrize("text", PROMPTS)
def test_cleans_as_the_reference(text: str) -> None:
    assert clean_prompt(text) == prompt_clean(text)


@pytest.mark.parametrize(("text", "cleaned", "ids"), RECORDED)
def test_what_is_recorded_is_the_reference_s(
    reference: Any, text: str, cleaned: str | None, ids: list[int]
) -> None:
    """The tests that run without it compare with these."""
    assert prompt_clean(text) == (text if cleaned is None else cleaned)
    assert reference(prompt_clean(text), truncation=True, max_length=24).input_ids == ids


@pytest.mark.parametrize("max_length", [512, 8])
def test_equals_transformers(folder: Path, reference: Any, max_length: int) -> None:
    texts = [*PROMPTS, *map(clean_prompt, PROMPTS)]
    expected = reference(
        texts,
        padding="max_length",
        max_length=max_length,
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="np",
    )
    got = PromptTokenizer(folder / "tokenizer.json", max_length)(texts)
    assert got.ids.dtype == got.mask.dtype == np.int32
    assert got.ids.shape == got.mask.shape == (len(texts), max_length)
    np.testing.assert_array_equal(got.ids, expected["input_ids"])
    np.testing.assert_array_equal(got.mask, expected["attention_mask"])
    assert got.lengths == expected["attention_mask"].sum(1).tolist()
    assert len(np.unique(got.ids)) > 25  # the vocabulary is not degenerate: not everything is <unk>


def test_equals_the_reloaded_tokenizer_where_that_keeps_to_the_file(folder: Path) -> None:
    """Known, already normalized characters: what transformers 5 replaces does not matter."""
    reloaded = T5TokenizerFast.from_pretrained(folder, local_files_only=True)
    texts = ["a cat walking on the beach at sunset.", "", "dog " * 300]
    expected = reloaded(texts, padding="max_length", max_length=512, truncation=True, return_tensors="np")
    got = PromptTokenizer(folder / "tokenizer.json")([text.strip() for text in texts])
    np.testing.assert_array_equal(got.ids, expected["input_ids"])
    np.testing.assert_array_equal(got.mask, expected["attention_mask"])


EMOJI = ("🐈 a cat", "a 🐈 cat 🏖️ at sunset", "👨‍👩‍👧‍👦", "dog 🇫🇷🇯🇵", "🙂🙃")


def charsmap(letter: str, becomes: str) -> bytes:
    """SentencePiece's compiled normalisation of one ASCII letter: the size of a trie in bytes, the trie as a
    double array of units, and what its leaves point into.
    """
    units = np.zeros(1024, "<u4")
    units[0] = 0x100 << 10  # the root's children are at 0x100 ^ letter
    child = 0x100 ^ ord(letter)
    units[child] = 0x200 << 10 | 1 << 8 | ord(letter)  # its leaf is at child ^ 0x200
    units[child ^ 0x200] = 1 << 31  # the text at 0
    return np.array(units.nbytes, "<u4").tobytes() + units.tobytes() + becomes.encode() + b"\0"


def file_with(folder: Path, tokenizer: Tokenizer) -> tuple[PromptTokenizer, Any]:
    """What we make of a tokenizer's file, and what transformers 5 does."""
    T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=0).save_pretrained(folder)
    return PromptTokenizer(folder / "tokenizer.json"), T5TokenizerFast.from_pretrained(folder)


def ids_of(tokens: TokenizedPrompts) -> list[list[int]]:
    return [list(row[:length]) for row, length in zip(tokens.ids, tokens.lengths, strict=True)]


def test_emoji_are_the_bytes_that_the_file_asks_for(tmp_path: Path) -> None:
    """transformers 5 switches that off, and takes id 2 for all that is unknown, in UMT5 the unused <s>."""
    tokenizer = small_tokenizer()
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
    first, pieces = len(pieces), [*map(tuple, pieces), *((f"<0x{byte:02X}>", -30.0) for byte in range(256))]
    tokenizer.model = models.Unigram(pieces, unk_id=3, byte_fallback=True)
    ours, theirs = file_with(tmp_path, tokenizer)
    for prompt in EMOJI:
        (found,), expected = ids_of(ours([clean_prompt(prompt)])), theirs(prompt_clean(prompt)).input_ids
        assert found == tokenizer.encode(clean_prompt(prompt)).ids  # as transformers 4 and the training
        unknown = [char for char in normalizers.NFKC().normalize_str(prompt) if not char.isascii()]
        data = [first + byte for char in unknown for byte in char.encode()]
        assert [one for one in found if one >= first] == data
        assert 3 not in found and 2 not in found
        assert 2 in expected and max(expected) < first and expected != found


def test_emoji_are_unknown_where_the_file_has_no_bytes(tmp_path: Path) -> None:
    ours, theirs = file_with(tmp_path, small_tokenizer())
    for prompt in EMOJI:
        (found,), expected = ids_of(ours([clean_prompt(prompt)])), theirs(prompt_clean(prompt)).input_ids
        assert 3 in found and 2 not in found
        assert expected == [2 if one == 3 else one for one in found]


@pytest.mark.parametrize("in_sequence", [False, True])
def test_of_normalisers_transformers_5_keeps_the_precompiled_one(tmp_path: Path, in_sequence: bool) -> None:
    tokenizer = small_tokenizer()
    compiled = normalizers.Precompiled(charsmap("Q", "cat"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), compiled]) if in_sequence else compiled
    ours, theirs = file_with(tmp_path, tokenizer)
    (found,) = ids_of(ours(["a Q"]))
    assert found == theirs("a Q").input_ids == theirs("a cat").input_ids
    (found,), (plain,) = ids_of(ours(["ｃａｔ"])), ids_of(ours(["cat"]))  # full width, which NFKC makes plain
    assert (found == plain) == in_sequence
    assert theirs("ｃａｔ").input_ids == [4, 2, 1] != theirs("cat").input_ids


def test_transformers_5_replaces_the_pre_tokenizer(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    ours, theirs = file_with(tmp_path, tokenizer)
    (found,) = ids_of(ours(["cat on"]))
    assert found == tokenizer.encode("cat on").ids and theirs("cat on").input_ids != found
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert theirs("cat on").input_ids == tokenizer.encode("cat on").ids


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(max_codepoint=127)))
def test_plain_text_takes_a_shortcut_to_the_same(text: str) -> None:
    """ASCII without an ampersand does not go through ftfy."""
    assert clean_prompt(text) == prompt_clean(text)
