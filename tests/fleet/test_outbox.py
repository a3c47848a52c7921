"""Videos in an object store: each is there whole, with its record, and a finished one is kept."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from wanfleet.outbox import Outbox, VideoStore
from wanrun.cli import wanrun
from wanrun.errors import UsageError


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


def test_a_run_puts_videos_into_a_store_and_keeps_finished_ones(
    toy_artifact: Path, tmp_path: Path, here: Path
) -> None:
    """By the command: made, skipped, made otherwise, replaced; nothing is left here."""
    prompts, store, page = tmp_path / "prompts.jsonl", tmp_path / "store", tmp_path / "report.html"
    prompts.write_text('{"prompt": "cat"}\n{"prompt": "dog", "output": "dog.npy", "seed": "random"}\n')
    url = store.as_uri()
    options = ["--prompts", str(prompts), "-o", f"{url}/{{index}}.npy"]
    first = made(toy_artifact, *options, "--report", str(page))
    assert f"wrote {url}/1.npy" in first and "2 made, 0 skipped" in first
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    assert sorted(before) == ["1.npy", "1.npy.json", "dog.npy", "dog.npy.json"]
    assert np.load(store / "1.npy").ndim == 4 and json.loads(before["1.npy.json"])["prompt"] == "cat"
    assert f"{url}/dog.npy" in page.read_text()

    (store / "1.npy").unlink()  # a process that was killed between the record and its video
    again = made(toy_artifact, *options, "--report", str(page))
    assert "not on this machine" in page.read_text() and "cannot be read" not in page.read_text()
    assert "1 made, 1 skipped" in again and f"{url}/dog.npy is there already" in again
    assert {path.name: path.read_bytes() for path in store.iterdir()} == before

    mine = store / "mine.npy"
    mine.write_text("not of a run")
    refused = CliRunner().invoke(wanrun, [str(toy_artifact), "--prompt", "a", "-o", f"{url}/mine.npy"])
    assert "mine.npy exists, and has no record" in str(refused.exception)
    assert mine.read_text() == "not of a run" and not mine.with_name("mine.npy.json").exists()
    mine.unlink()

    other = made(toy_artifact, *options, "--seed", "7")
    assert "1 failed" in other and "1.npy exists, and was made otherwise; expected seed 7" in other
    assert "2 made" in made(toy_artifact, *options, "--seed", "7", "--overwrite")
    assert (store / "1.npy").read_bytes() != before["1.npy"] and not list(here.iterdir())


def test_what_cannot_be_delivered_stays(tmp_path: Path, here: Path) -> None:
    """Where the error says."""
    store = VideoStore(f"{(tmp_path / 'store').as_uri()}/{{index}}.npy")
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_text("a file")
    video = Path(store.file("1.npy"))
    with pytest.raises(UsageError, match=rf"the video is {video}"), store:
        video.write_bytes(b"frames")
        store.deliver(video, {}, overwrite=True)
    assert video.read_bytes() == b"frames"


@pytest.mark.parametrize("place", ["file://{folder}/store", "memory://store"])
def test_a_video_that_another_process_has_finished_is_discarded(
    place: str, tmp_path: Path, here: Path
) -> None:
    """And a folder of pictures travels whole."""
    with VideoStore(f"{place.format(folder=tmp_path)}/a.frames", kept=True) as store:
        for text in ("first", "second"):
            Path(store.pattern).mkdir(exist_ok=True)
            (Path(store.pattern) / "0001.png").write_text(text)
            store.deliver(Path(store.pattern), {"made": text}, overwrite=False)
    assert not list(here.iterdir())
    assert store.read("a.frames/0001.png") == b"first"
    with VideoStore(f"{place.format(folder=tmp_path)}/o.frames") as other:
        for names in (("1", "2"), ("2",)):  # one that is replaced leaves no picture
            Path(other.pattern).mkdir()
            for name in names:
                (Path(other.pattern) / name).write_text(name)
            other.deliver(Path(other.pattern), {}, overwrite=True)
    assert other.read("o.frames/2") == b"2" and other.read("o.frames/1") is None
    assert store.record("a.frames") == {"made": "first"} and store.record("b.frames") is None
    with VideoStore(f"{place.format(folder=tmp_path)}/m.frames") as begun:
        Path(begun.pattern).mkdir()
        (Path(begun.pattern) / "0001.png").write_text("one")
        assert begun.put(Path(begun.pattern) / "0001.png", "m.frames/0002.png") and not begun.has("m.frames")
        begun.deliver(Path(begun.pattern), {}, overwrite=False)  # no record: it may be a folder of the user's
        assert begun.has("m.frames") and begun.read("m.frames/0002.png") == b"one"
        begun.remove("m.frames/0001.png")  # of a process that was killed: what it had put is removed
        Path(begun.pattern).mkdir()
        (Path(begun.pattern) / "0001.png").write_text("two")
        begun.deliver(Path(begun.pattern), {}, overwrite=False)
    assert begun.read("m.frames/0001.png") == b"two" and begun.read("m.frames/0002.png") is None
    broken = tmp_path / "broken"
    broken.write_text("[")
    assert not store.put(broken, "a.frames.json") and store.put(broken, "a.frames.json", overwrite=True)
    assert store.record("a.frames") == {}


def test_a_video_that_appeared_meanwhile_is_kept(tmp_path: Path, here: Path) -> None:
    """One without a record is another's; the new one stays here."""
    with (
        pytest.raises(UsageError, match=r"b.npy appeared .*; the video is"),
        VideoStore(f"{tmp_path.as_uri()}/b.npy") as store,
    ):
        Path(store.pattern).write_text("new")
        (tmp_path / "b.npy").write_text("old")
        store.deliver(Path(store.pattern), {}, overwrite=False)
    assert (tmp_path / "b.npy").read_text() == "old" and Path(store.pattern).read_text() == "new"
    assert store.record("b.npy") is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/a.npy", "results cannot be written to ftp://host"),
        ("file:///tmp/{seed}/a.npy", "the folder file:///tmp/{seed} has a field"),
        ("file:///tmp/", "'' is no name of a video"),
        ("s3://a.npy", "s3:// names no folder; expected s3://BUCKET, gs://BUCKET or file:///FOLDER"),
        ("s3:///a.npy", "s3:/// names no folder"),
        ("file://out/a.npy", "file://out/ names no folder"),
    ],
)
def test_what_is_no_place(url: str, message: str, here: Path) -> None:
    with pytest.raises(UsageError) as caught:
        VideoStore(url)
    assert message in str(caught.value)
    with pytest.raises(UsageError, match="without a folder"):
        VideoStore("memory://a/{index}.npy").file("b/c.npy")


def test_a_store_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    """A folder where a record should be, as for any error of a store's package."""
    (tmp_path / "a.json").mkdir()
    with pytest.raises(UsageError, match=r"a\.json cannot be read"):
        Outbox(tmp_path.as_uri()).read("a.json")
