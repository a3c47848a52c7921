"""From a request to a job: what is too large, what is resolved once, and the LoRAs of a folder."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from PIL import Image

import wanrun
from helpers.asked import asked, catalog
from helpers.manifests import built_with, plain_adapter, plain_manifest, with_profiles, write_adapter
from helpers.options import PROFILE
from wanrun import CancelToken
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.programs import Profile
from wanrun.errors import UsageError
from wanrun.request.adapters import placed
from wanserve.catalog import ServedModel
from wanserve.held import Held
from wanserve.intake import PROBES, Intake
from wanserve.keys import Client
from wanserve.loras import read_loras, with_loras
from wanserve.refusal import RefusedError
from wanserve.sizes import MAX_DEPTH, MAX_ITEMS, MAX_PLAIN, check_json, is_file, plain_bytes


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


async def test_one_request_of_each_client_is_looked_at_at_a_time() -> None:
    """A server that ends waits for none."""
    nobody: Any = None
    intake, slow = Intake(nobody, nobody, nobody, nobody), Slow()
    body: Any = SimpleNamespace(model=SimpleNamespace(resolve=lambda options, spell: slow), spell=str)

    async def ask(name: str) -> None:
        with pytest.raises(RefusedError) as caught:
            await intake._resolve(Client(name, b""), body, {}, {"image": "a.png"})
        assert caught.value.status == 503

    requests = [asyncio.create_task(ask(name)) for name in "aaab"]
    async with asyncio.timeout(5):
        while slow.reading < 2:  # one of each
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert slow.reading == 2 < PROBES
    intake.close()
    await asyncio.gather(*requests)


async def test_a_request_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the door; again only after a start, and to the same job. A change of it is resolved too."""
    times = list[str]()

    def resolve(artifact: Any, prompt: str, **options: Any) -> wanrun.Generation:
        times.append(prompt)
        return original(artifact, prompt, **options)

    original = wanrun.resolve
    monkeypatch.setattr(wanrun, "resolve", resolve, raising=False)
    text = catalog().models["text"]
    steps = {"timesteps": list(range(999, 100, -1)), "seed": 7}
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


async def test_uploads_are_where_the_job_looks(tmp_path: Path) -> None:
    """They came into another folder, where it was checked; those of a change too. No path is told."""
    full = catalog().models["full"]
    (profile,) = full.manifest.profiles.values()
    plain = with_profiles(full.manifest, [Profile(96, 64, 9, 1, True, 0, profile.options)])
    models = {"full": ServedModel("full", Artifact(plain, full.artifact.folder))}
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


@pytest.mark.slow
async def test_each_seed_is_a_job_of_its_own(tmp_path: Path) -> None:
    """All or none of them wait, each with the files; the same key has them all again."""
    full = catalog().models["full"]
    (profile,) = full.manifest.profiles.values()
    plain = with_profiles(full.manifest, [Profile(96, 64, 9, 1, True, 0, profile.options)])
    models = {"full": ServedModel("full", Artifact(plain, full.artifact.folder))}
    asks = {"prompt": "p", "mode": "animate", "image": image("red"), "video": image("black")}
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


FILE = base64.b64encode(bytes(range(256)) * 8000).decode()


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth > 1 else []


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        {"prompt": 'a "quoted" [text], {with} \\ marks' * 900},
        {"prompt": "\N{FOX FACE}" * 100_000, "negative_prompt": "\N{FOX FACE}" * 100_000},
        {"prompt": "\N{FOX FACE}" * 100_000, "image": f"data:image/png;base64,{FILE}"},
        {"image": [{"image_url": FILE}] * 4, "timesteps": [1000.0] * 10_000},
        nested(MAX_DEPTH),
    ],
    ids=["quotes", "emoji", "both", "files", "deep"],
)
def test_what_is_taken(value: Any) -> None:
    check_json(json.dumps(value).encode())
    check_json(json.dumps(value, ensure_ascii=False).encode())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/", "\\/"),
        ("+", "\\u002B"),
        ("+", "\\u002b"),
        ("=", "\\u003d"),
        ("\\r\\n", " "),
        ("\\r\\n", "\\t"),
        (",", ", "),
    ],
)
def test_base64_of_clients_that_escape_or_break_it(old: str, new: str) -> None:
    url = "data:image/png;name=my%20dog (1).png;base64," + FILE
    text = json.dumps("\r\n".join(url[start : start + 76] for start in range(0, len(url), 76)))
    assert old in text
    assert check_json(text.replace(old, new).encode()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("blank", ["", "\n", "\r\n", " ", "\t"])
def test_fields_of_forms_that_are_files_or_hold_them(blank: str) -> None:
    lines = blank.join(FILE[start : start + 64] for start in range(0, len(FILE), 64))
    assert plain_bytes(lines.encode()) == 0
    assert plain_bytes(json.dumps({"image_url": f"data:image/png;base64,{lines}"}).encode()) == 15
    assert plain_bytes(json.dumps([FILE, FILE]).encode()) == 6
    for prompt in (b"[" * 5000, b"{fox} runs " * 500):
        assert plain_bytes(prompt) == len(prompt)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b'{"timesteps":[' + b"{}," * 20_000_000, "too_many_items"),
        (b'{"timesteps":[' + b'"a\\\\",' * 9_000_000, "too_many_items"),
        (b'{"extra_body":{' + b'""' * 1_000_000, "too_many_items"),
        (b"[" * 9_000_000, "too_deep"),
        (b"1" * 50_000_000, "too_large"),
        (b'{"prompt":"' + b'\\"' * 30_000_000, "too_large"),
        (b'{"prompt":"' + b"\\" * 50_000_000 + b'"}', "too_large"),
        (b'{"prompt":"' + b"A" * 20_000_000 + b'\\u0041"}', "too_large"),
        (b'{"prompt":"' + "\N{FOX FACE}".encode() + b"A" * MAX_PLAIN + b'"}', "too_large"),
        (b'{"prompt":"' + b"a text " * 9_000_000, "too_large"),
        (json.dumps([[1]] * (MAX_ITEMS // 2 + 1)).encode(), "too_many_items"),
        (json.dumps(nested(MAX_DEPTH + 1)).encode(), "too_deep"),
    ],
    ids=[
        *(
            "objects",
            "strings",
            "empty strings",
            "brackets",
            "digits",
            "quotes",
            "backslashes",
            "an escape at the end",
        ),
        *("wide", "words", "just too many", "just too deep"),
    ],
)
def test_what_is_refused_before_it_is_decoded(text: bytes, code: str) -> None:
    with pytest.raises(RefusedError) as caught:
        check_json(text)
    assert caught.value.code == code


def test_a_file_is_long_and_no_words() -> None:
    text = FILE.encode()
    assert is_file(text, 0, len(text)) and not is_file(text, 0, 100)
    assert not is_file(text + b"<", 0, len(text) + 1)
    words = b"as long as they are here " * 1000
    assert not is_file(words, 0, len(words))


SLOTS = {PROFILE.name: structs.replace(PROFILE, options=built_with(lora_rank=8))}


def test_a_folder(tmp_path: Path) -> None:
    write_adapter(tmp_path / "b.safetensors", {}, rank=8)
    write_adapter(tmp_path / "a-1.safetensors", {})
    (tmp_path / "notes.txt").touch()
    found = read_loras(tmp_path)
    assert list(found) == ["a-1", "b"] and found["b"].path == tmp_path / "b.safetensors"
    (tmp_path / "c.safetensors").touch()
    with pytest.raises(UsageError, match=r"c\.safetensors"):
        read_loras(tmp_path)


def test_a_folder_without_any(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="--loras"):
            read_loras(folder)
    write_adapter(tmp_path / "a:1.safetensors", {})
    with pytest.raises(UsageError, match="rename"):
        read_loras(tmp_path)


def test_those_that_fit_a_model_are_beside_it(tmp_path: Path) -> None:
    for name, variant in (("style", "wan2.1-t2v"), ("own", "wan2.1-t2v"), ("other", "wan2.2-ti2v")):
        write_adapter(tmp_path / f"{name}.safetensors", {}, variant=variant)
    loras = read_loras(tmp_path)
    own = placed(loras["own"]).adapter
    artifacts = {
        "plain": Artifact(plain_manifest(profiles={PROFILE.name: PROFILE}), Path("a")),
        "with": Artifact(plain_manifest(adapters={"own": own}, profiles=SLOTS), Path("b")),
    }
    made, left = with_loras(artifacts, loras)
    assert {name: list(one.beside) for name, one in made.items()} == {
        "plain": ["own", "style"],
        "with": ["style"],
    }
    assert list(left) == ["other"] and "wan2.2-ti2v" in left["other"]
    assert (
        list(made["with"].adapters) == ["own", "style"]
        and made["plain"].manifest is artifacts["plain"].manifest
    )
    other = plain_manifest(adapters={"own": plain_adapter("own")}, profiles=SLOTS)
    another = {"with": Artifact(other, Path("b"))}
    with pytest.raises(UsageError, match="another LoRA own"):
        with_loras(another, loras)
    bare = Artifact(plain_manifest(profiles={PROFILE.name: PROFILE}), Path("my model"))
    with pytest.raises(UsageError, match=r"--lora-rank.4.--artifact.'my.model'"):
        with_loras({"bare": bare}, loras)


def test_one_that_no_profile_has_slots_for_is_told(tmp_path: Path) -> None:
    """Clients do not see it."""
    write_adapter(tmp_path / "big.safetensors", {}, rank=9)
    write_adapter(tmp_path / "style.safetensors", {}, rank=8)
    artifacts = {
        "plain": Artifact(plain_manifest(profiles={PROFILE.name: PROFILE}), Path("a")),
        "with": Artifact(plain_manifest(profiles=SLOTS), Path("b")),
    }
    made, left = with_loras(artifacts, read_loras(tmp_path))
    assert list(left) == ["big"] and "--lora-rank" in left["big"]
    assert list(ServedModel("with", made["with"]).loras) == ["style"]


async def test_what_a_client_sees(tmp_path: Path) -> None:
    """Each LoRA once, with its models; one of the folder as those of the artifact, and never a path."""
    text = catalog().models["text"]
    write_adapter(tmp_path / "more.safetensors", {}, rank=4)
    made, _ = with_loras({"one": text.artifact, "two": text.artifact}, read_loras(tmp_path))
    models = {name: ServedModel(name, artifact) for name, artifact in made.items()}
    async with asked(tmp_path / "data", models) as server:
        found = (await server.call("GET", "/v1/loras")).json["data"]
        assert [one["name"] for one in found] == ["style", "more"]
        assert all(one["models"] == ["one", "two"] for one in found)
        fields: dict[str, Any] = {
            "prompt": "p",
            "model": "one",
            "loras": [{"name": "more", "strength": 0.5}],
        }
        video = (await server.call("POST", "/v1/videos", fields)).json
        assert video["options"]["lora"] == fields["loras"]
        again = await server.call("GET", f"/v1/videos/{video['id']}")
        assert str(tmp_path) not in again.body.decode()
        waiting = server.service.queue.resolved.find(video["id"])
        assert waiting is not None and waiting.loras[0].file == str(tmp_path / "more.safetensors")
        changed = (await server.call("PATCH", f"/v1/videos/{video['id']}", {"lora": None})).json
        assert "lora" not in changed["options"]
        fields["loras"] = str(tmp_path / "more.safetensors")
        _, code, line = await server.refused("POST", "/v1/videos", fields)
        assert code == "unknown_name" and str(tmp_path) not in line
