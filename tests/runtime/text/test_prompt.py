"""Cleaning and tokenizing prompts, against diffusers and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import T5TokenizerFast  # type: ignore[attr-defined]

from wanrun.errors import ArtifactError
from wanrun.text.prompt import PromptTokenizer, clean_prompt

WORDS = ("a", "cat", "dog", "walking", "on", "the", "beach", "at", "sunset", "ing", "er", "猫", "в")

PROMPTS = [
    "a cat walking on the beach at sunset",
    "",
    "   ",
    "a",
    "A ﬁne “quote”, 猫が歩く — ﷺ  ｆｕｌｌ ｗｉｄｔｈ",
    "emoji 🐈‍⬛ and combining e\u0301 and \u200bzero width \ufeff",
    "tom &amp;amp; jerry &lt;cat&gt; &eacute;",
    "broken: schÃ¶n â€œquotedâ€\x9d",
    "tabs\tand\nnew\r\nlines \x0b\x1c\u2028\u00a0end ",
    "</s> in the <pad> text <unk>",
    "sunset " * 700,
    "猫" * 600,
]


@pytest.fixture(scope="module")
def reference() -> Any:
    """A small Unigram tokenizer with UMT5's arrangement of special tokens, wrapped by transformers.

    It is not reloaded: from_pretrained of transformers 5 puts T5's own normalizer, pre-tokenizer and
    unknown id in place of those in tokenizer.json, which transformers 4 and ``tokenizers`` follow.
    """
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<s>", 0.0), ("<unk>", -20.0), ("▁", -4.0)]
    pieces += [(c, -6.0 - i / 100) for i, c in enumerate("abcdefghijklmnopqrstuvwxyz.,&;<>/—“”")]
    pieces += [("▁" + word, -3.0 - i / 10) for i, word in enumerate(WORDS)]
    pieces += [(word, -5.0 - i / 10) for i, word in enumerate(WORDS) if len(word) > 1 or word == "猫"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=0)


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    reference.save_pretrained(path)
    return path


@pytest.mark.parametrize("text", PROMPTS)
def test_cleans_as_the_reference(text: str) -> None:
    assert clean_prompt(text) == prompt_clean(text)


def test_cleaning_by_hand() -> None:
    assert clean_prompt(" tom &amp;amp;\n\tjerry&nbsp; schÃ¶n ") == "tom & jerry schön"


@pytest.mark.parametrize("max_length", [512, 8])
def test_equals_transformers(folder: Path, reference: Any, max_length: int) -> None:
    texts = PROMPTS + [clean_prompt(text) for text in PROMPTS]
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


def test_does_not_depend_on_the_batch(folder: Path) -> None:
    tokenizer = PromptTokenizer(folder / "tokenizer.json")
    together = tokenizer(PROMPTS)
    for row, text in enumerate(PROMPTS):
        np.testing.assert_array_equal(tokenizer([text]).ids[0], together.ids[row])


def test_says_what_was_cut(folder: Path) -> None:
    tokenizer = PromptTokenizer(folder / "tokenizer.json", max_length=6)
    got = tokenizer(["a cat walking on the beach at sunset", "a cat walking on the", "", "a cat"])
    # Five tokens and the end of the sequence fit.
    assert got.cut == ["beach at sunset", None, None, None]
    assert got.lengths == [6, 6, 1, 3]
    assert got.ids[:, :].tolist()[0][-1] == 1
    assert got.ids[2].tolist() == [1, 0, 0, 0, 0, 0]


def test_settings_in_the_file_do_not_apply(folder: Path, tmp_path: Path) -> None:
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.enable_truncation(3, direction="left")
    stored.enable_padding(direction="left", length=7, pad_id=3, pad_token="<unk>")
    stored.save(str(tmp_path / "tokenizer.json"))
    plain = PromptTokenizer(folder / "tokenizer.json", 16)(["a cat on the beach"])
    np.testing.assert_array_equal(
        PromptTokenizer(tmp_path / "tokenizer.json", 16)(["a cat on the beach"]).ids, plain.ids
    )


def test_no_prompts(folder: Path) -> None:
    got = PromptTokenizer(folder / "tokenizer.json", 16)([])
    assert got.ids.shape == (0, 16)
    assert got.cut == got.lengths == []


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"not json", b"\xff\xfe\x00", b'{"version": "1.0", "model": {"type": "Nope"}}']
)
def test_refuses_a_file_that_is_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"tokenizer\.json cannot be read as a tokenizer; found .*again"):
        PromptTokenizer(path)


def test_refuses_a_missing_file_and_a_missing_pad_token(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is missing"):
        PromptTokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ArtifactError, match="no token 99999 to pad with"):
        PromptTokenizer(folder / "tokenizer.json", pad_id=99999)


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(max_codepoint=127)))
def test_plain_text_takes_a_shortcut_to_the_same(text: str) -> None:
    """ASCII without an ampersand does not go through ftfy."""
    assert clean_prompt(text) == prompt_clean(text)
