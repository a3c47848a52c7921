"""A live video of a model in a worker's process, which is killed."""

from __future__ import annotations

import http.client
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from helpers.artifacts import far_toy
from serve_client import served
from wanrun.media.read_video import read_video


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
