"""The options of a generation as keywords of Python, for type checkers and editors.

tests/helpers/keywords.py writes this file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, TypedDict

File = str | os.PathLike[str]


class Options(TypedDict, total=False):
    """The fields of ``Request`` besides the prompts; None is the default. For ``**options: Unpack[Options]``.

    A name of diffusers' pipelines that ``generate`` understands too is none of these.
    """

    image: File | None
    last_image: File | None
    video: File | None
    mask: File | None
    reference_image: File | Sequence[File] | None
    pose_video: File | None
    face_video: File | None
    background_video: File | None
    mask_video: File | None
    mode: Literal["animate", "replace"] | None
    segment_overlap: Literal[1, 5] | None
    conditioning_scale: float | None
    profile: str | None
    size: str | Sequence[int] | None
    num_frames: int | None
    num_steps: int | None
    guidance_scale: float | None
    guidance_scale_2: float | None
    boundary: float | None
    flow_shift: float | None
    solver: Literal["unipc", "dpm++", "euler", "lcm", "dmd", "rcm-ode", "rcm-sde"] | None
    timesteps: Sequence[float] | None
    schedule: str | None
    loop: Literal["step", "scan", "stream"] | None
    seed: int | Literal["random"] | None
    num_videos: int | None
    fps: float | None
