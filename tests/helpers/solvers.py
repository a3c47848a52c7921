"""The solvers that diffusers has too."""

from __future__ import annotations

from wanrun.denoising.solvers import SOLVERS

WITH_REFERENCE = tuple(
    sorted(
        name
        for name, solver in SOLVERS.items()
        if not (solver.scales_start or solver.trained_levels or name == "self-forcing")
    )
)
"""rCM's two have no class there: their tables are those of euler and lcm, and their noise is scaled. Nor has
dmd, whose levels tests/runtime/denoising compares with a search through all of them, nor self-forcing, whose
published loop is written out there."""
