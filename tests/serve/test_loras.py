"""The LoRAs of ``wanrun serve --loras``: what a folder has, and which models they are beside."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from helpers.asked import asked, catalog
from helpers.manifests import built_with, plain_adapter, plain_manifest, write_adapter
from helpers.options import PROFILE
from wanrun.artifact.artifact import Artifact
from wanrun.errors import UsageError
from wanrun.request.adapters import placed
from wanserve.catalog import ServedModel
from wanserve.loras import read_loras, with_loras

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


def test_what_a_client_sees(tmp_path: Path) -> None:
    """Each LoRA once, with its models; one of the folder as those of the artifact, and never a path."""
    text = catalog().models["text"]
    write_adapter(tmp_path / "more.safetensors", {}, rank=4)
    made, _ = with_loras({"one": text.artifact, "two": text.artifact}, read_loras(tmp_path))
    models = {name: ServedModel(name, artifact) for name, artifact in made.items()}

    async def test() -> None:
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

    asyncio.run(test())
