"""Builds the profiles that requests ask for and artifacts lack: one at a time, for a device without a worker.

Compilers want the device for themselves: a TPU has one process, and a worker has reserved a GPU's memory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import wanrun
from wanrun import CancelToken, Timings
from wanrun.artifact.select import UnbuiltError
from wanrun.request.building import built
from wanserve.catalog import Catalog
from wanserve.log import DEBUG, tell
from wanserve.video import Video


class Builds:
    """A builder of the profiles that artifacts lack.

    ``catalog`` has each profile once it is built. ``target`` is the one that workers load; None for the one
    that fits. ``asked`` returns the options of a video by Python name, with the paths of its files. ``busy``
    is the video whose profile is built, so that other builds wait; None if none is.
    """

    def __init__(
        self, catalog: Catalog, target: str | None, asked: Callable[[Video], Mapping[str, Any]]
    ) -> None:
        self._catalog, self._target, self._asked = catalog, target, asked
        self.busy: Video | None = None

    @property
    def known(self) -> frozenset[tuple[str, str]]:
        """Each model with each profile that it has now."""
        models = self._catalog.models.items()
        return frozenset((name, profile) for name, model in models for profile in model.manifest.profiles)

    def lacks(self, video: Video, known: frozenset[tuple[str, str]] | None = None) -> bool:
        """Returns whether a video's profile is not built.

        ``known`` are the profiles that were built when a worker was started; None for those built now.
        """
        served = video.model in self._catalog.models
        return served and (video.model, video.shape["profile"]) not in (
            self.known if known is None else known
        )

    def waits(self, video: Video) -> bool:
        """Whether a video waits until another profile is built."""
        return self.busy is not None and self.lacks(video)

    async def build(self, video: Video, place: Mapping[str, str], cancel: CancelToken) -> None:
        """Builds the profile of a video if it is lacking; other builds wait until then.

        ``place`` are variables of the environment that give the device; ``cancel`` ends the build. Raises as
        ``built``.
        """
        if self.lacks(video):
            await asyncio.to_thread(self._build, video, place, cancel)

    def _build(self, video: Video, place: Mapping[str, str], cancel: CancelToken) -> None:
        model = self._catalog.models[video.model]
        found, loop = model.artifact, {} if model.loop is None else {"loop": model.loop}
        try:
            wanrun.resolve(found, **loop | dict(self._asked(video)))
        except UnbuiltError as error:
            tell("building", id=video.id, model=video.model, profile=error.lacking.name)
            # In its own session Ctrl-C does not reach it: the server ends it.
            child = {
                "env": {**os.environ, **place},
                "start_new_session": True,
                "stdin": asyncio.subprocess.DEVNULL,
            }
            found = built(found, error, self._target, Timings(), _say, cancel, child)
        self._catalog.models[video.model] = replace(model, artifact=found)


def _say(line: str) -> None:
    tell("build", DEBUG, line=line)
