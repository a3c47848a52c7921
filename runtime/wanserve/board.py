"""What clients see of the jobs: their states, their places in the line, their ends; and who hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from wanserve.estimate import Estimates
from wanserve.folders import Folders
from wanserve.hub import Hub
from wanserve.job import Job, Live, shown
from wanserve.refusal import without_paths
from wanserve.running import Running
from wanserve.settings import Settings

MOVED_SECONDS: Final = 0.2
"""For which changes of the line are gathered: those who listen hear of all of them at once."""


class Board:
    """What clients see of the jobs.

    Args:
        settings: the limits.
        folders: the files.
        hub: who is told of changes.
        waiting: the waiting jobs, the next one first; the desk changes it.
        running: the jobs that workers have, by id; the desk changes it.
        times: what phases took before, by name.

    Attributes:
        workers: the number of devices.
    """

    def __init__(
        self,
        settings: Settings,
        folders: Folders,
        hub: Hub,
        waiting: list[Job],
        running: Mapping[str, Running],
        times: Mapping[str, float],
    ) -> None:
        self._settings, self._folders, self.hub = settings, folders, hub
        self._waiting, self._running = waiting, running
        self.estimates, self.workers = Estimates(times), 1
        self._telling = False

    def live(self, job: Job) -> Live | None:
        """Returns what is known of a job that waits or runs; None for others."""
        return self._live(job, None)

    def _live(self, job: Job, places: Mapping[str, Live] | None) -> Live | None:
        if job.over:  # also while that is being stored
            return None
        if (running := self._running.get(job.id)) is not None:
            self.estimates.follow(job, running.live, running.clock)
            return running.live
        return (self.places(job.id) if places is None else places).get(job.id)

    def places(self, last: str | None = None) -> dict[str, Live]:
        """Returns what is known of the waiting jobs by id, in their order.

        Args:
            last: the job after which no other one is asked for; None for all.
        """
        lefts = [self._live(running.job, {}) for running in self._running.values()]
        before = [None if left is None else left.remaining for left in lefts]
        ahead = None if None in before else sum(one for one in before if one is not None)
        found = dict[str, Live]()
        for position, job in enumerate(self._waiting, 1):
            own = self.estimates.total(job)
            left = None if own is None or ahead is None else own + ahead / max(self.workers, 1)
            ahead = None if own is None or ahead is None else ahead + own
            found[job.id] = Live(phase="queued", position=position, remaining=left)
            if job.id == last:
                break
        return found

    def shown(self, *jobs: Job) -> list[dict[str, Any]]:
        """Returns jobs as the API answers them."""
        places = self.places() if len(jobs) > 1 else None
        kept = self._settings.kept_seconds
        return [shown(job, self._live(job, places), kept(job.status)) for job in jobs]

    def publish(self, job: Job) -> None:
        """Tells those who listen of a job."""
        running = self._running.get(job.id)
        if self.hub.wanted and not (running is not None and running.removed):
            self.hub.publish(job.owner, job.id, "video", *self.shown(job))

    def moved(self) -> None:
        """Takes that places in the line have changed; those who listen are told soon, of all in one event."""
        if self.hub.wanted and not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_later(MOVED_SECONDS, self._tell_moves)

    def _tell_moves(self) -> None:
        self._telling = False
        places, waiting = self.places(), {job.id: job for job in self._waiting}

        def line(owner: str | None) -> msgspec.Raw:
            own = [job.id for job in self._waiting if owner in (None, job.owner)]
            return msgspec.Raw(msgspec.json.encode(_line(own, places)))

        def one(id: str) -> Mapping[str, Any] | None:
            job = waiting.get(id)
            return None if job is None else shown(job, places[id], self._settings.kept_seconds(job.status))

        self.hub.moved(line, one)

    def told(self, text: str, job: Job | None = None) -> str:
        """Returns a worker's text as clients are told it: with their names, without paths of the server."""
        names = {str(folder): name for name, folder in self._settings.artifacts.items()}
        if job is not None:
            names |= self._folders.names(self._folders.of(job.id), job.media)
        return without_paths(text, names)

    def retry_seconds(self) -> int:
        """Returns the seconds after which there may be room in the line."""
        left = [self.live(running.job) for running in self._running.values()]
        known = [one.remaining for one in left if one is not None and one.remaining is not None]
        return max(1, int(min(known, default=5.0)) + 1)


def _line(ids: Sequence[str], places: Mapping[str, Live]) -> dict[str, Any]:
    """The places of waiting jobs, as the API answers them."""
    waiting = list[dict[str, Any]]()
    for id in ids:
        left = places[id].remaining
        seconds = None if left is None else round(left, 2)
        waiting.append({"id": id, "position": places[id].position, "remaining_seconds": seconds})
    return {"object": "queue", "waiting": waiting}
