"""The marks ``slow`` and ``thorough`` say what tests take, and each tier fits its budget."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.tiers import BUDGETS, Tiers, Times, function


@pytest.fixture
def tiers(request: pytest.FixtureRequest) -> Tiers:
    """The tiers of this run."""
    found = request.config.pluginmanager.get_plugin("tiers")
    assert isinstance(found, Tiers)
    return found


@pytest.mark.parametrize(
    ("name", "of"), [("fast", ["fast"]), ("test", ["fast", "test"]), ("all", ["fast", "test", "all"])]
)
def test_a_tier_fits_its_budget(tiers: Tiers, name: str, of: list[str]) -> None:
    assert tiers.seconds(*of) <= BUDGETS[name], "make tests cheaper, not budgets larger"


def item(name: str, *fixtures: str, marks: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(nodeid=name, fixturenames=fixtures, get_closest_marker=dict.fromkeys(marks, 1).get)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (item("tests/a/test_x.py::test_new[3]"), "fast"),
        (item("tests/a/test_x.py::test_quick[0]"), "fast"),
        (item("tests/a/test_x.py::test_long[0]"), "test"),
        (item("tests/a/test_x.py::test_longer[0]"), "all"),
        (item("tests/a/test_x.py::test_longer", marks=("essential",)), "test"),
        (item("tests/a/test_x.py::test_new", "toy_artifact"), "fast"),
        (item("tests/a/test_x.py::test_new", "experts"), "test"),
        (item("tests/b/test_y.py::test_new", "experts"), "fast"),
        (item("tests/a/test_x.py::test_new", "built"), "all"),
        (item("tests/parity/test_z.py::test_new"), "test"),
    ],
)
def test_recorded_times_decide(one: Any, expected: str) -> None:
    tiers = Tiers()
    tiers.times = Times(
        {"tests/a/test_x.py": {"": 0.1, "test_quick": 0.2, "test_long": 1.5, "test_longer": 8.0}},
        {"tests::toy_artifact": 20.0, "tests/a::experts": 9.0, "tests/a/test_x.py::built": 9.0},
    )
    assert tiers.tier(one) == expected


def test_a_busy_machine_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "records"
    known = {f"test_{number}": 1.0 + number for number in range(11)}
    slow = {**{name: 2 * seconds for name, seconds in known.items()}, "test_0": 9.0, "test_new": 4.0}
    lines = [{"test": f"t.py::{name}", "seconds": s, "shared": {"t.py::x": 0.2}} for name, s in slow.items()]
    file.write_text("\n".join(map(json.dumps, lines)))
    times = Times({"t.py": {"": 0.0, **known}})
    times.update([file])
    assert times.tests == {"t.py": {"": 0.0, **known, "test_0": 4.5, "test_new": 2.0}}
    assert times.fixtures == {"t.py::x": 1.2}


def test_records_take_the_place_of_what_was_known(tmp_path: Path) -> None:
    file = tmp_path / "records"
    file.write_text(
        '{"test": "t.py::test_a[x]", "seconds": 0.25, "shared": {"tests::toy": 2.0, "import jax": 1.0}}\n'
        '{"test": "t.py::test_a[y]", "seconds": 0.5, "shared": {"tests::toy": 1.0}}\n'
        '{"test": "t.py::test_b", "seconds": 0.04, "shared": {}}\n'
    )
    times = Times({"t.py": {"": 3.0, "test_gone": 3.0}, "u.py": {"": 0.5}})
    times.update([file])
    assert times.tests == {"t.py": {"": 0.04, "test_a": 0.75}, "u.py": {"": 0.5}}
    assert times.fixtures == {"tests::toy": 3.0}
    assert function("t.py::test_a[x::y]") == ("t.py", "test_a")
