"""Videos in an object store: each is there whole, with its record, and a finished one is kept."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from helpers.options import run_options
from helpers.refusals import check_refusal, refuses
from wancli.jobs.existing import check_same
from wancli.jobs.worklist import make_worklist
from wancli.run import wanrun
from wanfleet import uploads
from wanfleet.uploads import StoreError, Uploads, VideoStore
from wanrun.artifact.artifact import open_artifact
from wanrun.codes import ErrorCode
from wanrun.errors import UsageError
from wanrun.timing.timings import Timings


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def made(artifact: Path, *options: str) -> str:
    """What the command says of prompts with one step each."""
    return CliRunner().invoke(wanrun, [str(artifact), "--steps", "1", *options]).output


def counts(said: str) -> list[str]:
    """How many prompts were made, skipped and failed."""
    return re.findall(r"\d+ (?:made|skipped|failed)", said)


def refusing(name: str, left: Iterator[str], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which fails for a name as often as there are reasons left."""

    def refused(store: VideoStore, asked: str) -> Any:
        if asked == name and (reason := next(left, None)) is not None:
            raise StoreError("wrong_kind", f"{name} is {reason}")
        return function(store, asked)

    return refused


@pytest.mark.slow
def test_a_run_puts_videos_into_a_store_and_keeps_finished_ones(
    toy_artifact: Path, tmp_path: Path, here: Path
) -> None:
    """By the command: made, skipped, made otherwise, replaced; nothing is left here."""
    prompts, store, page = tmp_path / "prompts.jsonl", tmp_path / "store", tmp_path / "report.html"
    prompts.write_text('{"prompt": "cat"}\n{"prompt": "dog", "output": "dog.npy", "seed": "random"}\n')
    url = store.as_uri()
    options = ["--prompts", str(prompts), "-o", f"{url}/{{index}}.npy"]
    first = made(toy_artifact, *options, "--report", str(page))
    assert f"wrote {url}/1.npy" in first and counts(first) == ["2 made", "0 skipped", "0 failed"]
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    assert sorted(before) == ["1.npy", "1.npy.json", "dog.npy", "dog.npy.json"]
    assert np.load(store / "1.npy").ndim == 4 and json.loads(before["1.npy.json"])["prompt"] == "cat"
    assert f"{url}/dog.npy" in page.read_text()

    (store / "1.npy").unlink()  # a process that was killed between the record and its video
    again = made(toy_artifact, *options, "--report", str(page))
    assert "this machine" in page.read_text() and "cannot be read" not in page.read_text()
    assert counts(again) == ["1 made", "1 skipped", "0 failed"] and f"{url}/dog.npy is" in again
    assert {path.name: path.read_bytes() for path in store.iterdir()} == before

    once = iter(["away"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VideoStore, "record", refusing("dog.npy", once, VideoStore.record))
        away = made(toy_artifact, *options)  # no seed is drawn in place of the recorded one
    assert counts(away) == ["0 made", "1 skipped", "1 failed"] and "dog.npy is away" in away

    mine = store / "mine.npy"
    mine.write_bytes(bytes(12))
    refused = CliRunner().invoke(wanrun, [str(toy_artifact), "--prompt", "a", "-o", f"{url}/mine.npy"])
    assert isinstance(refused.exception, UsageError)
    check_refusal(refused.exception, "exists", what=f"{url}/mine.npy ")
    assert mine.stat().st_size == 12 and not mine.with_name("mine.npy.json").exists()
    mine.unlink()

    other = made(toy_artifact, *options, "--seed", "7")
    assert counts(other)[2] == "1 failed" and "1.npy exists" in other and "seed 7" in other
    assert "2 made" in counts(made(toy_artifact, *options, "--seed", "7", "--overwrite"))
    assert (store / "1.npy").read_bytes() != before["1.npy"] and not list(here.iterdir())


def test_errors_name_the_url(artifact: Path, tmp_path: Path, here: Path) -> None:
    """Not the folder here, of which nobody has heard; of the command line, and of a line of a file."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "output": "b.xyz"}\n{"prompt": "a", "num_steps": 0}\n')
    one = run_options(prompt="a", output="s3://b/a.xyz")
    with refuses("unsupported", what="s3://b/a.xyz ", found="'.xyz'"):
        make_worklist(lambda: open_artifact(artifact), one, {}, Timings())
    many = run_options(prompts=prompts, output="s3://b/{index}.npy")
    first = make_worklist(lambda: open_artifact(artifact), many, {}, Timings()).failures[1]
    check_refusal(first, "unsupported", what=f"{prompts}:1: s3://b/b.xyz ")
    assert str(here) not in str(first)


def test_a_record_is_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder and in a store."""
    monkeypatch.setattr(uploads, "MAX_BYTES", 99)
    for place in (str(tmp_path), "s3://small"):
        for size in (99, 100):
            (tmp_path / "there").write_bytes(bytes(size))
            Uploads(place).put(tmp_path / "there", f"{size}.json")
        assert Uploads(place).read("99.json") == bytes(99)
        with refuses("unreadable", what="100.json", found="99 bytes"):
            Uploads(place).read("100.json")
    os.mkfifo(tmp_path / "fifo.json")
    with refuses("unreadable", what="fifo.json", found="not a file"):
        Uploads(tmp_path).read("fifo.json")


def test_what_cannot_be_delivered_stays(tmp_path: Path, here: Path) -> None:
    """Where the error says."""
    store = VideoStore(f"{(tmp_path / 'store').as_uri()}/{{index}}.npy")
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_text("a file")
    video = Path(store.file("1.npy"))
    with pytest.raises(UsageError, match=rf"the video is {video}"), store:
        video.write_bytes(b"frames")
        store.deliver(video, {}, True, partial(check_same, "it"))
    assert video.read_bytes() == b"frames"


def raises(error: Exception) -> Callable[..., None]:
    """A function that raises an error."""

    def function(*_: object, **__: object) -> None:
        raise error

    return function


def at_most(times: int, function: Callable[..., bool]) -> Callable[..., bool]:
    """The function, which fails after so many calls."""
    left = iter(range(times))

    def limited(*given: Any) -> bool:
        if next(left, None) is None:
            raise UsageError("invalid_value", "killed")
        return function(*given)

    return limited


Open = Callable[..., VideoStore]


@pytest.fixture(params=["file://", "s3:/"])
def store_of(request: pytest.FixtureRequest, tmp_path: Path, here: Path) -> Open:
    """Opens a store for videos of a name, in a folder and in a bucket."""
    return lambda name, **how: VideoStore(f"{request.param}{tmp_path}/store/{name}", **how)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file that no run has made."""
    (tmp_path / "mine").write_text("mine")
    return tmp_path / "mine"


def delivered(store: VideoStore, pictures: dict[str, str], facts: dict[str, Any], overwrite: bool) -> None:
    """Delivers a folder of pictures, or a file if there is one without a name."""
    video = Path(store.pattern)
    if "" in pictures:
        video.write_text(pictures[""])
    else:
        video.mkdir(exist_ok=True)
        for name, text in pictures.items():
            (video / name).write_text(text)
    store.deliver(video, facts, overwrite, partial(check_same, store.where(video.name)))


def test_the_same_video_of_another_process_is_kept(store_of: Open, tmp_path: Path) -> None:
    """And this one is discarded; another one stays here."""
    with store_of("a.frames", kept=True) as store:
        for text in ("first", "second"):
            delivered(store, {"0001.png": text}, {"seed": 1, "wanrun": text}, overwrite=False)
        assert store.read("a.frames/0001.png") == b"first"
        with refuses("exists", expected="seed 2", found=1, remedy=store.pattern):
            delivered(store, {"0001.png": "third"}, {"seed": 2}, overwrite=False)
        assert (Path(store.pattern) / "0001.png").read_text() == "third"
        assert store.record("a.frames") == {"seed": 1, "wanrun": "first"} and store.record("b") is None
        broken = tmp_path / "broken"
        broken.write_text("[")
        assert not store.put(broken, "a.frames.json") and store.put(broken, "a.frames.json", overwrite=True)
        assert store.record("a.frames") == {}


def test_a_video_without_a_record_is_kept(store_of: Open, mine: Path) -> None:
    """It is not of a run, a file or any folder; the new one stays here."""
    with store_of("b.npy") as store:
        for name, pictures in (("b.npy", {"": "new"}), ("b.frames", {"0001.png": "new"})):
            store.pattern = store.file(name)
            store.put(mine, name if "" in pictures else f"{name}/0002.png")
            with refuses("exists", what=f"{name} ", remedy=store.pattern):
                delivered(store, pictures, {}, overwrite=False)
            assert store.record(name) is None and Path(store.pattern).exists()
        assert store.read("b.npy") == store.read("b.frames/0002.png") == b"mine"


def test_a_video_is_replaced_whole(store_of: Open, mine: Path) -> None:
    """By one of fewer pictures, also by name of signs; if it ends early, there is no record of another."""
    with store_of("o[1].frames") as store:
        store.put(mine, "o1.frames/0001.png")
        for names in (("0001.png", "0002.png"), ("0001.png",)):
            delivered(store, dict.fromkeys(names, "new"), {"seed": len(names)}, overwrite=True)
        assert store.read("o[1].frames/0001.png") == b"new" and store.read("o[1].frames/0002.png") is None
        assert store.record("o[1].frames") == {"seed": 1} and store.read("o1.frames/0001.png") == b"mine"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "put", raises(UsageError("invalid_value", "ended")))
            with refuses("invalid_value", what="ended", remedy=store.pattern):
                delivered(store, {"0001.png": "other"}, {"seed": 2}, overwrite=True)
        assert store.record("o[1].frames") is None


def test_what_a_killed_process_began_is_finished(store_of: Open) -> None:
    """After its record and any number of pictures; the folder is whole when the last one has come."""
    with store_of("m.frames", kept=True) as store:
        pictures = {f"{number:04}.png": "one" for number in (1, 2, 3)}
        for puts in (1, 2):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(store, "put", at_most(puts, store.put))
                with pytest.raises(UsageError, match="killed"):
                    delivered(store, pictures, {"seed": 1}, overwrite=False)
            assert store.record("m.frames") == {"seed": 1} and not store.has("m.frames")
        delivered(store, pictures, {"seed": 1}, overwrite=False)
        assert store.has("m.frames") and store.read("m.frames/0003.png") == b"one"


@pytest.mark.parametrize(
    ("url", "code", "what"),
    [
        ("ftp://host/a.npy", "unsupported", "ftp://host"),
        ("memory://host/a.npy", "unsupported", "memory://host"),
        ("hf://me/videos/a.npy", "unsupported", "hf://me/videos"),
        ("s3:/bucket/a.npy", "invalid_value", "s3:/bucket/ "),
        ("file:///tmp/{seed}/a.npy", "invalid_value", "file:///tmp/{seed} "),
        ("file:///tmp/", "invalid_value", "'' "),
        ("s3://a.npy", "invalid_value", "s3:// "),
        ("s3:///a.npy", "invalid_value", "s3:/// "),
        ("file://out/a.npy", "invalid_value", "file://out/ "),
    ],
)
def test_what_is_no_place(url: str, code: ErrorCode, what: str, here: Path) -> None:
    with refuses(code, what=what):
        VideoStore(url)
    with refuses("invalid_value", what="'b/c.npy'"):
        VideoStore("s3://a/{index}.npy").file("b/c.npy")


def test_a_store_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    """A folder where a record should be, as for any error of a store's package."""
    (tmp_path / "a.json").mkdir()
    with refuses("unreadable", what="a.json"):
        Uploads(tmp_path.as_uri()).read("a.json")
    away, uploads = OSError("503 Slow Down"), Uploads(f"s3:/{tmp_path}")
    for method, asked in (("cat_file", uploads.read), ("exists", uploads.has), ("find", uploads.remove)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(uploads._files, method, raises(away))
            with refuses("unreachable", StoreError, found=away):
                asked("a.json")  # it may answer later
