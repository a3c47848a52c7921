"""What is stored: videos, durable and in order, their folders, and how long both are kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from helpers.house import video
from helpers.refusals import refuses
from wanserve import database as stored
from wanserve.database import VideoDatabase
from wanserve.folders import Folders
from wanserve.retention import outdated
from wanserve.settings import Settings
from wanserve.video import Failure, Upload


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[VideoDatabase]:
    store = VideoDatabase(path)
    try:
        yield store
    finally:
        store.close()


OF_BEFORE = (
    '{"id":"video_a","owner":"alice","model":"m","options":{"prompt":"a fox","seed":7},'
    '"media":[{"option":"image","file":"image-0.png","name":"cat.png","kind":"image","digest":"00"}],'
    '"format":"mp4","shape":{"profile":"p","size":"96x64","num_frames":9,"num_videos":1,"fps":16.0,'
    '"num_steps":10},"status":"failed","rank":4.0,"created":1.0,"started":2.0,"ended":3.0,"attempts":1,'
    '"resolved":{},"seconds":{},"bytes":0,"warnings":["w"],'
    '"error":{"code":"worker_died","message":"it has ended"},"unwanted":false,"idempotency":"k",'
    '"fingerprint":"f"}'
)
"""A record as versions before this one wrote it, byte for byte."""


async def test_a_database_of_before_is_read_and_written_alike(tmp_path: Path) -> None:
    async with opened(tmp_path / "jobs") as store:
        values = ("video_a", "alice", "failed", 4.0, 3.0, 0, "a fox", "k", OF_BEFORE.encode())
        columns = "id, owner, status, rank, ended, bytes, prompt, idempotency, record"
        insert = f"INSERT INTO videos ({columns}) VALUES ({', '.join('?' * len(values))})"
        await store.change(lambda connection: connection.execute(insert, values))
    async with opened(tmp_path / "jobs") as store:
        (found,) = store.listed("alice", 9) or ()
        assert found.error == Failure("worker_died", "it has ended")
        assert found.media == [Upload("image", "image-0.png", "cat.png", "image", "00")]
        assert msgspec.json.encode(found).decode() == f'{OF_BEFORE[:-1]},"live":null}}'


async def test_jobs_come_back(tmp_path: Path) -> None:
    one = video(
        id="video_1", rank=2.0, idempotency="key", options={"prompt": "a 50%_off cat", "seed": 2**64 - 1}
    )
    two = video(id="video_2", rank=1.0, owner="alice")
    async with opened(tmp_path / "jobs") as store:
        for each in (one, two):
            await store.change(lambda connection, each=each: stored.add(connection, each))
        assert [found.id for found in store.waiting()] == ["video_2", "video_1"]
        await store.change(lambda connection: stored.put_times(connection, {"a": 1.5}))
    async with opened(tmp_path / "jobs") as store:
        assert store.find("video_1") == one and store.find("video_3") is None
        assert store.times() == {"a": 1.5}
        found = await store.change(lambda connection: stored.with_key(connection, "", "key"))
        assert found == one
        assert [each.id for each in store.listed(None, 9) or ()] == ["video_2", "video_1"]
        assert [each.id for each in store.listed("alice", 9) or ()] == ["video_2"]
        assert [each.id for each in store.listed(None, 9, text="50%_off") or ()] == ["video_1"]
        assert store.listed(None, 9, text="50%xoff") == []
        assert store.listed(None, 9, after="video_3") is None
        assert store.listed("bob", 9, after="video_2") is None  # that of another key is not there
        assert store.listed("alice", 9, after="video_2") == []
        one.status, one.ended = "completed", 5.0
        await store.change(lambda connection: stored.put(connection, one))
        assert await store.change(stored.ended_videos) == [("video_1", "completed", 5.0, 0)]
        assert await store.change(lambda connection: stored.count(connection, "queued", "alice")) == 1
        assert await store.change(stored.last_rank) == 1.0
        await store.change(lambda connection: stored.remove(connection, "video_1"))
        await store.change(lambda connection: stored.put(connection, one))  # it stays away
        assert store.find("video_1") is None
        assert await store.change(stored.removed) == ["video_1"]
        await store.change(stored.forget_removed)
        assert await store.change(stored.removed) == []


@pytest.mark.parametrize("content", [b"notes" * 1000, None], ids=["a text", "another program's"])
def test_what_is_no_database_of_a_server(tmp_path: Path, content: bytes | None) -> None:
    """One line, and it stays as it is."""
    file = tmp_path / "jobs.sqlite3"
    if content is None:
        with contextlib.closing(sqlite3.connect(file)) as other:
            other.execute("CREATE TABLE videos (title TEXT)")
    else:
        file.write_bytes(content)
    before = file.read_bytes()
    with refuses("unreadable", what="jobs.sqlite3"):
        VideoDatabase(file)
    assert content is None or file.read_bytes() == before


async def test_a_change_that_fails_is_undone_alone(tmp_path: Path) -> None:
    """Those that are committed with it stay."""
    async with opened(tmp_path / "jobs") as store:

        def half(connection: sqlite3.Connection) -> None:
            stored.add(connection, video(id="video_half"))
            raise ZeroDivisionError

        changes = [lambda connection, n=n: stored.add(connection, video(id=f"video_{n}")) for n in range(3)]
        results = await asyncio.gather(
            *(store.change(change) for change in (changes[0], half, *changes[1:])), return_exceptions=True
        )
        assert [type(one) for one in results if one is not None] == [ZeroDivisionError]
        assert {each.id for each in store.listed(None, 9) or ()} == {"video_0", "video_1", "video_2"}
        with pytest.raises(sqlite3.IntegrityError):  # a key is one video's
            for one in (video(id="a", idempotency="k"), video(id="b", idempotency="k")):
                await store.change(lambda connection, one=one: stored.add(connection, one))
        assert store.alive


def test_what_is_kept() -> None:
    ended = [(name, "completed", end, 5) for name, end in (("new", 90.0), ("middle", 50.0), ("old", 10.0))]
    always = lambda seconds: lambda status: seconds  # noqa: E731
    assert list(outdated(ended, 100.0, always(None), None)) == []
    assert list(outdated(ended, 100.0, always(60.0), None)) == ["old"]
    assert list(outdated(ended, 100.0, always(None), 9)) == ["middle", "old"]
    assert list(outdated(ended, 100.0, always(45.0), 14)) == ["middle", "old"]
    plain, days = Settings({}, Path()), Settings({}, Path(), keep_seconds=8.0)
    states = ("completed", "failed", "cancelled")
    assert [plain.kept_seconds(state) for state in states] == [None, 7 * 86400.0, 7 * 86400.0]
    assert {days.kept_seconds(state) for state in states} == {8.0}


def test_the_folder_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One server has it at a time. What belongs to no video is removed, but nothing that it has not made."""
    folders = Folders(tmp_path / "data")
    (tmp_path / "data/incoming/photos").mkdir()
    (tmp_path / "data/incoming/photos/x.jpg").write_bytes(b"x")
    with refuses("busy", what=tmp_path / "data"):
        Folders(tmp_path / "data")
    (tmp_path / "file").write_text("")
    with refuses("unwritable", found="Not a directory", remedy="--data"):
        Folders(tmp_path / "file" / "data")
    kept, gone, removed, lost = (f"video_{digit * 32}" for digit in "abcd")
    for id in (kept, gone, "mine", "video_a"):
        (tmp_path / "data/videos" / id).mkdir()
    for id in (removed, lost):
        folders.out(one := video(id=id))
    for name in ("video.mp4.parts", "video.webm.parts", "other"):  # of two formats
        (folders.of(one.id) / "out" / name).mkdir()
    assert [path.name for path in folders.out(one).iterdir()] == ["video.mp4.parts"]
    left = tmp_path / f"data/incoming/request_{'e' * 32}"
    left.mkdir()
    (left / "x.png").write_bytes(b"x")
    with monkeypatch.context() as patch:  # a disk without links
        patch.setattr(os, "link", lambda source, target: Path(target).unlink())
        folders.keep(left, other := f"video_{'f' * 32}", more=True)
    assert (folders.of(other) / "x.png").read_bytes() == b"x"
    folders.remove(other)
    assert [path.name for path in folders.clean({kept}, {removed})] == [lost]
    assert {path.name for path in (tmp_path / "data/videos").iterdir()} == {kept, lost, "mine", "video_a"}
    assert [path.name for path in (tmp_path / "data/incoming").rglob("*")] == ["photos", "x.jpg"]
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
