"""A video of clips over HTTP is the command's, also after the death of its worker; it can be cancelled."""

from __future__ import annotations

import base64
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.pictures import picture
from serve_client import Server, served
from wancli.console import run
from wancli.run import wanrun

pytestmark = pytest.mark.slow  # what the server takes is not seen in its tests

STEPS, CLIPS = 12, 3


def later(server: Server, id: str) -> dict[str, Any]:
    """Returns a job once it is in a clip after the first."""
    while (job := server.look(id))["step"] <= STEPS:
        assert job["status"] in ("queued", "in_progress"), job
        time.sleep(0.005)
    return job


@pytest.mark.thorough
def test_a_video_of_clips(media_toy: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    image, output = tmp_path / "image-0.png", tmp_path / "o.mp4"  # as the server names it
    picture(90, 70).save(image)
    toy = media_toy("wan2.1-i2v")[1]
    given = {
        "prompt": "a fox",
        "negative_prompt": "",
        "steps": STEPS,
        "clip_prompts": "a cat\na dog",
        "seed": 5,
    }
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    files = ["--image", str(image), "--output", str(output), "--clips", str(CLIPS)]
    assert run(wanrun, ["--artifact", str(toy), *words, *files]) == 0
    with served(tmp_path / "data", f"toy={toy}") as server:

        def ask(clips: int) -> str:
            url = "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()
            answer = server.call("POST", "/v1/videos", {**given, "clips": clips, "image": url})
            assert answer.status == 200, answer.body
            return str(answer.json["id"])

        id, endless = ask(CLIPS), ask(500)
        assert later(server, id)["steps"] == STEPS * CLIPS
        (worker,) = server.workers
        os.kill(worker, signal.SIGKILL)
        while server.look(id)["attempts"] < 2:
            time.sleep(0.005)
        while not (job := server.look(id))["step"]:
            time.sleep(0.005)
        assert job["step"] > STEPS  # the first clip was there
        assert server.until(id, "completed")["progress"] == 100
        assert server.call("GET", f"/v1/videos/{id}/content").body == output.read_bytes()
        assert later(server, endless)["steps"] == STEPS * 500
        server.call("POST", f"/v1/videos/{endless}/cancel")
        server.until(endless, "cancelled")
        assert not list((tmp_path / "data").rglob("*.parts"))
