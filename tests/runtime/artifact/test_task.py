"""The record of a task: what every variant's says survives the manifest, and what cannot be is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from helpers.manifests import plain_manifest, plain_model
from helpers.media_files import task_of
from wanbuild.variants.table import variants
from wanrun.artifact.manifest import MANIFEST, read_manifest
from wanrun.artifact.media import SEVERAL
from wanrun.artifact.model import Chunking, ImageProcessor
from wanrun.artifact.task import Input, Preparation, Task
from wanrun.errors import ArtifactError
from wanrun.media.preparations import PREPARATIONS

PROCESSOR = ImageProcessor(
    shortest_edge=30, crop=30, resample=3, rescale_factor=1 / 255, mean=(0.5, 0.5, 0.5), std=(1, 1, 1)
)


def written(folder: Path, task: Task) -> dict[str, Any]:
    """Writes a manifest with this task, and gives its JSON."""
    chunks = Chunking(first=9, each=9, alone=True) if task.past else Chunking(first=1, each=3)
    plain_manifest(model=plain_model(task=task, image_processor=PROCESSOR, chunks=chunks)).write(folder)
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return found


@pytest.mark.parametrize("variant", variants())
def test_the_record_of_every_variant(tmp_path: Path, variant: str) -> None:
    task = task_of(variant)
    written(tmp_path, task)
    assert read_manifest(tmp_path).model.task == task
    row = variants()[variant]
    assert task.inputs.keys() == row.inputs.keys() and (task.windows is None) == (not row.previous_frames)


def test_closed_sets_are_the_runtime_s() -> None:
    assert set(get_args(Preparation)) == PREPARATIONS.keys()


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


INPUTS = ("model", "task", "inputs")
BAD: list[tuple[str, tuple[str, ...], Any, str]] = [
    ("wan2.1-i2v", (*INPUTS, "image", "prepare"), "stretch", "Invalid enum value 'stretch'"),
    ("wan2.1-i2v", (*INPUTS, "image", "kind"), "sound", "Invalid enum value 'sound'"),
    ("wan2.1-i2v", (*INPUTS, "image", "size"), 0, ">= 1"),
    ("wan2.1-i2v", (*INPUTS, "image", "colour"), 1, "unknown field `colour`"),
    ("wan2.1-i2v", (*INPUTS, "picture"), {"kind": "image", "array": "p"}, "Invalid enum value 'picture'"),
    ("wan2.1-i2v", ("model", "image_processor"), None, "image is encoded, and there is no image processor"),
    ("wan2.1-flf2v", (*INPUTS, "last_image", "array"), "image", "two inputs are called image"),
    ("wan2.2-i2v", (*INPUTS, "last_image", "default"), 256, "<= 255"),
    (
        "wan2.1-vace",
        (*INPUTS, "video", "encoded"),
        True,
        "the image encoder takes single images",
    ),
    ("wan2.1-vace", (*INPUTS, "reference_image", "required"), True, "references may have no images"),
    ("wan2.1-vace", (*INPUTS, "mask", "beside"), "image", "mask goes with an unknown input: image"),
    ("wan2.1-vace", (*INPUTS, "mask", "mode"), "replace", "mask is for an unknown mode: replace"),
    (
        "wan2.2-animate",
        (*INPUTS, "mask_video", "mode"),
        "put",
        "is for an unknown mode: put",
    ),
    ("wan2.2-animate", ("model", "task", "modes", "names"), [], "length >= 1"),
    ("wan2.2-animate", ("model", "task", "windows", "overlaps"), [0], ">= 1"),
    ("wan2.2-animate", ("model", "task", "windows", "frames_of"), "video", "the windows need video, which"),
    ("wan2.2-animate", (*INPUTS, "pose_video", "required"), False, "the windows need pose_video, which"),
    ("wan2.2-ti2v", ("model", "task", "held"), {}, "missing required field"),
    ("wan2.2-ti2v", ("model", "task", "start"), "image", "steps cannot begin with image"),
    ("helios-wan2.1", (*INPUTS, "image", "count"), None, "nothing takes how many frames it has"),
    ("helios-wan2.1", (*INPUTS, "video", "past"), 18, "two inputs are called given"),
    ("helios-wan2.1", ("model", "chunks", "alone"), False, "image is the past of a video whose chunks are"),
]


@pytest.mark.parametrize(("variant", "keys", "value", "message"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_is_one_line(
    tmp_path: Path, variant: str, keys: tuple[str, ...], value: Any, message: str
) -> None:
    data = written(tmp_path, task_of(variant))
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (tmp_path / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(ArtifactError) as caught:
        read_manifest(tmp_path)
    line = str(caught.value)
    assert message in line and "is damaged" in line and "\n" not in line


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
