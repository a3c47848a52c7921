"""Rules that are kept by counting: tests/exemptions.tsv lists what breaks one, and may only shrink."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from helpers.rules import REPOSITORY, RULES, counted, exempted, sources_of_ours


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
def test_nothing_new_breaks_a_rule(rule: str) -> None:
    """Fewer than listed: PYTHONPATH=tests python tests/helpers/rules.py takes them out. More: mend them."""
    assert counted(rule) == {file: most for (listed, file), most in exempted().items() if listed == rule}


def test_nothing_of_another_rule_is_listed() -> None:
    assert {rule for rule, _ in exempted()} <= RULES.keys()


@pytest.mark.parametrize(
    "rule, text, broken",
    [
        ("imports of what is no export", "from wanrun.units import in_bytes, plural", 2),
        ("imports of what is no export", "def f():\n from wanrun import load, _hidden", 1),
        ("imports of what is no export", "from wanrun import load\nfrom wanrun.errors import WanError", 0),
        ("long docstrings of private functions", 'def _f():\n """A.\n\n B.\n """', 1),
        ("long docstrings of private functions", 'class _C:\n def f(self):\n  """A.\n\n  B.\n  """', 1),
        ("long docstrings of private functions", 'def f():\n """A.\n\n B.\n """', 0),
        ("sentences compared in tests", 'assert said == "there is no such artifact"', 1),
        ("sentences compared in tests", 'with raises(E, match="there is no such artifact"):\n pass', 1),
        ("sentences compared in tests", 'assert said, "there is no such artifact"', 0),
        (
            "sentences compared in tests",
            'with refuses("exists", what="there is no such artifact"):\n pass',
            1,
        ),
    ],
)
def test_what_breaks_a_rule(rule: str, text: str, broken: int) -> None:
    file = REPOSITORY / "runtime" / "wanserve" / "made_up.py"
    assert len(list(RULES[rule][1](file, ast.parse(text)))) == broken


def test_a_long_module_is_found(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    file.write_text("\n" * 400)
    _, broken = RULES["modules above 400 lines"]
    assert list(broken(file, ast.parse(""))) == []
    file.write_text("\n" * 401)
    assert len(list(broken(file, ast.parse("")))) == 1


def test_child_processes_import_nothing_from_the_current_folder() -> None:
    """A user's ``http.py`` there would be imported instead of Python's, so ``-P`` comes before ``-m``."""
    sources = {file: file.read_text(encoding="utf-8") for file in sources_of_ours()}
    assert [file.name for file, text in sources.items() if 'executable, "-m"' in text] == []
    assert sum('executable, "-P", "-m"' in text for text in sources.values()) >= 5
