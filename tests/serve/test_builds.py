"""Profiles that are built for requests: when, and what becomes of their videos. No child is started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from helpers.asked import asked, catalog
from helpers.house import House, Worker, makes
from wanrun import Artifact, CancelToken
from wanrun.artifact.select import UnbuiltError
from wanrun.errors import UsageError
from wanserve import builds
from wanserve.builds import Builds
from wanserve.catalog import Catalog, ServedModel
from wanserve.device import Device
from wanserve.metrics import Metrics
from wanserve.refusal import RefusedError
from wanserve.video import Video

LACKING = "128x96x17-b1-cfg"
SHAPE = {
    "profile": LACKING,
    "size": "128x96",
    "num_frames": 17,
    "num_videos": 1,
    "fps": 16.0,
    "num_steps": 10,
}
OPTIONS = {"prompt": "a fox", "seed": 0, "size": (128, 96), "num_frames": 17}


class Child:
    """What ``built`` is for a server; it builds until ``go``, or fails.

    Attributes:
        cancels: the token of each build.
    """

    def __init__(self, failure: str = "") -> None:
        self.cancels, self.going, self._failure = list[CancelToken](), False, failure

    def __call__(self, artifact: Artifact, error: UnbuiltError, target: Any, *given: Any) -> Artifact:
        cancel, child = given[2:]
        assert child["env"]["CUDA_VISIBLE_DEVICES"] == "1" and child["start_new_session"]
        self.cancels.append(cancel)
        while not self.going:
            cancel.check()
            time.sleep(0.005)
        if self._failure:
            raise UsageError(
                "unsupported", "it cannot be built", found=self._failure, remedy="wanbuild compile"
            )
        profiles = {**artifact.manifest.profiles, error.lacking.name: error.lacking}
        return replace(artifact, manifest=structs.replace(artifact.manifest, profiles=profiles))


@asynccontextmanager
async def building(
    folder: Path, monkeypatch: pytest.MonkeyPatch, child: Child, more: int = 1
) -> AsyncIterator[tuple[House, Video]]:
    """A device whose child builds for a video; as many workers as ``more`` are started afterwards."""
    monkeypatch.setattr(builds, "built", child)
    house, models = House(folder, *(Worker(makes) for _ in range(1 + more))), Catalog({})
    models.models["text"] = catalog().models["text"]
    own = Builds(models, None, lambda video: video.options)
    house.device = house.another_device(builds=own, place={"CUDA_VISIBLE_DEVICES": "1"})
    one = await house.ask(model="text", shape=SHAPE, options=OPTIONS)
    async with house.kept():
        await house.until(lambda: child.cancels)
        yield house, one
        assert len(house.started) == 1 + more and house.started[0].runs == []


async def test_a_profile_is_built_before_its_video_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, by a device without a worker; another device makes what needs no build meanwhile."""
    child = Child()
    async with building(tmp_path, monkeypatch, child) as (house, one):
        (shown,) = house.queue.board.shown(one)
        assert (shown.status, shown.phase) == ("in_progress", "build") and not house.device.ready.is_set()
        own = house.device._builds
        assert own is not None
        other = Device(house.queue, lambda: Worker(makes), house.make, Metrics(), builds=own)  # type: ignore[arg-type, return-value]
        working = asyncio.create_task(other.keep())
        later = [await house.ask(model="text", shape=SHAPE, options=OPTIONS), await house.ask()]
        await house.over(later[1])
        assert later[0].status == "queued"
        child.going = True
        await house.over(one, later[0])
        assert [(video.status, video.attempts) for video in (one, *later)] == [("completed", 1)] * 3
        assert len(child.cancels) == 1 and own.busy is None and ("text", LACKING) in own.known
        await other.stop(0)
        await working


async def test_a_build_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a client; or by the end of the server, and then the video waits for the next start."""
    async with building(tmp_path / "a", monkeypatch, Child()) as (house, one):
        await house.queue.cancel(one)
        await house.until(lambda: one.over and house.device.ready.is_set())
        assert one.status == "cancelled"
    async with building(tmp_path / "b", monkeypatch, Child(), more=0) as (_, one):
        pass
    assert (one.status, one.attempts) == ("queued", 0)


async def test_a_build_that_fails_fails_its_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child("/srv/programs: too large")
    async with building(tmp_path, monkeypatch, child) as (house, one):
        child.going = True
        await house.until(lambda: one.over and house.device.ready.is_set())
        assert one.error is not None and one.error.code == "build_failed"
        assert "too large" in one.error.message
        assert "/srv" not in one.error.message and "wanbuild" not in one.error.message


async def test_a_shape_that_may_be_built_is_accepted(tmp_path: Path) -> None:
    """One that is too large or impossible is refused, and every one if nothing is built."""
    artifact = catalog().models["text"].artifact
    text = Catalog({"text": artifact}, build=True).models["text"]
    assert text.most == text.shown(0)["build_limit"] == 2 * 96 * 64 * 81
    ask = {"model": "text", "prompt": "a fox", "num_frames": 17}
    async with asked(tmp_path, {"text": text}) as server:
        answer = await server.call("POST", "/v1/videos", {**ask, "size": "128x96"})
        assert answer.json["size"] == "128x96" and answer.json["num_frames"] == 17
        (one,) = server.service.queue.waiting
        assert one.shape["profile"] == LACKING
        large = await server.refused("POST", "/v1/videos", {**ask, "size": "960x640"})
        assert large[:2] == (400, "not_built") and str(text.most) in large[2]
        odd = await server.refused("POST", "/v1/videos", {**ask, "size": "100x96"})
        assert odd[0] == 400 and "112x96" in odd[2]
        server.service.catalog.models["text"] = ServedModel("text", artifact)
        lacks = await server.refused("POST", "/v1/videos", {**ask, "size": "128x96"})
        assert lacks[:2] == (400, "not_built")
    with pytest.raises(RefusedError):
        Catalog({"text": artifact}, None, True, 1000).models["text"].resolve(OPTIONS, str)
