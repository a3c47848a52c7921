"""The rates of this machine, as earlier runs have shown: a small file in the user's cache."""

from __future__ import annotations

__all__ = ["LONG", "Rates"]

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from wanrun.files import canonical_json, read_bounded, replace_file, sha256_of, user_cache
from wanrun.machine.environment import host_environment, usable_cores

LONG = 20 * 60.0
"""Seconds of work that is announced before it begins."""

WEIGHT = 0.5
"""Of the newest measurement in the mean."""

MAX_BYTES = 2**12
"""The largest file of rates; real ones have a hundred bytes."""


@dataclass(frozen=True)
class Rates:
    """The rates of one kind of programs on this machine, such as FLOP/s of ``steps``.

    Args:
        file: where they are kept.
    """

    file: Path

    @classmethod
    def of(cls, environment: Mapping[str, Any], **facts: Any) -> Rates:
        """Returns the rates of programs on this machine.

        Args:
            environment: that of their target.
            facts: what else decides how fast they are, as JSON, such as the compute dtype.
        """
        names = ("platform", "device_kind", "device_count")
        device = {name: environment[name] for name in names}
        host = {**host_environment(environment["platform"]), "cores": usable_cores()}
        digest = sha256_of(canonical_json({"device": device, "host": host, **facts}))
        return cls(user_cache() / "rates" / f"{digest[:32]}.json")

    @property
    def known(self) -> dict[str, float]:
        """The measured rates; none without an intact file."""
        try:
            found = msgspec.json.decode(read_bounded(self.file, MAX_BYTES), type=dict[str, float])
        except (OSError, ValueError):
            return {}
        return {name: rate for name, rate in found.items() if 0 < rate < math.inf}

    def learn(self, flops: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """Adds what a run has measured to the means; without a cache that can be written, nothing.

        Args:
            flops: floating point operations by what was computed.
            seconds: what they took, by the same names; others are left out.
        """
        before = self.known
        new = {name: flops[name] / seconds[name] for name in flops if flops[name] and seconds.get(name)}
        means = {name: before.get(name, rate) * (1 - WEIGHT) + WEIGHT * rate for name, rate in new.items()}
        self._keep(before, means)

    def raise_to(self, best: Mapping[str, float]) -> None:
        """Keeps rates that are higher than any before; without a cache that can be written, nothing."""
        before = self.known
        self._keep(before, {name: rate for name, rate in best.items() if rate > before.get(name, 0.0)})

    def _keep(self, before: Mapping[str, float], new: Mapping[str, float]) -> None:
        if new:
            with contextlib.suppress(OSError):
                self.file.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self.file, msgspec.json.encode({**before, **new}))

    def seconds(self, flops: Mapping[str, float]) -> float | None:
        """Returns how long work takes; None if none of it was measured.

        What was not measured is taken to be as fast as the slowest of what was.
        """
        known = self.known
        if not flops or not known:
            return None
        slowest = min(known.values())
        return sum(number / known.get(name, slowest) for name, number in flops.items())
