"""Sources on the hub: what is downloaded, what goes on and what fails, against a small hub on loopback."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from helpers import UNPRIVILEGED
from helpers.hub_server import LARGE, Hub, Repository, read_folder, serve
from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.hub.errors import explained
from wanbuild.hub.repository import Located, locate_source, locate_tokenizer
from wanbuild.progress_line import ProgressLine
from wanbuild.source.checkpoint import open_source
from wanbuild.source.image_processor import FILE as IMAGE_PROCESSOR_FILE
from wanbuild.source.tokenizer import open_tokenizer
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.toy.toy_weights import Stored
from wanrun.artifact.manifest import read_manifest
from wanrun.codes import ErrorCode
from wanrun.errors import SourceError, shortened

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
LOCATE = "import sys; from wanbuild.hub.repository import locate_source; locate_source(sys.argv[1])"

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A toy of two shards per component, and what else published repositories hold."""
    folder = tmp_path_factory.mktemp("hub") / "toy"
    write_toy(folder, stored=Stored(shards=2))
    return {**read_folder(folder), **EXTRAS}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no token."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)  # the pieces in which a file arrives
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    return tmp_path / "cache"


@pytest.fixture
def hub(files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one repository, owner/toy."""
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
    home = str(cache.parent / "home")
    names = {"HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_HUB_CACHE": str(cache)}
    return {**names, "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}


def _locate(revision: str | None = None) -> Located:
    return locate_source(ID, revision, lambda line: None)


def _refused(code: ErrorCode, source: str = ID, revision: str | None = None, **parts: object) -> str:
    with refuses(code, SourceError, **parts) as caught:
        locate_source(source, revision, lambda line: None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _check_folder(located: Located, files: Files) -> None:
    """The folder holds the served bytes and opens as a checkpoint."""
    wanted = files.keys() - NOT_READ
    assert read_folder(located.path) == {name: files[name] for name in wanted}
    open_source(located.path, located.repository, located.revision).close()


def _contents(hub: Hub) -> list[tuple[str, str | None]]:
    """The large files that were asked for, each with its range."""
    return [(request.name, request.range) for request in hub.requests if request.at_content]


# What is downloaded.


def test_only_what_is_read_is_downloaded(
    hub: Hub, toy: Repository, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    located = locate_source(ID, report=lines.append)
    assert hub.names == files.keys() - NOT_READ
    assert (located.repository, located.revision) == (ID, toy.branches["main"])
    _check_folder(located, files)
    assert len(lines) == 1 and "7 files" in lines[0] and ID in lines[0]
    hub.forget()
    assert locate_source(ID, report=lines.append) == located
    assert (hub.listings, hub.requests, len(lines)) == (1, [], 1)
    assert capsys.readouterr() == ("", "")  # no bar of huggingface_hub's either


def test_a_tokenizer_of_the_hub(hub: Hub, toy: Repository, tmp_path: Path) -> None:
    assert locate_tokenizer(tmp_path) == tmp_path
    assert locate_tokenizer(Path("nowhere")) == Path("nowhere")
    folder = locate_tokenizer(Path(ID))
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert open_tokenizer(folder).pad_id == 0
    hub.repositories["owner/other"] = Repository()
    hub.repositories["owner/other"].commit({"a.json": b"{}"})
    with refuses("missing_file", SourceError, what="owner/other at ", expected="tokenizer/tokenizer.json"):
        locate_tokenizer(Path("owner/other"))


@pytest.mark.slow
def test_what_images_need_is_downloaded_too(hub: Hub, toy: Repository, tmp_path: Path) -> None:
    """The image encoder and its processor, whose settings are checked before any weight is asked for."""
    write_toy(tmp_path / "toy", "wan2.1-i2v")
    files = read_folder(tmp_path / "toy")
    toy.commit(files)
    wanted = files.keys() - (NOT_READ - {"image_encoder/model.safetensors"})
    located = _locate()
    assert read_folder(located.path) == {name: files[name] for name in wanted}
    open_source(located.path).close()
    hub.forget()
    processor = f"image_processor/{IMAGE_PROCESSOR_FILE}"
    toy.commit({**files, processor: b'{"resample": 0}'})
    _refused("unreadable", what="resample is 0 ")
    del files[processor]
    toy.commit(files)
    _refused("missing_file", what=processor)
    assert _contents(hub) == []


def test_revisions(hub: Hub, toy: Repository, files: Files) -> None:
    main, changed = toy.branches["main"], {**files, SECOND: files[SECOND][::-1]}
    other = toy.commit(changed, "refs/pr/1")
    _locate()
    hub.forget()
    located = _locate("refs/pr/1")
    assert located.revision == other and located.path.name == other
    assert (located.path / SECOND).read_bytes() == changed[SECOND]
    assert _contents(hub) == [(SECOND, None)]
    assert _locate(main).revision == main
    assert "/revision/nothing" in _refused("not_found", revision="nothing", what="HTTP 404")


@pytest.mark.parametrize(
    "revision",
    ["../../../x", "/tmp/x", "a/b..c", "a//b", "", "a/.b", "a\nb", "x" * 300],
)
def test_what_is_no_revision(revision: str, hub: Hub, toy: Repository, cache: Path) -> None:
    """Also where a hub says that it has it: the commit's name would be written to that path."""
    toy.branches[revision] = toy.branches["main"]
    with refuses("invalid_value", what=shortened(revision), remedy="--revision"):
        _locate(revision)
    assert hub.listings == 0 and not cache.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "header", "value"),
    [
        (FIRST, "ETag", "../../../../x"),
        ("model_index.json", "X-Repo-Commit", "/tmp/x"),
    ],
)
def test_a_hub_that_names_files_outside_the_cache(
    name: str, header: str, value: str, toy: Repository, cache: Path
) -> None:
    toy.headers[name] = {header: value}
    before = set(cache.parent.iterdir())
    _refused("unreachable", what=f"ValueError: its header {header} ")
    assert set(cache.parent.iterdir()) - before <= {cache}
    assert not Path("/tmp/x").exists()


def test_a_branch_that_moves_meanwhile(toy: Repository, files: Files) -> None:
    """All files are of the commit that was listed."""
    main = toy.branches["main"]
    changed = {name: data if name == "model_index.json" else b"{}" for name, data in files.items()}
    located = locate_source(ID, report=lambda line: toy.commit(changed))
    assert toy.branches["main"] != main == located.revision
    _check_folder(located, files)


def test_one_file_and_a_sole_variant(hub: Hub, toy: Repository, toy_checkpoint: Path) -> None:
    files = read_folder(toy_checkpoint)
    variant = "vae/diffusion_pytorch_model.fp32.safetensors"
    files[variant] = files.pop("vae/diffusion_pytorch_model.safetensors")
    toy.commit(files)
    with open_source(_locate().path) as source:
        assert [path.name for path in source.component("vae").files] == [Path(variant).name]
    toy.commit({**files, "vae/diffusion_pytorch_model.fp16.safetensors": files[variant]})
    hub.forget()
    message = _refused("wrong_kind", what="/vae ", expected="one", found="fp16")
    assert "fp32" in message and hub.names == {"model_index.json"}


# Repositories that are refused, before their weights are downloaded.


def _edited(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Files], Files]:
    def edit(files: Files) -> Files:
        data = json.loads(files[name])
        change(data)
        return {**files, name: json.dumps(data).encode()}

    return edit


def _indexed(**entries: Any) -> Callable[[Files], Files]:
    return _edited("model_index.json", lambda data: data.update(entries))


def _without(pattern: str) -> Callable[[Files], Files]:
    return lambda files: {name: data for name, data in files.items() if not re.fullmatch(pattern, name)}


def _with_expert(files: Files) -> Files:
    """With a second expert, like the first."""
    second = {n.replace("/", "_2/", 1): data for n, data in files.items() if n.startswith("transformer/")}
    expert = ["diffusers", "WanTransformer3DModel"]
    return _indexed(transformer_2=expert, boundary_ratio=0.875)({**files, **second})


def _mapped(name: str) -> Callable[[Files], Files]:
    return _edited(INDEX, lambda data: data["weight_map"].update(x=name))


VACE = ["diffusers", "WanVACETransformer3DModel"]
REFUSED: dict[str, tuple[Callable[[Files], Files], ErrorCode, dict[str, str]]] = {
    "no model_index.json": (_without("model_index.json"), "missing_file", {"remedy": "-Diffusers"}),
    "another pipeline": (_indexed(_class_name="FluxPipeline"), "unsupported", {"found": "FluxPipeline"}),
    "another component": (
        _indexed(adapter=["diffusers", "Adapter"]),
        "unsupported",
        {"what": "adapter (diffusers.Adapter)"},
    ),
    "an unknown field": (
        _edited("vae/config.json", lambda data: data.update(is_odd=True)),
        "unreadable",
        {"what": "unknown field is_odd"},
    ),
    "a transformer of another class than the index says": (
        _indexed(_class_name="WanVACEPipeline", transformer=VACE),
        "wrong_kind",
        {"expected": "WanVACETransformer3DModel", "found": "'WanTransformer3DModel'"},
    ),
    "experts that differ": (
        lambda files: _edited("transformer_2/config.json", lambda data: data.update(ffn_dim=57))(
            _with_expert(files)
        ),
        "mismatch",
        {"expected": "ffn_dim 56", "found": "ffn_dim 57"},
    ),
    "no config": (_without("vae/config.json"), "missing_file", {"what": "vae/config.json"}),
    "no weights but pickled ones": (_without("transformer/.*safetensors.*"), "untrusted", {}),
    "a shard that is not there": (_without(SECOND), "missing_file", {"what": SECOND}),
    "a shard outside the folder": (_mapped("../../evil.safetensors"), "untrusted", {"found": "../evil"}),
    "a pickled shard": (_mapped("evil.bin"), "untrusted", {"what": "evil.bin"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_weights(case: str, hub: Hub, toy: Repository, files: Files) -> None:
    change, code, parts = REFUSED[case]
    toy.commit(change(files))
    _refused(code, **parts)
    assert _contents(hub) == []
    assert not any(name.endswith((".bin", ".safetensors")) for name in hub.names)


def test_a_file_that_needs_xet(hub: Hub, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(files[FIRST]) - 1)
    _refused("unreachable", what="too large", remedy="hf download owner/toy")


# Transfers that break off.


@pytest.mark.slow
def test_a_lost_connection_is_taken_up_in_the_same_run(
    hub: Hub, toy: Repository, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the bytes are counted once."""
    seen: list[int] = []
    monkeypatch.setattr(ProgressLine, "advance", lambda progress, n: seen.append(n))
    toy.faults[FIRST] = [("cut", 50_000)]
    _check_folder(_locate(), files)
    first, second = hub.ranges(FIRST)
    assert first is None and second is not None and 40_000 < int(second[6:-1]) <= 50_000
    assert sum(seen) == sum(len(files[name]) for name in files.keys() - NOT_READ if name.endswith(LARGE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "what"),
    [
        (("reset", 50_000), "unreachable", "ReadError"),
        (("status", 503), "unreachable", "503 "),
        (("status", 404), "not_found", FIRST),
    ],
)
def test_the_next_run_goes_on(
    fault: tuple[str, int], code: ErrorCode, what: str, hub: Hub, toy: Repository, files: Files
) -> None:
    """With the file that failed, which starts over, and not with those that are whole."""
    toy.faults[FIRST] = [fault]
    _refused(code, what=what)
    hub.forget()
    located = _locate()
    assert (FIRST, None) in _contents(hub) and len(_contents(hub)) < 7
    _check_folder(located, files)


def test_a_cached_file_that_is_cut_off(hub: Hub, files: Files) -> None:
    blob = (_locate().path / FIRST).resolve()
    blob.write_bytes(files[FIRST][:-1])
    _refused("damaged", what=FIRST, expected=len(files[FIRST]), found=len(files[FIRST]) - 1, remedy=blob)
    blob.unlink()
    _check_folder(_locate(), files)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "end", "fault"),
    [
        (signal.SIGINT, (130, "interrupted"), ("stall", 11 * 2**20)),
        (signal.SIGTERM, (143, "terminated"), ("slow", 500_000)),
    ],
)
def test_stopped_runs(
    number: signal.Signals,
    end: tuple[int, str],
    fault: tuple[str, int],
    hub: Hub,
    toy: Repository,
    files: Files,
    cache: Path,
    tmp_path: Path,
) -> None:
    """Whole files are kept; the one in transfer, of which 10 MiB have come, is removed and starts over."""
    data = os.urandom(24_000_000)
    toy.commit({**files, FIRST: data})
    toy.faults[FIRST] = [fault]
    command = [Path(sys.executable).with_name("wanbuild"), "convert", ID, "--artifact", tmp_path / "artifact"]
    environment = {**os.environ, **_environment(hub, cache)}
    deadline, blobs = time.monotonic() + 60, cache / "models--owner--toy" / "blobs"
    pattern = f"{hashlib.sha256(data).hexdigest()}.*.incomplete"
    with subprocess.Popen(command, env=environment, stderr=-1, stdout=-1, text=True) as process:
        while not [part for part in blobs.glob(pattern) if part.stat().st_size >= 10 * 2**20]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        started = time.monotonic()
        error = process.communicate(timeout=60)[1]
    assert time.monotonic() - started < 5  # a silence of the library's is 10 s
    assert (process.returncode, error.splitlines()[-1]) == end
    assert not list(blobs.glob(pattern))
    hub.forget()
    toy.faults.clear()
    folder = _locate().path
    assert _contents(hub) == [(FIRST, None)]
    assert (folder / FIRST).read_bytes() == data


# Who may read.


@pytest.mark.parametrize(("token", "status"), [(None, 401), ("hf_wrong", 403)])
def test_access(
    token: str | None,
    status: int,
    hub: Hub,
    toy: Repository,
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the metadata and of files; a token is sent to the hub, and not to the content network."""
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    toy.token, toy.faults["api"] = "hf_right", [("status", status)]
    for _ in range(2):
        said = _refused("not_found", what=f"{hub.url}/{ID} answers HTTP {status} ", remedy="HF_TOKEN")
        assert "hf_wrong" not in said
    hub.forget()
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    _check_folder(_locate(), files)
    tokens = {(request.at_content, request.token) for request in hub.requests}
    assert tokens == {(False, "Bearer hf_right"), (True, None)}


# A hub that does not answer, and a cache that does not take.


def test_a_hub_that_does_not_answer(
    hub: Hub, toy: Repository, files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refused("not_found", "owner/nothing", what=f"{hub.url}/owner/nothing answers HTTP 404 ")
    toy.faults["api"] = [("status", 503), ("status", 200)]
    _refused("unreachable", what="503 ")
    _refused("unreachable", remedy="HF_ENDPOINT")  # the answer is empty
    toy.commits["../../../evil"], toy.branches["main"] = files, "../../../evil"
    _refused("unreachable", what="'../../../evil'")
    hub.silent = True
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    _refused("unreachable", what="ReadTimeout")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        _refused("unreachable", what="ConnectError", remedy="HF_HUB_OFFLINE=1")
    assert not cache.exists()


@pytest.mark.thorough
def test_a_cache_that_cannot_be_written(hub: Hub, cache: Path) -> None:
    """It is an error unless everything is there."""

    def locate_unprivileged() -> subprocess.CompletedProcess[str]:
        for path in (cache, *cache.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        command = [sys.executable, UNPRIVILEGED, sys.executable, "-c", LOCATE, ID]
        environment = {**os.environ, **_environment(hub, cache)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    cache.mkdir()
    message = locate_unprivileged().stderr.splitlines()[-1]
    assert "SourceError" in message and os.strerror(errno.EACCES) in message
    cache.rmdir()
    cache.write_text("")
    _refused("unwritable", what=cache, remedy="HF_HOME")
    cache.unlink()
    _locate()
    result = locate_unprivileged()
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("error", "code", "parts"),
    [
        *(
            (OSError(number, os.strerror(number)), "no_space", {"what": os.strerror(number)})
            for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        ),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "unwritable", {"remedy": "HF_HOME"}),
        (RecursionError("a thousand brackets"), "unreachable", {"what": "RecursionError"}),
    ],
)
def test_what_fails_meanwhile(error: Exception, code: ErrorCode, parts: dict[str, str]) -> None:
    with refuses(code, SourceError, **parts), explained(ID):
        raise error


# Offline.


@pytest.mark.slow
def test_offline(hub: Hub, toy: Repository, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """All or an error; another tool's half-precision variant is not taken for the weights."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _refused("missing_file", what="owner/toy at main", remedy="HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    toy.branches["v1"] = commit = toy.branches["main"]
    revisions = (None, "main", "v1", commit)
    online = [_locate(revision) for revision in revisions]
    hub.forget()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert [_locate(revision) for revision in revisions] == online
    folder = online[0].path
    _check_folder(online[0], files)
    for name in ("model_index.json", INDEX, SECOND, "vae/config.json", "tokenizer/tokenizer.json"):
        half = (folder / name).rename(folder / "transformer/diffusion_pytorch_model.fp16.safetensors")
        _refused("missing_file", what=f" {name} of ", remedy="HF_HUB_OFFLINE")
        half.rename(folder / name)
    assert (hub.listings, hub.requests) == (0, [])


# Folders.


def test_folders_and_files(toy_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_source(toy_checkpoint) == Located(toy_checkpoint, None, None)
    monkeypatch.chdir(toy_checkpoint.parent.parent)
    name = f"{toy_checkpoint.parent.name}/{toy_checkpoint.name}"
    assert locate_source(name) == Located(Path(name), None, None)
    with refuses("no_effect", what="--revision"):
        locate_source(name, "main")
    _refused("wrong_kind", str(toy_checkpoint / "model_index.json"))
    (tmp_path / "wan.pth").write_bytes(b"pickle")
    _refused("untrusted", str(tmp_path / "wan.pth"))
    monkeypatch.chdir(tmp_path)
    assert locate_source("") == Located(Path(), None, None)  # as Path does: the folder one is in


NO_IDS = "nothing ./owner/toy ../owner /owner/toy a/b/c owner/toy/ ~/toy owner/-toy owner/wan.safetensors"


@pytest.mark.parametrize("source", [*NO_IDS.split(), "a" * 5000, "https://huggingface.co/owner/toy"])
def test_what_is_no_hub_id(source: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code: ErrorCode = "unreadable" if len(source) == 5000 else "missing_file"
    assert hub.url not in _refused(code, source)
    assert (hub.listings, hub.requests) == (0, [])


# The command.


@pytest.mark.thorough
def test_convert(
    hub: Hub, toy: Repository, cache: Path, tmp_path: Path, cli: Any, toy_checkpoint: Path
) -> None:
    """The same weights as from the folder; the manifest says where they are from. What is given is not asked
    for."""
    toy.commit({**read_folder(toy_checkpoint), **EXTRAS}, "v1")
    cli.succeeds("wanbuild", "convert", toy_checkpoint, "--artifact", tmp_path / "folder")
    command = ("wanbuild", "convert", ID, "--revision", "v1", "--artifact")
    assert ID in cli.succeeds(*command, tmp_path / "hub", **_environment(hub, cache))
    assert not hub.names & NOT_READ
    folder, downloaded = (read_manifest(tmp_path / name) for name in ("folder", "hub"))
    assert downloaded.source["repository"] == ID
    assert downloaded.source["revision"] == toy.branches["v1"]
    assert downloaded.source["files"] == folder.source["files"]
    assert downloaded.components == folder.components
    none = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "none")}
    assert "HF_HUB_OFFLINE" in cli.fails(4, *command, tmp_path / "x", **none)

    hub.forget()
    shutil.rmtree(cache)
    weights = next((toy_checkpoint / "transformer").glob("*.safetensors"))
    given = {"transformer": weights, "tokenizer": toy_checkpoint / "tokenizer"}
    found = convert(ConvertRequest(ID, tmp_path / "given", revision="v1", files=given))
    assert any(name.startswith("vae/") for name, _ in _contents(hub))
    assert not any(name.startswith(("transformer/", "tokenizer/tok")) for name, _ in _contents(hub))
    assert f"transformer/{weights.name}" in found.source["files"]
