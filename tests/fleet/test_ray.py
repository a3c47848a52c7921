"""A Ray dataset of prompts, on a local cluster; a worker is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wanrun
from wanfleet.ray import VideoMaker, make_videos

PROMPTS = 40
WORKERS = 4


def test_a_row_becomes_a_video_once(toy_artifact: Path, tmp_path: Path) -> None:
    """Without Ray: what an actor does."""
    maker = VideoMaker(str(toy_artifact), str(tmp_path / "videos"), ".npy")
    row = {"id": np.int64(7), "prompt": "a cat", "seed": np.int64(3), "num_steps": 1, "size": None}
    first = maker(row)
    assert first["made"] and first["error"] == "" and first["id"] == 7
    (video,) = map(Path, first["videos"])
    facts = json.loads(first["metadata"])
    assert (facts["prompt"], facts["seed"], facts["num_steps"]) == ("a cat", 3, 1)
    with wanrun.load(toy_artifact) as pipeline:
        expected = pipeline.generate("a cat", seed=3, num_steps=1)
    assert (np.load(video) == expected.frames[0]).all()
    made = video.stat().st_mtime_ns
    again = maker(row)
    assert not again["made"] and again["videos"] == first["videos"] and video.stat().st_mtime_ns == made
    assert again["metadata"] == first["metadata"]
    named = maker({"prompt": "a cat", "num_steps": 1, "output": "mine"})
    assert named["videos"] == [str(tmp_path / "videos" / "mine.npy")]
    other = maker({"prompt": "a dog", "num_steps": 1, "output": "mine"})
    assert "is there, and was made otherwise" in other["error"] and other["videos"] == []
    assert "num_steps" in maker({"prompt": "a", "num_steps": 0})["error"]
    assert "is no name" in maker({"prompt": "a", "output": "../x"})["error"]
    url = VideoMaker(str(toy_artifact), "memory://bucket/videos", ".npy")
    assert url(row)["videos"] == [f"memory://bucket/videos/{video.name}"] and not url(row)["made"]


def actors() -> list[int]:
    """The processes of Ray that make videos."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and b"ray::MapWorker" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of this machine alone."""
    ray = pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("ray")
    environment = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
    ray.init(
        num_cpus=WORKERS + 1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2**27,
        _temp_dir=str(folder) if len(str(folder)) < 60 else None,
        runtime_env=environment,
    )
    yield ray
    ray.shutdown()


def test_forty_prompts_four_workers_one_killed(cluster: Any, toy_artifact: Path, tmp_path: Path) -> None:
    rows = [{"id": number, "prompt": f"cat {number}", "num_steps": 1} for number in range(PROMPTS)]
    videos = tmp_path / "videos"
    dataset = make_videos(
        cluster.data.from_items(rows), toy_artifact, videos, workers=WORKERS, suffix=".npy", num_cpus=1
    )
    killed = list[int]()

    def kill() -> None:
        deadline = time.monotonic() + 120
        while len(list(videos.glob("*.npy"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        killed.extend(actors()[:1])
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    made = dataset.take_all()
    killer.join()
    assert killed and len(made) == PROMPTS and {row["error"] for row in made} == {""}
    assert sorted(row["id"] for row in made) == list(range(PROMPTS))
    names = [row["videos"][0] for row in made]
    assert len(set(names)) == PROMPTS and set(names) == {str(path) for path in videos.glob("*.npy")}
    assert not [path for path in videos.iterdir() if path.name.startswith(".") and path.suffix != ".npy"]
    with wanrun.load(toy_artifact) as pipeline:
        for row in made[::13]:
            expected = pipeline.generate(row["prompt"], num_steps=1)
            assert (np.load(row["videos"][0]) == expected.frames[0]).all()
