"""Media of jobs are read once to be checked, one set is kept, and what changes meanwhile is noticed."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from helpers.media_files import manifest_of
from helpers.options import PROFILE, of_media
from helpers.refusals import refuses
from wancli.jobs.media_sets import MediaSets
from wanrun.artifact.manifest import Manifest
from wanrun.errors import UsageError
from wanrun.media import facts, prepare
from wanrun.media.inputs import Inputs, Media
from wanrun.request.generation import Generation
from wanrun.timing.timings import Timings


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
            raise UsageError("unreadable", f"{name} cannot be read", found="nothing", remedy="give another")
        return {"image": name, "image_sha256": f"{name}{self.versions[name]}"}

    def load_media(self, manifest: Manifest, profile: Any, media: Media, **options: Any) -> Inputs:
        self.reads.append(str(media.image))
        return Inputs({"image": np.zeros(3)}, self.facts(media), self.num_frames, media.segment_overlap or 1)

    def media_facts(self, manifest: Manifest, profile: Any, media: Media) -> dict[str, Any] | None:
        self.digests.append(str(media.image))
        return None if media.mode == "replace" else self.facts(media)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    reader = Reader()
    monkeypatch.setattr(prepare, "load_media", reader.load_media)
    monkeypatch.setattr(facts, "media_facts", reader.media_facts)
    return reader


@pytest.fixture
def sets(reader: Reader) -> MediaSets:
    return MediaSets(Timings())


MANIFEST = manifest_of("wan2.2-i2v")


def of(name: str, **more: Any) -> Generation:
    return of_media(MANIFEST, PROFILE, Media(image=cast(Any, name), **more))


@pytest.mark.parametrize(
    ("calls", "reads", "digests"),
    [
        ("facts a, facts a, digests a", "a", ""),  # each set is read once to be checked
        ("digests a, digests a", "", "a"),  # what is there already is only digested,
        ("digests a, digests a/replace", "a", "aa"),  # unless digests do not tell all
        ("facts a, facts b, inputs a, inputs a, inputs b, inputs a", "abba", ""),  # the first set is kept
        ("facts a, spare a, facts b, spare a, inputs b", "ab", ""),  # and not where no job takes it
    ],
)
def test_what_is_read(sets: MediaSets, reader: Reader, calls: str, reads: str, digests: str) -> None:
    for call in calls.split(", "):
        way, _, what = call.partition(" ")
        name, _, mode = what.partition("/")
        generation = of(name, mode=mode or None)
        if way == "inputs":
            sets.inputs(generation)
        elif way == "spare":
            sets.spare(generation)
        else:
            facts = sets.facts(generation, digests=way == "digests")
            assert facts is not None and facts.facts == {"image": name, "image_sha256": f"{name}1"}
    assert (reader.reads, reader.digests) == ([*reads], [*digests])


def test_jobs_that_share_media_get_the_same_object(sets: MediaSets) -> None:
    first = sets.inputs(of("a"))
    assert first is not None and sets.inputs(of("a")) is first
    sets.inputs(of("b"))
    assert sets.inputs(of("a")) is not first


def test_what_cannot_be_used_is_read_once_and_said_every_time(sets: MediaSets, reader: Reader) -> None:
    looks = (sets.facts, sets.facts, partial(sets.facts, digests=True), sets.inputs)
    for look in looks:
        with refuses("unreadable", what="x ", found="nothing", remedy="another"):
            look(of("x"))
    assert reader.reads == ["x"]


@pytest.mark.slow
def test_one_set_is_in_memory(sets: MediaSets) -> None:
    inputs = sets.inputs(of("a"))
    assert inputs is not None
    alive = weakref.ref(inputs)
    del inputs
    sets.inputs(of("b"))
    gc.collect()
    assert alive() is None


def test_a_change_since_the_check_is_noticed(sets: MediaSets, reader: Reader) -> None:
    sets.facts(of("b"))
    sets.facts(of("a"))
    reader.versions["a"] = 2
    for _ in range(2):
        with refuses("changed", expected="image_sha256 a1", found="a2"):
            sets.inputs(of("a"))


def test_a_long_video_is_made_in_parts(sets: MediaSets, reader: Reader) -> None:
    reader.num_frames = 33
    for options, overlap in (({}, 1), ({"segment_overlap": 3}, 3)):
        found = sets.facts(of("a", **options))
        assert found is not None and found.num_frames == 33 and not found.arrays
        assert found.segment_overlap == overlap


def test_without_media_nothing_is_read(sets: MediaSets, reader: Reader) -> None:
    nothing = of_media(MANIFEST, PROFILE, None)
    assert sets.facts(nothing) is sets.facts(nothing, digests=True) is sets.inputs(nothing) is None
    assert (reader.reads, reader.digests) == ([], [])
