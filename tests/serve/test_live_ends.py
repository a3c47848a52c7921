"""Ends of live videos, and what comes at that moment: a kill, a full disk, a slow copy, a reader."""

from __future__ import annotations

import asyncio
import errno
import time
from pathlib import Path

import pytest

from helpers.house import video
from helpers.living import HEAD, House, house, part_of, run
from wanserve.folders import Folders
from wanserve.live_files import LiveFiles, Piece
from wanserve.live_jobs import LiveJob, LiveReader
from wanserve.messages import Fragment
from wanserve.video import LiveState


def test_the_newest_prompt_of_one_that_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is by the prompt that was given while it was made, and by one that was given since."""

    async def test() -> None:
        async with house(tmp_path, monkeypatch) as there:
            there.colours.seconds = 0.2
            for later in (None, "a cat"):
                id = await there.ask(num_frames=5)
                while (await there.look(id))["phase"] != "live":
                    await asyncio.sleep(0.01)
                await there.call("PATCH", f"/v1/videos/{id}", {"prompt": "a hare"})
                there.service.queue.withheld["text"] = "it was changed"
                there.workers[-1].kill()
                while (job := await there.look(id))["status"] != "queued":
                    await asyncio.sleep(0.01)
                assert job["prompt"] == "a hare"
                if later is not None:
                    await there.call("PATCH", f"/v1/videos/{id}", {"prompt": later})
                del there.service.queue.withheld["text"]
                there.service.queue.turns.look_again()
                prompt = later or "a hare"
                parts = [part_of(there.colours, number, prompt) for number in range(2)]
                assert await (await (await there.read(id)).begin()).rest() == HEAD + b"".join(parts)
                assert [one["prompt"] for one in (await there.ended(id))["live"]["prompts"]] == [prompt]

    run(test())


def test_what_is_read_while_it_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest fragment goes and the rest becomes one file while a reader's next one is looked for."""

    async def test() -> None:
        one = video(live=LiveState(seconds=9.0, bytes=9))
        folders, read = Folders(tmp_path), LiveFiles.read
        folders.out(one)
        job, files = LiveJob(one, folders, 9.0, lambda *_: asyncio.sleep(0)), folders.live(one)
        files.begin(HEAD)

        def add(number: int) -> None:
            data = b"%d" % number * (1 + number)
            files.add(Piece(number, number, 1), data)
            job.take(Fragment(one.id, number, number, 1, len(data), 0.0, "", ""))

        def late(self: LiveFiles, piece: Piece) -> bytes:
            monkeypatch.setattr(LiveFiles, "read", read)
            loop.call_soon_threadsafe(add, 3)
            while job.made < 4:
                time.sleep(0.001)
            files.join(4)
            assert files.clear()
            return read(self, piece)

        loop = asyncio.get_running_loop()
        for number in range(3):
            add(number)
        monkeypatch.setattr(LiveFiles, "read", late)
        assert [(await job._fragment(LiveReader(number)))[1] for number in (2, 3, 0)] == [
            b"222",
            *[b"3333"] * 2,
        ]
        job.end()

    run(test())


async def kept(there: House, id: str) -> bytes:
    return bytes((await there.call("GET", f"/v1/videos/{id}/content")).body)


def test_nothing_ends_what_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that takes longer than one waits for readers; and one on a full disk, which comes later."""
    join, full = LiveFiles.join, list[OSError]()

    def slow(self: LiveFiles, frames: int) -> None:
        time.sleep(0.2)
        for error in full:
            raise error
        join(self, frames)

    async def test() -> None:
        monkeypatch.setattr(LiveFiles, "join", slow)
        async with house(tmp_path, monkeypatch, live_wait_seconds=0.1) as there:
            for _ in range(2):
                id = await there.ask(num_frames=1)
                while (await there.look(id))["live"]["made"] == 0:
                    await asyncio.sleep(0.01)
                late = await there.call("PATCH", f"/v1/videos/{id}", {"prompt": "a hare"})
                assert (late.status, late.json["error"]["code"]) == (409, "already_ended")
                job = await there.ended(id)
                assert (job["status"], job["live"]["stopped"]) == ("completed", None)
                whole = HEAD + part_of(there.colours, 0)
                assert (await kept(there, id) == whole) is not bool(full)
                full[:] = [OSError(errno.ENOSPC, "full")]
            full.clear()
            await there.service.queue.store_again()
            assert await kept(there, id) == whole and not there.service._folders.with_fragments()
            assert (await there.look(id))["live"]["made"] == 1

    run(test())


def test_who_comes_late_sees_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest video that may be made, of which a part is made only once it is read."""

    async def test() -> None:
        async with house(tmp_path, monkeypatch, max_live_seconds=0.5) as there:
            id = await there.ask(num_frames=9)
            await asyncio.sleep(0.7)
            assert (await there.look(id))["live"]["made"] == 5
            await (await (await there.read(id)).begin()).rest()
            job = await there.ended(id)
            assert (job["num_frames"], job["live"]["stopped"]) == (9, None)

    run(test())


def test_the_server_ends_before_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the next start, whether its worker has the time to end it or not."""

    async def test() -> None:
        for grace in (0.0, 5.0):
            async with house(tmp_path / str(grace), monkeypatch) as there:
                there.colours.seconds, there.service._grace = 0.3, grace
                id = await there.ask()
                while (await there.look(id))["phase"] != "live":
                    await asyncio.sleep(0.01)
            found = there.service.queue.find(id, None)
            assert (found.status, found.unwanted, found.attempts) == ("queued", False, 0)
            assert found.live is not None and found.live.stopped is None

    run(test())
