"""The options of a generation that a model may have defaults for."""

from __future__ import annotations

import wanrun
from wanrun.rows import Row

DEFAULTS = (
    "steps",
    "guidance_scale",
    "guidance_scale_2",
    "guidance_start",
    "guidance_end",
    "boundary",
    "flow_shift",
    "solver",
    "timesteps",
    "fps",
)
"""The options of a generation that a model may have defaults for, by key."""


def default_rows() -> dict[str, Row]:
    """Returns the options that can be defaults, by their keys."""
    by_key = {row.key: row for row in wanrun.options()}
    return {key: by_key[key] for key in DEFAULTS}
