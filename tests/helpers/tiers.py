"""Which tests ``make test-fast`` and ``make test`` leave out: decided by what each took when it was recorded.

``tests/times.json`` has CPU seconds of a quiet machine; ``python tests/helpers/tiers.py RECORDS`` updates it
from what ``--record-times`` has written, in the same unit. A test there is a function, all of its cases
together. One that it lacks takes next to nothing, or is new: ``Cost`` fails it if that is not so.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TIMES = Path(__file__).parents[1] / "times.json"

SLOW_SECONDS = 0.25
"""From here on ``make test-fast`` leaves a test out."""

THOROUGH_SECONDS = 2.0
"""From here on ``make test`` leaves a test out, unless it is marked ``essential``."""

COSTLY_SECONDS = 2.0
"""A test is slow too if it has a fixture of other modules that takes so long, but for ``EVERYBODYS``."""

EVERYBODYS = frozenset({"toy_artifact", "golden"})

BUDGETS: Mapping[str, float] = {"fast": 80.0, "test": 760.0, "all": 2300.0}
"""CPU seconds of the tests of each tier, with the fixtures that they share. Two cores have 120 in a minute;
lint, types, imports and collection come on top."""


@dataclass
class Times:
    """What was recorded, in CPU seconds.

    Attributes:
        tests: by file, then by function; the functions below a tenth of a second are together under "".
        fixtures: of a module or of the session, by the file or the folder that has it, ``::`` and the name.
    """

    tests: dict[str, dict[str, float]] = field(default_factory=dict)
    fixtures: dict[str, float] = field(default_factory=dict)

    def of(self, file: str, function: str) -> float:
        """What a function's cases take together; 0 if nothing is listed of it."""
        return self.tests.get(file, {}).get(function, 0.0)

    def update(self, records: list[Path]) -> None:
        """Takes what was recorded of some files in place of what was known of them.

        One machine is busier than another, by a factor of two: what is recorded is divided by the median of
        recorded to known seconds, over the tests that are in both.
        """
        functions: defaultdict[str, Counter[str]] = defaultdict(Counter)
        fixtures = Counter[str]()
        for record in (json.loads(line) for file in records for line in file.read_text().splitlines()):
            file, name = function(record["test"])
            functions[file][name] += record["seconds"]
            fixtures.update({key: seconds for key, seconds in record["shared"].items() if "::" in key})
        slower = self._slower(functions)
        for file, seconds in functions.items():
            seconds = Counter({name: s / slower for name, s in seconds.items()})
            listed = {name: round(s, 2) for name, s in sorted(seconds.items()) if s >= 0.1}
            self.tests[file] = {"": round(seconds.total() - sum(listed.values()), 2), **listed}
        self.fixtures = {name: s for name, s in self.fixtures.items() if not _is_of(name, functions)}
        self.fixtures |= {name: round(s / slower, 1) for name, s in fixtures.items() if s >= 0.5}

    def _slower(self, recorded: Mapping[str, Mapping[str, float]]) -> float:
        """How many times what is known a test took; 1 where fewer than ten can be compared."""
        ratios = [
            seconds / known
            for file, functions in recorded.items()
            for name, seconds in functions.items()
            if (known := self.of(file, name)) >= SLOW_SECONDS
        ]
        return statistics.median(ratios) if len(ratios) >= 10 else 1.0


def _is_of(fixture: str, files: Collection[str]) -> bool:
    """Whether a fixture is of one of these files, and not of a folder."""
    return fixture.partition("::")[0] in files


def read_times() -> Times:
    return Times(**json.loads(TIMES.read_text())) if TIMES.exists() else Times()


def function(test: str) -> tuple[str, str]:
    """The file and the function of a test's id."""
    file, _, name = test.partition("::")
    return file, name.partition("[")[0]


class Tiers:
    """A plug-in that marks tests ``slow`` and ``thorough``.

    Attributes:
        times: what was recorded.
        tiers: the first tier that has it, by the file and the function of each test that was collected.
        used: recorded fixtures by tier.
    """

    def __init__(self) -> None:
        self.times = read_times()
        self.tiers: dict[tuple[str, str], str] = {}
        self.used: defaultdict[str, set[str]] = defaultdict(set)

    def tier(self, item: pytest.Item) -> str:
        """The first tier that has a test: ``fast``, ``test`` or ``all``."""
        file, name = function(item.nodeid)
        fixtures = {key: self.times.fixtures[key] for key in self._fixtures(item)}
        own = sum(seconds for key, seconds in fixtures.items() if key.startswith(f"{file}::"))
        seconds = self.times.of(file, name) + own
        if seconds >= THOROUGH_SECONDS and item.get_closest_marker("essential") is None:
            return "all"
        costly = any(
            seconds >= COSTLY_SECONDS and key.rpartition("::")[2] not in EVERYBODYS
            for key, seconds in fixtures.items()
        )
        torch = file.startswith("tests/parity/")
        return "test" if torch or costly or seconds >= SLOW_SECONDS else "fast"

    def _fixtures(self, item: pytest.Item) -> set[str]:
        """The recorded fixtures that a test has, in any way."""
        names = set(getattr(item, "fixturenames", ()))
        return {
            key
            for key in self.times.fixtures
            for place, _, name in [key.rpartition("::")]
            if name in names and item.nodeid.startswith(place)
        }

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            found = self.tier(item)
            self.tiers[function(item.nodeid)] = found
            self.used[found] |= self._fixtures(item)
            if found != "fast":
                item.add_marker("slow")
            if found == "all":
                item.add_marker("thorough")

    def seconds(self, *tiers: str) -> float:
        """What the tests of tiers took, with the fixtures that they share."""
        functions = (
            self.times.tests[file].get(name, 0.0)
            for (file, name), of in self.tiers.items()
            if of in tiers and file in self.times.tests
        )
        files = {file for (file, _), of in self.tiers.items() if of in tiers}
        rest = (self.times.tests[file].get("", 0.0) for file in files & self.times.tests.keys())
        fixtures = set().union(*(self.used[of] for of in tiers))
        return sum(functions) + sum(rest) + sum(self.times.fixtures[key] for key in fixtures)


if __name__ == "__main__":
    times = read_times()
    times.update([Path(name) for name in sys.argv[1:]])
    times.tests = {file: seconds for file, seconds in times.tests.items() if Path(file).exists()}
    TIMES.write_text(json.dumps(vars(times), indent=1, sort_keys=True) + "\n")
