"""The keys of clients, what one of them can take from others, and what they hear where there is no room."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from helpers.asked import asked, catalog, denies
from helpers.house import video
from helpers.manifests import with_profiles
from helpers.refusals import refuses
from hostile.refusal import time_limit
from hostile.things import ENDLESS
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.programs import Profile
from wanrun.codes import ErrorCode
from wanserve import bodies, room, service
from wanserve import database as stored
from wanserve.bodies import Bodies
from wanserve.catalog import ServedModel
from wanserve.field_names import INSTEAD, MEDIA, MERGED, NO_EFFECT, options_by_name
from wanserve.fields import OWN
from wanserve.folders import Folders
from wanserve.held import Held
from wanserve.keys import COOKIE, Client, Keys, read_keys
from wanserve.protocol import BoundedProtocol
from wanserve.room import NO_FILES, NO_SPACE, Room, frames_bytes
from wanserve.service import check_certificate

KEYS = Keys([Client(name, hashlib.sha256(name.encode() * 20).digest()) for name in "ab"])
PLAIN = {"model": "text", "prompt": "p"}
PART = '--xyz\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name * 20}"}


def parts(*given: tuple[str, str, bytes]) -> bytes:
    """A form of parts: name, what else its header says, and bytes."""
    return b"".join(PART.format(*one[:2]).encode() + one[2] + b"\r\n" for one in given) + b"--xyz--\r\n"


async def test_the_job_of_another_key_is_not_there(tmp_path: Path) -> None:
    """No answer tells that its id exists."""
    async with asked(tmp_path, catalog().models, KEYS) as server:
        answer = await server.call("POST", "/v1/videos", PLAIN, **key("a"))
        id, none = answer.json["id"], f"video_{'0' * 32}"
        assert (await server.call("GET", f"/v1/videos?after={id}", **key("a"))).json["data"] == []
        for end in ("?after={}", "/{}", "/{}/content", "/{}/events"):
            path = f"/v1/videos{end}"
            told = [await server.refused("GET", path.format(one), **key("b")) for one in (id, none)]
            assert told[0][2].replace(id, none) == told[1][2] and told[0][:2] == told[1][:2]


@pytest.mark.slow
async def test_every_field_of_any_type(tmp_path: Path) -> None:
    """One line with a status of 4xx, or a video: no error of our own."""
    names = {*options_by_name(), *MEDIA, *MERGED, *NO_EFFECT, *INSTEAD, *OWN, "position"}
    async with asked(tmp_path, catalog().models, max_waiting=10**6) as server:
        for name in sorted(names):
            for value in ({"a": {}}, [{"role": {}}]):
                answer = await server.call("POST", "/v1/videos", {**PLAIN, "model": "full", name: value})
                assert answer.status == 400, (name, value, answer.body)


async def test_a_page_of_long_prompts_is_short(tmp_path: Path) -> None:
    """What an answer takes in memory until it is read is bounded; the next page goes on."""
    async with asked(tmp_path, catalog().models) as server:
        long = {**PLAIN, "prompt": "\N{FOX FACE}" * 100_000}
        ids = [(await server.call("POST", "/v1/videos", long)).json["id"] for _ in range(4)]
        found, after, sizes = list[str](), "", list[int]()
        while len(found) < 4:
            page = await server.call("GET", f"/v1/videos?order=asc{after}")
            sizes.append(len(page.body))
            found += [one["id"] for one in page.json["data"]]
            assert page.json["has_more"] == (len(found) < 4)
            assert page.json["last_id"] == found[-1]
            after = f"&after={found[-1]}"
        assert found == ids and len(sizes) > 1 and max(sizes) < 2 << 20


@pytest.mark.parametrize("charset", ["utf-7", "unicode_escape", "utf-16", "rot13", "idna", "x" * 999, ""])
async def test_forms_of_other_charsets(tmp_path: Path, charset: str) -> None:
    """Python's codecs make texts that are none: lone surrogates."""
    body = parts(("model", "", b"text"), ("prompt", "", b"+2AA- \\ud800"))
    async with asked(tmp_path, catalog().models) as server:
        kind = f"multipart/form-data; boundary=xyz; charset={charset}"
        assert (await server.refused("POST", "/v1/videos", body, **{"content-type": kind}))[0] == 400
        kind = "multipart/form-data; boundary=xyz; charset=UTF-8"
        assert (await server.call("POST", "/v1/videos", body, **{"content-type": kind})).status == 200


async def test_a_file_is_told_by_its_name(tmp_path: Path) -> None:
    """That of the client, and no path of the server: also where its folder has a blank."""
    body = parts(
        ("model", "", b"full"),
        ("prompt", "", b"p"),
        ("mode", "", b"animate"),
        ("image", '; filename="../my cat.png"', b"\x89PNG no picture"),
        ("video", '; filename="v.mp4"', b"\0\0\0\x18ftypisom" + bytes(20)),
    )

    full = catalog().models["full"]
    (profile,) = full.manifest.profiles.values()
    without_references = Profile(96, 64, 9, 1, True, 0, profile.options)
    models = {
        "full": ServedModel(
            "full", Artifact(with_profiles(full.manifest, [without_references]), full.artifact.folder)
        )
    }
    async with asked(tmp_path / "my videos", models) as server:
        kind = "multipart/form-data; boundary=xyz"
        told = (await server.refused("POST", "/v1/videos", body, **{"content-type": kind}))[2]
        assert "my cat.png" in told and "incoming" not in told and "request_" not in told, told


def _raises(error: Exception) -> Callable[..., Any]:
    def fails(*_: Any) -> None:
        raise error

    return fails


async def test_a_model_that_is_withheld(tmp_path: Path) -> None:
    """Its videos wait for the next start, and whoever waits for one is told at once."""
    async with asked(tmp_path, catalog().models) as server:
        server.service.queue.withheld["text"] = "it was changed"
        refusal = await server.refused("POST", "/v1/videos/sync", {"model": "text", "prompt": "x"})
        assert refusal[:2] == (503, "withheld")
        assert [one.status for one in server.service.queue.waiting] == ["queued"]


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool) -> None:
    """One line for each request, not ready, and no video begins; when to try again only if room is made."""
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    settings = {"keep_bytes": 1} if comes_back else {}
    async with asked(tmp_path, catalog().models, **settings) as server:
        assert (await server.call("POST", "/v1/videos", PLAIN)).status == 200
        for place, name, error, status in (
            (stored, "add", full, 507),
            (stored, "add", OSError(errno.EDQUOT, "Disk quota exceeded"), 507),
            (stored, "add", OSError(errno.EMFILE, "Too many open files"), 503),
            (room, "RESERVE", None, 507),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, 2**60 if error is None else _raises(error))
                answer = await server.call("POST", "/v1/videos", PLAIN)
                assert answer.status == status, answer.body
                assert ("retry-after" in answer.headers) == (comes_back or status == 503)
                assert answer.json["error"]["message"].startswith(NO_SPACE if status == 507 else NO_FILES)
                if error is None:
                    ready = await server.call("GET", "/readyz")
                    assert (ready.status, ready.json) == (503, {"status": NO_SPACE})
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(server.service.queue.turns.next(Held()), 0.02)
        assert len(server.service.queue.waiting) == 1
        await asyncio.wait_for(server.service.queue.turns.next(Held()), 1)


async def test_old_jobs_go_while_nothing_can_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files make the room that the rest needs."""
    async with asked(tmp_path, catalog().models, keep_seconds=-1.0) as server:
        id = (await server.call("POST", "/v1/videos", PLAIN)).json["id"]
        await server.call("POST", f"/v1/videos/{id}/cancel")
        monkeypatch.setattr(server.service.queue, "store_again", _raises(sqlite3.OperationalError("full")))
        cleaning = asyncio.create_task(server.service._clean())
        while (await server.call("GET", f"/v1/videos/{id}")).status == 200:
            await asyncio.sleep(0.001)
        assert (await server.call("GET", "/v1/videos")).json["data"] == []
        cleaning.cancel()


def test_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Room(tmp_path)
    assert one.lack() is None and one.lack(2**60) == NO_SPACE
    assert one.refusal(ValueError()) is None and one.refusal(OSError(errno.EIO, "x")) is None
    assert one.refusal(sqlite3.OperationalError("x")) is None
    monkeypatch.setattr(room.os, "open", _raises(OSError(errno.EMFILE, "x")))
    assert one.lack() == NO_FILES
    long = video(options={"prompt": "p", "seed": 0, "num_frames": 100})
    assert (frames_bytes(video()), frames_bytes(long)) == (96 * 64 * 3 * 9, 96 * 64 * 3 * 100)


async def test_small_bodies_of_a_client_are_read_one_at_a_time(tmp_path: Path) -> None:
    class Small:
        headers = {"content-type": "application/json", "content-length": "2"}  # noqa: RUF012 - of a request

        async def body(self) -> bytes:
            return b"{}"

    reader = Bodies(Folders(tmp_path))
    async with reader.read(Small(), "a"), reader.read(Small(), "b"):  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), reader.read(Small(), "a"):  # type: ignore[arg-type]
                pass
    async with reader.read(Small(), "a"):  # type: ignore[arg-type]
        pass


async def test_large_bodies_have_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, and each client's first before any other's second."""

    class Large:
        headers = {"content-type": "application/json"}  # noqa: RUF012 - of a request, and no length

        async def stream(self) -> Any:
            yield json.dumps({"prompt": "x" * 90_000}).encode()

    order = list[str]()

    async def read(reader: Bodies, name: str, event: asyncio.Event | None = None) -> None:
        async with reader.read(Large(), name[0]) as form:  # type: ignore[arg-type]
            assert len(form.fields["prompt"]) == 90_000
            order.append(name)
            if event is not None:
                await event.wait()
        assert not form.fields

    reader, event = Bodies(Folders(tmp_path)), asyncio.Event()
    tasks = [asyncio.create_task(read(reader, "a1", event))]
    while not order:
        await asyncio.sleep(0.001)
    for name in ("a2", "a3", "b1"):
        tasks.append(asyncio.create_task(read(reader, name)))
        await asyncio.sleep(0.01)
    event.set()
    await asyncio.gather(*tasks)
    assert order[0] == "a1" and order.index("b1") < order.index("a3")
    event.clear()
    holds = asyncio.create_task(read(reader, "a4", event))
    while order[-1] != "a4":
        await asyncio.sleep(0.001)
    monkeypatch.setattr(bodies, "TURN_SECONDS", 0.02)
    with denies("too_many_uploads", 429) as caught:
        await read(reader, "b2")
    assert caught.value.headers["Retry-After"] == "10"
    event.set()
    await holds
    await read(reader, "b3")
    assert not list((tmp_path / "incoming").iterdir())


async def test_connections_leave_room_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond the bound are closed at once: nobody can take all of the descriptors."""
    limits = {8192: 2000, 1024: 448, 64: 16}
    for soft, most in limits.items():
        monkeypatch.setattr(service.resource, "getrlimit", lambda which, soft=soft: (soft, soft))
        assert service.connections() == most

    class Transport(asyncio.Transport):
        closed = False

        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return default

        def abort(self) -> None:
            self.closed = True

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config, state = uvicorn.Config(app, limit_concurrency=10, log_config=None), ServerState()
    transports = [Transport() for _ in range(15)]
    for transport in transports:
        BoundedProtocol(config, state, {}).connection_made(transport)
    assert [transport.closed for transport in transports] == [False] * 11 + [True] * 4


async def test_a_key_has_a_part_of_the_connections(tmp_path: Path) -> None:
    async with asked(tmp_path, catalog().models, KEYS) as server:
        server.app._most_open = 2
        streams = [asyncio.create_task(server.call("GET", "/v1/events", **key("a"))) for _ in range(2)]
        while server.service.queue.hub.wanted is False:
            await asyncio.sleep(0.001)
        told = await server.refused("GET", "/v1/models", **key("a"))
        assert told[:2] == (429, "too_many_requests")
        assert (await server.call("GET", "/v1/models", **key("b"))).status == 200
        server.service.queue.hub.close()
        await asyncio.gather(*streams)
        assert (await server.call("GET", "/v1/models", **key("a"))).status == 200


KEY = "sk-0123456789abcdef"


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# people\n\nalice {KEY}a\nbob {KEY}b 3 60\n")
    file.chmod(0o600)
    keys = read_keys(file, f"carol {KEY}c; dave {KEY}d")
    for name, limit in (("alice", None), ("bob", 3), ("carol", None), ("dave", None)):
        found = keys.of({"authorization": f"Bearer {KEY}{name[0]}"})
        assert found is not None and (found.name, found.max_waiting) == (name, limit)
        assert found.max_live_seconds == (None if limit is None else 60)
    found = keys.of({"cookie": f'a={{"b":1}}; {COOKIE}={KEY}b'})
    assert found is not None and found.name == "bob"
    for headers in (
        {},
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"Basic {KEY}a"},
        {"cookie": "a=b;;"},
    ):
        assert keys.of(headers) is None
    everybody = Keys().of({})
    assert everybody is not None and everybody.name == ""


@pytest.mark.parametrize(
    ("text", "code", "parts"),
    [
        ("alice", "invalid_value", {"what": "line 1 ", "expected": "NAME KEY"}),
        ("\nalice short", "out_of_range", {"what": "line 2 ", "expected": "16"}),
        (f"alice {KEY} 1 1 1", "invalid_value", {"what": "line 1 ", "expected": "NAME KEY"}),
        (f"alice {KEY} many", "invalid_value", {"what": "line 1 ", "expected": "NAME KEY"}),
        (f"alice {KEY} 0 0", "out_of_range", {"what": "line 1 ", "expected": "1 or more"}),
        (f"alice {KEY} \N{SUPERSCRIPT TWO}", "invalid_value", {"what": "line 1 ", "expected": "NAME KEY"}),
        (f"alice {KEY}\nalice {KEY}b", "conflict", {"what": "name"}),
        (f"alice {KEY}\nbob {KEY}", "conflict", {"what": "key"}),
        ("# nobody", "invalid_value", {"what": "keys", "expected": "a name and"}),
    ],
)
def test_keys_that_are_refused(tmp_path: Path, text: str, code: ErrorCode, parts: dict[str, Any]) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(0o600)
    with refuses(code, **parts):
        read_keys(file, None)


def test_keys_that_others_can_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice {KEY}")
    file.chmod(0o644)
    with refuses("untrusted", what=file, remedy="chmod 600"):
        read_keys(file, None)
    with refuses("unreadable", what=tmp_path / "none"):
        read_keys(tmp_path / "none", None)


@pytest.mark.parametrize("kind", ENDLESS)
def test_keys_and_certificates_that_are_no_files(tmp_path: Path, kind: str) -> None:
    """They are refused at once: nobody waits for a pipe's writer, or reads a device without an end."""
    file = tmp_path / "file"
    ENDLESS[kind](file)
    with time_limit(2):
        with refuses("unreadable", what=file):
            read_keys(file, None)
        with refuses("unreadable", what="TLS certificate"):
            check_certificate((file, file))
