"""A Ray dataset of prompts, on a local cluster; a worker is killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wanrun
from helpers.refusals import refuses
from wanfleet.ray import VideoMaker
from wanfleet.rows import RowStore, RowTurns, request_of
from wanfleet.uploads import Uploads
from wanrun.errors import UsageError
from wanrun.media.inputs import Inputs

PROMPTS, WORKERS = 12, 2


def refused(uploads: Uploads, name: str) -> None:
    """What a store does that lets nobody remove a file."""
    raise UsageError("unwritable", f"{name} cannot be removed")


def test_a_row_begins_when_the_one_before_has_made_its_steps() -> None:
    """One that may have ended a worker is alone, and so ends none of another row."""
    turns, seen, may_end = RowTurns(), list[str](), threading.Event()

    def make(name: str, alone: bool) -> None:
        with turns.taken(alone) as passed:
            seen.append(f"{name} begins")
            passed()
            assert may_end.wait(10)
            seen.append(f"{name} ends")

    with ThreadPoolExecutor(3) as threads:
        threads.submit(make, "a", False)
        while not seen:
            time.sleep(0.001)
        alone = threads.submit(make, "b", True)
        time.sleep(0.05)
        assert seen == ["a begins"]
        may_end.set()
        alone.result()
        assert seen == ["a begins", "a ends", "b begins", "b ends"]
        may_end.clear()
        threads.submit(make, "c", False)
        other = threads.submit(make, "d", False)
        while len(seen) < 6:  # both are under way
            time.sleep(0.001)
        assert {*seen[4:]} == {"c begins", "d begins"}
        may_end.set()
        other.result()
    with pytest.raises(UsageError), turns.taken(alone=False):
        raise UsageError("invalid_value", "of a row")
    with turns.taken(alone=True):
        pass


@pytest.mark.thorough
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
        generation = pipeline.resolve("a cat")
    images = [Inputs(facts={"image": name, "image_sha256": digest}) for name, digest in ("aX", "bX", "aY")]
    digests = [request_of(generation, one, drawn=False) for one in images]  # a file's name does not count
    assert digests[0] == digests[1] != digests[2]
    strengths = [[{"name": "a", "strengths": {"transformer": strength}}] for strength in (0.5, 1.0)]
    chosen = [replace(generation, options={**generation.options, "lora": lora}) for lora in strengths]
    assert len({request_of(one, None, drawn=False) for one in (generation, *chosen)}) == 3
    assert (np.load(video) == expected.frames[0]).all()
    made = video.stat().st_mtime_ns
    again = maker(row)
    assert not again["made"] and again["videos"] == first["videos"] and video.stat().st_mtime_ns == made
    assert again["metadata"] == first["metadata"]
    mine = tmp_path / "videos" / "mine.npy"
    mine.write_bytes(b"of another")
    asked = {"prompt": "a cat", "seed": "random", "num_steps": 1, "output": "mine"}
    assert re.search(r"mine\.npy .*no record", maker(asked)["error"])
    assert mine.read_bytes() == b"of another" and not mine.with_name("mine.json").exists()
    mine.unlink()
    named = maker(asked)
    assert named["videos"] == [str(mine)] and named["made"]
    drawn = np.load(mine)
    mine.unlink()  # as if the worker was killed after it wrote the record
    assert maker(asked)["metadata"] == named["metadata"] and (np.load(mine) == drawn).all()
    other = maker({"prompt": "a dog", "num_steps": 1, "output": "mine"})
    assert "other options" in other["error"] and other["videos"] == []
    assert "num_steps" in maker({"prompt": "a", "num_steps": 0})["error"]
    deadly, tries = {**row, "output": "deadly"}, tmp_path / "videos" / "deadly.tries"
    tries.write_bytes(bytes(4))  # as many workers have died of it
    assert maker(deadly)["videos"] == [] and not tries.exists()
    tries.write_bytes(bytes(3))
    assert maker(deadly)["error"] == "" and not tries.exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Uploads, "remove", refused)
        kept = maker({**row, "output": "kept"})
    assert kept["error"] == "" and kept["made"]
    twin = {**asked, "output": "twin"}  # two workers begin, and the other one's record comes first
    record = tmp_path / "videos" / "twin.json"
    with pytest.MonkeyPatch.context() as patch:
        ours = RowStore.__dict__["deliver"]

        def late(self: RowStore, name: str, files: list[Path], facts: dict[str, Any]) -> dict[str, Any]:
            patch.undo()
            patch.setattr(Uploads, "read", lambda *_: patch.undo())
            record.write_text(json.dumps({**facts, "request": "another"}))
            return ours(self, name, files, facts)  # type: ignore[no-any-return]

        patch.setattr(RowStore, "deliver", late)
        assert re.search("/twin .*other options", maker(twin)["error"])
    assert json.loads(record.read_text())["request"] == "another"
    assert not record.with_suffix(".npy").exists()
    whole = json.loads(record.with_stem(video.stem).read_text())
    for damaged in (
        "[" * 100_000,
        json.dumps({**whole, "videos": ["../elsewhere"]}),
        json.dumps({**whole, "videos": 5}),
        json.dumps({**whole, "videos": [5]}),
    ):
        record.with_stem(video.stem).write_text(damaged)
        assert "other options" in maker(row)["error"]
    record.with_stem(video.stem).write_text(json.dumps(whole))
    assert "'1x1x1-b1-cfg'" in maker({"prompt": "a", "profile": "1x1x1-b1-cfg"})["error"]
    assert '"../x"' in maker({"prompt": "a", "output": "../x"})["error"]
    url = VideoMaker(str(toy_artifact), "s3://bucket/videos", ".frames")
    assert url(row)["videos"] == [f"s3://bucket/videos/{video.stem}.frames"] and not url(row)["made"]
    assert url._uploads.read(f"{video.stem}.frames/0001.png") is not None
    with refuses("unsupported", expected=".mp4", found="mp4"):
        VideoMaker(str(toy_artifact), "s3://bucket/videos", "mp4")


@pytest.mark.thorough
def test_each_prompt_has_a_video_though_a_worker_is_killed(toy_artifact: Path, tmp_path: Path) -> None:
    """In a process of its own: Ray forks, which JAX warns of."""
    pytest.importorskip("ray")
    videos, file = tmp_path / "videos", tmp_path / "told.json"
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-m", "helpers.ray_job", toy_artifact, videos, file, str(PROMPTS), str(WORKERS)],
        env={**os.environ, "PYTHONPATH": paths, "RAY_AUTH_MODE": "disabled", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(file.read_text())
    by_number = {row["id"]: row for row in told["rows"]}
    assert len(told["killed"]) == 1 and by_number.keys() == set(range(PROMPTS))
    again = {row["id"]: row for row in told["again"]}  # a second pass: nothing is made, and all is told again
    assert told["files"] == 1 and {row["made"] for row in again.values()} == {False}
    same = ("prompt", "size", "videos", "metadata", "error")
    assert [[again[number][name] for name in same] for number in by_number] == [
        [row[name] for name in same] for row in by_number.values()
    ]
    failed = by_number.pop(0)
    assert failed["error"] and failed["videos"] == []
    made = list(by_number.values())
    assert {row["error"] for row in made} == {""}
    names = [row["videos"][0] for row in made]
    assert not list(videos.glob("*.tries"))
    assert len(set(names)) == PROMPTS - 1 and set(names) == {str(path) for path in videos.glob("[!.]*.npy")}
    with wanrun.load(toy_artifact) as pipeline:
        for row in made[::13]:
            expected = pipeline.generate(row["prompt"], num_steps=1)
            assert (np.load(row["videos"][0]) == expected.frames[0]).all()
