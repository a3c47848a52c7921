"""The parts of the server by themselves: keys, paths in texts, devices, retention, estimates, listeners."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, structs

from helpers.house import video
from helpers.manifests import built_with, full_manifest, plain_manifest
from helpers.options import PROFILE
from helpers.refusals import refuses
from hostile.refusal import time_limit
from hostile.things import ENDLESS
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.guiders import NAG_DEFAULTS
from wanrun.codes import ErrorCode
from wanrun.errors import UsageError, field
from wanserve.catalog import ServedModel
from wanserve.environments import environments
from wanserve.estimate import Estimates
from wanserve.folders import Folders
from wanserve.keys import COOKIE, Keys, read_keys
from wanserve.process import how
from wanserve.progress import VideoProgress
from wanserve.publisher import Publisher, stream
from wanserve.refusal import RefusedError, refused, told_with, without_paths
from wanserve.request_media import kind_of, safe_name
from wanserve.retention import outdated
from wanserve.service import check_certificate
from wanserve.settings import Settings
from wanserve.video import Upload

KEY = "sk-0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("no manifest in /srv/models/wan", "no manifest in wan"),
        ("'/a/b c/d.png' cannot be read; found /x", "'b c/d.png' cannot be read; found x"),
        ("file:///etc/passwd is a URL", "passwd is a URL"),
        ("run wanbuild compile --artifact /srv/a/b, or ~/x/y", "run wanbuild compile --artifact b, or y"),
        ("96x64/2 and a ratio of 3/4, and/or", "96x64/2 and a ratio of 3/4, and/or"),
        ("(/dev/shm/pytest-0/x.png)", "(x.png)"),
        ("at /", "at /"),
    ],
)
def test_no_answer_has_a_path(text: str, plain: str) -> None:
    assert without_paths(text) == plain


@pytest.mark.parametrize("nag", [False, True])
def test_nag_is_offered_where_a_profile_is_built_for_it(nag: bool) -> None:
    profile = structs.replace(PROFILE, options=built_with(nag=nag))
    model = ServedModel("a", Artifact(plain_manifest(profiles={profile.name: profile}), Path("a")))
    assert (NAG_DEFAULTS.keys() <= model.options.keys()) == nag


def test_known_paths_have_names() -> None:
    """Those with spaces too, which nobody can tell from words."""
    names = Folders.names(Path("/srv/my videos/a"), [Upload("image", "image-0.png", "cat.png", "image", "")])
    text = "/srv/my videos/a/image-0.png, /srv/my videos/a/x, /srv/wan"
    assert without_paths(text, names) == "cat.png, x, wan"
    with pytest.raises(RefusedError) as caught, told_with(names):
        raise RefusedError("no /srv/my videos/a/image-0.png")
    assert str(caught.value) == "no cat.png"


def test_a_refusal_is_one_line_in_the_form_of_openai() -> None:
    error = RefusedError("a\nb\x1b[2J", 429, code="queue_full", param="x").body["error"]
    assert error == {
        "message": "a\\nb\\x1b[2J",
        "type": "rate_limit_error",
        "param": "x",
        "code": "queue_full",
    }
    parts = {"expected": "b", "found": "/c/d", "remedy": "e"}
    shown = {"message": "a; expected b; found d; e", "expected": "b", "found": "d", "remedy": "e"}
    assert shown.items() <= RefusedError("a", **parts).body["error"].items()
    kinds = {status: RefusedError("x", status).body["error"]["type"] for status in (400, 401, 403, 404, 500)}
    assert list(kinds.values()) == [
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "server_error",
    ]


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


def test_a_worker_for_each_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on a CPU and for a mesh; on accelerators each sees its own alone."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plain, mesh = [plain_manifest()], [full_manifest()]
    assert environments(plain, None, tmp_path) == [{}]
    assert environments(plain, 2, tmp_path) == [{}, {}]
    for number in range(2):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    assert environments(plain, None, tmp_path) == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    assert environments(mesh, None, tmp_path) == [{}]
    assert environments(plain, 1, tmp_path) == [{}]
    assert len(environments(plain, 3, tmp_path)) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa, GPU-bb")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments(plain, None, tmp_path)] == [
        "GPU-aa",
        "GPU-bb",
    ]
    other = tmp_path / "tpu"
    for name in ("vfio/0", "vfio/1", "vfio/vfio"):
        (other / "dev" / name).mkdir(parents=True)
    assert [one["TPU_VISIBLE_CHIPS"] for one in environments(plain, None, other)] == ["0", "1"]


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


def test_listeners() -> None:
    """Each hears of its own videos alone; one that is too slow is ended; a stream ends with its video."""

    async def run() -> list[bytes]:
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
        return told

    told = asyncio.run(run())
    names = [line.split(b"\n")[1] for line in told[1:]]
    assert names == [b"event: queued", b"event: steps", b"event: completed"]


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


def test_kinds_and_names() -> None:
    assert kind_of(b"\x89PNG....") == (".png", "image")
    assert kind_of(b"RIFF....WEBP") == (".webp", "image")
    assert kind_of(b"RIFF....AVI ") == (".avi", "video")
    assert kind_of(b"\0\0\0\x18ftypisom") == (".mp4", "video")
    assert kind_of(b"\0\0\0\x18ftypavif") == (".avif", "image")
    assert kind_of(b"\0\0\0\x18ftypheic") == (".heic", "image")
    assert kind_of(b"hello") == (".bin", "video")
    assert [safe_name(name) for name in ("../../a.png", "C:\\x\\b.png", "a\nb", "", None)] == [
        "a.png",
        "b.png",
        "ab",
        "file",
        "file",
    ]


def test_how_a_worker_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(process.pid, signal.SIGKILL)
    assert how(process.wait()).startswith("signal 9 (Killed, ")
    assert how(-signal.SIGSEGV).startswith("signal 11 (")
    assert how(3) == "exit code 3"


@pytest.mark.parametrize(
    ("remedy", "told"),
    [
        ("encode it again, or give a folder of images", "x; encode it again"),
        (
            f"choose one of these, or {field('build')}, or add one with wanbuild compile",
            "x; choose one of these",
        ),
        ("run wanbuild compile", "x"),
    ],
)
def test_a_client_builds_nothing_and_has_no_folder(remedy: str, told: str) -> None:
    assert str(refused(UsageError("invalid_value", "x", remedy=remedy), str)) == told
