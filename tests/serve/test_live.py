"""Live videos over HTTP: what a request may ask for, what readers get, and who decides the pace."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.asked import asked, catalog, in_chunks
from helpers.living import FRAMES, HEAD, TYPE, House, house, part_of
from wanrun.media.read_video import read_video
from wanrun.media.write_video import read_metadata
from wanserve.keys import Client, Keys
from wanserve.live_jobs import AHEAD, LEAD_SECONDS

TOOK = {"steps", "encode"}


async def still(there: House) -> int:
    """The number of chunks that were made, once no more are made."""
    made = -1
    while made != len(there.colours.made):
        made = len(there.colours.made)
        await asyncio.sleep(0.15)
    return made


async def test_a_live_video_plays_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file at the end is what was read; the same seed gives the same bytes."""
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
            assert b"".join(parts) == there.whole(4, seed) == await there.content(id)
            assert (await there.call("GET", f"/v1/videos/{id}/live")).body == b"".join(parts)
            assert (await there.call("GET", f"/v1/videos/{id}/live?pace=fast")).status == 400
            assert (await there.content(id, "thumbnail"))[:4] == b"RIFF"
            assert (await there.content(id, "last_frame"))[1:4] == b"PNG"
        metrics = (await there.call("GET", "/metrics")).body.decode()
        assert "wanserve_live_first_frame_seconds_count 2.0" in metrics
        assert "wanserve_live_frames_total 26.0" in metrics


@pytest.mark.slow
async def test_it_is_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H.264 with its metadata, whole or without the fragments that are not kept."""
    async with house(tmp_path, monkeypatch, encodes=True, live_bytes=1000) as there:
        id = await there.ask(num_frames=1 + 4 * FRAMES)
        reading = await (await there.read(id)).begin()
        assert 'codecs="avc1.' in reading.headers
        live, job = await reading.rest(), await there.ended(id)
        kept = await there.content(id)
        for name, data, first in (("live", live, 0), ("kept", kept, job["live"]["dropped"])):
            (file := tmp_path / f"{name}.mp4").write_bytes(data)
            assert len(list(read_video(file, "--video"))) == 17 - first
            assert read_metadata(file)["prompt"] == "a fox"
        assert 0 < job["live"]["dropped"] < 17


async def test_the_fastest_reader_decides_the_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not read stops the device; it does not stop others, and gets all of it later."""
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
        assert await there.content(id) == there.whole(len(there.colours.made))


async def test_the_oldest_fragments_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes later, or is too slow, goes on with the newest."""
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
        assert await there.content(id) == HEAD + b"".join(
            part_of(there.colours, number) for number in range(made - 3, made)
        )
        assert job["live"]["dropped"] == 1 + FRAMES * (made - 4)


async def test_a_prompt_changes_the_next_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.slow
async def test_readers_that_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty are cut off, and twenty are slow: nothing hangs, and those who stay get the same bytes."""
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
        assert results[:20] == [there.whole(61)] * 20
        assert (await there.ended(id))["status"] == "completed"
        assert there.colours.made == list(range(61))


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
async def test_a_request(tmp_path: Path, fields: Any, status: int, param: Any, line: str) -> None:
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


async def test_who_plays_is_given_what_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it is made and taken; who comes later begins with the newest fragment."""
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
