"""Two videos of one worker: when the second is begun, and what becomes of both."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.house import House, Worker, cancelled, makes, run, video, workers
from wanrun import Event, Outcome
from wanrun.job.line import AT_ONCE
from wanserve.held import Held
from wanserve.messages import OutOfMemoryError
from wanserve.video import Video


def passes(worker: Worker, id: str) -> None:
    """Makes the steps of a video, and goes on with it."""
    worker.say(Event(id, "steps", 3, 3))


def completes(id: str) -> Outcome:
    return Outcome(id=id, seconds={"steps": 9.0}, steps=3)


def full(id: str) -> Outcome:
    return Outcome(id=id, error=OutOfMemoryError("out_of_range", "too large"))


@pytest.fixture
def begun(tmp_path: Path) -> Callable[..., Any]:
    """Has a worker make the steps of some videos, while ``then`` looks on; others make what is left."""

    def play(then: Callable[[House, list[Video], Worker], Any], *fields: dict[str, Any]) -> None:
        async def test() -> None:
            start, started = workers(Worker(passes), Worker(makes), Worker(makes))
            house = House(tmp_path, start)
            videos = [await house.ask(**one) for one in fields]
            keeping = asyncio.create_task(house.device.keep())
            await house.until(lambda: started and house.device._held.told(videos[0]))
            await then(house, videos, started[0])
            await house.until(lambda: all(one.over for one in videos))
            await house.stop(keeping)

        run(test())

    return play


def test_the_next_begins_when_the_steps_are_made(begun: Callable[..., Any]) -> None:
    """No third one; what it shares with the one before is learned, and left out of the line's seconds."""

    async def then(house: House, videos: list[Video], worker: Worker) -> None:
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
        await house.until(lambda: videos[1].over)
        assert board.estimates.times[board.estimates.name(videos[1], "shared")] >= 0.1
        worker.say(completes(videos[2].id))

    begun(then, {}, {}, {})


def test_another_model_waits_for_the_end(begun: Callable[..., Any]) -> None:
    async def then(house: House, videos: list[Video], worker: Worker) -> None:
        await asyncio.sleep(0.1)
        assert len(worker.runs) == 1
        for one in videos:
            await house.until(lambda one=one: one.id in worker.runs)
            worker.say(completes(one.id))

    begun(then, {"model": "a"}, {"model": "b"}, {"model": "a"})


@pytest.mark.parametrize("other", ["completes", "full", "dies"])
def test_want_of_memory_of_one(begun: Callable[..., Any], other: str) -> None:
    """The other one ends, or is made again too; the one is made again, alone, as all are from then on."""

    async def then(house: House, videos: list[Video], worker: Worker) -> None:
        await house.until(lambda: len(worker.runs) == 2)
        worker.say(full(videos[0].id))
        await house.until(lambda: videos[0].status == "queued")
        assert house.device._held.most == 1 and videos[2].status == "queued"
        if other != "dies":
            ended = completes(videos[1].id)
            worker.say(ended if other == "completes" else full(videos[1].id))
            await house.until(lambda: videos[1].status != "in_progress")
        worker.kill(1)
        await house.until(lambda: videos[2].over)
        assert [one.status for one in videos] == ["completed"] * 3
        assert [one.attempts for one in videos] == [2, 1 if other == "completes" else 2, 1]

    begun(then, {}, {}, {})


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGSEGV])
def test_a_worker_that_dies_with_two(begun: Callable[..., Any], code: int) -> None:
    """Either may be to blame: both run again, each alone."""

    async def then(house: House, videos: list[Video], worker: Worker) -> None:
        await house.until(lambda: len(worker.runs) == 2)
        worker.kill(code)
        await house.until(lambda: all(one.over for one in videos))
        assert [(one.status, one.attempts) for one in videos] == [("completed", 2)] * 2
        assert house.device._held.most == (1 if code == -signal.SIGKILL else AT_ONCE)

    begun(then, {}, {})


def test_one_comes_while_an_end_is_stored(begun: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker goes on: both are made."""

    async def then(house: House, videos: list[Video], worker: Worker) -> None:
        size = house.folders.size
        late = list[Video]()

        def slow(id: str) -> int:
            asyncio.run_coroutine_threadsafe(come(), loop).result()
            return size(id)

        async def come() -> None:
            if not late:
                late.append(await house.ask())
                await house.until(lambda: worker.runs == [videos[0].id, late[0].id])

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(house.folders, "size", slow)
        worker.say(completes(videos[0].id))
        await house.until(lambda: late and late[0].id in worker.runs)
        worker.say(completes(late[0].id))
        await house.until(lambda: late[0].over)
        assert [(one.status, one.attempts) for one in (*videos, *late)] == [("completed", 1)] * 2

    begun(then, {})


def test_two_wait_for_the_next_start(begun: Callable[..., Any]) -> None:
    async def then(house: House, videos: list[Video], worker: Worker) -> None:
        await house.until(lambda: len(worker.runs) == 2)
        house.queue.turns.closing = True
        await house.device.stop(0.05)
        await house.device.settle()
        assert [(one.status, one.attempts) for one in videos] == [("queued", 0)] * 2
        for one in videos:
            await house.queue.cancel(one)

    begun(then, {}, {})


def test_a_worker_that_has_none_comes_first(tmp_path: Path) -> None:
    """Also where one that has made its steps has waited for longer; but one that ends takes none."""

    async def test() -> None:
        house, busy, free, ends = House(tmp_path, lambda: None), Held(), Held(), Held()
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
        four, lasts = await house.ask(), [board.progress(each) for each in (two, three)]
        own = board.estimates.total(four)
        left = sum(each.remaining for each in lasts)  # type: ignore[misc, union-attr]
        assert board.places()[four.id].remaining == pytest.approx(own + left, rel=0.01)
        await house.queue.cancel(three)
        await house.queue.ended(cancelled(three.id))
        left = sum(board.progress(each).remaining for each in (one, two))  # type: ignore[misc, union-attr]
        assert board.places()[four.id].remaining == pytest.approx(own + left, rel=0.01)
        house.store.close()

    run(test())


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
