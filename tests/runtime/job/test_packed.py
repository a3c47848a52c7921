"""A job, its events and its outcome as another process reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import DecodeError, structs
from PIL import Image

from helpers.manifests import plain_manifest, with_model
from helpers.media_files import task_of
from helpers.options import PROFILE, generation
from wanfleet.uploads import StoreError
from wanrun import errors
from wanrun.artifact.manifest import Component
from wanrun.denoising.solvers import StageStart
from wanrun.errors import ArtifactError, UsageError, WanError, field
from wanrun.job.job import Job
from wanrun.job.outcome import Outcome, from_wire, plain, to_wire
from wanrun.job.outputs import THUMBNAIL, Output
from wanrun.job.packed import PackedJob, pack
from wanrun.job.progress import Event
from wanrun.media.inputs import Media
from wanrun.request.generation import Generation

ONE = plain_manifest(components={"transformer": Component("transformer", {})})
OUTPUTS = (Output(Path("a/v.mp4"), 1), Output(Path("a/v.webp"), 1, THUMBNAIL))


def sent(job: Job) -> PackedJob:
    packed: PackedJob = from_wire(to_wire(pack(job)), PackedJob)
    return packed


def facts(generation: Generation) -> dict[str, Any]:
    """All of a generation but the manifest and the table."""
    names = ("profile", "ranges", "fps", "media", "loras", "warnings")
    return {**{name: getattr(generation, name) for name in names}, **generation.options}


@pytest.mark.parametrize(
    "options",
    [{}, {"seed": 2**64 - 1, "flow_shift": 0.1 + 0.2, "fps": 23.976}, {"timesteps": (900.1, 500.0, 3.3)}],
)
def test_a_generation_is_the_same_there(options: dict[str, Any]) -> None:
    made = generation(**options)
    table = replace(made.table, starts=(StageStart(0), StageStart(2, 0.75, 0.5)))
    job = Job("7", replace(made, table=table), OUTPUTS)
    found = sent(job).unpack(job.generation.manifest)
    assert (found.id, found.outputs) == (job.id, job.outputs)
    assert found.generation.manifest is job.generation.manifest
    assert facts(found.generation) == facts(job.generation)
    for name in ("timesteps", "coefficients", "sigmas", "noise"):
        there, here = getattr(found.generation.table, name), getattr(job.generation.table, name)
        assert there.dtype == here.dtype and np.array_equal(there, here)
    assert (found.generation.table.name, found.generation.table.start) == ("unipc", 1.0)
    assert found.generation.table.starts == (StageStart(0), StageStart(2, 0.75, 0.5))


def test_media_are_sent_as_paths() -> None:
    manifest = with_model(ONE, variant="wan2.2-i2v", task=task_of("wan2.2-i2v", encoder=False))
    job = Job("7", generation(manifest, image=Path("i.png")))
    found = sent(job).unpack(job.generation.manifest).generation
    assert found.media == Media(image="i.png")
    vace = with_model(ONE, variant="wan2.1-vace", task=task_of("wan2.1-vace"))
    profile = structs.replace(PROFILE, num_references=2)
    two = Job("7", generation(vace, profile, reference_image=("a.png", "b.png")))
    media = sent(two).unpack(two.generation.manifest).generation.media
    assert media is not None and media.reference_image == ("a.png", "b.png")
    given = structs.replace(job.generation.media, image=Image.new("RGB", (8, 8)))  # type: ignore[type-var]
    held = generation(manifest, image="i.png")
    object.__setattr__(held, "media", given)
    with pytest.raises(UsageError) as caught:
        pack(Job("7", held))
    assert caught.value.fields == ("image",)


def test_a_job_of_another_artifact_or_version() -> None:
    job = Job("7", generation())
    manifest = job.generation.manifest
    for packed in (structs.replace(sent(job), wanrun="0"), structs.replace(sent(job), content_digest="0")):
        with pytest.raises(ArtifactError) as caught:
            packed.unpack(manifest)
        assert caught.value.found == "0"


# Outcomes and events.


def again(record: Event | Outcome) -> Event | Outcome:
    line = to_wire(record)
    assert b"\n" not in line
    found: Event | Outcome = from_wire(line, Event | Outcome)
    return found


def test_an_outcome_and_an_event() -> None:
    outcome = Outcome(id="1", metadata={"a": [1.5, None]}, seconds={"steps": 0.1}, steps=3, warnings=["w"])
    event = Event("1", "steps", 2, 3)
    assert again(outcome) == outcome and again(event) == event
    with pytest.raises(DecodeError):
        from_wire(b"{}", Event | Outcome)


@pytest.mark.parametrize(
    "kind", [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, WanError)]
)
def test_an_error_keeps_its_class_and_its_parts(kind: type[WanError]) -> None:
    error = kind("conflict", f"{field('seed')} is\nwrong", expected=3, found=None, remedy="")
    found = again(Outcome(id="1", error=error))
    assert isinstance(found, Outcome) and type(found.error) is kind
    assert found.error.code == "conflict"
    assert found.error.spelled(str.upper) == error.spelled(str.upper) and found.error.fields == ("seed",)


def test_errors_of_other_classes() -> None:
    """One of another package is itself where it is imported; else, or made otherwise, of the class above."""

    class OddError(UsageError):
        def __init__(self) -> None:
            super().__init__("busy", "odd")

    for error, kind in ((StoreError("unreachable", "full"), StoreError), (OddError(), UsageError)):
        found = again(Outcome(id="1", error=error))
        assert isinstance(found, Outcome) and type(found.error) is kind and str(found.error) == str(error)
    line = to_wire(Outcome(id="1", error=StoreError("unreachable", "full"))).replace(
        b"StoreError", b"UnknownError"
    )
    assert type(from_wire(line, Outcome).error) is UsageError
    with pytest.raises(NotImplementedError):
        to_wire(object())


def test_metadata_as_json_holds_it() -> None:
    half = "a byte that is no UTF-8: \udcff"
    assert plain({"a": (1, 2), "b": ValueError("x"), "c": half}) == {"a": [1, 2], "b": "x", "c": half}
