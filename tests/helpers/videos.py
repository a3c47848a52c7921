"""Videos of the server that no server has, and what tells a worker to make one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import wanrun
from helpers.options import generation
from wanserve.messages import Make
from wanserve.video import Video


def video(**fields: Any) -> Video:
    """A video of ten steps with these fields."""
    shape = {"profile": "p", "size": "96x64", "num_frames": 9, "num_videos": 1, "fps": 16.0, "num_steps": 10}
    plain = {"owner": "", "model": "m", "options": {"prompt": "x", "seed": 0}, "shape": shape, "created": 1.0}
    return Video(**{**plain, **fields})


def make(id: str, model: str, folder: Path = Path()) -> Make:
    """The message of a plain job, whose files are written into a folder."""
    outputs = wanrun.outputs_of(folder / "video.npy", 1, ("video", "thumbnail", "last_frame"))
    return Make(model, wanrun.pack(wanrun.Job(id, generation(), outputs)))
