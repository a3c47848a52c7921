"""README.md says what the commands do."""

from __future__ import annotations

from helpers.readme import README, parts, table


def test_the_table_of_options_is_the_commands() -> None:
    """After a change of an option: PYTHONPATH=tests python tests/helpers/readme.py"""
    _, found, _ = parts(README.read_text(encoding="utf-8"))
    assert found == table()
