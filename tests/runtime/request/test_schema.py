"""Every option of a request is one row, from which each way of asking derives."""

from __future__ import annotations

from helpers.damage import flag
from wancli.run import wanrun
from wanrun.denoising.solvers import SOLVERS
from wanrun.request.schema import rows, schema


def test_the_command_line_has_every_row() -> None:
    options = {param.name: param for param in wanrun.params}
    for row in rows():
        assert options[row.name].opts == [row.flag, *(["-p"] if row.name == "prompt" else [])]
        assert row.flag == flag(row.key)
        if row.name != "prompt":
            assert row.help.rstrip(".") in str(getattr(options[row.name], "help", ""))


def test_the_json_schema() -> None:
    found = schema()
    assert found["required"] == ["prompt"] and found["additionalProperties"] is False
    assert set(found["properties"]) == {row.key for row in rows()}
    assert found["properties"]["steps"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 10_000,
        "description": "Denoising steps.",
    }
    assert found["properties"]["solver"]["enum"] == sorted(SOLVERS)
    assert found["properties"]["seed"] | {"description": ""} == {
        "type": "integer",
        "minimum": 0,
        "maximum": 2**64 - 1,
        "default": 0,
        "description": "",
    }
    assert "null" not in str(found)
