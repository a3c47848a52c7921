"""The published ways to sample distilled models, by name: their steps, solver, guidance and shift.

| name | models | update |
|---|---|---|
| ``lightning-4`` | Wan2.2-Lightning, lightx2v's 4-step LoRAs of 2.1 and 2.2 | x += (sigma' - sigma) v |
| ``self-forcing-4`` | Self-Forcing, without its causal loop | x = (1 - sigma') m0 + sigma' noise |
| ``causvid-3``, ``fastwan-3`` | CausVid (bidirectional), FastWan | the same, at levels of training |
| ``rcm-4`` | rCM and TurboWan, T2V | that of ``self-forcing-4``, from sigma noise |
| ``rcm-4-ode`` | the same models | that of ``lightning-4``, from sigma noise |
| ``rcm-4-i2v``, ``rcm-4-i2v-ode`` | their image to video | the same two |

sigma is timestep / 1000. That of rCM is tan(u) / (1 + tan(u)) for u = atan(80), 1.5, 1.4 and 1, with images
atan(200). CausVid and FastWan give the model whole timesteps, and take the nearest of 1000 levels with
shift 8: 1, 0.756757 and 0.521739 (the solver ``dmd``).
With two experts the boundary decides: of ``lightning-4`` each takes two steps.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanbuild.options import default_rows
from wanrun.errors import UsageError, escaped, shortened
from wanrun.files import read_bounded

MAX_BYTES = 2**20

_SHIFT_5 = (1000.0, 937.5, 2500 / 3, 625.0)
"""Shift 5 of 1, 3/4, 1/2 and 1/4."""

_DMD_3: Mapping[str, Any] = MappingProxyType(
    {"timesteps": (1000.0, 757.0, 522.0), "solver": "dmd", "guidance_scale": 1.0, "flow_shift": 8.0}
)


def _rcm(sigma_max: float, solver: str) -> Mapping[str, Any]:
    tangents = [sigma_max, *(math.tan(u) for u in (1.5, 1.4, 1.0))]
    timesteps = tuple(1000 * tangent / (1 + tangent) for tangent in tangents)
    return {"timesteps": timesteps, "solver": solver, "guidance_scale": 1.0}


SAMPLINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "lightning-4": {"timesteps": _SHIFT_5, "solver": "euler", "guidance_scale": 1.0, "flow_shift": 5.0},
        "causvid-3": _DMD_3,
        "fastwan-3": _DMD_3,
        "self-forcing-4": {"timesteps": _SHIFT_5, "solver": "lcm", "guidance_scale": 1.0, "flow_shift": 5.0},
        "rcm-4": _rcm(80, "rcm-sde"),
        "rcm-4-ode": _rcm(80, "rcm-ode"),
        "rcm-4-i2v": _rcm(200, "rcm-sde"),
        "rcm-4-i2v-ode": _rcm(200, "rcm-ode"),
    }
)
"""By name, defaults by key: see ``wanbuild.options.default_rows``."""

_TASKS: Mapping[str, str] = MappingProxyType(
    {"rcm-4": "t2v", "rcm-4-ode": "t2v", "rcm-4-i2v": "i2v", "rcm-4-i2v-ode": "i2v"}
)
"""The task of the models of a way to sample, where it is one."""

_OF_LORAS = ("lightning-4",)
"""Ways to sample of models that are mostly published as LoRAs."""


def sampling_doubts(sampling: str | None, task: str, repository: str | None, merged: bool) -> Iterator[str]:
    """Yields what speaks against a way to sample for a model, one line each.

    Args:
        sampling: as of ``with_sampling``.
        task: the model's, such as ``t2v``.
        repository: the checkpoint's, on the hub; None for a folder or files.
        merged: whether a LoRA, or a transformer from a file of its own, was given.
    """
    if sampling is None or sampling not in SAMPLINGS:
        return
    place = repository or ""
    base = place.startswith("Wan-AI/") and "distill" not in place.lower()
    if (made_for := _TASKS.get(sampling, task)) != task:
        yield f"the sampling {sampling} is for models of {made_for}, and this is one of {task}"
    if base and not merged:
        yield f"the sampling {sampling} is for distilled models, and {repository} is none"
    elif not merged and sampling in _OF_LORAS:
        yield (
            f"the sampling {sampling} is for models with a distilled LoRA, and none was given; if the "
            "checkpoint is not distilled itself, add it: --lora FILE, or --lora-high and --lora-low"
        )


def with_sampling(sampling: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns defaults with those of a way to sample, which given ones replace.

    Args:
        sampling: a name, or a .toml file of such defaults; None for none.
        given: defaults by key.

    Raises:
        UsageError: for an unknown name, and a file that cannot be read or has another key.
    """
    if sampling is None:
        return dict(given)
    if (named := SAMPLINGS.get(sampling)) is not None:
        return {**named, **given}
    if not sampling.endswith(".toml"):
        expected = f"one of {', '.join(SAMPLINGS)}, or a .toml file"
        raise UsageError(f"there is no sampling {shortened(sampling)}", expected=expected)
    what = f"the sampling {escaped(sampling)}"
    try:
        read = tomllib.loads(read_bounded(Path(sampling), MAX_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{what} cannot be read", found=error) from None
    if unknown := read.keys() - default_rows().keys():
        expected = f"some of {', '.join(default_rows())}"
        raise UsageError(f"{what} has an unknown key", expected=expected, found=shortened(min(unknown)))
    return {**read, **given}
