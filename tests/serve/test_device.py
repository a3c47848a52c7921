"""A device, whose workers are threads of the test: what becomes of its videos, whatever a worker does."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.house import House, Worker, cancelled, makes, video, works_on
from wanrun import Event, Outcome
from wanrun.errors import ArtifactError, WanError
from wanrun.job.line import AT_ONCE
from wanserve.held import Held
from wanserve.messages import Broken, ChangedError, OutOfMemoryError
from wanserve.video import Video


def completes(id: str) -> Outcome:
    return Outcome(id=id, seconds={"steps": 9.0}, steps=3)


def full(id: str) -> Outcome:
    return Outcome(id=id, error=OutOfMemoryError("out_of_memory", "too large"))


async def test_the_job_after_one_that_took_the_memory(tmp_path: Path) -> None:
    """It goes to the next worker, although it waited when the first one was about to end."""

    def ends(worker: Worker, id: str) -> str:
        worker.say(full(id))
        time.sleep(0.2)
        return "ends"

    house = House(tmp_path, Worker(ends, 12), Worker(makes))
    videos = [await house.ask() for _ in range(2)]
    async with house.kept():
        await house.over(*videos)
        assert [one.status for one in videos] == ["failed", "completed"]
        assert videos[0].error is not None and videos[0].error.code == "out_of_memory"
        assert [len(one.runs) for one in house.started] == [1, 1] and videos[1].attempts == 1


async def test_a_job_that_cannot_be_begun(tmp_path: Path) -> None:
    """Of a model that is no longer served, or is another now: it fails, and its worker goes on."""
    house = House(tmp_path, Worker(makes))
    videos = [await house.ask(model=name) for name in ("gone", "other", "m")]
    async with house.kept():
        await house.over(*videos)
        assert [one.status for one in videos] == ["failed", "failed", "completed"] and len(house.started) == 1
        assert [one.error and one.error.code for one in videos] == ["not_begun", "unknown_name", None]


async def test_jobs_of_a_changed_artifact_wait(tmp_path: Path) -> None:
    """For the next start of the server; those of other models go on, and one that waits can be cancelled."""

    def makes_m(worker: Worker, id: str) -> None:
        changed = ChangedError("changed", "/srv/b was changed while it is served")
        worker.say(Outcome(id=id, error=changed if id == videos[0].id else None))

    house = House(tmp_path, Worker(makes_m))
    videos = [await house.ask(model=name) for name in ("b", "b", "m")]
    end = house.queue.hub.end(videos[1].id)
    async with house.kept():
        await house.over(videos[2])
        assert [(one.status, one.attempts) for one in videos[:2]] == [("queued", 0)] * 2
        assert house.started[0].runs == [videos[0].id, videos[2].id]
        assert "/srv" not in house.queue.withheld["b"] and end.done()
        await house.queue.cancel(videos[0])


async def test_a_worker_that_dies_before_it_hears_of_its_job(tmp_path: Path) -> None:
    house = House(tmp_path, Worker(lambda worker, id: "ends", 1), Worker(makes))
    one = await house.ask()
    async with house.kept():
        await house.over(one)
        assert (one.status, one.attempts) == ("completed", 2)


async def test_a_job_is_begun_while_that_is_stored(tmp_path: Path) -> None:
    """A slow disk does not hold it up."""
    house = House(tmp_path, Worker(makes))
    one, go = await house.ask(), threading.Event()
    slow = asyncio.create_task(house.store.change(lambda connection: go.wait(5)))
    async with house.kept():
        await house.until(lambda: house.started and house.started[0].runs == [one.id])
        assert not (go.is_set() or slow.done())
        go.set()
        await house.until(lambda: one.id not in house.queue._unstored and one.over)
        found = house.store.find(one.id)
        assert await slow and found is not None and found.status == "completed"


async def test_who_waits_for_an_end(tmp_path: Path) -> None:
    """Hears of that of a video, of its removal, and of that of the server."""
    house = House(tmp_path, Worker(makes))
    hub, videos = house.queue.hub, [await house.ask() for _ in range(2)]
    made, removed, other = map(hub.end, (videos[0].id, videos[1].id, "other"))
    await house.queue.delete(videos[1])
    assert [one.done() for one in (made, removed, other)] == [False, True, False]
    async with house.kept():
        await house.until(made.done)
        assert videos[0].status == "completed" and not other.done()
        hub.close()
        assert other.done() and hub.end("more").done()


async def test_a_stop_while_a_worker_starts_and_in_a_pause(tmp_path: Path) -> None:
    """``keep`` ends either way, and at once."""
    begun, go = threading.Event(), threading.Event()

    def slow() -> Worker:
        begun.set()
        go.wait(5)
        return Worker(works_on)

    house = House(tmp_path / "a", start=slow)
    async with house.kept():
        await house.until(begun.is_set)
        asyncio.get_running_loop().call_later(0.1, go.set)

    def none() -> Worker:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    house = House(tmp_path / "b", start=none)  # no more processes: it tries again, with pauses
    async with house.kept() as keeping:
        await house.until(lambda: house.device.problem is not None)
        await asyncio.sleep(0.1)
        assert not keeping.done()


async def test_a_stop_gives_back_what_runs_and_cancels_what_was_to_be(tmp_path: Path) -> None:
    house = House(tmp_path / "a", Worker(works_on))
    one = await house.ask()
    async with house.kept(seconds=0.05):
        await house.until(lambda: one.status == "in_progress" and house.queue.running)
    assert (one.status, one.attempts) == ("queued", 0)
    house = House(tmp_path / "b", Worker(works_on))
    one = await house.ask()
    async with house.kept():
        await house.until(lambda: house.device._held.told(one))
        one.unwanted = True  # its worker does not listen
    assert one.status == "cancelled"


async def test_nothing_can_be_loaded(tmp_path: Path) -> None:
    """It ends the service if no worker of any device ever could; else they try again."""
    house = House(tmp_path / "a", Worker(makes, 3, Broken(ArtifactError("damaged", "damaged"))))
    with pytest.raises(ArtifactError, match="damaged"):
        await house.device.keep()
    house.store.close()
    house = House(tmp_path / "b", Worker(makes, 3, Broken(WanError("failed", "full"))), Worker(makes))
    house.queue.loads = True
    async with house.kept():
        await house.until(lambda: len(house.started) == 2 and house.device.ready.is_set())


@asynccontextmanager
async def begun(folder: Path, *fields: dict[str, Any]) -> AsyncIterator[tuple[House, list[Video], Worker]]:
    """Some videos, and the worker that has made the steps of the first; others make what is left."""

    def passes(worker: Worker, id: str) -> None:
        worker.say(Event(id, "steps", 3, 3))

    house = House(folder, Worker(passes), Worker(makes), Worker(makes))
    videos = [await house.ask(**one) for one in fields]
    async with house.kept():
        await house.until(lambda: house.started and house.device._held.told(videos[0]))
        yield house, videos, house.started[0]
        await house.over(*videos)


async def test_the_next_begins_when_the_steps_are_made(tmp_path: Path) -> None:
    """No third one; what it shares with the one before is learned, and left out of the line's seconds."""
    async with begun(tmp_path, {}, {}, {}) as (house, videos, worker):
        board = house.queue.board
        await house.until(lambda: len(worker.runs) == 2)
        assert house.queue.running == AT_ONCE and videos[2].status == "queued"
        board.estimates.learn(videos[0], {"steps": 30.0}, 3)
        left = [one.remaining for one in map(board.progress, videos) if one is not None]
        assert left[2] == pytest.approx(left[1] + 150, rel=0.01)  # type: ignore[operator]
        await asyncio.sleep(0.1)
        worker.say(completes(videos[0].id))
        await house.until(lambda: len(worker.runs) == 3)
        worker.say(completes(videos[1].id))
        await house.over(videos[1])
        assert board.estimates.times[board.estimates.name(videos[1], "shared")] >= 0.1
        worker.say(completes(videos[2].id))


async def test_another_model_waits_for_the_end(tmp_path: Path) -> None:
    async with begun(tmp_path, {"model": "a"}, {"model": "b"}, {"model": "a"}) as (house, videos, worker):
        await asyncio.sleep(0.1)
        assert len(worker.runs) == 1
        for one in videos:
            await house.until(lambda one=one: one.id in worker.runs)
            worker.say(completes(one.id))


@pytest.mark.parametrize("other", ["completes", "full", "dies"])
async def test_want_of_memory_of_one(tmp_path: Path, other: str) -> None:
    """The other one ends, or is made again too; the one is made again, alone, as all are from then on."""
    async with begun(tmp_path, {}, {}, {}) as (house, videos, worker):
        await house.until(lambda: len(worker.runs) == 2)
        worker.say(full(videos[0].id))
        await house.until(lambda: videos[0].status == "queued")
        assert house.device._held.most == 1 and videos[2].status == "queued"
        if other != "dies":
            ended = completes(videos[1].id)
            worker.say(ended if other == "completes" else full(videos[1].id))
            await house.until(lambda: videos[1].status != "in_progress")
        worker.kill(1)
        await house.over(videos[2])
        assert [one.status for one in videos] == ["completed"] * 3
        assert [one.attempts for one in videos] == [2, 1 if other == "completes" else 2, 1]


@pytest.mark.parametrize(("code", "most"), [(-signal.SIGKILL, 1), (-signal.SIGSEGV, AT_ONCE)])
async def test_a_worker_that_dies_with_two(tmp_path: Path, code: int, most: int) -> None:
    """Either may be to blame: both run again, each alone."""
    async with begun(tmp_path, {}, {}) as (house, videos, worker):
        await house.until(lambda: len(worker.runs) == 2)
        worker.kill(code)
        await house.over(*videos)
        assert [(one.status, one.attempts) for one in videos] == [("completed", 2)] * 2
        assert house.device._held.most == most


async def test_one_comes_while_an_end_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker goes on: both are made."""
    async with begun(tmp_path, {}) as (house, videos, worker):
        size, late, loop = house.folders.size, list[Video](), asyncio.get_running_loop()

        def slow(id: str) -> int:
            asyncio.run_coroutine_threadsafe(come(), loop).result()
            return size(id)

        async def come() -> None:
            if not late:
                late.append(await house.ask())
                await house.until(lambda: worker.runs == [videos[0].id, late[0].id])

        monkeypatch.setattr(house.folders, "size", slow)
        worker.say(completes(videos[0].id))
        await house.until(lambda: late and late[0].id in worker.runs)
        worker.say(completes(late[0].id))
        await house.over(*late)
        assert [(one.status, one.attempts) for one in (*videos, *late)] == [("completed", 1)] * 2


async def test_two_wait_for_the_next_start(tmp_path: Path) -> None:
    async with begun(tmp_path, {}, {}) as (house, videos, worker):
        await house.until(lambda: len(worker.runs) == 2)
        house.queue.turns.closing = True
        await house.device.stop(0.05)
        await house.device.settle()
        assert [(one.status, one.attempts) for one in videos] == [("queued", 0)] * 2
        for one in videos:
            await house.queue.cancel(one)


async def test_a_worker_that_has_none_comes_first(tmp_path: Path) -> None:
    """Also where one that has made its steps has waited for longer; but one that ends takes none."""
    house, busy, free, ends = House(tmp_path), Held(), Held(), Held()
    ends.leaving = True
    one = await house.ask()
    assert await house.queue.turns.next(busy) is one
    busy.take(Event(one.id, "decode", 3, 3))
    asking = [asyncio.create_task(house.queue.turns.next(held)) for held in (busy, free, ends)]
    await asyncio.sleep(0)
    two = await house.ask()
    await house.until(asking[1].done)
    assert not asking[0].done()
    three = await house.ask()
    await house.until(asking[0].done)
    asking[2].cancel()
    board = house.queue.board
    for each in (one, two, three):
        board.estimates.learn(each, {"steps": 30.0}, 10)
    four = await house.ask()
    own = board.estimates.total(four)

    def waits(*before: Video) -> None:
        left = sum(board.progress(each).remaining for each in before)  # type: ignore[misc, union-attr]
        assert board.places()[four.id].remaining == pytest.approx(own + left, rel=0.01)

    waits(two, three)
    await house.queue.cancel(three)
    await house.queue.ended(cancelled(three.id))
    waits(one, two)
    house.store.close()


def test_what_is_tried_again_is_tried_alone() -> None:
    held, one = Held(), video(attempts=1)
    assert held.fits(one) and held.shared(one) is None
    held.add(one)
    assert not held.take(Event(one.id, "steps", 2, 3)) and not held.fits(video())
    assert held.take(Event(one.id, "steps", 3, 3)) and not held.take(Event(one.id, "decode", 3, 3))
    assert held.fits(video()) and not held.fits(video(attempts=1))
    one.attempts = 2
    assert not held.fits(video())


def test_an_end_before_that_of_the_one_before() -> None:
    """Such as a cancel: the one before shared nothing, and the line waits for it again."""
    held, (one, other) = Held(), (video(started=1.0), video(started=2.0))
    for each in (one, other):
        held.add(each)
    held.drop(other)
    assert held.shared(one) is None and held.videos == [one]
