"""From a request to a job: what of one client keeps no other one waiting, and what is resolved once."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

import wanrun
from helpers.asked import asked, catalog
from helpers.manifests import with_profiles
from wanrun import CancelToken
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.programs import Profile
from wanrun.errors import UsageError
from wanserve.catalog import ServedModel
from wanserve.held import Held
from wanserve.intake import PROBES, Intake
from wanserve.keys import Client
from wanserve.refusal import RefusedError


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def image(colour: str) -> str:
    file = io.BytesIO()
    Image.new("RGB", (96, 64), colour).save(file, "PNG")
    return data_url(file.getvalue())


class Slow:
    """A generation whose media are looked at until that is cancelled."""

    def __init__(self) -> None:
        self.reading = 0

    def probe_media(self, *, cancel: CancelToken) -> None:
        self.reading += 1
        while not cancel.cancelled:
            time.sleep(0.01)
        cancel.check()


def test_one_request_of_each_client_is_looked_at_at_a_time() -> None:
    """A server that ends waits for none."""
    nobody: Any = None
    intake, slow = Intake(nobody, nobody, nobody, nobody), Slow()
    body: Any = SimpleNamespace(model=SimpleNamespace(resolve=lambda options, spell: slow), spell=str)

    async def ask(name: str) -> None:
        with pytest.raises(RefusedError) as caught:
            await intake._resolve(Client(name, b""), body, {}, {"image": "a.png"})
        assert caught.value.status == 503

    async def main() -> None:
        requests = [asyncio.create_task(ask(name)) for name in "aaab"]
        async with asyncio.timeout(5):
            while slow.reading < 2:  # one of each
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert slow.reading == 2 < PROBES
        intake.close()
        await asyncio.gather(*requests)

    asyncio.run(main())


def test_a_request_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the door; again only after a start, and to the same job. A change of it is resolved too."""
    times = list[str]()

    def resolve(artifact: Any, prompt: str, **options: Any) -> wanrun.Generation:
        times.append(prompt)
        return original(artifact, prompt, **options)

    original = wanrun.resolve
    monkeypatch.setattr(wanrun, "resolve", resolve, raising=False)
    text = catalog().models["text"]
    steps = {"timesteps": list(range(999, 100, -1)), "seed": 7}

    async def test() -> None:
        async with asked(tmp_path, {"text": ServedModel("text", text.artifact)}) as server:
            queue, intake = server.service.queue, server.service.intake
            asks = {"model": "text", "prompt": "a fox", **steps}
            id = (await server.call("POST", "/v1/videos", asks)).json["id"]
            video = await queue.turns.next(Held())
            made = intake.make(video)
            assert (video.id, made.job.id, made.model, times) == (id, id, "text", ["a fox"])
            assert made.job.options["seed"] == 7 and len(made.job.outputs) == 3
            queue.resolved.drop(id)  # as after a start
            assert intake.make(video) == made and len(times) == 2
            await queue.put_back(video)
            await server.call("PATCH", f"/v1/videos/{id}", {"seed": 8})
            assert intake.make(await queue.turns.next(Held())).job.options["seed"] == 8 and len(times) == 3
            await queue.ended(wanrun.Outcome(id=id))
            assert queue.resolved.find(id) is None

    asyncio.run(test())


def test_uploads_are_where_the_job_looks(tmp_path: Path) -> None:
    """They came into another folder, where it was checked; those of a change too. No path is told."""
    full = catalog().models["full"]
    (profile,) = full.manifest.profiles.values()
    plain = with_profiles(full.manifest, [Profile(96, 64, 9, 1, True, 0, profile.options)])
    models = {"full": ServedModel("full", Artifact(plain, full.artifact.folder))}

    async def test() -> None:
        async with asked(tmp_path, models) as server:
            queue, intake = server.service.queue, server.service.intake
            asks = {"prompt": "p", "mode": "animate", "image": image("red"), "video": image("black")}
            answer = await server.call("POST", "/v1/videos", asks)
            assert answer.status == 200, answer.body
            path = f"/v1/videos/{answer.json['id']}"
            assert (await server.call("PATCH", path, {"image": image("blue")})).status == 200
            video = await queue.turns.next(Held())
            media = intake.make(video).job.media
            assert media is not None and not list((tmp_path / "incoming").iterdir())
            assert [data_url(Path(str(one)).read_bytes()) for one in (media.image, media.video)] == [
                image("blue"),
                image("black"),
            ]
            damaged = UsageError("damaged", f"image {media.image} is damaged")  # which no probe has seen
            await queue.ended(wanrun.Outcome(id=video.id, error=damaged))
            assert video.error is not None and video.error.code == "damaged"
            assert video.error.message == damaged.what.replace(str(media.image), "data")

    asyncio.run(test())


@pytest.mark.slow
def test_each_seed_is_a_job_of_its_own(tmp_path: Path) -> None:
    """All or none of them wait, each with the files; the same key has them all again."""
    full = catalog().models["full"]
    (profile,) = full.manifest.profiles.values()
    plain = with_profiles(full.manifest, [Profile(96, 64, 9, 1, True, 0, profile.options)])
    models = {"full": ServedModel("full", Artifact(plain, full.artifact.folder))}
    asks = {"prompt": "p", "mode": "animate", "image": image("red"), "video": image("black")}

    async def test() -> None:
        async with asked(tmp_path, models, max_waiting=3) as server:
            queue, intake, key = server.service.queue, server.service.intake, {"idempotency-key": "k"}
            made, again = [
                (await server.call("POST", "/v1/videos", {**asks, "seeds": seeds}, **key)).json["data"]
                for seeds in ([3, 1], "3, 1")
            ]
            assert [one["seed"] for one in made] == [3, 1] and again == made
            listener = queue.hub.listen(None)
            for seeds, fewer in (([5, 6], False), ([5, 6, 7, 8], True)):
                status, code, message = await server.refused("POST", "/v1/videos", {**asks, "seeds": seeds})
                assert (status, code) == (429, "queue_full") and len(queue.waiting) == 2
                assert ("fewer" in message) is fewer
            assert await listener.next(0.01) is None  # nobody has heard of one of them
            assert (await server.refused("POST", "/v1/videos", {**asks, "seeds": [3]}, **key))[0] == 409
            for one in made:
                job = intake.make(video := await queue.turns.next(Held())).job
                assert (job.id, job.options["seed"]) == (one["id"], one["seed"]) and job.media is not None
                assert data_url(Path(str(job.media.video)).read_bytes()) == image("black")
                await queue.delete(video)
                await queue.ended(wanrun.Outcome(id=job.id))
            for path, more in (("/v1/videos/sync", {}), ("/v1/videos", {"seed": 1})):
                _, _, message = await server.refused("POST", path, {**asks, "seeds": [1, 2], **more})
                assert "seeds" in message
            for seeds in ([], [1.5], ["x"], "1,", 3, list(range(101))):
                assert (await server.refused("POST", "/v1/videos", {**asks, "seeds": seeds}))[0] == 400
            assert not list((tmp_path / "incoming").iterdir()) and not list((tmp_path / "videos").iterdir())

    asyncio.run(test())
