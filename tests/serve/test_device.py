"""Videos at a queue whose workers are threads of the test: what becomes of videos, whatever a worker does."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.asked import denies
from helpers.house import House, Worker, cancelled, makes, run, video, workers, works_on
from wanrun import Event, Outcome
from wanrun.errors import ArtifactError, WanError
from wanserve import database as stored
from wanserve.held import Held
from wanserve.messages import (
    Broken,
    ChangedError,
    OutOfMemoryError,
    Preview,
)
from wanserve.metrics import Metrics
from wanserve.publisher import Publisher
from wanserve.queue import Queue
from wanserve.refusal import RefusedError
from wanserve.room import frames_bytes
from wanserve.video import Video


def test_the_job_after_one_that_took_the_memory(tmp_path: Path) -> None:
    """It goes to the next worker, although it waited when the first one was about to end."""

    def full(worker: Worker, id: str) -> str:
        worker.say(Outcome(id=id, error=OutOfMemoryError("out_of_memory", "too large")))
        time.sleep(0.2)
        return "ends"

    async def test() -> None:
        start, started = workers(Worker(full, 12), Worker(makes))
        house = House(tmp_path, start)
        videos = [await house.ask() for _ in range(2)]
        keeping = asyncio.create_task(house.device.keep())
        await house.until(lambda: all(one.over for one in videos))
        assert [one.status for one in videos] == ["failed", "completed"]
        assert videos[0].error is not None and videos[0].error.code == "out_of_memory"
        assert [len(one.runs) for one in started] == [1, 1] and videos[1].attempts == 1
        await house.stop(keeping)

    run(test())


def test_a_job_that_cannot_be_begun(tmp_path: Path) -> None:
    """Of a model that is no longer served, or is another now: it fails, and its worker goes on."""

    async def test() -> None:
        start, started = workers(Worker(makes))
        house = House(tmp_path, start)
        videos = [await house.ask(model=name) for name in ("gone", "other", "m")]
        keeping = asyncio.create_task(house.device.keep())
        await house.until(lambda: all(one.over for one in videos))
        assert [one.status for one in videos] == ["failed", "failed", "completed"] and len(started) == 1
        assert [one.error and one.error.code for one in videos] == ["not_begun", "unknown_name", None]
        await house.stop(keeping)

    run(test())


def test_jobs_of_a_changed_artifact_wait(tmp_path: Path) -> None:
    """For the next start of the server; those of other models go on, and one that waits can be cancelled."""

    def makes_m(worker: Worker, id: str) -> None:
        changed = ChangedError("changed", "/srv/b was changed while it is served")
        worker.say(Outcome(id=id, error=changed if id == first else None))

    async def test() -> None:
        nonlocal first
        start, started = workers(Worker(makes_m))
        house = House(tmp_path, start)
        videos = [await house.ask(model=name) for name in ("b", "b", "m")]
        first, end = videos[0].id, house.queue.hub.end(videos[1].id)
        keeping = asyncio.create_task(house.device.keep())
        await house.until(lambda: videos[2].over)
        assert [(one.status, one.attempts) for one in videos[:2]] == [("queued", 0)] * 2
        assert started[0].runs == [first, videos[2].id] and "/srv" not in house.queue.withheld["b"]
        assert end.done()
        await house.queue.cancel(videos[0])
        await house.stop(keeping)

    first = ""
    run(test())


def test_a_worker_that_dies_before_it_hears_of_its_job(tmp_path: Path) -> None:
    async def test() -> None:
        start, _ = workers(Worker(lambda worker, id: "ends", 1), Worker(makes))
        house = House(tmp_path, start)
        one = await house.ask()
        keeping = asyncio.create_task(house.device.keep())
        await house.until(lambda: one.over)
        assert (one.status, one.attempts) == ("completed", 2)
        await house.stop(keeping)

    run(test())


def test_a_job_is_begun_while_that_is_stored(tmp_path: Path) -> None:
    """A slow disk does not hold it up."""

    async def test() -> None:
        start, started = workers(Worker(makes))
        house = House(tmp_path, start)
        one, go = await house.ask(), threading.Event()
        slow = asyncio.create_task(house.store.change(lambda connection: go.wait(5)))
        keeping = asyncio.create_task(house.device.keep())
        await house.until(lambda: started and started[0].runs == [one.id])
        assert not (go.is_set() or slow.done())
        go.set()
        await house.until(lambda: one.id not in house.queue._unstored and one.over)
        found = house.store.find(one.id)
        assert await slow and found is not None and found.status == "completed"
        await house.stop(keeping)

    run(test())


def test_who_waits_for_an_end(tmp_path: Path) -> None:
    """Hears of that of a video, of its removal, and of that of the server."""

    async def test() -> None:
        start, _ = workers(Worker(makes))
        house = House(tmp_path, start)
        hub, videos = house.queue.hub, [await house.ask() for _ in range(2)]
        made, removed, other = map(hub.end, (videos[0].id, videos[1].id, "other"))
        await house.queue.delete(videos[1])
        assert [one.done() for one in (made, removed, other)] == [False, True, False]
        keeping = asyncio.create_task(house.device.keep())
        await house.until(made.done)
        assert videos[0].status == "completed" and not other.done()
        hub.close()
        assert other.done() and hub.end("more").done()
        await house.stop(keeping)

    run(test())


def test_a_stop_while_a_worker_starts_and_in_a_pause(tmp_path: Path) -> None:
    """``keep`` ends either way, and at once."""

    async def test() -> None:
        begun, go = threading.Event(), threading.Event()

        def slow() -> Worker:
            begun.set()
            go.wait(5)
            return Worker(works_on)

        house = House(tmp_path / "a", slow)
        keeping = asyncio.create_task(house.device.keep())
        await house.until(begun.is_set)
        asyncio.get_running_loop().call_later(0.1, go.set)
        await house.stop(keeping)

        def none() -> Worker:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        house = House(tmp_path / "b", none)  # no more processes: it tries again, with pauses
        keeping = asyncio.create_task(house.device.keep())
        await house.until(lambda: house.device.problem is not None)
        await asyncio.sleep(0.1)
        assert not keeping.done()
        await house.stop(keeping)

    run(test())


def test_a_stop_gives_back_what_runs_and_cancels_what_was_to_be(tmp_path: Path) -> None:
    async def test() -> None:
        start, _ = workers(Worker(works_on))
        house = House(tmp_path / "a", start)
        one = await house.ask()
        keeping = asyncio.create_task(house.device.keep())
        await house.until(lambda: one.status == "in_progress" and house.queue.running)
        await house.stop(keeping, seconds=0.05)
        assert (one.status, one.attempts) == ("queued", 0)

        start, _ = workers(Worker(works_on))
        house = House(tmp_path / "b", start)
        one = await house.ask()
        keeping = asyncio.create_task(house.device.keep())
        await house.until(lambda: house.device._held.told(one))
        one.unwanted = True  # its worker does not listen
        await house.stop(keeping)
        assert one.status == "cancelled"

    run(test())


def test_nothing_can_be_loaded(tmp_path: Path) -> None:
    """It ends the service if no worker of any device ever could; else they try again."""

    async def test() -> None:
        start, _ = workers(Worker(makes, 3, Broken(ArtifactError("damaged", "damaged"))))
        house = House(tmp_path / "a", start)
        with pytest.raises(ArtifactError, match="damaged"):
            await house.device.keep()
        house.store.close()
        start, started = workers(Worker(makes, 3, Broken(WanError("failed", "full"))), Worker(makes))
        house = House(tmp_path / "b", start)
        house.queue.loads = True
        keeping = asyncio.create_task(house.device.keep())
        await house.until(lambda: len(started) == 2 and house.device.ready.is_set())
        await house.stop(keeping)

    run(test())


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Callable[..., House]]:
    houses = list[House]()

    def make(**settings: Any) -> House:
        houses.append(House(tmp_path, lambda: None, **settings))
        return houses[-1]

    yield make
    for house in houses:
        house.store.close()


def test_two_cancels_at_once(queue: Callable[[], House]) -> None:
    async def test() -> None:
        house = queue()
        one = await house.ask()
        (house.folders.out(one) / "video.mp4.parts").mkdir()  # the server was ended while it was made
        found = [house.queue.find(one.id, None) for _ in range(4)]
        results = await asyncio.gather(*map(house.queue.cancel, found), return_exceptions=True)
        assert [type(each) for each in results] == [type(None), *[RefusedError] * 3]
        assert house.queue.find(one.id, None).status == "cancelled"
        assert not list((house.folders.of(one.id) / "out").iterdir())

    run(test())


def test_the_places_behind_a_withheld_model(queue: Callable[[], House]) -> None:
    """Its videos have no end, and those of others do not wait for them."""

    async def test() -> None:
        house = queue()
        board, videos = house.queue.board, [await house.ask(model=name) for name in ("b", "m")]
        for one in videos:
            board.estimates.learn(one, {"steps": 1.0}, 1)
        house.queue.withheld["b"] = "it was changed"
        lefts = [place.remaining for place in board.places().values()]
        assert lefts == [None, board.estimates.total(videos[1])]

    run(test())


def test_an_end_that_cannot_be_stored(queue: Callable[[], House], monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: it is known all the same, and stored later."""

    async def test() -> None:
        house = queue()
        one = await house.ask()

        def full(connection: sqlite3.Connection, video: Video) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        put = stored.put
        monkeypatch.setattr(stored, "put", full)
        with pytest.raises(sqlite3.OperationalError):
            await house.queue.cancel(one)
        assert house.queue.find(one.id, None).status == "cancelled"
        assert house.queue.current([house.store.find(one.id) or one])[0].status == "cancelled"
        monkeypatch.setattr(stored, "put", put)
        await house.queue.store_again()
        found = house.store.find(one.id)
        assert found is not None and found.status == "cancelled"

    run(test())


def test_a_removal_that_cannot_be_stored(queue: Callable[[], House], monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the video is gone all the same, its key is free, and that is stored later."""

    async def test() -> None:
        house = queue()
        runs, again, _ = [await house.ask(idempotency=key) for key in "abc"]
        await house.queue.begin(await house.queue.turns.next(Held()), lambda: None)
        videos, listener = [runs, again], house.queue.hub.listen(None)
        folders = [house.folders.out(one) for one in videos]

        def full(connection: sqlite3.Connection, id: str) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(stored, "remove", full)
            for one in videos:
                with pytest.raises(sqlite3.OperationalError):
                    await house.queue.delete(one)
            await house.queue.ended(cancelled(runs.id))
            for one in videos:
                with denies("not_found", 404, message=one.id):
                    house.queue.find(one.id, None)
            assert len(house.queue.current(house.store.listed(None, 9) or [])) == 1
            assert not any(folder.exists() for folder in folders)
        assert [(await listener.next(1) or ("",))[0] for _ in videos] == ["deleted"] * 2
        new = await house.ask(idempotency="b")
        assert house.queue.find(new.id, None) is new and house.store.find(again.id) is None
        await house.queue.store_again()
        assert not any(house.store.find(one.id) for one in videos)

    run(test())


def test_a_job_that_has_no_room_holds_up_no_other(
    queue: Callable[[], House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first that fits beside those that run is next; and one that is put back has its place again."""

    async def test() -> None:
        house = queue()
        plain = video()
        large = await house.ask(shape={**plain.shape, "num_frames": 10**9})
        small = [await house.ask() for _ in range(2)]
        monkeypatch.setattr(house.queue.room, "left", lambda: frames_bytes(plain) * 3 // 2)
        first = await house.queue.turns.next(Held())
        assert first is small[0] and house.queue.room.lack_logged() is None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(house.queue.turns.next(Held()), 0.02)
        assert house.queue.waiting == [large, small[1]]
        listener = house.queue.hub.listen(None)
        await house.queue.put_back(first)
        assert house.queue.waiting == [large, *small]
        assert [(await listener.next(1) or ("",))[0] for _ in range(2)] == ["video", "queue"]

    run(test())


def test_a_long_line_is_told_at_once(queue: Callable[..., House]) -> None:
    """Its moves are one event for each who listens, of its own videos, and nobody is sent away for them."""

    async def test() -> None:
        house = queue(max_waiting=700)
        videos = await asyncio.gather(*(house.ask(owner="ab"[number % 2]) for number in range(510)))
        everybody, one_key = house.queue.hub.listen(None), house.queue.hub.listen("b")
        alone = house.queue.hub.listen("b", videos[-1].id)
        for gone in videos[:3]:
            await house.queue.delete(gone)
        await house.queue.move(videos[-1], 2)
        heard = [await everybody.next(2) for _ in range(4)]
        assert [event and event[0] for event in heard] == ["deleted"] * 3 + ["queue"]
        places = msgspec.json.decode(heard[3][1])["waiting"]  # type: ignore[index]
        assert [place["position"] for place in places] == list(range(1, 508))
        own = [await one_key.next(2) for _ in range(2)]
        assert len(msgspec.json.decode(own[1][1])["waiting"]) == 254  # type: ignore[index]
        moved = await alone.next(2)
        assert moved is not None and moved[1].position == 3
        assert await everybody.next(0.01) is None

    run(test())


def test_a_preview_is_asked_for_by_those_who_listen(queue: Callable[[], House]) -> None:
    async def test() -> None:
        house, looks = queue(), list[str]()
        await house.ask()
        waits = await house.ask()
        one = await house.queue.turns.next(Held())
        house.queue.board.looked_at(one, lambda: looks.append(one.id))
        house.queue.take(Event(one.id, "steps", 1, 9))
        house.queue.hub.listen("somebody else")
        house.queue.take(Event(one.id, "steps", 2, 9))
        assert not looks
        with pytest.raises(RefusedError) as refused:
            house.queue.board.preview(one)
        assert refused.value.status == 404
        listener = house.queue.hub.listen(one.owner)
        house.queue.take(Event(one.id, "steps", 3, 9))
        house.queue.board.show(Preview(one.id, 3, b"a picture"))
        assert house.queue.board.preview(one) == (3, b"a picture") and looks == [one.id] * 3
        heard = [await listener.next(0.05) for _ in range(2)]
        assert [event[1].preview for event in heard if event] == [None, 3]
        house.queue.board.show(Preview("another", 3, b""))
        with pytest.raises(RefusedError) as refused:
            house.queue.board.preview(waits)
        assert refused.value.status == 409

    run(test())


def test_nobody_hears_of_a_job_after_it_was_deleted(queue: Callable[[], House]) -> None:
    async def test() -> None:
        house = queue()
        await house.ask()
        one, listener = await house.queue.turns.next(Held()), house.queue.hub.listen(None)
        await house.queue.begin(one, lambda: None)
        await house.queue.delete(one)
        house.queue.take(Event(one.id, "steps", 3, 9))
        await house.queue.ended(cancelled(one.id))
        heard = [event async for event in _all(listener)]
        assert [name for name, _ in heard][-1] == "deleted"
        with denies("not_found", 404, message=one.id):
            house.queue.find(one.id, None)

    async def _all(listener: Any) -> Any:
        while (event := await listener.next(0.05)) is not None:
            yield event

    run(test())


def test_moves_and_restarts(queue: Callable[[], House], tmp_path: Path) -> None:
    """The order is stored; what was running waits again, and that it ran is not held against it."""

    async def test() -> None:
        house = queue()
        videos = [await house.ask(owner=owner) for owner in "aabaa"]
        await house.queue.move(videos[4], 1)
        await house.queue.move(videos[0], 99)
        order = [videos.index(one) for one in house.queue.waiting]
        assert order == [4, 1, 2, 3, 0]  # the one of b has kept its place
        first = await house.queue.turns.next(Held())
        await house.queue.begin(first, lambda: None)
        other = Queue(house.settings, house.folders, house.store, Publisher(), Metrics())
        await other.restore()
        assert [one.id for one in other.waiting] == [videos[index].id for index in order]
        assert other.waiting[0].attempts == 0
        third = other.board.progress(other.waiting[2])
        assert third is not None and third.position == 3

    run(test())
