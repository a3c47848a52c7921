"""Schedules of another artifact: a small model's for a large one, where choosing would take days."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wanbuild.calibrate.fit import Steps
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.errors import UsageError


def taken_steps(manifest: Manifest, source: Path) -> dict[str, Steps]:
    """Returns the steps of another artifact's schedules by name, the most first.

    They can only hold where solver, shift, guidance and boundary are the same, and may not even hold there.
    ``manifest`` is that of the artifact that they are for. Raises UsageError if the other has no schedules,
    or was made for another solver, shift, guidance or boundary.
    """
    given = read_manifest(source)
    if not given.schedules:
        raise UsageError("not_built", f"{source} has no schedules", remedy="calibrate it first")
    if others := list(_others(given, manifest)):
        raise UsageError(
            "mismatch",
            f"the schedules of {source} are for another model",
            expected=", ".join(f"{name} {own}" for name, own, _ in others),
            found=", ".join(f"{name} {other}" for name, _, other in others),
        )
    schedules = sorted(given.schedules.items(), key=lambda one: -len(one[1].timesteps))
    return {name: Steps(one.timesteps, one.coefficients) for name, one in schedules}


def _others(given: Manifest, manifest: Manifest) -> Iterator[tuple[str, Any, Any]]:
    """Yields each default that matters to a schedule and differs: its name, this model's, the other's."""
    ours, theirs = manifest.model.default_options(), given.model.default_options()
    for name in ("solver", "flow_shift", "guidance_scale", "guidance_scale_2", "boundary"):
        if ours.get(name) != theirs.get(name):
            yield name, ours.get(name), theirs.get(name)
