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
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

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
"""By name, defaults by key: see ``wanbuild.convert_options.default_rows``."""
