"""Writes random images and videos as files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from wanrun.replay.samples import samples


def write_samples(
    folder: Path, names: Collection[str], size: tuple[int, int], frames: int, face: int
) -> None:
    """Writes samples of options as files: an image as the option's name with ``.png``, a video as frames.

    The frames are in a folder of the option's name. ``size`` is the width and height of the videos in pixels,
    and ``face`` approximately those of a face video.
    """
    for name, sample in samples(names, size, frames, 1, face, seed=0).items():
        if name == "reference_image":
            (sample,) = sample
        target = folder / name if isinstance(sample, list) else folder
        target.mkdir(parents=True, exist_ok=True)
        if isinstance(sample, list):
            for index, frame in enumerate(sample):
                frame.save(target / f"{index:03}.png")
        else:
            sample.save(folder / f"{name}.png")
