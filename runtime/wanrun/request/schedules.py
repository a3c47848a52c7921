"""The options of a request that a schedule decides: the artifact's by its name, or one in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.schedules import Schedule
from wanrun.errors import UsageError, field, shortened
from wanrun.files import read_bounded
from wanrun.request.request import Request

MAX_BYTES = 2**20
"""The largest file of a schedule."""

_MADE_FOR = ("guidance_scale", "guidance_scale_2", "boundary")


def scheduled(request: Request, manifest: Manifest) -> tuple[Request, dict[str, Any]]:
    """Returns a request with the options of its schedule, if it names one, and the fitted coefficients.

    Raises:
        UsageError: if there is no such schedule, or it does not fit the model or the request.
    """
    if request.schedule is None:
        return request, {}
    chosen, name = _find(request.schedule, manifest), field("schedule")
    decided = {
        "num_steps": len(chosen.timesteps),
        "solver": chosen.solver,
        "timesteps": chosen.timesteps,
        "flow_shift": manifest.model.defaults.flow_shift,
    }
    for option, value in decided.items():
        if getattr(request, option) not in (None, value):
            raise UsageError(
                f"{name} and {field(option)} contradict each other", remedy=f"leave {field(option)} out"
            )
    if (wrong := next(_misfits(chosen, request, manifest), None)) is not None:
        fitting = [
            key for key, one in manifest.schedules.items() if not any(_misfits(one, request, manifest))
        ]
        raise UsageError(
            f"{name} {shortened(request.schedule)} is for another request: {wrong}",
            expected="one of " + ", ".join(fitting) if fitting else None,
            remedy=None if fitting else f"leave {name} out, or run wanbuild calibrate",
        )
    made_for = {option: getattr(chosen, option) for option in _MADE_FOR}
    fitted = {} if chosen.coefficients is None else {"coefficients": chosen.coefficients}
    return structs.replace(request, solver=chosen.solver, timesteps=chosen.timesteps, **made_for), fitted


def _misfits(chosen: Schedule, request: Request, manifest: Manifest) -> Iterator[str]:
    """Yields each setting that differs from what a schedule was made for."""
    if ("boundary" in manifest.model.options) != (chosen.boundary is not None):
        yield f"it was made for {'one transformer' if chosen.boundary is None else 'two experts'}"
        return
    for option in _MADE_FOR:
        given, made_for = getattr(request, option), getattr(chosen, option)
        if given not in (None, made_for):
            if made_for is None:
                yield f"it was made without {field(option)}"
            else:
                yield f"it was made for {field(option)} {made_for:g}, not {given:g}"


def _find(name: str, manifest: Manifest) -> Schedule:
    if (found := manifest.schedules.get(name)) is not None:
        return found
    what = f"there is no schedule {shortened(name)}"
    if not name.endswith(".json"):
        names = ", ".join(manifest.schedules) or "no schedules; wanbuild calibrate makes some"
        raise UsageError(what, expected="a .json file, or one of the artifact's: " + names)
    try:
        data = read_bounded(Path(name), MAX_BYTES).removeprefix(b"\xef\xbb\xbf")  # a byte order mark
        return msgspec.json.decode(data, type=Schedule)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the schedule {shortened(name)} cannot be read", found=error) from None
