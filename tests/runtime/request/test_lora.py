"""A LoRA as a request writes it: a text, a record, or several of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wanrun.errors import UsageError
from wanrun.request.lora import LoraChoice, parse_lora
from wanrun.request.prompts_file import Line, read_entries
from wanrun.request.resolve import request_of

PLAIN = LoraChoice(name="a", strength=0.5)
OF_EXPERTS = LoraChoice(name="a", high=0.9, low=-0.6)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("a", LoraChoice(name="a")),
        ("a:0.5", PLAIN),
        ("a:0", LoraChoice(name="a", strength=0.0)),
        ("a:-1e-1", LoraChoice(name="a", strength=-0.1)),
        ("a:high=0.9,low=-0.6", OF_EXPERTS),
        ("a: low = -0.6, high = 0.9", OF_EXPERTS),
        ("a:high=1", LoraChoice(name="a", high=1.0)),
        ("c:d.safetensors:2", LoraChoice(name="c:d.safetensors", strength=2.0)),
        ("dir/a.safetensors", LoraChoice(name="dir/a.safetensors")),
    ],
)
def test_a_text(text: str, choice: LoraChoice) -> None:
    assert parse_lora(text) == choice
    again = parse_lora(str(choice))
    assert again.of_experts == choice.of_experts
    assert again.strength == (1.0 if text == choice.name else choice.strength)


@pytest.mark.parametrize(
    "behind",
    ["", "x", "nan", "inf", "1e39", "1:x", "1,2", "high=1,high=2", "mid=1", "high", "high=", "high=1,2"],
)
def test_what_is_no_strength(behind: str) -> None:
    with pytest.raises(UsageError, match="not understood"):
        parse_lora(f"a:{behind}")
    with pytest.raises(UsageError, match="not understood"):
        parse_lora(f":{behind or 1}")


def test_a_file_with_a_colon_wins(tmp_path: Path) -> None:
    (tmp_path / "e:2").touch()
    assert parse_lora(f"{tmp_path}/e:2") == LoraChoice(name=f"{tmp_path}/e:2")
    assert parse_lora(f"{tmp_path}/e:2:3") == LoraChoice(name=f"{tmp_path}/e:2", strength=3.0)
    assert parse_lora(f"{tmp_path}/e:2", files=False) == LoraChoice(name=f"{tmp_path}/e", strength=2.0)
    assert parse_lora("a\0:2").name == "a\0"


@pytest.mark.parametrize(
    "given",
    [
        "a:0.5",
        ["a:0.5"],
        {"name": "a", "strength": 0.5},
        ({"name": "a", "strength": np.float32(0.5)},),
        PLAIN,
        [PLAIN],
    ],
)
def test_each_way_to_write_it(given: Any) -> None:
    for name in ("lora", "loras"):
        assert request_of({"prompt": "p", name: given}).lora == (PLAIN,)


def test_paths_and_none() -> None:
    assert request_of({"prompt": "p", "lora": Path("a.safetensors")}).lora == (
        LoraChoice(name="a.safetensors"),
    )
    both = [{"name": Path("a"), "high": 0.9, "low": -0.6}, "b"]
    assert request_of({"prompt": "p", "lora": both}).lora[0] == OF_EXPERTS
    assert (
        request_of({"prompt": "p", "lora": None}).lora == request_of({"prompt": "p", "lora": []}).lora == ()
    )


@pytest.mark.parametrize(
    "given",
    [
        {"name": ""},
        {"nam": "a"},
        {"name": 3},
        {"name": "a", "strength": "1"},
        {"name": "a", "strength": True},
        {"name": "a", "strength": float("nan")},
        {"name": "a", "strength": float("inf")},
        {"name": "a", "strength": 1, "high": 2},
        {"name": "a", "strengths": {}},
        "",
        "a:x",
        ["a", 3],
        [["a"]],
        3,
    ],
    ids=str,
)
def test_what_is_refused(given: Any) -> None:
    with pytest.raises(UsageError) as raised:
        request_of({"prompt": "p", "lora": given})
    assert "\n" not in str(raised.value) and raised.value.expected is not None


def test_the_lines_of_a_prompts_file(tmp_path: Path) -> None:
    """A line's own replace those of the command line."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "p"}\n'
        '{"prompt": "p", "lora": "a:0.5"}\n'
        '{"prompt": "p", "loras": [{"name": "a", "high": 0.9, "low": -0.6}, "b"]}\n'
        '{"prompt": "p", "lora": []}\n'
        '{"prompt": "p", "lora": {"name": "a", "strength": "much"}}\n'
    )
    entries, failures = read_entries(file, Line(prompt="", lora=(PLAIN, LoraChoice(name="c"))))
    names = [[one.name for one in entry.line.lora] for entry in entries]
    assert names == [["a", "c"], ["a"], ["a", "b"], []] and entries[2].line.lora[0] == OF_EXPERTS
    assert list(failures) == [5]
