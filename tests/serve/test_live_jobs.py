"""Live videos over HTTP: what readers get, who decides the pace, how they end, and what is left of them."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.asked import asked, catalog, in_chunks
from helpers.house import video
from helpers.living import FRAMES, HEAD, TYPE, House, house, part_of, run
from wanrun.media.read_video import read_video
from wanrun.media.write_video import read_metadata
from wanserve import database as stored
from wanserve.database import VideoDatabase
from wanserve.folders import Folders
from wanserve.keys import Client, Keys
from wanserve.live_files import Piece
from wanserve.live_jobs import AHEAD, LEAD_SECONDS
from wanserve.retention import restored
from wanserve.video import LiveState

TOOK = {"steps", "encode"}


def whole(there: House, chunks: int, seed: int = 0) -> bytes:
    return HEAD + b"".join(part_of(there.colours, number, seed=seed) for number in range(chunks))


async def content(there: House, id: str, variant: str = "video") -> bytes:
    answer = await there.call("GET", f"/v1/videos/{id}/content?variant={variant}")
    assert answer.status == 200, answer.body
    return bytes(answer.body)


async def still(there: House) -> int:
    """The number of chunks that were made, once no more are made."""
    made = -1
    while made != len(there.colours.made):
        made = len(there.colours.made)
        await asyncio.sleep(0.15)
    return made


def test_a_live_video_plays_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file at the end is what was read; the same seed gives the same bytes."""

    async def test() -> None:
        async with house(tmp_path, monkeypatch) as there:
            there.colours.seconds = 0.05
            for seed in (5, 6):
                there.colours.made.clear()
                id = await there.ask(num_frames=13, seed=seed)
                first, second = [await there.read(id) for _ in range(2)]
                await first.begin()
                assert first.status == 200 and TYPE in first.headers
                parts = [await first.part() for _ in range(2)]
                assert len(there.colours.made) <= 2
                job = await there.look(id)
                assert 0 < job["progress"] < 100 and job["step"] is job["steps"] is None
                parts += [part async for part in first.parts()]
                assert await (await second.begin()).rest() == b"".join(parts)
                job = await there.ended(id)
                assert (job["status"], job["num_frames"], job["live"]["stopped"]) == ("completed", 13, None)
                assert job["stage_durations"]["steps"] >= 0.2 and job["stage_durations"].keys() == TOOK
                assert (job["progress"], job["live"]["first_seconds"] > 0.05) == (100, True)
                assert b"".join(parts) == whole(there, 4, seed) == await content(there, id)
                assert (await there.call("GET", f"/v1/videos/{id}/live")).body == b"".join(parts)
                assert (await there.call("GET", f"/v1/videos/{id}/live?pace=fast")).status == 400
                assert (await content(there, id, "thumbnail"))[:4] == b"RIFF"
                assert (await content(there, id, "last_frame"))[1:4] == b"PNG"
            metrics = (await there.call("GET", "/metrics")).body.decode()
            assert "wanserve_live_first_frame_seconds_count 2.0" in metrics
            assert "wanserve_live_frames_total 26.0" in metrics

    run(test())


@pytest.mark.slow
def test_it_is_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H.264 with its metadata, whole or without the fragments that are not kept."""

    async def test() -> None:
        async with house(tmp_path, monkeypatch, encodes=True, live_bytes=1000) as there:
            id = await there.ask(num_frames=1 + 4 * FRAMES)
            reading = await (await there.read(id)).begin()
            assert 'codecs="avc1.' in reading.headers
            live, job = await reading.rest(), await there.ended(id)
            kept = await content(there, id)
            for name, data, first in (("live", live, 0), ("kept", kept, job["live"]["dropped"])):
                (file := tmp_path / f"{name}.mp4").write_bytes(data)
                assert len(list(read_video(file, "--video"))) == 17 - first
                assert read_metadata(file)["prompt"] == "a fox"
            assert 0 < job["live"]["dropped"] < 17

    run(test())


def test_the_fastest_reader_decides_the_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not read stops the device; it does not stop others, and gets all of it later."""

    async def test() -> None:
        async with house(tmp_path, monkeypatch) as there:
            there.colours.nbytes = 1 << 18
            id = await there.ask()
            slow = await (await there.read(id)).begin()
            assert await slow.part() == HEAD
            before = await still(there)
            assert before < 10
            fast = await (await there.read(id)).begin()
            assert await fast.part() == HEAD
            for number in range(before + 10):
                assert await fast.part() == part_of(there.colours, number)
            assert await still(there) > before + 10
            for number in range(before + 10):
                assert await slow.part() == part_of(there.colours, number)
            assert (await there.call("POST", f"/v1/videos/{id}/cancel")).status == 200
            job = await there.ended(id)
            assert (job["status"], job["live"]["stopped"]) == ("completed", "client")
            rest = [part async for part in slow.parts()]
            assert len(there.colours.made) == before + 10 + len(rest) and rest == [
                part_of(there.colours, before + 10 + number) for number in range(len(rest))
            ]
            assert await content(there, id) == whole(there, len(there.colours.made))

    run(test())


def test_the_oldest_fragments_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes later, or is too slow, goes on with the newest."""

    async def test() -> None:
        async with house(tmp_path, monkeypatch, live_bytes=3 << 18) as there:
            there.colours.nbytes = 1 << 18
            id = await there.ask()
            slow = await (await there.read(id)).begin()
            assert await slow.part() == HEAD
            fast = await (await there.read(id)).begin()
            for _ in range(16):
                await fast.part()
            made = await still(there)
            late = await (await there.read(id)).begin()
            assert await late.part() == HEAD
            assert await late.part() == part_of(there.colours, made - 1)
            parts = [part_of(there.colours, number) for number in range(2 * made)]
            numbers = [parts.index(await slow.part()) for _ in range(made // 2)]
            assert numbers == sorted(set(numbers)) and numbers[0] == 0
            skipped = [one for one, other in pairwise(numbers) if other > one + 1]
            assert len(skipped) == 1
            await there.call("POST", f"/v1/videos/{id}/cancel")
            job, made = await there.ended(id), len(there.colours.made)
            assert await content(there, id) == HEAD + b"".join(
                part_of(there.colours, number) for number in range(made - 3, made)
            )
            assert job["live"]["dropped"] == 1 + FRAMES * (made - 4)

    run(test())


def test_a_prompt_changes_the_next_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with house(tmp_path, monkeypatch) as there:
            id = await there.ask()
            reading = await (await there.read(id)).begin()
            seen = [await reading.part()]
            head = (await there.call("HEAD", f"/v1/videos/{id}/live")).headers
            assert (head["content-type"], head.get("content-length")) == (TYPE, None)
            for number in range(10):
                answer = await there.call("PATCH", f"/v1/videos/{id}", {"prompt": f"a hare {number}"})
                assert answer.status == 200, answer.body
                made = len(there.colours.made)
                new = part_of(there.colours, made + 1, f"a hare {number}")
                while (part := await reading.part()) != new:
                    seen.append(part)
                    assert len(seen) < made + 4
                seen.append(part)
            for body, status, code in (
                ({"prompt": "x", "seed": 1}, 409, "not_waiting"),
                ({"seed": None}, 409, "not_waiting"),
                ({"prompt": "x", "position": 1}, 409, "not_waiting"),
                ({"prompt": "x", "live": False}, 400, "invalid_value"),
                ({"prompt": None}, 400, "missing_parameter"),
                ({}, 400, "missing_parameter"),
            ):
                answer = await there.call("PATCH", f"/v1/videos/{id}", body)
                assert (answer.status, answer.json["error"]["code"]) == (status, code)
                assert b"\\n" not in answer.body
            await there.call("POST", f"/v1/videos/{id}/cancel")
            job = await there.ended(id)
            prompts = [one["prompt"] for one in job["live"]["prompts"]]
            assert prompts[0] == "a fox" and prompts[-1] == "a hare 9" and len(prompts) == 11
            answer = await there.call("PATCH", f"/v1/videos/{id}", {"prompt": "late"})
            assert answer.status == 409

    run(test())


@pytest.mark.slow
def test_readers_that_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty are cut off, and twenty are slow: nothing hangs, and those who stay get the same bytes."""

    async def test() -> None:
        async with house(tmp_path, monkeypatch) as there:
            there.colours.seconds, chance = 0.002, random.Random(0)
            id = await there.ask(num_frames=1 + 60 * FRAMES)

            async def cut(parts: int) -> None:
                reading = await there.read(id)
                if parts:
                    await reading.begin()
                for _ in range(parts):
                    await reading.part()
                reading.leave()

            async def slow(seconds: float) -> bytes:
                reading, parts = await (await there.read(id)).begin(), list[bytes]()
                async for part in reading.parts():
                    parts.append(part)
                    await asyncio.sleep(seconds)
                return b"".join(parts)

            cuts = [cut(chance.randrange(40)) for _ in range(20)]
            slows = [slow(chance.random() * 0.01) for _ in range(20)]
            results = await asyncio.gather(*slows, *cuts)
            assert results[:20] == [whole(there, 61)] * 20
            assert (await there.ended(id))["status"] == "completed"
            assert there.colours.made == list(range(61))

    run(test())


@pytest.mark.slow
@pytest.mark.parametrize(
    "reads", [0, 4, 1], ids=["nobody comes", "the last one goes", "the last one is dead"]
)
def test_without_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: int) -> None:
    """No more than two chunks are made for nobody, and it ends after a while; the next job runs."""

    async def test() -> None:
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
            assert there.colours.made.index(0, 1) <= most and await next_one.rest() == whole(there, 1, 1)

    run(test())


def test_a_killed_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made plays, and the job fails with the reason; one that nobody saw a part of runs again."""

    async def test() -> None:
        async with house(tmp_path, monkeypatch) as there:
            id = await there.ask()
            reading = await (await there.read(id)).begin()
            parts = [await reading.part() for _ in range(3)]
            there.workers[-1].kill()
            parts.append(await reading.rest())
            job = await there.ended(id)
            assert (job["status"], job["error"]["code"]) == ("failed", "worker_died")
            assert "signal 9" in job["error"]["message"]
            assert b"".join(parts) == await content(there, id) == whole(there, len(parts[3]) // 1024 + 2)
            there.colours.seconds = 0.2
            id = await there.ask(num_frames=5)
            reading = await there.read(id)
            while (await there.look(id))["phase"] != "live":
                await asyncio.sleep(0.01)
            there.workers[-1].kill()
            assert await (await reading.begin()).rest() == whole(there, 2)
            assert (await there.ended(id))["attempts"] == 2

    run(test())


def test_how_a_live_video_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the limit, by an error after a chunk, by a cancel before one, and with the server."""

    async def test() -> None:
        async with house(tmp_path, monkeypatch, max_live_seconds=3.0) as there:

            async def ended(id: str) -> dict[str, Any]:
                await (await (await there.read(id)).begin()).rest()
                return await there.ended(id)

            job = await ended(await there.ask())
            assert (job["num_frames"], job["live"]["stopped"]) == (49, "limit")
            there.colours.fails[2] = MemoryError()
            id = await there.ask()
            assert (await ended(id))["error"]["code"] == "out_of_memory"
            assert await content(there, id) == whole(there, 2)
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
        assert path.read_bytes() == whole(there, (path.stat().st_size - len(HEAD)) // 1024)

    run(test())


def test_the_server_was_killed(tmp_path: Path) -> None:
    """What plays has failed, or has ended if it was to, and is one file; what does not runs again."""

    async def test() -> None:
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

    run(test())


@pytest.mark.parametrize(
    ("fields", "status", "param", "line"),
    [
        ({"num_frames": 157}, 200, None, ""),
        ({"seconds": "9.9", "live": "true"}, 200, None, ""),
        ({"num_frames": 165}, 400, "num_frames", "at most 10 seconds, 160 frames; found 165 frames"),
        ({"seconds": 10.3}, 400, "seconds", "found 165 frames"),
        ({"num_frames": 156}, 400, "num_frames", "one more than a multiple of 4"),
        ({"num_frames": 0}, 400, "num_frames", "expected 1 to 1000000000"),
        ({"live": "yes"}, 400, "live", "expected true or false"),
        ({"format": "webm"}, 400, "format", "live and format exclude each other"),
        ({"n": 2}, 400, "n", "live and n exclude each other"),
        ({"seeds": "1,2"}, 400, "seeds", "live and seeds exclude each other"),
        ({"model": "once"}, 400, "live", "makes a video at once"),
    ],
    ids=lambda value: None,
)
def test_a_request(tmp_path: Path, fields: Any, status: int, param: Any, line: str) -> None:

    async def test() -> None:
        once = catalog().models["text"]
        models = {"text": in_chunks(once), "once": once}
        keys = Keys([Client("a", hashlib.sha256(b"a" * 20).digest(), None, 10)])
        async with asked(tmp_path, models, keys) as server:
            body = {"model": "text", "prompt": "a fox", "live": True, **fields}
            answer = await server.call("POST", "/v1/videos", body, authorization=f"Bearer {'a' * 20}")
            assert answer.status == status, answer.body
            if status == 200:
                assert answer.json["live"]["frames"] == 157 and answer.json["live"]["seconds"] == 10
            else:
                error = answer.json["error"]
                assert (error["param"], line in error["message"]) == (param, True), error

    run(test())


def test_who_plays_is_given_what_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it is made and taken; who comes later begins with the newest fragment."""

    async def test() -> None:
        async with house(tmp_path, monkeypatch) as there:
            id, began = await there.ask(), time.monotonic()
            fps = there.service.queue.find(id, None).shape["fps"]
            played = await (await there.read(id, "?pace=played")).begin()
            rest = asyncio.create_task(played.rest())
            for seconds in (0.0, 0.5):
                await asyncio.sleep(seconds)
                most = (LEAD_SECONDS + time.monotonic() - began) * fps / FRAMES + AHEAD + 1
                assert len(there.colours.made) <= most
            late = await (await there.read(id, "?pace=played")).begin()
            assert await late.part() == HEAD
            assert await late.part() in [part_of(there.colours, number) for number in there.colours.made[2:]]
            await there.call("POST", f"/v1/videos/{id}/cancel")
            await rest

    run(test())
