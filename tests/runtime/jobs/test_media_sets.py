"""Media of jobs are read once to be checked, one set is kept, and what changes meanwhile is noticed."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from helpers.media_tasks import manifest_of, profile_of
from wanrun.artifact.manifest import Manifest
from wanrun.errors import UsageError
from wanrun.jobs.media_sets import Checked, MediaSet, MediaSets
from wanrun.media import prepare
from wanrun.media.types import Inputs, Media
from wanrun.timing.timings import Timings

PROFILE = "64x48"


class Reader:
    """In place of the functions that read files: an array, and the file's name and version as facts.

    Attributes:
        reads: the files whose content was decoded.
        digests: those that were only digested.
        versions: of a file; what has none cannot be read.
    """

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.digests: list[str] = []
        self.versions = dict.fromkeys("abc", 1)
        self.num_frames: int | None = None

    def facts(self, media: Media) -> dict[str, Any]:
        name = str(media.image)
        if name not in self.versions:
            raise UsageError(f"{name} cannot be read", found="nothing", remedy="give another")
        return {"image": name, "image_sha256": f"{name}{self.versions[name]}"}

    def load_media(self, manifest: Manifest, profile: Any, media: Media) -> Inputs:
        self.reads.append(str(media.image))
        return Inputs({"image": np.zeros(3)}, self.facts(media), self.num_frames, media.segment_overlap or 1)

    def media_facts(self, manifest: Manifest, profile: Any, media: Media) -> dict[str, Any] | None:
        self.digests.append(str(media.image))
        return None if media.mode == "replace" else self.facts(media)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    reader = Reader()
    monkeypatch.setattr(prepare, "load_media", reader.load_media)
    monkeypatch.setattr(prepare, "media_facts", reader.media_facts)
    return reader


def sets_of(variant: str) -> MediaSets:
    """Of a manifest that has one profile."""
    model, profiles = manifest_of(variant).model, {PROFILE: profile_of()}
    return MediaSets(cast(Manifest, SimpleNamespace(model=model, profiles=profiles)), Timings())


@pytest.fixture
def sets(reader: Reader) -> MediaSets:
    return sets_of("wan2.2-i2v")


def of(name: str, **more: Any) -> MediaSet:
    return MediaSet(PROFILE, Media(image=cast(Any, name), **more))


def test_each_set_is_read_once_to_be_checked(sets: MediaSets, reader: Reader) -> None:
    facts = {"image": "a", "image_sha256": "a1"}
    assert sets.check(of("a")) == sets.check(of("a")) == sets.digest(of("a")) == Checked(facts)
    assert (reader.reads, reader.digests) == (["a"], [])


def test_what_is_there_already_is_digested_alone(sets: MediaSets, reader: Reader) -> None:
    assert sets.digest(of("a")) == sets.digest(of("a")) == Checked({"image": "a", "image_sha256": "a1"})
    assert (reader.reads, reader.digests) == ([], ["a"])
    sets.digest(of("a", mode="replace"))  # of which the digests do not tell all
    assert reader.reads == ["a"]


def test_what_cannot_be_used_is_read_once_and_said_every_time(sets: MediaSets, reader: Reader) -> None:
    for look in (sets.check, sets.check, sets.digest, sets.inputs):
        with pytest.raises(UsageError, match="x cannot be read; found nothing; give another"):
            look(of("x"))
    assert reader.reads == ["x"]


def test_jobs_that_share_media_get_the_same_object(sets: MediaSets, reader: Reader) -> None:
    for name in "ab":
        sets.check(of(name))
        sets.keep(of(name))
    first = sets.inputs(of("a"))
    assert first is not None and sets.inputs(of("a")) is first
    sets.inputs(of("b"))
    assert sets.inputs(of("a")) is not first
    assert reader.reads == ["a", "b", "b", "a"]  # what the first job takes was kept when it was checked


def test_one_set_is_in_memory(sets: MediaSets) -> None:
    inputs = sets.inputs(of("a"))
    assert inputs is not None
    alive = weakref.ref(inputs)
    del inputs
    sets.inputs(of("b"))
    gc.collect()
    assert alive() is None


def test_what_no_job_takes_first_is_not_kept(sets: MediaSets, reader: Reader) -> None:
    sets.check(of("a"))
    sets.check(of("b"))
    sets.keep(of("a"))
    sets.inputs(of("a"))
    assert reader.reads == ["a", "b", "a"]


def test_a_change_since_the_check_is_noticed(sets: MediaSets, reader: Reader) -> None:
    sets.check(of("a"))
    sets.check(of("b"))
    reader.versions["a"] = 2
    with pytest.raises(
        UsageError, match=r"changed while the run .*expected image_sha256 a1; found a2; run wanrun"
    ):
        sets.inputs(of("a"))


def test_a_long_video_is_made_in_parts(sets: MediaSets, reader: Reader) -> None:
    reader.num_frames = 33
    assert sets.check(of("a")).num_frames == 33
    assert sets.check(of("a")).num_segments == 4  # of 9 frames, which share one
    assert sets.check(of("a", segment_overlap=3)).num_segments == 5


def test_a_task_without_media_reads_nothing(reader: Reader) -> None:
    sets = sets_of("wan2.1-t2v")
    nothing = MediaSet(PROFILE, Media())
    assert sets.check(nothing) == sets.digest(nothing) == Checked()
    assert sets.inputs(nothing) is None
    with pytest.raises(UsageError, match=r"image cannot be used with wan2\.1-t2v"):
        sets.check(MediaSet(PROFILE, Media(image=Path("a.png"))))
    assert reader.reads == []
