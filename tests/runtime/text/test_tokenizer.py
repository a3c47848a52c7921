"""Prompts: cleaned and tokenized as diffusers and transformers do it, also in another process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from helpers.damage import flip, own
from helpers.refusals import refuses
from helpers.started import Started
from helpers.texts import PROMPTS, RECORDED, small_tokenizer
from wanrun.artifact.artifact import open_artifact
from wanrun.errors import ArtifactError
from wanrun.text import tokenizer as module
from wanrun.text.tokenizer import ArtifactTokenizer, PromptTokenizer, clean_prompt

# --- prompt ---


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
    nothing = tokenizer([])
    assert nothing.ids.shape == (0, 6) and nothing.cut == nothing.lengths == []


def test_settings_in_the_file_do_not_apply(folder: Path, tmp_path: Path) -> None:
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.enable_truncation(3, direction="left")
    stored.enable_padding(direction="left", length=7, pad_id=3, pad_token="<unk>")
    stored.save(str(tmp_path / "tokenizer.json"))
    plain = PromptTokenizer(folder / "tokenizer.json", 16)(["a cat on the beach"])
    np.testing.assert_array_equal(
        PromptTokenizer(tmp_path / "tokenizer.json", 16)(["a cat on the beach"]).ids, plain.ids
    )


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"not json", b"\xff\xfe\x00", b'{"version": "1.0", "model": {"type": "Nope"}}']
)
def test_refuses_a_file_that_is_no_tokenizer(folder: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    with refuses("missing_file", ArtifactError, what=path):
        PromptTokenizer(path)
    path.write_bytes(content)
    with refuses("unreadable", ArtifactError, what=path, remedy="build") as caught:
        PromptTokenizer(path)
    assert caught.value.found
    with refuses("damaged", ArtifactError, what=" 99999 "):
        PromptTokenizer(folder / "tokenizer.json", pad_id=99999)


# --- tokenizer ---


TEXTS = ["a red fox", "", "snow & 猫 " * 400, 'quotes " and \\ lines\n']


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tokenizer is large."""
    monkeypatch.setattr(module, "LARGE_BYTES", 1)


def make(artifact: Path) -> ArtifactTokenizer:
    return ArtifactTokenizer(open_artifact(artifact))


def same(tokenizer: ArtifactTokenizer, artifact: Path, texts: list[str]) -> bool:
    found, expected = tokenizer(texts), PromptTokenizer(artifact / "tokenizer/tokenizer.json", 512)(texts)
    assert found.ids.dtype == found.mask.dtype == np.int32
    assert np.array_equal(found.ids, expected.ids) and np.array_equal(found.mask, expected.mask)
    return found.lengths == expected.lengths and found.cut == expected.cut


@pytest.mark.usefixtures("large")
def test_the_same_tokens_without_loading_it_here(toy_artifact: Path, started: Started) -> None:
    tokenizer = make(toy_artifact)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArtifactTokenizer, "load", None)
        tokenizer.start(TEXTS)
        assert same(tokenizer, toy_artifact, TEXTS)
        assert same(tokenizer, toy_artifact, TEXTS)  # remembered
    assert same(tokenizer, toy_artifact, TEXTS[:1])
    assert [process.returncode for process in started] == [0]


def test_a_small_one_needs_no_process(toy_artifact: Path, started: Started) -> None:
    tokenizer = make(toy_artifact)
    tokenizer.start(TEXTS)
    assert same(tokenizer, toy_artifact, TEXTS) and started == []


@pytest.mark.usefixtures("large")
def test_other_prompts_than_announced(toy_artifact: Path) -> None:
    tokenizer = make(toy_artifact)
    tokenizer.start(TEXTS[:1])
    assert same(tokenizer, toy_artifact, TEXTS)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("failure", ["killed", "no such program", "no memory for a process"])
def test_a_process_that_fails(
    toy_artifact: Path, started: Started, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    tokenizer = make(toy_artifact)
    if failure == "killed":
        started.then = subprocess.Popen.kill
    elif failure == "no such program":
        monkeypatch.setattr(module.sys, "executable", "/nowhere/python")
    elif failure == "no memory for a process":
        monkeypatch.setattr(module.subprocess, "Popen", fail)
    tokenizer.start(TEXTS)
    assert same(tokenizer, toy_artifact, TEXTS)


@pytest.mark.usefixtures("large")
def test_damage_is_found_before_it_is_read(artifact: Path) -> None:
    own(artifact, "tokenizer")
    flip(artifact / "tokenizer/tokenizer.json", 1000)
    tokenizer = make(artifact)
    for call in (lambda: tokenizer.start(TEXTS), tokenizer.load, lambda: tokenizer(TEXTS)):
        with refuses("damaged", ArtifactError, what="tokenizer/tokenizer.json", expected="sha256 "):
            call()
