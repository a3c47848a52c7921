"""Cleaning and tokenizing prompts, against diffusers and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import T5TokenizerFast  # type: ignore[attr-defined]

from helpers.prompts import PROMPTS, RECORDED, small_tokenizer
from wanrun.text.prompt import PromptTokenizer, clean_prompt


@pytest.fixture(scope="module")
def reference() -> Any:
    """A small tokenizer, wrapped by transformers.

    It is not reloaded: from_pretrained of transformers 5 puts T5's own normalizer, pre-tokenizer and
    unknown id in place of those in tokenizer.json, which transformers 4 and ``tokenizers`` follow.
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


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(max_codepoint=127)))
def test_plain_text_takes_a_shortcut_to_the_same(text: str) -> None:
    """ASCII without an ampersand does not go through ftfy."""
    assert clean_prompt(text) == prompt_clean(text)
