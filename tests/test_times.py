"""The marks ``slow`` and ``thorough`` choose the tests of each tier, and each tier fits its budget."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.tiers import BUDGETS, TIERS, misplaced, read_times, tier, updated

TESTS = Path(__file__).parent


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_fits_its_budget(name: str) -> None:
    times, tiers = read_times(), TIERS[: TIERS.index(name) + 1]
    seconds = sum(of[one] for of in times.values() for one in tiers)
    assert seconds <= BUDGETS[name], "make tests cheaper, not budgets larger"


def test_every_folder_has_its_times() -> None:
    folders = {file.parent.relative_to(TESTS.parent).as_posix() for file in TESTS.rglob("test_*.py")}
    assert read_times().keys() == folders


@pytest.mark.parametrize(
    ("file", "marks", "expected"),
    [
        ("tests/a/test_x.py", (), "fast"),
        ("tests/a/test_x.py", ("slow",), "test"),
        ("tests/a/test_x.py", ("thorough",), "all"),
        ("tests/a/test_x.py", ("slow", "thorough"), "all"),
        ("tests/parity/test_x.py", (), "test"),
        ("tests/parity/test_x.py", ("thorough",), "all"),
    ],
)
def test_marks_decide(file: str, marks: tuple[str, ...], expected: str) -> None:
    item: Any = SimpleNamespace(nodeid=f"{file}::test", get_closest_marker=dict.fromkeys(marks, 1).get)
    assert tier(item) == expected


def record(
    test: str, of: str, seconds: float, fixtures: str = "", shared: dict[str, float] | None = None
) -> dict[str, Any]:
    cost = {"tier": of, "seconds": seconds, "fixtures": fixtures.split(), "shared": shared or {}}
    return {"test": test} | cost


def test_records_take_the_place_of_what_was_known_of_a_folder() -> None:
    records = [
        record("t/test_a.py::test_x[y::z]", "test", 0.5, "t::toy", {"t::toy": 2.0, "import jax": 1.0}),
        record(
            "t/test_a.py::test_x[w]", "test", 0.25, "t::toy t/test_a.py::own", {"t::toy": 1.0, "v::toy": 1.0}
        ),
        record("t/test_b.py::test_y", "fast", 0.125, "t::toy"),
        record("test_c.py::test_z", "all", 3.0),
    ]
    times = updated({"t": {"fast": 9.0, "all": 9.0}, "u": {"fast": 0.5}}, records)
    assert times == {"t": {"test": 0.75, "fast": 3.125}, "u": {"fast": 0.5}, ".": {"all": 3.0}}


def test_a_busy_machine_changes_nothing() -> None:
    known = {f"t{number}": {"fast": 1.0 + number} for number in range(11)}
    records = [record(f"t{number}/test_x.py::test_x", "fast", 2.0 + 2 * number) for number in range(1, 11)]
    records += [record("t0/test_x.py::test_x", "fast", 9.0), record("new/test_x.py::test_x", "test", 4.0)]
    assert updated(known, records) == known | {"t0": {"fast": 4.5}, "new": {"test": 2.0}}


def test_cases_and_own_fixtures_count_for_a_test() -> None:
    records = [
        *(record("t/test_a.py::test_x[{case}]", "fast", 0.3) for case in "yz"),
        record("t/test_b.py::test_x", "test", 0.1, shared={"t/test_b.py::own": 4.5}),
        record("t/test_b.py::test_y", "test", 0.1, shared={"t::toy": 9.0}),
        record("t/test_b.py::test_z", "all", 50.0),
    ]
    assert [line.partition(" ")[0] for line in misplaced(records)] == [
        "t/test_a.py::test_x",
        "t/test_b.py::test_x",
    ]
