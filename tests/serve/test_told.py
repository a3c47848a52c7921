"""What a server tells: clients in refusals, which have no paths, and its log, a line for each event."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.asked import asked, catalog
from wanrun.errors import UsageError, field
from wanserve.folders import Folders
from wanserve.log import LOG, WARNING, start_log, tell
from wanserve.refusal import RefusedError, refused, told_with, without_paths
from wanserve.video import Upload

SECRET = "a fox in my kitchen"


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Begins a log at the level info in a format; it ends after the test."""
    levels = LOG.level, logging.root.level

    def begin(format: str) -> None:
        monkeypatch.setattr(logging.root, "handlers", [])  # pytest's own
        start_log("info", format)

    yield begin
    LOG.setLevel(levels[0])
    logging.root.setLevel(levels[1])


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_line_for_each_event(
    begin: Callable[[str], None], format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a client or a file is called, it is one line and one fact; of libraries warnings are there."""
    begin(format)
    name = "/v1/\nvideos status=200 \udcff"
    tell("accepted", id="video_1", path=name, client=None)
    logging.getLogger("asyncio").info("not told")
    LOG.warning("%d folders stay", 2)
    first, second = capsys.readouterr().err.splitlines()
    if format == "text":
        assert first.endswith(r' INFO accepted id=video_1 path="/v1/\nvideos status=200 \udcff"')
        assert second.endswith(" WARNING 2 folders stay")
    else:
        facts = json.loads(first)
        assert facts.pop("time") > 0
        assert facts == {"level": "info", "event": "accepted", "id": "video_1", "path": name}
        assert json.loads(second)["event"] == "2 folders stay"


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_traceback_is_told(
    begin: Callable[[str], None], format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(format)
    try:
        raise ValueError("a bug")
    except ValueError as error:
        LOG.error("ended", exc_info=error)
    told = capsys.readouterr().err
    assert "Traceback" in (told if format == "text" else json.loads(told)["exception"])


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
async def test_prompts_are_told_at_debug_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    """Neither a job's nor what is searched for. An answer with an error is told, one to a look is not."""
    caplog.set_level(level, LOG.name)
    async with asked(tmp_path, catalog().models) as server:
        await server.call("POST", "/v1/videos", {"model": "text", "prompt": SECRET})
        await server.call("GET", "/v1/videos?q=kitchen")
        await server.call("GET", "/v1/videos/none")
    told = [(record.getMessage(), getattr(record, "facts", {})) for record in caplog.records]
    assert ("kitchen" in str(told)) == (level == logging.DEBUG)
    statuses = [facts["status"] for event, facts in told if event == "answered"]
    assert statuses == ([200, 404] if level == logging.INFO else [200, 200, 404])
    assert [event for event, _ in told].count("accepted") == 1
    assert all(record.levelno < WARNING for record in caplog.records)


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
