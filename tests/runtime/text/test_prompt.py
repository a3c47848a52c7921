"""Cleaning and tokenizing prompts, against what diffusers and transformers made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from helpers.prompts import PROMPTS, RECORDED, small_tokenizer
from helpers.refusals import refuses
from wanrun.errors import ArtifactError
from wanrun.text.tokenizer import PromptTokenizer, clean_prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    small_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize(("text", "cleaned", "ids"), RECORDED)
def test_recorded_prompts(folder: Path, text: str, cleaned: str | None, ids: list[int]) -> None:
    assert clean_prompt(text) == (text if cleaned is None else cleaned)
    got = PromptTokenizer(folder / "tokenizer.json", 24)([clean_prompt(text)])
    assert got.ids.dtype == got.mask.dtype == np.int32
    assert got.ids.tolist() == [ids + [0] * (24 - len(ids))]
    assert got.mask.tolist() == [[1] * len(ids) + [0] * (24 - len(ids))]
    assert got.lengths == [len(ids)]


def test_cleaning_by_hand() -> None:
    given, cleaned = " tom &amp;amp;\n\tjerry&nbsp; schÃ¶n ", "tom & jerry schön"
    assert clean_prompt(given) == cleaned


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
    with refuses("unreadable", ArtifactError, what=path, remedy="build") as caught:
        PromptTokenizer(path)
    assert caught.value.found


def test_refuses_a_missing_file_and_a_missing_pad_token(folder: Path, tmp_path: Path) -> None:
    with refuses("missing_file", ArtifactError, what=tmp_path / "tokenizer.json"):
        PromptTokenizer(tmp_path / "tokenizer.json")
    with refuses("damaged", ArtifactError, what=" 99999 "):
        PromptTokenizer(folder / "tokenizer.json", pad_id=99999)
