"""Images and videos become conditions: what runs, what is kept for the next prompt, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from helpers.fake_programs import FakeProgram, FakePrograms
from helpers.manifests import with_model
from helpers.media_files import manifest_of
from helpers.refusals import refuses
from wanbuild.variants.from_video import with_start
from wanrun.errors import ArtifactError
from wanrun.generation.conditioning import Conditioning, LastEncoded
from wanrun.media.inputs import Inputs
from wanrun.media.windows import Window
from wanrun.timing.timings import Timings

FRAMES = 9
IMAGE, VIDEO, PIXELS = (1, 4, 6, 3), (FRAMES, 4, 6, 3), (1, 5, 5, 3)


def encode_image(pixels: np.ndarray, **_: Any) -> dict[str, Any]:
    return {"image_tokens": pixels.sum()}


def encode_video(**arrays: Any) -> dict[str, Any]:
    given = {name: value for name, value in arrays.items() if name in ("image", "pose_video")}
    return {"condition": {"sum": sum(int(value.sum()) for value in given.values())}}


def step(*inputs: str, **arrays: tuple[str, tuple[int, ...]]) -> FakeProgram:
    return FakeProgram(("transformer", "latents", *inputs, *arrays), arrays)


class HeldStep(FakeProgram):
    """A step whose condition is the latents of a frame: an input of several arrays."""

    @property
    def avals(self) -> Mapping[str, Any]:
        condition = {"condition": {"first_frame": "float32[16,1,6,8]"}}
        return {"inputs": {**super().avals["inputs"], **condition}}


def image_programs() -> FakePrograms:
    """Those of an image-to-video model with an image encoder."""
    return FakePrograms(
        encode_image=FakeProgram(("image_encoder", "pixels"), {"pixels": ("uint8", PIXELS)}, encode_image),
        encode_video=FakeProgram(("vae", "image"), {"image": ("uint8", IMAGE)}, encode_video),
        prepare=FakeProgram(("transformer", "embeddings", "image_tokens")),
        denoise_step=step("condition"),
    )


def animate_programs() -> FakePrograms:
    """Those of a model that makes long videos in windows."""
    arrays = {"pose_video": ("uint8", VIDEO), "previous": ("float32", (5, 4, 6, 3))}
    flags = {"overlap": ("int32", ()), "later": ("int32", ())}
    return FakePrograms(
        encode_image=FakeProgram(("image_encoder", "pixels"), {"pixels": ("uint8", PIXELS)}, encode_image),
        encode_video=FakeProgram(("vae", *arrays, *flags), {**arrays, **flags}, encode_video),
        prepare=FakeProgram(("transformer", "image_tokens", "face_video"), {"face_video": ("uint8", VIDEO)}),
        denoise_loop=step("condition"),
    )


def held_programs() -> FakePrograms:
    """Those of a model whose first frame may be held: TI2V."""

    def encode(image: np.ndarray, **_: Any) -> dict[str, Any]:
        return {"condition": {"first_frame": np.full((16, 1, 6, 8), image.mean(), np.float32)}}

    return FakePrograms(
        encode_video=FakeProgram(("vae", "image"), {"image": ("uint8", IMAGE)}, encode),
        prepare=FakeProgram(("transformer", "embeddings")),
        denoise_step=HeldStep(
            ("transformer", "latents", "condition", "frame_mask"), {"frame_mask": ("float32", (3,))}
        ),
    )


@pytest.fixture
def timings() -> Timings:
    return Timings()


def conditioning_of(
    programs: FakePrograms,
    variant: str = "wan2.1-i2v",
    low_memory: bool = False,
    last: LastEncoded | None = None,
    **model: Any,
) -> Conditioning:
    """With these facts of the model besides the variant's."""
    profile = SimpleNamespace(
        name="64x48x9", width=64, height=48, num_frames=FRAMES, num_videos=1, num_references=0
    )
    manifest, last = with_model(manifest_of(variant), **model), LastEncoded() if last is None else last
    return Conditioning(cast(Any, programs), manifest, cast(Any, profile), last, low_memory=low_memory)


def image_inputs(value: int = 1) -> Inputs:
    return Inputs({"image": np.full(IMAGE, value, np.uint8), "pixels": np.full(PIXELS, value, np.uint8)})


def video_inputs(frames: int = 25) -> Inputs:
    """Videos whose every frame has its number."""
    numbered = np.broadcast_to(np.arange(frames, dtype=np.uint8)[:, None, None, None], (frames, *VIDEO[1:]))
    return Inputs(
        {"pixels": np.ones(PIXELS, np.uint8), "pose_video": numbered, "face_video": numbered + 100},
        num_frames=frames,
        segment_overlap=1,
    )


def test_an_image_becomes_tokens_and_a_condition(timings: Timings) -> None:
    programs, inputs = image_programs(), image_inputs(3)
    conditioning = conditioning_of(programs)
    conditioning.request_weights()
    conditioning.request_programs()
    assert programs.calls == [
        ("request", ([], ["image_encoder", "vae"])),
        ("request", (["encode_image", "encode_video"], [])),
    ]
    programs.calls.clear()
    conditions = conditioning(inputs, timings=timings)
    assert programs.names == ["encode_image", "encode_video"]
    assert conditions.prepare == {"image_tokens": 3 * np.prod(PIXELS)}
    assert conditions.steps == {"condition": {"sum": 3 * np.prod(IMAGE)}}
    assert conditions.held is None and conditioning.needed
    assert [span.phase for span in timings.labelled_spans] == ["encode_media"]


def test_the_same_inputs_are_encoded_once(timings: Timings) -> None:
    programs = image_programs()
    conditioning, one, two = conditioning_of(programs), image_inputs(1), image_inputs(1)
    first = conditioning(one, timings=timings)
    assert conditioning(one, timings=timings) == first
    assert len(programs.calls) == 2
    conditioning(two, timings=timings)  # equal, and another object: it may change
    conditioning(one, timings=timings)
    assert len(programs.calls) == 6


def test_what_other_programs_made_is_not_taken(timings: Timings) -> None:
    last, inputs = LastEncoded(), image_inputs()
    conditioning_of(image_programs(), last=last)(inputs, timings=timings)
    same, other = image_programs(), image_programs()
    other["encode_video"].sha256 = "another"
    conditioning_of(same, last=last)(inputs, timings=timings)
    conditioning_of(other, last=last)(inputs, timings=timings)
    assert same.names == [] and other.names == ["encode_image", "encode_video"]


@pytest.mark.slow
def test_one_encoding_is_kept_and_its_inputs_are_not(timings: Timings) -> None:
    """So another object at the same address is not taken for them."""
    last, one, two = LastEncoded(), image_inputs(), image_inputs()
    conditioning = conditioning_of(image_programs(), last=last)
    conditioning(one, timings=timings)
    conditioning(two, timings=timings)
    assert list(last) == [two]
    del two
    gc.collect()
    assert len(last) == 0


@pytest.mark.parametrize("low_memory", [True, False])
def test_low_memory_lets_go_of_the_image_encoder(timings: Timings, low_memory: bool) -> None:
    programs = image_programs()
    conditioning_of(programs, low_memory=low_memory)(image_inputs(), timings=timings)
    assert programs.names == ["encode_image", *(["release"] if low_memory else []), "encode_video"]
    assert ("release", "image_encoder") in programs.calls or not low_memory


def test_a_window_gets_its_part_of_the_videos(timings: Timings) -> None:
    programs, inputs = animate_programs(), video_inputs()
    conditioning = conditioning_of(programs, "wan2.2-animate")
    first = conditioning(inputs, timings=timings, window=Window(3, 0, 9))
    last_frames = np.ones((5, 4, 6, 3), np.float32)
    carried = {"previous": last_frames}
    third = conditioning(inputs, timings=timings, window=Window(3, 16, 25), carried=carried)
    # The image is encoded once, the video for each window.
    assert programs.names == ["encode_image", "encode_video", "encode_video"]
    (_, one), (_, three) = programs.calls[1:]
    assert one["pose_video"][:, 0, 0, 0].tolist() == list(range(9))
    assert three["pose_video"][:, 0, 0, 0].tolist() == list(range(16, 25))
    assert (one["later"], three["later"]) == (0, 1) and one["overlap"] == 1
    assert not one["previous"].any() and three["previous"] is last_frames
    assert first.prepare["face_video"][:, 0, 0, 0].tolist() == list(range(100, 109))
    assert third.prepare["face_video"][0, 0, 0, 0] == 116
    # The next prompt finds the first window's.
    conditioning(inputs, timings=timings, window=Window(3, 0, 9))
    assert len(programs.calls) == 3 and conditioning.needed


def test_a_frame_that_is_held(timings: Timings) -> None:
    programs = held_programs()
    conditioning = conditioning_of(programs, "wan2.2-ti2v")
    inputs = Inputs({"image": np.full(IMAGE, 2, np.uint8)})
    conditions = conditioning(inputs, timings=timings)
    assert conditions.steps["frame_mask"].tolist() == [0, 1, 1]
    assert conditions.held is not None and (conditions.held == 2).all()
    without = conditioning(None, timings=timings)  # the same program, and nothing to hold
    assert without.steps["frame_mask"].tolist() == [1, 1, 1] and without.held is None
    assert without.steps["condition"]["first_frame"].shape == (16, 1, 6, 8)
    assert not without.steps["condition"]["first_frame"].any() and not conditioning.needed


def test_the_scale_of_control_blocks(timings: Timings) -> None:
    programs = image_programs()
    scaled = step("condition", conditioning_scale=("float32", (2,)))
    programs = FakePrograms(**{**programs.programs, "denoise_step": scaled})
    model_options = {"conditioning_scale": 0.75, "guidance_scale_2": 3.0}
    conditioning, inputs = conditioning_of(programs, options=model_options), image_inputs()
    asked: list[tuple[dict[str, Any], float]] = [
        ({"conditioning_scale": 0.5, "seed": 7}, 0.5),
        ({"conditioning_scale": 1.0}, 1.0),
        ({"seed": 7}, 0.75),
        ({}, 0.75),
    ]
    for options, scale in asked:  # of what is kept too
        steps = conditioning(inputs, timings=timings, options=options).steps
        assert steps["conditioning_scale"].tolist() == [scale, scale]
        assert steps["conditioning_scale"].dtype == np.float32
        assert steps.keys() == {"condition", "conditioning_scale"}  # what the steps have an input for


def test_a_video_to_begin_with(timings: Timings) -> None:
    """It is encoded once, alone or beside a held frame; and a profile that has no program for it says so."""
    programs, video = held_programs(), np.full(VIDEO, 2, np.uint8)
    manifest = manifest_of("wan2.2-ti2v")
    task = with_start(manifest, built=True)["model"].task

    def encode(start_video: np.ndarray, **_: Any) -> dict[str, Any]:
        return {"start": np.full((16, 3, 6, 8), start_video.mean(), np.float32)}

    with pytest.raises(ArtifactError, match="64x48x9"):
        conditioning_of(programs, "wan2.2-ti2v", task=task)(Inputs({"start_video": video}), timings=timings)
    programs.programs["encode_start"] = FakeProgram(
        ("vae", "start_video"), {"start_video": ("uint8", VIDEO)}, encode, role="start"
    )
    conditioning = conditioning_of(programs, "wan2.2-ti2v", task=task)
    alone, both = Inputs({"start_video": video}), Inputs({"image": video[:1] * 3, "start_video": video})
    for inputs, names in ((alone, ["encode_start"]), (both, ["encode_start", "encode_video"])):
        programs.calls.clear()
        for _ in range(2):
            conditions = conditioning(inputs, timings=timings)
            assert conditions.start is not None and (conditions.start == 2).all()
            assert (conditions.held is None) == (inputs is alone)
        assert programs.names == names
    programs.calls.clear()
    assert conditioning.blank().start is None  # and a warm-up runs the program
    assert programs.names == ["encode_start", "encode_video"]
    assert conditioning(Inputs({"image": video[:1]}), timings=timings).start is None


def test_text_alone_has_no_conditions(timings: Timings) -> None:
    programs = FakePrograms(prepare=FakeProgram(("transformer",)), denoise_step=step())
    conditioning = conditioning_of(programs, "wan2.1-t2v")
    for inputs in (None, Inputs()):
        conditions = conditioning(inputs, timings=timings)
        assert (conditions.prepare, conditions.steps, conditions.held) == ({}, {}, None)
    assert not conditioning.needed
    programs = FakePrograms(**{**programs.programs, "denoise_step": step(nag=("float32", (3,)))})
    able = conditioning_of(programs, "wan2.1-t2v")
    assert able(None, timings=timings, options={"nag_scale": 11.0}).steps["nag"].tolist() == [11, 2.5, 0.25]
    assert able(None, timings=timings).steps["nag"][0] == 1


@pytest.mark.parametrize(
    ("variant", "missing"),
    [
        ("wan2.1-i2v", ("encode_image", "encode_video")),
        ("wan2.1-i2v", ("encode_video",)),
        ("wan2.1-t2v", ("encode_image", "encode_video")),  # a model of text alone
    ],
)
def test_a_profile_without_a_program_of_the_task(
    timings: Timings, variant: str, missing: tuple[str, ...]
) -> None:
    programs = image_programs()
    for name in missing:
        del programs.programs[name]
    with refuses("not_built", ArtifactError, what="64x48x9", remedy="wanbuild compile"):
        conditioning_of(programs, variant)(image_inputs(), timings=timings)
    assert programs.calls == []
