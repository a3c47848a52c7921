"""Ends of live videos, and what comes at that moment: a kill, a full disk, a slow copy, a reader."""

from __future__ import annotations

import asyncio
import errno
import http.client
import os
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.artifacts import far_toy
from helpers.house import video
from helpers.living import HEAD, house
from serve_client import served
from wanrun.media.read_video import read_video
from wanserve import database as stored
from wanserve.database import VideoDatabase
from wanserve.folders import Folders
from wanserve.live_files import LiveFiles, Piece
from wanserve.live_jobs import AHEAD, LiveJob, LiveReader
from wanserve.messages import Fragment
from wanserve.retention import restored
from wanserve.video import LiveState


async def test_the_newest_prompt_of_one_that_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is by the prompt that was given while it was made, and by one that was given since."""
    async with house(tmp_path, monkeypatch) as there:
        there.colours.seconds = 0.2
        for later in (None, "a cat"):
            id = await there.ask(num_frames=5)
            await there.until(id, lambda job: job["phase"] == "live")
            await there.call("PATCH", f"/v1/videos/{id}", {"prompt": "a hare"})
            there.service.queue.withheld["text"] = "it was changed"
            there.workers[-1].kill()
            job = await there.until(id, lambda job: job["status"] == "queued")
            assert job["prompt"] == "a hare"
            if later is not None:
                await there.call("PATCH", f"/v1/videos/{id}", {"prompt": later})
            del there.service.queue.withheld["text"]
            there.service.queue.turns.look_again()
            prompt = later or "a hare"
            assert await there.play(id) == there.whole(2, prompt=prompt)
            assert [one["prompt"] for one in (await there.ended(id))["live"]["prompts"]] == [prompt]


async def test_what_is_read_while_it_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest fragment goes and the rest becomes one file while a reader's next one is looked for."""
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


async def test_nothing_ends_what_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that takes longer than one waits for readers; and one on a full disk, which comes later."""
    join, full = LiveFiles.join, list[OSError]()

    def slow(self: LiveFiles, frames: int) -> None:
        time.sleep(0.2)
        for error in full:
            raise error
        join(self, frames)

    monkeypatch.setattr(LiveFiles, "join", slow)
    async with house(tmp_path, monkeypatch, live_wait_seconds=0.1) as there:
        for _ in range(2):
            id = await there.ask(num_frames=1)
            await there.until(id, lambda job: job["live"]["made"])
            late = await there.call("PATCH", f"/v1/videos/{id}", {"prompt": "a hare"})
            assert (late.status, late.json["error"]["code"]) == (409, "already_ended")
            job = await there.ended(id)
            assert (job["status"], job["live"]["stopped"]) == ("completed", None)
            kept = await there.call("GET", f"/v1/videos/{id}/content")
            assert (kept.body == there.whole(1)) is not bool(full)
            full[:] = [OSError(errno.ENOSPC, "full")]
        full.clear()
        await there.service.queue.store_again()
        assert await there.content(id) == there.whole(1) and not there.service._folders.with_fragments()
        assert (await there.look(id))["live"]["made"] == 1


async def test_who_comes_late_sees_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest video that may be made, of which a part is made only once it is read."""
    async with house(tmp_path, monkeypatch, max_live_seconds=0.5) as there:
        id = await there.ask(num_frames=9)
        await asyncio.sleep(0.7)
        assert (await there.look(id))["live"]["made"] == 5
        await there.play(id)
        job = await there.ended(id)
        assert (job["num_frames"], job["live"]["stopped"]) == (9, None)


async def test_the_server_ends_before_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the next start, whether its worker has the time to end it or not."""
    for grace in (0.0, 5.0):
        async with house(tmp_path / str(grace), monkeypatch) as there:
            there.colours.seconds, there.service._grace = 0.3, grace
            id = await there.ask()
            await there.until(id, lambda job: job["phase"] == "live")
        found = there.service.queue.find(id, None)
        assert (found.status, found.unwanted, found.attempts) == ("queued", False, 0)
        assert found.live is not None and found.live.stopped is None


@pytest.mark.thorough
def test_a_model_behind_processes(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same bytes for the same seed; a worker that is killed leaves a video, and the next one serves."""
    live = {"prompt": "a fox", "live": True, "num_steps": 1, "seed": 3}
    with served(tmp_path / "data", f"far={far_toy(tmp_path_factory)[1]}") as server:
        first = server.call("POST", "/v1/videos", live).json["id"]
        with closing(http.client.HTTPConnection(server.host, server.port)) as connection:
            connection.request("GET", f"/v1/videos/{first}/live")
            with connection.getresponse() as reading:
                made = reading.read(3000)
                assert server.call("PATCH", f"/v1/videos/{first}", {"prompt": "a hare"}).status == 200
                os.kill(server.workers[0], signal.SIGKILL)
                made += reading.read()
        job = server.ended(first)
        assert (job["status"], job["error"]["code"]) == ("failed", "worker_died")
        assert server.call("GET", f"/v1/videos/{first}/content").body == made
        second = server.call("POST", "/v1/videos", {**live, "num_frames": 5}).json["id"]
        again = server.call("GET", f"/v1/videos/{second}/live").body
        assert server.ended(second)["num_frames"] == 5
        (tmp_path / "made.mp4").write_bytes(again)
        assert len(list(read_video(tmp_path / "made.mp4", "--video"))) == 5
        first_made, first_again = (data.partition(b"moof")[2][:1500] for data in (made, again))
        assert len(first_made) == 1500 and first_made == first_again


@pytest.mark.slow
@pytest.mark.parametrize(
    "reads", [0, 4, 1], ids=["nobody comes", "the last one goes", "the last one is dead"]
)
async def test_without_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: int) -> None:
    """No more than two chunks are made for nobody, and it ends after a while; the next job runs."""
    async with house(tmp_path, monkeypatch, live_wait_seconds=0.3, body_seconds=0.3) as there:
        there.colours.nbytes = 1 << 18 if reads == 1 else 1024
        id, after = await there.ask(), await there.ask(num_frames=1, seed=1)
        most = AHEAD
        if reads:
            reading = await (await there.read(id)).begin()
            for _ in range(reads):
                await reading.part()
            if reads > 1:
                reading.leave()
            await asyncio.sleep(0.1)
            most = len(there.colours.made) + AHEAD
        next_one = await there.read(after)
        job = await there.ended(id)
        assert (job["status"], job["live"]["stopped"]) == ("completed", "no_reader")
        await next_one.begin()
        assert there.colours.made.index(0, 1) <= most and await next_one.rest() == there.whole(1, 1)


async def test_a_killed_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made plays, and the job fails with the reason; one that nobody saw a part of runs again."""
    async with house(tmp_path, monkeypatch) as there:
        id = await there.ask()
        reading = await (await there.read(id)).begin()
        parts = [await reading.part() for _ in range(3)]
        there.workers[-1].kill()
        parts.append(await reading.rest())
        job = await there.ended(id)
        assert (job["status"], job["error"]["code"]) == ("failed", "worker_died")
        assert "signal 9" in job["error"]["message"]
        assert b"".join(parts) == await there.content(id) == there.whole(len(parts[3]) // 1024 + 2)
        there.colours.seconds = 0.2
        id = await there.ask(num_frames=5)
        reading = await there.read(id)
        await there.until(id, lambda job: job["phase"] == "live")
        there.workers[-1].kill()
        assert await (await reading.begin()).rest() == there.whole(2)
        assert (await there.ended(id))["attempts"] == 2


async def test_how_a_live_video_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the limit, by an error after a chunk, by a cancel before one, and with the server."""
    async with house(tmp_path, monkeypatch, max_live_seconds=3.0) as there:

        async def ended(id: str) -> dict[str, Any]:
            await there.play(id)
            return await there.ended(id)

        job = await ended(await there.ask())
        assert (job["num_frames"], job["live"]["stopped"]) == (49, "limit")
        there.colours.fails[2] = MemoryError()
        id = await there.ask()
        assert (await ended(id))["error"]["code"] == "out_of_memory"
        assert await there.content(id) == there.whole(2)
        there.colours.seconds = 0.3
        id = await there.ask()
        reading = await there.read(id)
        await there.call("POST", f"/v1/videos/{id}/cancel")
        assert (await there.ended(id))["status"] == "cancelled"
        assert (await reading.begin()).status == 409
        there.service.queue.withheld["text"] = "it was changed"
        waits = await there.ask()
        assert (await (await there.read(waits)).begin()).status == 503
        del there.service.queue.withheld["text"]
        reading = await there.read(waits)
        await there.call("DELETE", f"/v1/videos/{waits}")
        assert (await reading.begin()).status == 404
        there.colours.seconds = 0.0
        there.colours.fails.clear()
        last = await there.ask()
        await (await (await there.read(last)).begin()).part()
        video = there.service.queue.find(last, None)
    assert (video.status, video.live and video.live.stopped) == ("completed", "server")
    path = there.service._folders.result(video, 0, "video")
    assert path.read_bytes() == there.whole((path.stat().st_size - len(HEAD)) // 1024)


async def test_the_server_was_killed(tmp_path: Path) -> None:
    """What plays has failed, or has ended if it was to, and is one file; what does not runs again."""
    folders = Folders(tmp_path)
    store = VideoDatabase(folders.database)
    names = [f"video_{number:032}" for number in range(7)]
    no_live, failed, stopped, joined, ended, nothing, made = names
    for id in names:
        frames = 21 if id == made else None
        live = None if id == no_live else LiveState(frames=frames, seconds=9.0, bytes=99)
        one = video(id=id, status="in_progress", attempts=1, live=live, unwanted=id == stopped)
        if id == ended:
            one.status, one.live = "completed", LiveState(seconds=9.0, bytes=99, dropped=13, made=21)
        await store.change(partial(stored.add, video=one))
        folders.out(one)
        files = folders.live(one)
        if id not in (no_live, nothing):
            files.begin(HEAD)
        # Killed: after its second fragment, after that it was joined, and while fragments were removed.
        for number in {no_live: (), nothing: (), ended: (4,)}.get(id, (3, 4)):
            files.add(Piece(number, 1 + 4 * number, 4), b"%d" % number)
        if id in (joined, ended):
            folders.result(one, 0, "video").write_bytes(HEAD + b"34")
    waiting = await restored(store, folders)
    assert [one.id for one in waiting] == [no_live, nothing]
    for id in (failed, stopped, joined, ended, made):
        found = store.find(id)
        assert found is not None and found.live is not None
        how = ("failed", "worker_died") if id in (failed, joined) else ("completed", None)
        assert (found.status, found.error and found.error.code, found.attempts) == (*how, 1)
        assert (found.live.dropped, found.live.made, found.bytes) == (13, 21, len(HEAD) + 2)
        assert folders.result(found, 0, "video").read_bytes() == HEAD + b"34"
    assert folders.with_fragments() == []
    store.close()
