"""Videos of the server that no server has."""

from __future__ import annotations

from typing import Any

from wanserve.video import Video


def video(**fields: Any) -> Video:
    """A video of ten steps with these fields."""
    shape = {"profile": "p", "size": "96x64", "num_frames": 9, "num_videos": 1, "fps": 16.0, "num_steps": 10}
    plain = {"owner": "", "model": "m", "options": {"prompt": "x", "seed": 0}, "shape": shape, "created": 1.0}
    return Video(**{**plain, **fields})
