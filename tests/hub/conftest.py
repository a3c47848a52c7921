"""An artifact with two targets, served from loopback."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.damage import linked
from helpers.elsewhere import build_elsewhere, put_golden, record_verdict
from helpers.hub_server import Repository, read_folder, serve
from helpers.hub_uploads import UploadHub
from wanrun.trust.verdict import Verdict

NAME = "me/wan"


@pytest.fixture(scope="session")
def two_targets(
    toy_artifact: Path, golden: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The toy artifact with a recorded result and a second target, which is not of this machine and has a
    verdict. No links."""
    folder = tmp_path_factory.mktemp("two")
    artifact = linked(toy_artifact, folder / "linked")
    put_golden(artifact, golden)
    build_elsewhere(artifact, beside=True, packages={"jax": "0.1", "jaxlib": "0.1"})
    record_verdict(artifact, Verdict(outcome="passed", reason="they agree"))
    return Path(shutil.copytree(artifact, folder / "two"))


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two pairs of keys, a.pem and a.pub, b.pem and b.pub."""
    folder = tmp_path_factory.mktemp("keys")
    for name in "ab":
        for command in (
            f"openssl ecparam -genkey -name prime256v1 -noout -out {name}.pem",
            f"openssl ec -in {name}.pem -pubout -out {name}.pub",
        ):
            subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[UploadHub]:
    """A hub, empty, which huggingface_hub talks to."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
    monkeypatch.setenv("HF_TOKEN", "secret")
    with serve(UploadHub) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between tries
        yield server


@pytest.fixture
def published(hub: UploadHub, two_targets: Path) -> UploadHub:
    """The hub with the artifact of two targets as me/wan, without a model card."""
    hub.repositories[NAME] = Repository()
    hub.repositories[NAME].commit(read_folder(two_targets))
    return hub
