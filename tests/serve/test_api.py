"""The API as clients use it: the openai client, other servers' forms, and what each state is."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

import wanrun
from helpers.pictures import picture
from serve_client import Server, events, served
from wancli.console import run
from wancli.run import wanrun as command
from wanserve.shown import ShownVideo

pytestmark = pytest.mark.slow  # what the server takes is not seen in its tests

PROMPT = "a red fox runs through fresh snow"
LONG = 5000
"""Steps of a video that is still running when a test looks at it."""


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # OpenAI has closed its own service
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield client


def make(server: Server, **fields: Any) -> dict[str, Any]:
    """Asks for a short video of the toy."""
    answer = server.call("POST", "/v1/videos", {"model": "toy", "prompt": PROMPT, "num_steps": 2, **fields})
    assert answer.status == 200, answer.body
    return dict(answer.json)


@pytest.mark.slow
def test_the_openai_client(client: openai.OpenAI, toy_artifact: Path, tmp_path: Path) -> None:
    """It makes, lists over three pages, downloads and deletes videos; only its base URL is changed.

    The second one is made in windows.
    """
    made, windows = [], {"num_frames": 17, "window_frames": 9}
    lengths: list[dict[str, Any]] = [{"seconds": "0.5"}, windows, {"num_frames": 9}]
    for seed, length in enumerate(lengths):
        video = client.videos.create_and_poll(
            prompt=PROMPT,
            model="toy",  # type: ignore[arg-type]
            size="96x64",  # type: ignore[arg-type]
            extra_body={"num_inference_steps": 2, "seed": seed, "fps": 16, **length},
        )
        assert (video.status, video.progress, video.error) == ("completed", 100, None)
        assert video.seconds == f"{length.get('num_frames', 9) / 16:.4g}"
        made.append(video.id)
    pages = [client.videos.list(limit=1)]
    while pages[-1].has_next_page() and len(pages) < 3:
        pages.append(pages[-1].get_next_page())
    assert [[video.id for video in page.data] for page in pages] == [[id] for id in made[::-1]]
    assert set(made) <= {video.id for video in client.videos.list(order="asc", limit=2)}
    with wanrun.load(toy_artifact) as pipeline:
        for seed, length in enumerate(lengths[1:], 1):
            result = pipeline.generate(PROMPT, num_steps=2, seed=seed, **length)
            (own,) = result.save(tmp_path / f"{seed}.mp4", fps=16)
            assert client.videos.download_content(made[seed]).read() == own.read_bytes()
    assert client.videos.download_content(made[1], variant="thumbnail").read()[:4] == b"RIFF"
    for id in made:
        assert client.videos.delete(id).deleted
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(id)


def test_the_openai_client_understands_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.videos.create(prompt=PROMPT, model="toy", size="112x96")  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.param) == ("not_built", "size")
    assert " 96x64x9-b1-cfg" in str(caught.value) and "wanbuild" not in str(caught.value)
    with pytest.raises(openai.BadRequestError, match=r" 0\.5625") as caught:
        client.videos.create(prompt=PROMPT, model="toy", seconds="12")
    assert caught.value.param == "seconds"


BOUNDARY = "c84217054fb091dbd151f7ec217044f7"


def multipart(**fields: str) -> tuple[str, bytes]:
    """The content type and the body of a form."""
    head = f"--{BOUNDARY}\r\nContent-Disposition: form-data; name="
    parts = [f'{head}"{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()]
    return f"multipart/form-data; boundary={BOUNDARY}", f"{''.join(parts)}--{BOUNDARY}--\r\n".encode()


SENT = {"model": "toy", "prompt": PROMPT, "size": "96x64", "num_frames": 9, "fps": 16, "seed": [5], "n": 1}
# As litellm.video_generation(model="openai/toy", ...) 1.110 sends it, vLLM-Omni's curl, and SGLang's JSON.
FORMS = {
    "litellm": multipart(
        model="toy", prompt=PROMPT, seconds="0.5", size="96x64", fps="16", num_inference_steps="2", seed="5"
    ),
    "vllm-omni": multipart(
        model="toy",
        prompt=PROMPT,
        width="96",
        height="64",
        num_frames="9",
        fps="16",
        num_inference_steps="2",
        seed="5",
        extra_params="{}",
    ),
    "sglang": ("application/json", json.dumps({**SENT, "extra_body": {"num_inference_steps": 2}}).encode()),
}


def test_the_forms_of_other_clients_give_the_same_job(server: Server) -> None:
    videos = []
    for kind, body in FORMS.values():
        answer = server.call("POST", "/v1/videos", body, **{"content-type": kind})
        assert answer.status == 200, answer.body
        videos.append(server.ended(answer.json["id"]))
    assert [video["resolved"] for video in videos] == [videos[0]["resolved"]] * 3
    assert len({server.call("GET", f"/v1/videos/{video['id']}/content").body for video in videos}) == 1


def test_events_tell_each_step(server: Server) -> None:
    """The video waits behind another until somebody listens."""
    ahead, video = make(server, num_steps=LONG), make(server, num_steps=5, seed=11)

    async def listen() -> list[tuple[str, dict[str, Any]]]:
        told = list[tuple[str, dict[str, Any]]]()
        async for event in events(server.host, server.port, f"/v1/videos/{video['id']}/events"):
            if not told:
                await asyncio.to_thread(server.call, "POST", f"/v1/videos/{ahead['id']}/cancel")
            told.append(event)
        return told

    told = asyncio.run(listen())
    names = [name for name, _ in told]
    assert names[-1] == "completed" and told[-1][1]["progress"] == 100
    steps = [data["step"] for name, data in told if name == "steps"]
    assert steps == sorted(steps) and set(range(1, 6)) <= set(steps)
    progress = [data["progress"] for _, data in told]
    assert progress == sorted(progress)
    order = [name for name in dict.fromkeys(names) if name in ("steps", "decode", "encode", "completed")]
    assert order == ["steps", "decode", "encode", "completed"]


def test_states_are_true(server: Server) -> None:
    """One runs, two wait with their positions; they can be moved and changed; each is cancelled."""
    first, second, third = (make(server, num_steps=LONG, seed=seed) for seed in (1, 2, 3))
    now = server.running(first["id"])
    assert (now["status"], now["phase"], now["position"]) == ("in_progress", "steps", None)
    assert [server.look(video["id"])["position"] for video in (second, third)] == [1, 2]
    path = f"/v1/videos/{third['id']}"
    assert server.call("PATCH", path, {"position": 1, "seed": 9, "steps": 3}).json["position"] == 1
    changed = server.look(third["id"])
    assert changed["options"] == {"prompt": PROMPT, "num_steps": 3, "seed": 9}
    assert server.look(second["id"])["position"] == 2
    for body in (
        {"size": "1x1"},
        {"position": 0},
        {"position": 2**70},
        {"model": "other"},
        {"nonsense": None},
    ):
        assert server.call("PATCH", path, body).status == 400
    other = server.call("PATCH", path, {"format": "gif", "seed": None, "input_reference": None}).json
    assert (other["format"], other["seed"]) == ("gif", 0)
    assert server.call("PATCH", f"/v1/videos/{first['id']}", {"seed": 1}).status == 409
    assert server.call("POST", f"/v1/videos/{second['id']}/cancel").json["status"] == "cancelled"
    assert server.call("POST", f"/v1/videos/{second['id']}/cancel").status == 409
    began = time.monotonic()
    told = server.call("POST", f"/v1/videos/{first['id']}/cancel").json
    assert told["phase"] == "cancelling" or told["status"] == "cancelled"  # it is quick
    assert server.ended(first["id"])["status"] == "cancelled"
    assert time.monotonic() - began < 5  # of twenty seconds and more
    assert server.ended(third["id"])["status"] == "completed"  # the device is free
    assert server.call("GET", f"/v1/videos/{first['id']}/content").status == 409


def test_a_job_that_runs_is_deleted(server: Server) -> None:
    video = make(server, num_steps=LONG)
    server.running(video["id"])
    assert server.call("DELETE", f"/v1/videos/{video['id']}").json["deleted"]
    assert server.call("GET", f"/v1/videos/{video['id']}").status == 404
    assert server.ended(make(server)["id"])["status"] == "completed"


def test_an_idempotency_key(server: Server) -> None:
    fields = {"model": "toy", "prompt": PROMPT, "num_steps": 2, "seed": "random"}
    key = {"idempotency-key": "order 66"}
    first = server.call("POST", "/v1/videos", fields, **key)
    again = server.call("POST", "/v1/videos", fields, **key)
    assert again.json["id"] == first.json["id"] and again.headers["idempotent-replayed"] == "true"
    waited = server.call("POST", "/v1/videos/sync", fields, **key)
    assert waited.body == server.call("GET", f"/v1/videos/{first.json['id']}/content").body
    assert server.call("POST", "/v1/videos", {**fields, "num_steps": 3}, **key).status == 409
    other = server.call("POST", "/v1/videos", fields, **{"idempotency-key": "order 67"})
    assert other.json["id"] != first.json["id"]
    assert server.ended(other.json["id"])["seed"] != first.json["seed"]


def test_a_key_after_a_change(server: Server) -> None:
    """The same request is the same video, also when it was changed meanwhile."""
    blocks = make(server, num_steps=LONG)
    fields = {"model": "toy", "prompt": PROMPT, "num_steps": 3}
    first = server.call("POST", "/v1/videos", fields, **{"idempotency-key": "changed"}).json
    server.call("PATCH", f"/v1/videos/{first['id']}", {"num_steps": 2})
    assert (
        server.call("POST", "/v1/videos", fields, **{"idempotency-key": "changed"}).json["id"] == first["id"]
    )
    for video in (blocks, first):
        server.call("DELETE", f"/v1/videos/{video['id']}")


def test_the_client_of_the_page(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines of Python in docs/serving.md make a video."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    code = textwrap.dedent(page[page.index("    import json, time") : page.index("The openai package")])
    own = {"http://127.0.0.1:8000": server.url, "wan2.1-1.3b": "toy", "832x480": "96x64"}
    for text, other in own.items():
        assert code.count(text) == 1
        code = code.replace(text, other)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert (tmp_path / "cat.mp4").read_bytes()[4:8] == b"ftyp"
    assert capsys.readouterr().out.splitlines()[-1].startswith("completed None 100 %")


def test_contents(server: Server) -> None:
    video = server.ended(make(server)["id"])
    path = f"/v1/videos/{video['id']}/content"
    whole = server.call("GET", path)
    assert whole.headers["content-type"] == "video/mp4" and whole.body[4:8] == b"ftyp"
    part = server.call("GET", path, range="bytes=2-9")
    assert (part.status, part.body) == (206, whole.body[2:10])
    assert server.call("GET", path, range=f"bytes={len(whole.body)}-").status == 416
    assert server.call("GET", f"{path}?variant=last_frame").body[:4] == b"\x89PNG"
    assert server.call("GET", f"{path}?variant=spritesheet").status == 400
    assert server.call("GET", f"{path}?index=1").status == 400
    from PIL import Image

    picture = Image.open(io.BytesIO(server.call("GET", f"{path}?variant=last_frame").body))
    assert picture.size == (96, 64)


def test_lists(server: Server) -> None:
    ids = [
        server.ended(make(server, prompt=f"a list_of {word}", num_steps=1)["id"])["id"]
        for word in ("cats", "dogs")
    ]
    found = server.call("GET", "/v1/videos?q=list_of+dogs").json
    assert [video["id"] for video in found["data"]] == [ids[1]]
    assert server.call("GET", "/v1/videos?q=listXof").json["data"] == []
    page = server.call("GET", "/v1/videos?q=list_of&limit=1&order=asc").json
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[0], ids[0], True)
    rest = server.call("GET", f"/v1/videos?q=list_of&limit=1&order=asc&after={ids[0]}").json
    assert (rest["first_id"], rest["has_more"]) == (ids[1], False)
    for query in ("limit=0", "limit=x", "limit=101", "order=up", "status=happy", "after=video_1"):
        assert server.call("GET", f"/v1/videos?{query}").status == 400


def test_formats_and_models(server: Server) -> None:
    """Two models are loaded by use; formats are those that wanrun writes."""
    video = server.ended(make(server, model="other", format="gif", num_steps=1)["id"])
    assert (video["model"], video["format"]) == ("other", "gif")
    answer = server.call("GET", f"/v1/videos/{video['id']}/content")
    assert answer.headers["content-type"] == "image/gif" and answer.body[:4] == b"GIF8"
    paths = server.call("GET", "/openapi.json").json["paths"]
    described = paths["/v1/videos/{id}/content"]["get"]["responses"]["200"]["content"]
    for variant in ("video", "thumbnail", "last_frame"):
        answer = server.call("GET", f"/v1/videos/{video['id']}/content?variant={variant}")
        assert answer.headers["content-type"] in described
    assert "application/x-www-form-urlencoded" in paths["/v1/videos"]["post"]["requestBody"]["content"]
    models = server.call("GET", "/v1/models").json["data"]
    assert [model["id"] for model in models] == ["toy", "other"]
    assert server.call("GET", "/v1/models/toy").json == models[0]
    assert server.call("POST", "/v1/videos", {"prompt": PROMPT}).json["error"]["param"] == "model"


def test_the_description_is_true(server: Server) -> None:
    """Each field of the schema is understood, and its types are those that are taken."""
    schema = server.call("GET", "/openapi.json").json
    fields = schema["components"]["schemas"]["CreateVideo"]["properties"]
    assert {
        "prompt",
        "num_steps",
        "guidance_scale",
        "seed",
        "size",
        "seconds",
        "input_reference",
    } <= fields.keys()
    assert (fields["num_steps"]["minimum"], fields["num_steps"]["maximum"]) == (1, 10_000)
    assert "unipc" in fields["solver"]["enum"]
    assert "num_inference_steps" in fields["num_steps"]["x-aliases"]
    for name in fields:
        error = server.call("POST", "/v1/videos", {"model": "toy", name: {"no": "such"}}).json["error"]
        assert "unknown field" not in error["message"] or "'no'" in error["message"], name
    waiting = server.call("GET", f"/v1/videos/{make(server)['id']}").json
    for answered in (waiting, server.ended(waiting["id"])):
        msgspec.convert(answered, ShownVideo)


def test_metrics_and_health(server: Server) -> None:
    server.ended(make(server)["id"])
    text = server.call("GET", "/metrics").body.decode()
    assert 'wanserve_videos_total{model="toy",status="completed"}' in text
    assert 'wanserve_phase_seconds_count{phase="decode"}' in text
    assert "wanserve_ready_workers 1.0" in text and "wanserve_waiting 0.0" in text
    assert server.call("GET", "/healthz").json == {"status": "ok"}
    assert server.call("GET", "/readyz").json == {"status": "ready"}


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
    assert run(command, ["--artifact", str(toy), *words, *files]) == 0
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
