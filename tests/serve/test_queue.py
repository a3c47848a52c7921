"""The line of a server: its order, its ends and removals, and who hears of them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from helpers.asked import denies
from helpers.house import House, cancelled, video
from wanrun import Event
from wanserve import database as stored
from wanserve.estimate import Estimates
from wanserve.held import Held
from wanserve.messages import Preview
from wanserve.metrics import Metrics
from wanserve.progress import VideoProgress
from wanserve.publisher import Publisher, stream
from wanserve.queue import Queue
from wanserve.refusal import RefusedError
from wanserve.room import frames_bytes
from wanserve.video import Video


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Callable[..., House]]:
    houses = list[House]()

    def make(**settings: Any) -> House:
        houses.append(House(tmp_path, **settings))
        return houses[-1]

    yield make
    for house in houses:
        house.store.close()


async def test_two_cancels_at_once(queue: Callable[[], House]) -> None:
    house = queue()
    one = await house.ask()
    (house.folders.out(one) / "video.mp4.parts").mkdir()  # the server was ended while it was made
    found = [house.queue.find(one.id, None) for _ in range(4)]
    results = await asyncio.gather(*map(house.queue.cancel, found), return_exceptions=True)
    assert [type(each) for each in results] == [type(None), *[RefusedError] * 3]
    assert house.queue.find(one.id, None).status == "cancelled"
    assert not list((house.folders.of(one.id) / "out").iterdir())


async def test_the_places_behind_a_withheld_model(queue: Callable[[], House]) -> None:
    """Its videos have no end, and those of others do not wait for them."""
    house = queue()
    board, videos = house.queue.board, [await house.ask(model=name) for name in ("b", "m")]
    for one in videos:
        board.estimates.learn(one, {"steps": 1.0}, 1)
    house.queue.withheld["b"] = "it was changed"
    lefts = [place.remaining for place in board.places().values()]
    assert lefts == [None, board.estimates.total(videos[1])]


async def test_an_end_that_cannot_be_stored(
    queue: Callable[[], House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: it is known all the same, and stored later."""
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


async def test_a_removal_that_cannot_be_stored(
    queue: Callable[[], House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: the video is gone all the same, its key is free, and that is stored later."""
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


async def test_a_job_that_has_no_room_holds_up_no_other(
    queue: Callable[[], House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first that fits beside those that run is next; and one that is put back has its place again."""
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


async def test_a_long_line_is_told_at_once(queue: Callable[..., House]) -> None:
    """Its moves are one event for each who listens, of its own videos, and nobody is sent away for them."""
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


async def test_a_preview_is_asked_for_by_those_who_listen(queue: Callable[[], House]) -> None:
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


async def test_nobody_hears_of_a_job_after_it_was_deleted(queue: Callable[[], House]) -> None:
    async def _all(listener: Any) -> Any:
        while (event := await listener.next(0.05)) is not None:
            yield event

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


async def test_moves_and_restarts(queue: Callable[[], House], tmp_path: Path) -> None:
    """The order is stored; what was running waits again, and that it ran is not held against it."""
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


def test_progress_follows_what_was_measured() -> None:
    estimates, one = Estimates({}), video()
    assert estimates.total(one) is None
    far = VideoProgress(one, phase="steps", step=0, steps=10)
    estimates.follow(far, {"phase": 0.0, "step": None})
    assert far.remaining is None and 0 < far.percent < 20
    news = estimates.learn(one, {"text": 1.0, "steps": 20.0, "decode": 4.0, "encode": 1.0}, 10)
    assert news == {"m p text": 1.0, "m p step": 2.0, "m p decode": 4.0, "m p encode": 1.0}
    assert estimates.total(one) == 26.0
    assert Estimates(news).total(video(shape={**one.shape, "num_steps": 5})) == 16.0  # of fewer steps
    half = video(shape={**one.shape, "guided": 5})  # whose steps take less time than those with guidance
    assert estimates.total(half) is None and [*estimates.learn(half, {"steps": 15.0}, 10).values()] == [1.5]
    assert (estimates.total(half), estimates.total(one)) == (21.0, 26.0)
    clips = video(shape={**one.shape, "num_steps": 30, "windows": 3})  # two of which were there
    assert estimates.total(clips) is None
    assert estimates.learn(clips, {"steps": 20.0, "decode": 4.0}, 10) == {"m p*3 step": 2.0}
    longer = video(shape={**one.shape, "other_frames": 321})
    assert estimates.learn(longer, {"steps": 20.0}, 10) == {"m p:321 step": 2.0}
    seen = []
    for phase, step, passed in (
        ("loading", 0, 9),
        ("text", 0, 0.5),
        ("steps", 0, 1),
        ("steps", 5, 0),
        ("decode", 10, 2),
    ):
        far = VideoProgress(one, phase=phase, step=step, steps=10)
        estimates.follow(far, {"phase": passed, "step": None})
        seen.append((far.percent, far.remaining))
    assert seen == [(0, 26.0), (1, 25.5), (7, 24.0), (42, 15.0), (88, 3.0)]
    far = VideoProgress(one, phase="decode", step=10, steps=10, percent=95)
    estimates.follow(far, {"phase": 99.0, "step": None})
    assert (
        far.percent == 95 and far.remaining is not None and far.remaining > 1
    )  # never back, and never at its end before it is
    estimates.learn(one, {"steps": 40.0}, 10)
    assert estimates.total(one) == 36.0


class Shown(Struct):
    """What a stream looks at of a video."""

    id: str
    status: str
    phase: str | None


async def test_listeners() -> None:
    """Each hears of its own videos alone; one that is too slow is ended; a stream ends with its video."""
    hub = Publisher()
    assert not hub.wanted
    all_of_a, slow = hub.listen("a"), hub.listen(None)
    one = stream(hub, "a", "1", lambda: Shown("1", "queued", "queued"))
    told = [await anext(one)]
    hub.publish("a", "1", "video", Shown("1", "in_progress", "steps"))
    hub.publish("b", "2", "video", Shown("2", "queued", "queued"))
    assert (await all_of_a.next(1)) == ("video", Shown("1", "in_progress", "steps"))
    assert await all_of_a.next(0.01) is None
    for number in range(1000):
        hub.publish("c", "3", "video", {"id": number})
    assert (await slow.next(1)) == ("closed", {})
    assert await slow.next(0.01) is None
    for place in (3, 2):  # what waits is replaced
        hub.moved(lambda owner, place=place: {"of": owner, "place": place}, lambda id: None)
    assert (await all_of_a.next(1)) == ("queue", {"of": "a", "place": 2})
    hub.publish("a", "1", "video", Shown("1", "completed", None))
    told += [event async for event in one]
    for listener in (all_of_a, slow):
        hub.leave(listener)
    assert not hub.wanted
    hub.close()
    assert [event async for event in stream(hub, "a")] == [b"retry: 1000\n\n"]
    names = [line.split(b"\n")[1] for line in told[1:]]
    assert names == [b"event: queued", b"event: steps", b"event: completed"]
