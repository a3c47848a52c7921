"""The server's log: a line for each event, as text or JSON, and who may read what in it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.asked import asked, catalog
from wanserve.log import LOG, WARNING, start_log, tell

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
def test_prompts_are_told_at_debug_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    """Neither a job's nor what is searched for. An answer with an error is told, one to a look is not."""
    caplog.set_level(level, LOG.name)

    async def test() -> None:
        async with asked(tmp_path, catalog().models) as server:
            await server.call("POST", "/v1/videos", {"model": "text", "prompt": SECRET})
            await server.call("GET", "/v1/videos?q=kitchen")
            await server.call("GET", "/v1/videos/none")

    asyncio.run(test())
    told = [(record.getMessage(), getattr(record, "facts", {})) for record in caplog.records]
    assert ("kitchen" in str(told)) == (level == logging.DEBUG)
    statuses = [facts["status"] for event, facts in told if event == "answered"]
    assert statuses == ([200, 404] if level == logging.INFO else [200, 200, 404])
    assert [event for event, _ in told].count("accepted") == 1
    assert all(record.levelno < WARNING for record in caplog.records)
