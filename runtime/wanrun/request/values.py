"""The values that options take, with their bounds."""

from __future__ import annotations

__all__ = ["OF_WHOLE_VIDEOS", "Positive"]

from typing import Annotated

from msgspec import Meta

from wanrun.artifact.model import MAX_FLOAT32, MAX_STEPS

Text = Annotated[str, Meta(max_length=100_000)]
"""Of which the model reads 512 tokens; splitting five million characters into tokens takes gigabytes."""
Steps = Annotated[int, Meta(ge=1, le=MAX_STEPS)]
FewSteps = Annotated[int, Meta(ge=0, le=MAX_STEPS)]
Seed = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": 2**64 - 1})]
"""The bound above does not fit msgspec's: ``wanrun.denoising.noise`` checks it."""
Scale = Annotated[float, Meta(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
AtLeast1 = Annotated[float, Meta(ge=1, le=MAX_FLOAT32)]
Positive = Annotated[float, Meta(gt=0, le=MAX_FLOAT32)]
Count = Annotated[int, Meta(ge=1)]
Clips = Annotated[int, Meta(ge=1, le=1000)]
Layers = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1, max_length=1000)]
Size = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,4}[xX*][1-9][0-9]{0,4}\Z")]
Rate = Annotated[float, Meta(ge=0.1, le=240)]
"""Frames per second that every container can hold."""
Timesteps = Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=MAX_STEPS)]

OF_WHOLE_VIDEOS = ("clips", "clip_prompts", "window_frames", "num_videos")
"""Options that exclude a live video."""
