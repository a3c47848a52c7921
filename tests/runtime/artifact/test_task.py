"""The record of a task: what every variant says survives the manifest, and what cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import pytest

from helpers.manifests import plain_manifest, plain_model
from helpers.media_files import task_of
from helpers.pictures import picture
from wanbuild.variants.table import variants
from wanrun.artifact.manifest import MANIFEST, manifest_of
from wanrun.artifact.media import MEDIA_KINDS, SEVERAL, Media, MediaOption
from wanrun.artifact.model import Chunking, ImageProcessor, Model
from wanrun.artifact.task import Input, Preparation, Task
from wanrun.media.preparations import PREPARATIONS
from wanrun.request.schema import rows

# --- task ---


PROCESSOR = ImageProcessor(
    shortest_edge=30, crop=30, resample=3, rescale_factor=1 / 255, mean=(0.5, 0.5, 0.5), std=(1, 1, 1)
)


def model(task: Task) -> Model:
    chunks = Chunking(first=9, each=9, alone=True) if task.past else Chunking(first=1, each=3)
    return plain_model(task=task, image_processor=PROCESSOR, chunks=chunks)


@pytest.mark.parametrize("variant", variants())
def test_the_record_of_every_variant(variant: str) -> None:
    task = task_of(variant)
    manifest = plain_manifest(model=model(task))
    assert manifest_of(manifest.encoded(), Path(MANIFEST)) == manifest
    row = variants()[variant]
    assert task.inputs.keys() == row.inputs.keys() and (task.windows is None) == (not row.previous_frames)


def test_what_is_encoded_whatever_is_given() -> None:
    found = {variant for variant in variants() if task_of(variant).always_encodes}
    assert found == variants().keys() - {
        "wan2.1-t2v",
        "wan2.2-t2v",
        "wan2.2-ti2v",
        "anyflow-wan2.1",
        "anyflow-far-wan2.1",
        "self-forcing-wan2.1",
        "helios-wan2.1",
        "helios-mid-wan2.1",
        "helios-distilled-wan2.1",
    }


INPUTS = ("task", "inputs")
BAD: list[tuple[str, tuple[str, ...], Any, str]] = [
    ("wan2.1-i2v", (*INPUTS, "image", "prepare"), "stretch", "Invalid enum value 'stretch'"),
    ("wan2.1-i2v", (*INPUTS, "image", "kind"), "sound", "Invalid enum value 'sound'"),
    ("wan2.1-i2v", (*INPUTS, "image", "size"), 0, ">= 1"),
    ("wan2.1-i2v", (*INPUTS, "image", "colour"), 1, "unknown field `colour`"),
    ("wan2.1-i2v", (*INPUTS, "picture"), {"kind": "image", "array": "p"}, "Invalid enum value 'picture'"),
    ("wan2.1-i2v", ("image_processor",), None, "image is encoded, and there is no image processor"),
    ("wan2.1-flf2v", (*INPUTS, "last_image", "array"), "image", "two inputs are called image"),
    ("wan2.2-i2v", (*INPUTS, "last_image", "default"), 256, "<= 255"),
    ("wan2.1-vace", (*INPUTS, "video", "encoded"), True, "the image encoder takes single images"),
    ("wan2.1-vace", (*INPUTS, "reference_image", "required"), True, "references may have no images"),
    ("wan2.1-vace", (*INPUTS, "mask", "beside"), "image", "mask goes with an unknown input: image"),
    ("wan2.1-vace", (*INPUTS, "mask", "mode"), "replace", "mask is for an unknown mode: replace"),
    ("wan2.2-animate", (*INPUTS, "mask_video", "mode"), "put", "is for an unknown mode: put"),
    ("wan2.2-animate", ("task", "modes", "names"), [], "length >= 1"),
    ("wan2.2-animate", ("task", "windows", "overlaps"), [0], ">= 1"),
    ("wan2.2-animate", ("task", "windows", "frames_of"), "video", "the windows need video, which"),
    ("wan2.2-animate", (*INPUTS, "pose_video", "required"), False, "the windows need pose_video, which"),
    ("wan2.2-ti2v", ("task", "held"), {}, "missing required field"),
    ("wan2.2-ti2v", ("task", "start"), "image", "steps cannot begin with image"),
    ("helios-wan2.1", (*INPUTS, "image", "count"), None, "nothing takes how many frames it has"),
    ("helios-wan2.1", (*INPUTS, "video", "past"), 18, "two inputs are called given"),
    ("helios-wan2.1", ("chunks", "alone"), False, "image is the past of a video whose chunks are"),
]


@pytest.mark.parametrize(("variant", "keys", "value", "message"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_is_refused(variant: str, keys: tuple[str, ...], value: Any, message: str) -> None:
    data = msgspec.to_builtins(model(task_of(variant)))
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(data, Model)


def test_a_single_set_of_images_is_counted() -> None:
    task = task_of("wan2.1-vace")
    assert task.counted == ("reference_image", task.inputs["reference_image"])
    assert task_of("wan2.2-animate").counted is None
    again = Input(kind="images", array="others")
    with pytest.raises(ValueError, match=r"^image .*images"):
        msgspec.structs.replace(task, inputs={**task.inputs, "image": again})
    one = msgspec.structs.replace(task.inputs[SEVERAL], kind="image")
    with pytest.raises(ValueError, match=r"^reference_image "):
        msgspec.structs.replace(task, inputs={SEVERAL: one})


# --- media ---


def test_media_are_rows() -> None:
    """What is given as files on the command line is given in memory as ``Media``, under the same names."""
    names = [row.name for row in rows()]
    assert set(Media.__struct_fields__) == {*MEDIA_KINDS, "mode", "segment_overlap", "fit"} <= set(names)
    assert names[:3] == ["prompt", "negative_prompt", "image"]
    assert [row.name for row in rows() if row.many and not row.record] == [SEVERAL] == ["reference_image"]
    assert ["video" in kind for kind in MEDIA_KINDS.values()] == [False] * 3 + [True] * 6  # images come first
    assert set(get_args(cast(Any, MediaOption))) == MEDIA_KINDS.keys()
    assert set(get_args(Preparation)) == PREPARATIONS.keys()
    image = picture(8, 8)
    in_memory = Media(image, video=[image], reference_image=(image, "a.png"))
    assert in_memory == Media(image=image, video=[image], reference_image=(image, "a.png"))
    assert len({Media("a.png"), Media(image="a.png")}) == 1
