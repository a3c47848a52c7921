"""The result of a generation."""

from __future__ import annotations

import base64
import html
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wanrun.media.video_paths import video_paths
from wanrun.request.arguments import path_of
from wanrun.request.elsewhere import no_attribute
from wanrun.timing.timings import Timings


@dataclass(frozen=True, repr=False)
class Result:
    """The result of one generation.

    Args:
        frames: uint8 (B, F, H, W, 3).
        latents: final latents of the video's frames, float32 (B, C, T, h, w), normalised; of the last window
            if there are several.
        options: prompt, seed, solver, fps and all other options of the generation, for the video's metadata.
        timings: times of this generation and of the loading during it; the ``timings`` argument of
            ``generate`` if one was passed.
        warnings: problems of the request that did not keep the video from being made, one line each: the end
            of a prompt that was cut off, or guidance that is off because no profile is built with it.
        leading: the latent frames in front of the video's, such as those of reference images, float32
            (B, C, R, h, w); None if the model has none.
    """

    frames: np.ndarray
    latents: np.ndarray
    options: Mapping[str, Any]
    timings: Timings
    warnings: tuple[str, ...] = ()
    leading: np.ndarray | None = None

    @property
    def all_latents(self) -> np.ndarray:
        """The latents with those in front, float32 (B, C, R + T, h, w), as the transformer has them."""
        return self.latents if self.leading is None else np.concatenate([self.leading, self.latents], 2)

    if not TYPE_CHECKING:  # for a type checker there is no such name

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("Result", name)

    def __repr__(self) -> str:
        count, frames, height, width, _ = self.frames.shape
        prompt = str(self.options["prompt"])
        shown = prompt if len(prompt) <= 40 else prompt[:40] + "..."
        videos = "1 video" if count == 1 else f"{count} videos"
        return (
            f"<Result {shown!r}, seed {self.options['seed']}: {videos} of {frames} frames, {width}x{height}>"
        )

    def _repr_html_(self) -> str:
        """Returns the videos for a notebook, which shows the last value of a cell."""
        with tempfile.TemporaryDirectory() as folder:
            videos = [path.read_bytes() for path in self.save(Path(folder) / "video.mp4")]
        tag = '<video controls loop muted autoplay src="data:video/mp4;base64,{}"></video>'
        shown = (tag.format(base64.b64encode(video).decode()) for video in videos)
        return f"<p>{html.escape(repr(self))}</p>{''.join(shown)}"

    def save(
        self, path: str | os.PathLike[str], *, fps: float | None = None, overwrite: bool = False
    ) -> list[Path]:
        """Writes the videos with the options in their metadata, as the command ``wanrun`` does.

        Args:
            path: .mp4, .mov, .webm, .gif, .webp, .png, .npy or .frames, a folder of PNG; several videos are
                ``name-0.mp4`` and so on.
            fps: frames per second; None for those of the options.
            overwrite: whether existing files are replaced.

        Returns:
            the path of each video.

        Raises:
            UsageError: if the path is invalid, the suffix is unknown, or a file exists or cannot be written.
        """
        from wanrun.media.write_video import check_free, write_video

        rate = float(self.options["fps"] if fps is None else fps)
        videos = video_paths(path_of(path, "path"), len(self.frames))
        check_free(videos, overwrite, ways=("pass overwrite=True", "another name"))
        for index, video in enumerate(videos):
            write_video(
                self.frames[index], video, rate, {**self.options, "fps": rate, "video": index}, overwrite
            )
        return videos
