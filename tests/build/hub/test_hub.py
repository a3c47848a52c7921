"""Sources on the hub: what is downloaded and how it goes on, against a small hub on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers import UNPRIVILEGED
from helpers.hub_server import Hub, Repository, read_folder, serve
from wanbuild.hub import download as hub_download
from wanbuild.hub.repository import Located, locate_source
from wanbuild.source.checkpoint import open_source
from wanbuild.toy.checkpoint import write_toy
from wanrun.artifact.manifest import read_manifest
from wanrun.console import Progress
from wanrun.errors import SourceError, UsageError

ID = "owner/toy"
FIRST = "transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
SECOND = "transformer/diffusion_pytorch_model-00002-of-00002.safetensors"
INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
EXTRAS = {
    "README.md": b"# toy",
    ".gitattributes": b"*.safetensors filter=lfs",
    "assets/video.mp4": b"video",
    "wan.pth": b"pickle",
    "transformer/diffusion_pytorch_model.bin": b"pickle",
    "transformer/diffusion_pytorch_model.fp16.safetensors": b"half",
    "text_encoder/pytorch_model.bin": b"pickle",
    "text_encoder/model.fp16-00001-of-00001.safetensors": b"half",
    "text_encoder/model.safetensors.index.fp16.json": b"{}",
    "vae/diffusion_pytorch_model.onnx": b"onnx",
    "image_encoder/model.safetensors": b"unlisted",
}
NOT_READ = {"tokenizer/special_tokens_map.json", "wanbuild_toy.json", *EXTRAS}

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A toy of two shards per component, and what else published repositories hold."""
    folder = tmp_path_factory.mktemp("hub") / "toy"
    write_toy(folder, shards=2)
    return {**read_folder(folder), **EXTRAS}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no token."""
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)  # it keeps whole chunks of what arrived
    return tmp_path / "cache"


@pytest.fixture
def hub(files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one repository, owner/toy."""
    from huggingface_hub import constants

    with serve() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        # huggingface_hub makes it of the environment when it is imported.
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        server.repositories[ID] = Repository()
        server.repositories[ID].commit(files)
        yield server


@pytest.fixture
def toy(hub: Hub) -> Repository:
    return hub.repositories[ID]


def _environment(hub: Hub, cache: Path) -> dict[str, str]:
    """Environment variables of a command that uses this hub and this cache."""
    home = cache.parent / "home"
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "",
    }


def _quiet(line: str) -> None:
    """A report that shows nothing."""


def _refused(message: str, source: str = ID, revision: str | None = None) -> str:
    with pytest.raises(SourceError, match=message) as caught:
        locate_source(source, revision, _quiet)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _check_folder(located: Located, files: Files) -> None:
    """The folder holds the served bytes and opens as a checkpoint."""
    wanted = files.keys() - NOT_READ
    assert read_folder(located.path).keys() == wanted
    assert all((located.path / name).read_bytes() == files[name] for name in wanted)
    open_source(located.path, located.repository, located.revision).close()


def _partial(cache: Path, data: bytes) -> Path:
    return cache / "models--owner--toy" / "blobs" / f"{hashlib.sha256(data).hexdigest()}.incomplete"


# What is downloaded.


def test_only_what_is_read_is_downloaded(
    hub: Hub, toy: Repository, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    located = locate_source(ID, report=lines.append)
    assert hub.names == files.keys() - NOT_READ
    assert hub.listings == 1
    assert (located.repository, located.revision) == (ID, toy.branches["main"])
    _check_folder(located, files)
    assert len(lines) == 1 and "7 files" in lines[0] and ID in lines[0]
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "")  # no bar of huggingface_hub's either


def test_what_images_need_is_downloaded_too(hub: Hub, toy: Repository, tmp_path: Path) -> None:
    """The image encoder and its processor, whose settings are checked before any weight is asked for."""
    from wanbuild.source.images import FILE

    write_toy(tmp_path / "toy", "wan2.1-i2v")
    files = read_folder(tmp_path / "toy")
    toy.commit(files)
    located = locate_source(ID, report=_quiet)
    wanted = files.keys() - (NOT_READ - {"image_encoder/model.safetensors"})
    assert read_folder(located.path) == {name: files[name] for name in wanted}
    open_source(located.path).close()
    hub.forget()
    toy.commit({**files, f"image_processor/{FILE}": b'{"resample": 0}'})
    _refused("resample is 0 and only 3 is supported")
    assert not any(name.endswith(".safetensors") for name in hub.names)
    del files[f"image_processor/{FILE}"]
    toy.commit(files)
    _refused(FILE)


def test_cached_files_are_not_asked_for_again(hub: Hub, files: Files) -> None:
    first = locate_source(ID, report=_quiet)
    hub.forget()
    lines: list[str] = []
    assert locate_source(ID, report=lines.append) == first
    assert (hub.listings, hub.requests, lines) == (1, [], [])


def test_a_download_of_huggingface_hub_is_used(hub: Hub, toy: Repository, cache: Path) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download(ID, FIRST, endpoint=hub.url, cache_dir=cache, revision=toy.branches["main"])
    hub.forget()
    locate_source(ID, report=_quiet)
    assert FIRST not in hub.names and SECOND in hub.names


def test_revisions(hub: Hub, toy: Repository, files: Files) -> None:
    main = toy.branches["main"]
    other = toy.commit({**files, SECOND: files[SECOND][::-1]}, "refs/pr/1")
    locate_source(ID, report=_quiet)
    hub.forget()
    located = locate_source(ID, "refs/pr/1", _quiet)
    assert located.revision == other and located.path.name == other
    assert (located.path / SECOND).read_bytes() == files[SECOND][::-1]
    assert {request.name for request in hub.requests if request.at_content} == {SECOND}
    assert locate_source(ID, main, _quiet).revision == main
    assert "has no revision nothing" in _refused("nothing", revision="nothing")


def test_a_branch_that_moves_meanwhile(hub: Hub, toy: Repository, files: Files) -> None:
    """All files are of the commit that was listed."""
    main = toy.branches["main"]
    changed = {name: data if name == "model_index.json" else b"{}" for name, data in files.items()}
    located = locate_source(ID, report=lambda line: toy.commit(changed))
    assert toy.branches["main"] != main
    assert located.revision == main
    _check_folder(located, files)


def test_files_of_the_same_content(hub: Hub, toy: Repository, files: Files) -> None:
    same = b'{"any": "settings"}'
    names = {"scheduler/scheduler_config.json": same, "tokenizer/tokenizer_config.json": same}
    toy.commit({**files, **names, SECOND: files[FIRST]})
    located = locate_source(ID, report=_quiet)
    assert all((located.path / name).read_bytes() == same for name in names)
    assert (located.path / SECOND).read_bytes() == (located.path / FIRST).read_bytes() == files[FIRST]
    assert len(hub.ranges(FIRST)) + len(hub.ranges(SECOND)) == 1
    assert sum(r.method == "GET" and r.name in names for r in hub.requests) == 1


def test_one_file_and_a_sole_variant(hub: Hub, toy: Repository, toy_checkpoint: Path) -> None:
    files = read_folder(toy_checkpoint)
    plain = "vae/diffusion_pytorch_model.safetensors"
    variant = "vae/diffusion_pytorch_model.fp32.safetensors"
    files[variant] = files.pop(plain)
    toy.commit(files)
    located = locate_source(ID, report=_quiet)
    with open_source(located.path) as source:
        assert [path.name for path in source.component("vae").files] == [Path(variant).name]
    toy.commit({**files, "vae/diffusion_pytorch_model.fp16.safetensors": files[variant]})
    hub.forget()
    message = _refused("more than one set of weights")
    assert "fp16" in message and "fp32" in message and "vae of owner/toy" in message
    assert hub.names == {"model_index.json"}


# Repositories that are refused, before their weights are downloaded.


def _edited(files: Files, name: str, change: Callable[[dict[str, Any]], object]) -> Files:
    data = json.loads(files[name])
    change(data)
    return {**files, name: json.dumps(data).encode()}


def _with_expert(files: Files) -> Files:
    """With a second expert, like the first."""
    second = {n.replace("/", "_2/", 1): data for n, data in files.items() if n.startswith("transformer/")}
    entries = {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.875}
    return _edited({**files, **second}, "model_index.json", lambda d: d.update(entries))


REFUSED: dict[str, tuple[Callable[[Files], Files], str]] = {
    "no model_index.json": (
        lambda files: {name: data for name, data in files.items() if name != "model_index.json"},
        "name ends in -Diffusers",
    ),
    "another pipeline": (
        lambda files: _edited(files, "model_index.json", lambda d: d.update(_class_name="FluxPipeline")),
        "'FluxPipeline'",
    ),
    "another component": (
        lambda files: _edited(
            files, "model_index.json", lambda d: d.update(adapter=["diffusers", "Adapter"])
        ),
        "adapter .diffusers.Adapter. is not supported",
    ),
    "an unknown field": (
        lambda files: _edited(files, "vae/config.json", lambda d: d.update(is_odd=True)),
        "unknown field is_odd",
    ),
    "a boundary and no second expert": (
        lambda files: _edited(files, "model_index.json", lambda d: d.update(boundary_ratio=0.875)),
        "boundary_ratio and transformer_2 contradict each other",
    ),
    "a transformer of another class than the index says": (
        lambda files: _edited(
            files,
            "model_index.json",
            lambda d: d.update(
                _class_name="WanVACEPipeline", transformer=["diffusers", "WanVACETransformer3DModel"]
            ),
        ),
        "another class; expected WanVACETransformer3DModel; found 'WanTransformer3DModel'",
    ),
    "experts that differ": (
        lambda files: _edited(
            _with_expert(files), "transformer_2/config.json", lambda d: d.update(ffn_dim=57)
        ),
        "expected ffn_dim 56; found ffn_dim 57",
    ),
    "an expert of pickled weights": (
        lambda files: {
            name: data
            for name, data in _with_expert(files).items()
            if not (name.startswith("transformer_2/") and "safetensors" in name)
        },
        "transformer_2 of owner/toy .* is a pickled checkpoint",
    ),
    "no config": (
        lambda files: {name: data for name, data in files.items() if name != "vae/config.json"},
        "lacks vae/config.json",
    ),
    "no weights but pickled ones": (
        lambda files: {
            name: data
            for name, data in files.items()
            if not (name.startswith("transformer/") and "safetensors" in name)
        },
        "pickled checkpoint",
    ),
    "a shard that is not there": (
        lambda files: {name: data for name, data in files.items() if name != SECOND},
        f"lacks {SECOND}",
    ),
    "a shard outside the folder": (
        lambda files: _edited(files, INDEX, lambda d: d["weight_map"].update(x="../../evil.safetensors")),
        "outside its folder",
    ),
    "a pickled shard": (
        lambda files: _edited(files, INDEX, lambda d: d["weight_map"].update(x="evil.bin")),
        "pickled checkpoint",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_weights(case: str, hub: Hub, toy: Repository, files: Files) -> None:
    change, message = REFUSED[case]
    toy.commit(change(files))
    _refused(message)
    assert not any(request.at_content for request in hub.requests)
    assert not any(name.endswith((".bin", ".safetensors")) for name in hub.names)


def test_a_full_disk(hub: Hub, files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room is noticed before the weights; what is cached, in part too, does not count."""
    large = {name for name in files.keys() - NOT_READ if name.endswith((".safetensors", "tokenizer.json"))}
    needed = sum(len(files[name]) for name in large)
    usage = shutil.disk_usage(cache.parent)
    free = needed - 1

    def fake(path: object) -> Any:
        return usage._replace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", fake)
    assert "HF_HOME" in _refused("too full")
    assert not any(request.at_content for request in hub.requests)
    _partial(cache, files[FIRST]).write_bytes(files[FIRST][:1])
    locate_source(ID, report=_quiet)


# Transfers that break off.


class _Counted(Progress):
    """Keeps what was announced and done."""

    seen: list[list[int]] = []  # noqa: RUF012  emptied by the test

    def __init__(self, total: int, *args: Any, **options: Any) -> None:
        super().__init__(total, *args, **options)
        self.seen.append([total, 0])

    def advance(self, n: int = 1) -> None:
        self.seen[-1][1] += n
        super().advance(n)


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Bytes announced and done, of each download."""
    monkeypatch.setattr(hub_download, "Progress", _Counted)
    monkeypatch.setattr(_Counted, "seen", [])
    return _Counted.seen


def _break_off(toy: Repository, files: Files, cache: Path) -> int:
    """A run in which one shard breaks off half-way for good; returns how many bytes of it are kept."""
    toy.faults[FIRST] = [("cut", len(files[FIRST]) // 2), ("status", 503)]
    assert "answered HTTP 503" in _refused("what has arrived is kept")
    assert toy.faults[FIRST] == []
    kept = _partial(cache, files[FIRST]).read_bytes()
    assert kept == files[FIRST][: len(kept)] and len(kept) > len(files[FIRST]) // 2 - 4096
    return len(kept)


def test_the_next_run_goes_on(
    hub: Hub, toy: Repository, files: Files, cache: Path, progress: list[list[int]]
) -> None:
    kept = _break_off(toy, files, cache)
    hub.forget()
    located = locate_source(ID, report=_quiet)
    assert hub.ranges(FIRST) == [f"bytes={kept}-"]
    _check_folder(located, files)
    assert not list(cache.rglob("*.incomplete"))
    assert progress[-1][0] == progress[-1][1] >= len(files[FIRST])


def test_a_server_that_starts_over(
    hub: Hub, toy: Repository, files: Files, cache: Path, progress: list[list[int]]
) -> None:
    _break_off(toy, files, cache)
    toy.ranges = False
    _check_folder(locate_source(ID, report=_quiet), files)
    assert progress[-1][0] == progress[-1][1]


@pytest.mark.parametrize("fault", ["cut", "reset"])
def test_a_lost_connection_is_taken_up_in_the_same_run(
    fault: str, hub: Hub, toy: Repository, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.faults[FIRST] = [(fault, 50_000), (fault, 50_000)]
    _check_folder(locate_source(ID, report=_quiet), files)
    first, second, third = hub.ranges(FIRST)
    assert first is None and second is not None and third is not None
    assert 40_000 < int(second[6:-1]) <= 50_000 < int(third[6:-1]) <= 100_000
    assert all(line.startswith("warning: ") for line in capsys.readouterr().err.splitlines())


@pytest.mark.parametrize("damage", ["other bytes", "too long", "a bit of a whole file"])
def test_a_partial_file_that_is_damaged(
    damage: str, hub: Hub, toy: Repository, files: Files, cache: Path
) -> None:
    kept = _break_off(toy, files, cache)
    partial, data = _partial(cache, files[FIRST]), files[FIRST]
    if damage == "too long":
        partial.write_bytes(data + b"more")
        _check_folder(locate_source(ID, report=_quiet), files)
        return
    partial.write_bytes(data[::-1][:kept] if damage == "other bytes" else data[:-1] + bytes([data[-1] ^ 1]))
    assert FIRST in _refused("damaged on the way")
    _check_folder(locate_source(ID, report=_quiet), files)


def test_a_cached_file_that_is_cut_off(hub: Hub, toy: Repository, files: Files) -> None:
    located = locate_source(ID, report=_quiet)
    blob = (located.path / FIRST).resolve()
    blob.write_bytes(files[FIRST][:-1])
    message = _refused("cut off")
    assert f"delete {blob}" in message
    blob.unlink()
    _check_folder(locate_source(ID, report=_quiet), files)


LOCATE = "import sys; from wanbuild.hub.repository import locate_source; locate_source(sys.argv[1])"


def _start(hub: Hub, cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, **_environment(hub, cache)}
    return subprocess.Popen(
        [sys.executable, "-c", LOCATE, ID],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_and_interrupted_runs(hub: Hub, toy: Repository, files: Files, cache: Path) -> None:
    """kill -9 keeps what has arrived; Ctrl-C does not wait for a connection that has fallen silent."""
    data = os.urandom(24_000_000)  # the library hands on chunks of 10 MiB
    content = {**files, FIRST: data}
    toy.commit(content)
    partial = _partial(cache, data)
    for signal_number in (signal.SIGKILL, signal.SIGINT):
        before = partial.stat().st_size if partial.exists() else 0
        toy.faults[FIRST] = [("stall", 11 * 2**20)]
        process = _start(hub, cache)
        _wait_for(lambda before=before: partial.exists() and partial.stat().st_size >= before + 10 * 2**20)
        process.send_signal(signal_number)
        started = time.monotonic()
        process.communicate(timeout=30)
        assert time.monotonic() - started < 5  # the silent connection is given up after 10 s
        assert process.returncode == -signal_number
    kept = partial.stat().st_size
    assert kept >= 20 * 2**20
    hub.forget()
    located = locate_source(ID, report=_quiet)
    assert hub.ranges(FIRST) == [f"bytes={kept}-"]
    assert (located.path / FIRST).read_bytes() == data


def test_two_runs_at_once(hub: Hub, files: Files) -> None:
    hub.delay_seconds = 0.3
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: locate_source(ID, report=_quiet), range(2))
    assert first == second
    assert len(hub.ranges(FIRST)) == len(hub.ranges(SECOND)) == 1
    _check_folder(first, files)


# Who may read.


@pytest.mark.parametrize("gate", ["files", "metadata"])
def test_without_a_token(gate: str, hub: Hub, toy: Repository) -> None:
    if gate == "files":
        toy.token = "hf_right"
    else:
        toy.faults["api"] = [("status", 401)]
    message = _refused("accept the licence")
    assert f"{hub.url}/{ID}" in message and "set HF_TOKEN" in message and "without a token" in message


@pytest.mark.parametrize("gate", ["files", "metadata"])
def test_with_a_token_that_is_refused(
    gate: str, hub: Hub, toy: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    if gate == "files":
        toy.token = "hf_right"
    else:
        toy.faults["api"] = [("status", 403)]
    message = _refused("refuses the token that was sent")
    assert "accept the licence" in message and "hf_wrong" not in message


def test_with_the_right_token(
    hub: Hub, toy: Repository, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent to the hub, and not to the content network."""
    toy.token = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    _check_folder(locate_source(ID, report=_quiet), files)
    assert {request.token for request in hub.requests if not request.at_content} == {"Bearer hf_right"}
    assert {request.token for request in hub.requests if request.at_content} == {None}


# A hub that does not answer.


def test_no_such_repository(hub: Hub) -> None:
    message = _refused("no folder owner/nothing, and no repository", "owner/nothing")
    assert f"{hub.url}/owner/nothing" in message


def test_a_failing_hub(hub: Hub, toy: Repository) -> None:
    toy.faults["api"] = [("status", 503)]
    assert "Service Unavailable" in _refused("answered HTTP 503")


def test_something_else_than_a_hub(hub: Hub, toy: Repository) -> None:
    toy.commits[toy.branches["main"]] = {}
    toy.faults["api"] = [("status", 200)]
    _refused("does not answer as the hub does")


@pytest.mark.parametrize("listing", ["sha", "size", "blobId"])
def test_a_listing_that_is_not_understood(
    listing: str, hub: Hub, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    from helpers import hub_server

    def listed(name: str, data: bytes) -> dict[str, Any]:
        entry = hub_server_listed(name, data)
        changes: dict[str, Any] = {"size": -1, "blobId": "../../evil"}
        return {**entry, **({listing: changes[listing]} if listing in changes else {})}

    hub_server_listed = hub_server._listed
    monkeypatch.setattr(hub_server, "_listed", listed)
    if listing == "sha":
        repository = hub.repositories[ID]
        repository.commits["../../../evil"] = files
        repository.branches["main"] = "../../../evil"
    _refused("does not answer as the hub does")


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        message = _refused("cannot be reached: ConnectError")
    assert "HF_HUB_OFFLINE=1" in message


def test_a_silent_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.silent = True
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    _refused("cannot be reached: ReadTimeout")


def test_a_cache_that_cannot_be_written(hub: Hub, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o500)
    result = subprocess.run(
        [sys.executable, UNPRIVILEGED, sys.executable, "-c", LOCATE, ID],
        env={**os.environ, **_environment(hub, cache)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    message = result.stderr.splitlines()[-1]
    assert "SourceError" in message and "cannot be written: Permission denied" in message


def test_a_cache_that_is_a_file(hub: Hub, cache: Path) -> None:
    cache.write_text("")
    assert "HF_HOME" in _refused("cannot be written")


# Offline.


@pytest.fixture
def offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Switches offline mode on."""
    from huggingface_hub import constants

    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("revision", [None, "main", "v1", "commit"])
def test_offline_with_everything(
    revision: str | None, hub: Hub, toy: Repository, files: Files, offline: Callable[[], None]
) -> None:
    toy.branches["v1"] = toy.branches["main"]
    revision = toy.branches["main"] if revision == "commit" else revision
    online = locate_source(ID, revision, _quiet)
    hub.forget()
    offline()
    assert locate_source(ID, revision, _quiet) == online
    _check_folder(online, files)
    assert (hub.listings, hub.requests) == (0, [])


@pytest.mark.parametrize(
    "name", ["model_index.json", INDEX, SECOND, "vae/config.json", "tokenizer/tokenizer.json"]
)
def test_offline_with_a_file_missing(name: str, hub: Hub, offline: Callable[[], None]) -> None:
    (locate_source(ID, report=_quiet).path / name).unlink()
    hub.forget()
    offline()
    message = _refused("offline mode is on")
    assert name.removesuffix(".index.json") in message and "unset HF_HUB_OFFLINE" in message
    assert (hub.listings, hub.requests) == (0, [])


def test_offline_with_another_tools_variant(
    hub: Hub, files: Files, cache: Path, offline: Callable[[], None]
) -> None:
    """A half-precision variant in the cache is not taken for the weights."""
    located = locate_source(ID, report=_quiet)
    (located.path / INDEX).rename(located.path / "transformer/diffusion_pytorch_model.fp16.safetensors")
    offline()
    assert "transformer/diffusion_pytorch_model.safetensors" in _refused("lacks")


def test_offline_with_nothing(hub: Hub, offline: Callable[[], None]) -> None:
    offline()
    assert "model_index.json of owner/toy at main" in _refused("offline mode is on")


# Folders.


def test_a_folder_is_returned_as_it_is(toy_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_source(toy_checkpoint) == Located(toy_checkpoint, None, None)
    monkeypatch.chdir(toy_checkpoint.parent.parent)
    name = f"{toy_checkpoint.parent.name}/{toy_checkpoint.name}"
    assert locate_source(name) == Located(Path(name), None, None)
    with pytest.raises(UsageError, match="--revision"):
        locate_source(name, "main")


@pytest.mark.parametrize(
    "source",
    [
        "nothing",
        "./owner/toy",
        "../owner",
        "/owner/toy",
        "a/b/c",
        "owner/toy/",
        "~/toy",
        "owner/-toy",
        "",
        "a" * 5000,
        "owner/wan.safetensors",
        "https://huggingface.co/owner/toy",
    ],
)
def test_what_is_no_hub_id(source: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    if source == "":
        assert locate_source(source) == Located(Path(), None, None)  # as Path does: the folder one is in
        return
    assert hub.url not in _refused("there is no folder|cannot be read", source)
    assert (hub.listings, hub.requests) == (0, [])


def test_a_file(toy_checkpoint: Path, tmp_path: Path) -> None:
    _refused("is not a folder", str(toy_checkpoint / "model_index.json"))
    (tmp_path / "wan.pth").write_bytes(b"pickle")
    _refused("pickled checkpoint", str(tmp_path / "wan.pth"))


# The command.


def test_convert(
    hub: Hub, toy: Repository, cache: Path, tmp_path: Path, cli: Any, toy_checkpoint: Path
) -> None:
    """The same weights as from the folder; the manifest says where they are from."""
    toy.commit({**read_folder(toy_checkpoint), **EXTRAS}, "v1")
    environment = _environment(hub, cache)
    cli.succeeds("wanbuild", "convert", toy_checkpoint, "--artifact", tmp_path / "folder")
    output = cli.succeeds(
        "wanbuild", "convert", ID, "--revision", "v1", "--artifact", tmp_path / "hub", **environment
    )
    assert ID in output
    assert not hub.names & NOT_READ
    folder, downloaded = (read_manifest(tmp_path / name) for name in ("folder", "hub"))
    assert downloaded.source["repository"] == ID
    assert downloaded.source["revision"] == toy.branches["v1"]
    assert downloaded.source["files"] == folder.source["files"]
    assert downloaded.components == folder.components
    message = cli.fails(
        4,
        "wanbuild",
        "convert",
        ID,
        "--artifact",
        tmp_path / "x",
        HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path / "none"),
    )
    assert "offline mode is on" in message
