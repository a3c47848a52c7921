"""Schedules of another artifact: a small model's for a large one, which would take days to calibrate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import structs

from wanbuild.calibrate.calibrate import written
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.errors import UsageError


def take(artifact: Path, source: Path) -> Manifest:
    """Adds the schedules of another artifact, without their figures: nothing was measured on this model.

    A schedule holds for a model with the same solver, shift, guidance and boundary: of the tiny checkpoints,
    image to video gains nearly as much by that of text to video as by its own (``benchmarks/transfer.py``).
    One of the same name is replaced.

    Returns:
        The artifact's new manifest.

    Raises:
        UsageError: if the other has no schedules, or was made for another solver, shift, guidance or
            boundary, and for an artifact that cannot be written.
    """
    given, own = read_manifest(source), open_artifact(artifact)
    if not given.schedules:
        raise UsageError(f"{source} has no schedules", remedy="calibrate it first")
    if others := list(_others(given, own.manifest)):
        raise UsageError(
            f"the schedules of {source} are for another model",
            expected=", ".join(f"{name} {own}" for name, own, _ in others),
            found=", ".join(f"{name} {other}" for name, _, other in others),
        )
    taken = {name: structs.replace(one, measured={}) for name, one in given.schedules.items()}
    return written(own, taken).manifest


def _others(given: Manifest, manifest: Manifest) -> Iterator[tuple[str, Any, Any]]:
    """Yields each default that matters to a schedule and differs: its name, this model's, the other's."""
    ours, theirs = manifest.model.default_options(), given.model.default_options()
    for name in ("solver", "flow_shift", "guidance_scale", "guidance_scale_2", "boundary"):
        if ours.get(name) != theirs.get(name):
            yield name, ours.get(name), theirs.get(name)
