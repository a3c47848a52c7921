"""What clients see of the videos: their states, their places in the line, their ends; and who hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from wanrun import Event
from wanserve.estimate import Estimates
from wanserve.folders import Folders
from wanserve.messages import Preview
from wanserve.progress import QUEUED, STEPS, VideoProgress
from wanserve.publisher import Publisher
from wanserve.refusal import RefusedError, absent, without_paths
from wanserve.settings import Settings
from wanserve.shown import ShownVideo, shown
from wanserve.video import Video

MOVED_SECONDS: Final = 0.2
"""For which changes of the line are gathered: those who listen hear of all of them at once."""


class Board:
    """What clients see of the videos.

    The queue changes ``waiting``, the next video first, and ``running``, the videos that workers have, by id.
    ``withheld`` says by model why its videos wait for the next start; so they hold up no others. ``times``
    are what phases took before, by name. ``workers`` is the number of devices.
    """

    def __init__(
        self,
        settings: Settings,
        folders: Folders,
        hub: Publisher,
        waiting: list[Video],
        running: Mapping[str, VideoProgress],
        withheld: Mapping[str, str],
        times: Mapping[str, float],
    ) -> None:
        self._settings, self._folders, self.hub = settings, folders, hub
        self._waiting, self._running, self._withheld = waiting, running, withheld
        self.estimates, self.workers = Estimates(times), 1
        self._telling = False

    def progress(self, video: Video) -> VideoProgress | None:
        """Returns how far a video is that waits or is made; None for others."""
        return self._progress(video, None)

    def _progress(self, video: Video, places: Mapping[str, VideoProgress] | None) -> VideoProgress | None:
        if video.over:  # also while that is being stored
            return None
        if (running := self._running.get(video.id)) is not None:
            self.estimates.follow(running, running.clock)
            return running
        return (self.places(video.id) if places is None else places).get(video.id)

    def places(self, last: str | None = None) -> dict[str, VideoProgress]:
        """Returns the waiting videos' places by id, in order, up to the video ``last``; None for all."""
        followed = {one.follows for one in self._running.values()}
        lefts = [self._progress(one.video, {}) for id, one in self._running.items() if id not in followed]
        before = [None if left is None else left.remaining for left in lefts]
        ahead = None if None in before else sum(one for one in before if one is not None)
        found = dict[str, VideoProgress]()
        for position, video in enumerate(self._waiting, 1):
            own = self.estimates.total(video)
            left = None if own is None or ahead is None else own + ahead / max(self.workers, 1)
            if video.model in self._withheld:
                left = None
            else:
                ahead = None if own is None or ahead is None else ahead + own
            found[video.id] = VideoProgress(video, QUEUED, position, remaining=left)
            if video.id == last:
                break
        return found

    def shown(self, *videos: Video) -> list[ShownVideo]:
        """Returns videos as the API answers them."""
        places = self.places() if len(videos) > 1 else None
        kept = self._settings.kept_seconds
        return [shown(video, self._progress(video, places), kept(video.status)) for video in videos]

    def publish(self, video: Video) -> None:
        """Publishes how a video is now."""
        running = self._running.get(video.id)
        if self.hub.wanted and not (running is not None and running.removed):
            self.hub.publish(video.owner, video.id, "video", *self.shown(video))
        if video.over:
            self.hub.ended(video.id)

    def take(self, running: VideoProgress, event: Event) -> None:
        """Records and publishes what a worker does; those who listen have a preview made of a step."""
        running.take(event)
        self.publish(running.video)
        if event.phase == STEPS and self.hub.hears(running.video.owner, event.id):
            running.look()

    def looked_at(self, video: Video, look: Callable[[], None]) -> None:
        """Keeps the function that asks a video's worker for a preview."""
        self._running[video.id].look = look

    def show(self, preview: Preview) -> None:
        """Keeps the newest preview of a video that runs, and publishes it."""
        if (running := self._running.get(preview.id)) is not None:
            running.preview = preview.step, preview.image
            self.publish(running.video)

    def preview(self, video: Video) -> tuple[int, bytes]:
        """Returns the newest preview of a video that runs and its step, and asks for the next one.

        Raises RefusedError if there is none.
        """
        if (running := self._running.get(video.id)) is None:
            raise absent("preview", video)
        running.look()
        if running.preview is None:
            what = "there is no preview yet; the first comes with a step, if the artifact has a map"
            raise RefusedError(what, 404, code="not_ready")
        return running.preview

    def moved(self) -> None:
        """Publishes the places in the queue soon, all in one event."""
        if self.hub.wanted and not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_later(MOVED_SECONDS, self._tell_moves)

    def _tell_moves(self) -> None:
        self._telling = False
        places, waiting = self.places(), {video.id: video for video in self._waiting}

        def line(owner: str | None) -> msgspec.Raw:
            own = [video.id for video in self._waiting if owner in (None, video.owner)]
            return msgspec.Raw(msgspec.json.encode(_line(own, places)))

        def one(id: str) -> ShownVideo | None:
            video = waiting.get(id)
            return (
                None if video is None else shown(video, places[id], self._settings.kept_seconds(video.status))
            )

        self.hub.moved(line, one)

    def told(self, text: str, video: Video | None = None) -> str:
        """Returns a worker's text as clients get it: with their names, without paths of the server."""
        names = {str(folder): name for name, folder in self._settings.artifacts.items()}
        if video is not None:
            names |= self._folders.names(self._folders.of(video.id), video.media)
        return without_paths(text, names)

    def retry_seconds(self) -> int:
        """Returns the seconds after which there may be room in the line."""
        left = [self.progress(running.video) for running in self._running.values()]
        known = [one.remaining for one in left if one is not None and one.remaining is not None]
        return max(1, int(min(known, default=5.0)) + 1)


def _line(ids: Sequence[str], places: Mapping[str, VideoProgress]) -> dict[str, Any]:
    """The places of waiting videos, as the API answers them."""
    waiting = list[dict[str, Any]]()
    for id in ids:
        left = places[id].remaining
        seconds = None if left is None else round(left, 2)
        waiting.append({"id": id, "position": places[id].position, "remaining_seconds": seconds})
    return {"object": "queue", "waiting": waiting}
