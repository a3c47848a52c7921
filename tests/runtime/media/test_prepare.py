"""Media become programs' inputs: what each task takes, in which windows; what does not fit is refused."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from helpers.media_files import CLIP, FACE, FRAMES, HEIGHT, WIDTH, manifest_of, profile_of
from helpers.pictures import picture, pictures, write_folder, write_video
from helpers.refusals import check_refusal, refuses
from wanbuild.variants.from_video import with_start
from wanrun.artifact.model import Chunking
from wanrun.artifact.programs import Profile
from wanrun.errors import UsageError, WanError
from wanrun.media import prepare as wanrun_inputs
from wanrun.media.facts import media_facts
from wanrun.media.inputs import Inputs, Media
from wanrun.media.prepare import load_media
from wanrun.media.processors import clip_pixels, cropped, filled, greyscale, reference_canvas, resized
from wanrun.media.windows import (
    check_chunks,
    check_segments,
    last_chunks,
    num_windows,
    padded_frames,
    reflected,
    windows,
)

# --- prepare ---


A, B = picture(90, 70, 1), picture(50, 80, 2)
MOVING = pictures(FRAMES, WIDTH, HEIGHT)


def load(variant: str, media: Media, profile: Profile | None = None) -> Inputs:
    return load_media(manifest_of(variant), profile or profile_of(), media)


def refused(variant: str, media: Media, profile: Profile | None = None) -> WanError:
    with pytest.raises(UsageError) as caught:
        load_media(manifest_of(variant), profile or profile_of(), media)
    assert "\n" not in str(caught.value)
    return caught.value


# -- image to video


def test_first_and_last_image() -> None:
    found = load("wan2.1-flf2v", Media(image=A, last_image=B)).arrays
    assert found.keys() == {"image", "last_image", "pixels"}
    np.testing.assert_array_equal(found["image"], resized(A, WIDTH, HEIGHT)[None])
    np.testing.assert_array_equal(found["last_image"], resized(B, WIDTH, HEIGHT)[None])
    # The encoder sees the pictures as they are, not as the video's size stretches them.
    np.testing.assert_array_equal(found["pixels"], clip_pixels([A, B], CLIP))
    found = load("wan2.1-i2v", Media(image=A)).arrays
    assert found.keys() == {"image", "pixels"} and found["pixels"].shape == (1, 30, 30, 3)
    assert load("wan2.2-ti2v", Media(image=A)).arrays.keys() == {"image"}
    assert load("wan2.2-ti2v", Media()).arrays == {}


@pytest.mark.slow
@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_the_fit_of_an_image_is_recorded(fit: str, tmp_path: Path) -> None:
    path = tmp_path / "wide.png"
    picture(300, 40).save(path)
    found = load("wan2.1-i2v", Media(image=path, fit=fit))
    made = {"crop": cropped, "pad": filled}[fit](picture(300, 40), WIDTH, HEIGHT)
    np.testing.assert_array_equal(found.arrays["image"], made[None])
    np.testing.assert_array_equal(found.arrays["pixels"], clip_pixels([picture(300, 40)], CLIP))
    assert (found.facts["fit"], found.warnings) == (fit, ())
    assert media_facts(manifest_of("wan2.1-i2v"), profile_of(), Media(image=path, fit=fit)) == found.facts
    assert "fit" not in load("wan2.1-i2v", Media(image=path, fit="stretch")).facts


def test_what_is_changed_of_a_photo_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(np.zeros((40, 300, 4), np.uint8)).save(path, save_all=True, append_images=[A])
    found = load("wan2.1-i2v", Media(image=path)).warnings
    assert len(found) == 3 and all(line.startswith(f"image {path}: ") for line in found)
    square = [picture(64, 64)] * FRAMES
    media = animate(pose_video=square, face_video=square)
    assert [line.partition(":")[0] for line in load("wan2.2-animate", media).warnings] == ["pose_video"]
    assert load("wan2.1-i2v", Media(image=picture(WIDTH, HEIGHT))).warnings == ()


def test_a_last_image_that_is_optional() -> None:
    without = load("wan2.2-i2v", Media(image=A)).arrays
    given = load("wan2.2-i2v", Media(image=A, last_image=B)).arrays
    assert without.keys() == given.keys() == {"image", "last_image", "has_last_image"}
    assert (without["has_last_image"], given["has_last_image"]) == (0, 1)
    assert given["has_last_image"].dtype == np.int32 and given["has_last_image"].shape == ()
    assert without["last_image"].shape == given["last_image"].shape and not without["last_image"].any()


# -- VACE


def test_vace_video_and_mask(tmp_path: Path) -> None:
    mask = [frame.convert("L").convert("RGB") for frame in pictures(FRAMES, 30, 90, 7)]  # any size will do
    media = Media(video=write_folder(MOVING, tmp_path / "video"), mask=mask)
    found = load("wan2.1-vace", media).arrays
    assert found.keys() == {"video", "mask", "has_video"} and found["has_video"] == 1
    np.testing.assert_array_equal(found["video"], np.stack(MOVING))
    np.testing.assert_array_equal(found["mask"], np.stack([resized(one, WIDTH, HEIGHT) for one in mask]))


def test_a_mask_without_any_white_is_warned_about() -> None:
    black = [Image.new("RGB", (WIDTH, HEIGHT)) for _ in range(FRAMES)]
    found = load("wan2.1-vace", Media(video=MOVING, mask=black))
    (warning,) = found.warnings
    assert warning.startswith("the mask has no white in any frame")
    black[-1].putpixel((0, 0), (255, 255, 255))
    assert load("wan2.1-vace", Media(video=MOVING, mask=black)).warnings == ()
    assert load("wan2.1-vace", Media(video=black)).warnings == ()  # which is no mask


def test_a_mask_that_is_drawn_as_transparency(tmp_path: Path) -> None:
    """From files and in memory; the control video's transparency is dropped, as the reference does."""
    layer = Image.new("RGBA", (WIDTH, HEIGHT), (255, 255, 255, 0))
    layer.paste((255, 255, 255, 255), (0, 0, WIDTH, HEIGHT // 2))
    folder = write_folder([layer] * FRAMES, tmp_path / "mask")
    for mask in (folder, [layer] * FRAMES):
        found = load("wan2.1-vace", Media(video=MOVING, mask=mask)).arrays["mask"]
        assert (found[:, : HEIGHT // 2] == 255).all() and not found[:, HEIGHT // 2 :].any()
    assert (load("wan2.1-vace", Media(video=folder)).arrays["video"] == 255).all()


def test_vace_without_a_mask_or_a_video() -> None:
    found = load("wan2.1-vace", Media(video=MOVING)).arrays
    assert found["has_video"] == 1 and (found["mask"] == 255).all()
    assert found["mask"].shape == (FRAMES, HEIGHT, WIDTH, 3)
    found = load("wan2.1-vace", Media()).arrays
    assert found["has_video"] == 0 and not found["video"].any() and (found["mask"] == 255).all()
    assert found["has_video"].dtype == np.int32 and found["video"].dtype == np.uint8


def test_vace_references_keep_their_order() -> None:
    found = load("wan2.1-vace", Media(reference_image=(A, B)), profile_of(2)).arrays["references"]
    np.testing.assert_array_equal(found, np.stack([reference_canvas(one, WIDTH, HEIGHT) for one in (A, B)]))
    assert found.dtype == np.float32
    for most in (2, 0):
        wrong = refused("wan2.1-vace", Media(reference_image=(A,)), profile_of(most))
        check_refusal(wrong, "mismatch", what="reference_image", expected=most, found=1)
    small = refused("wan2.1-vace", Media(reference_image=(A, picture(7, 90))), profile_of(2))
    check_refusal(small, "out_of_range", what="reference_image", expected=8, found="7x90")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["video", "mask"])
@pytest.mark.parametrize("count", [1, FRAMES - 1, FRAMES + 1, 40])
def test_vace_refuses_another_number_of_frames(name: str, count: int, tmp_path: Path) -> None:
    path = write_video(pictures(count, WIDTH, HEIGHT), tmp_path / "some.mp4")
    wrong = refused("wan2.1-vace", replace(Media(video=MOVING), **{name: path}))
    found = f"more than {FRAMES}" if count > FRAMES else count
    check_refusal(wrong, "mismatch", what=path, expected=FRAMES, found=found)
    assert wrong.fields == (name,)


def test_of_a_video_to_begin_with_the_first_frames_are_taken(tmp_path: Path) -> None:
    """With a warning, where they are counted; of a folder those alone are read."""
    plain, profile = manifest_of("wan2.1-t2v"), profile_of()
    manifest = plain.changed(**with_start(plain, built=True))
    frames = pictures(FRAMES + 2, WIDTH, HEIGHT)
    folder = write_folder(frames, tmp_path / "frames")
    for video, warnings in ((frames, 1), (frames[:FRAMES], 0), (folder, 0)):
        found = load_media(manifest, profile, Media(video=video))
        assert len(found.warnings) == warnings
        assert np.array_equal(found.arrays["start_video"], np.stack([*map(np.asarray, frames[:FRAMES])]))
    assert media_facts(manifest, profile, Media(video=folder)) == found.facts
    with pytest.raises(UsageError) as caught:
        load_media(manifest, profile, Media(video=frames[:8]))
    assert caught.value.fields == ("video",) and caught.value.found == 8


def test_given_frames_end_with_a_chunk(tmp_path: Path) -> None:
    """Zeros are behind them, and their number goes with them; an image is one frame."""
    manifest, profile = manifest_of("anyflow-far-wan2.1"), profile_of(num_frames=21)
    frames = pictures(22, WIDTH, HEIGHT)
    for media, count in ((Media(video=frames[:13]), 13), (Media(image=frames[0]), 1)):
        arrays = load_media(manifest, profile, media).arrays
        assert arrays["given_frames"] == count and arrays["given"].shape == (21, HEIGHT, WIDTH, 3)
        assert np.array_equal(arrays["given"][:count], np.stack([*map(np.asarray, frames[:count])]))
        assert not arrays["given"][count:].any()
    with pytest.raises(UsageError):
        load_media(manifest, profile, Media(video=frames[:14]))
    folder = Media(video=write_folder(frames[:13], tmp_path / "frames"))
    assert media_facts(manifest, profile, folder) == load_media(manifest, profile, folder).facts


def test_of_a_video_to_continue_the_last_chunks_are_taken(tmp_path: Path) -> None:
    """Seven chunks of 9 frames have 19 latent frames; all frames are counted, and decide the digest."""
    manifest, profile = manifest_of("helios-wan2.1"), profile_of()
    frames = [*map(np.asarray, pictures(75, WIDTH, HEIGHT))]
    kept = np.stack([frames[0], *frames[75 - 63 :]])
    for media, taken, count in (
        (Media(video=frames), kept, 75),
        (Media(image=frames[2]), frames[2][None], 1),
    ):
        arrays = load_media(manifest, profile, media).arrays
        assert arrays["given_frames"] == count and np.array_equal(arrays["given"], taken)
    with pytest.raises(UsageError) as caught:
        load_media(manifest, profile, Media(video=frames[:8]))
    assert caught.value.fields == ("video",) and caught.value.found == 8
    folder = Media(video=write_folder(pictures(12, WIDTH, HEIGHT), tmp_path / "frames"))
    assert media_facts(manifest, profile, folder) == load_media(manifest, profile, folder).facts


def test_vace_takes_larger_videos_of_its_aspect_ratio() -> None:
    large = pictures(FRAMES, 2 * WIDTH + 6, 2 * HEIGHT)  # 6 pixels are rounded away
    found = load("wan2.1-vace", Media(video=large)).arrays["video"]
    np.testing.assert_array_equal(found, np.stack([resized(one, WIDTH, HEIGHT) for one in large]))


def test_vace_refuses_sizes_that_would_condition_a_part() -> None:
    for width, height, becomes in ((200, 100, "64x16"), (48, 48, "48x48"), (60, 48, "48x48"), (12, 9, "0x0")):
        wrong = refused("wan2.1-vace", Media(video=pictures(FRAMES, width, height)))
        check_refusal(wrong, "mismatch", expected="64x48", found=f"{width}x{height}", remedy="64x48")
        assert str(wrong.found).endswith(becomes)
        assert (becomes in str(wrong.remedy)) == (becomes != "0x0")


# -- Animate

POSES = pictures(14, 70, 60, 3)
FACES = pictures(16, 25, 31, 5)


def animate(**more: Any) -> Media:
    return replace(Media(image=A, pose_video=POSES, face_video=FACES), **more)


def test_animate_pads_to_whole_segments() -> None:
    """14 frames are two segments of 9 that share one: 17 frames."""
    loaded = load("wan2.2-animate", animate())
    found = loaded.arrays
    order = [*range(14), 12, 11, 10]
    assert loaded.num_frames == 14
    np.testing.assert_array_equal(
        found["pose_video"], np.stack([resized(POSES[index], WIDTH, HEIGHT) for index in order])
    )
    np.testing.assert_array_equal(
        found["face_video"], np.stack([resized(FACES[index], FACE, FACE) for index in [*range(16), 14]])
    )
    np.testing.assert_array_equal(found["image"], filled(A, WIDTH, HEIGHT)[None])
    np.testing.assert_array_equal(found["pixels"], clip_pixels([A], CLIP))
    assert found["replace"] == 0 and found["replace"].dtype == np.int32
    assert found["background_video"].shape == (17, HEIGHT, WIDTH, 3) and not found["background_video"].any()
    assert found["mask_video"].shape == (17, HEIGHT, WIDTH) and not found["mask_video"].any()
    assert found["mask_video"].strides == (0, 0, 0)  # one byte of memory


def test_animate_replaces() -> None:
    background, mask = pictures(40, 70, 60, 8), pictures(3, 33, 60, 9)
    media = animate(mode="replace", background_video=background, mask_video=mask)
    found = load("wan2.2-animate", media).arrays
    assert found["replace"] == 1
    expected = np.stack([resized(frame, WIDTH, HEIGHT) for frame in background[:17]])
    np.testing.assert_array_equal(found["background_video"], expected)
    order = [0, 1, 2, 1, 0, 1, 2, 1, 0, 1, 2, 1, 0, 1, 2, 1, 0]
    np.testing.assert_array_equal(
        found["mask_video"], np.stack([greyscale(resized(mask[index], WIDTH, HEIGHT)) for index in order])
    )


def test_animate_refuses_what_is_too_short() -> None:
    for media, profile, parts in (
        (animate(pose_video=POSES[:1]), None, {"what": "pose_video", "expected": 1, "found": 1}),
        (animate(face_video=FACES[:1]), None, {"what": "face_video", "expected": 2, "found": 1}),
        (
            animate(pose_video=POSES[:5], segment_overlap=5),
            profile_of(num_frames=13),
            {"what": "pose_video", "expected": 5, "found": 5},
        ),
        # Segments of 9 frames that share 5: the reference stops with an assertion.
        (animate(segment_overlap=5), None, {"what": 9, "expected": 10}),
    ):
        check_refusal(refused("wan2.2-animate", media, profile), "out_of_range", **parts)
    long = load("wan2.2-animate", animate(segment_overlap=5), profile_of(num_frames=13))
    assert len(long.arrays["pose_video"]) == 21


def test_animate_refuses_what_would_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = 3 * WIDTH * HEIGHT + 3 * FACE * FACE
    monkeypatch.setattr(wanrun_inputs, "MAX_BYTES", 14 * frame)
    assert load("wan2.2-animate", animate()).num_frames == 14
    monkeypatch.setattr(wanrun_inputs, "MAX_BYTES", 14 * frame - 1)
    both = animate(mode="replace", background_video=POSES, mask_video=POSES)
    for media, most in ((animate(), 13), (both, 6)):
        wrong = refused("wan2.2-animate", media)
        check_refusal(wrong, "out_of_range", what="pose_video", expected=f"{most} frames")


def test_a_narrow_picture_is_refused() -> None:
    for variant, media in (
        ("wan2.2-animate", animate(image=picture(1, 100))),
        ("wan2.1-i2v", Media(image=picture(1, 80_000))),
    ):
        check_refusal(refused(variant, media), "out_of_range", what="image", found="1x", remedy="crop")


# --- windows ---


@pytest.mark.parametrize("frames, found, nearest", [(12, "12", "1 13"), (14, "14", "13"), (22, "21", "13")])
def test_a_given_video_ends_with_a_chunk(frames: int, found: str, nearest: str) -> None:
    chunks = Chunking(first=1, each=3)
    check_chunks(13, 21, chunks, 4, "it")
    with pytest.raises(UsageError) as caught:
        check_chunks(frames, 21, chunks, 4, "it")
    assert str(caught.value.found).endswith(found)
    assert re.findall("[0-9]+", str(caught.value.remedy)) == nearest.split()
    assert re.findall("[0-9]+", str(caught.value.expected)) == ["1", "13"]


def test_of_a_video_to_continue_the_first_frame_and_the_last_chunks_are_kept() -> None:
    assert last_chunks(range(10), 3, 2, "it") == ([0, *range(4, 10)], 10)
    assert last_chunks(range(5), 3, 2, "it") == ([0, 2, 3, 4], 5)
    assert last_chunks(range(3), 3, 2, "it") == ([0, 0, 1, 2], 3)
    with pytest.raises(UsageError) as caught:
        last_chunks(range(2), 3, 2, "it")
    assert caught.value.found == 2 and "3" in str(caught.value.expected)


@pytest.mark.parametrize("overlap", [1, 5])
@pytest.mark.parametrize("length", [13, 17, 77])
def test_segments_are_the_references(length: int, overlap: int) -> None:
    """The formulas of WanAnimatePipeline.__call__; windows cover the padded video exactly."""
    for frames in range(overlap + 1, 4 * length):
        rest = (frames - overlap) % (length - overlap)
        target = frames if rest == 0 else frames + (length - overlap) - rest
        assert padded_frames(frames, length, overlap) == target
        assert num_windows(frames, length, overlap) == target // (length - overlap)
        check_segments(frames, length, overlap)
        found = windows(target, length, overlap)
        assert found[0].start == 0 and found[-1].stop == target
        assert {(one.count, one.stop - one.start) for one in found} == {(len(found), length)}
        assert all(one.stop - after.start == overlap for one, after in itertools.pairwise(found))


@pytest.mark.parametrize(("length", "overlap"), [(1, 1), (5, 5), (9, 5), (2, 1)])
def test_segments_too_short_to_overlap_are_refused(length: int, overlap: int) -> None:
    with refuses("out_of_range", what=length, expected=f"more than {2 * overlap} frames"):
        check_segments(40, length, overlap)


def test_reflection() -> None:
    assert reflected(5, 10) == [0, 1, 2, 3, 4, 3, 2, 1, 0, 1]
    assert reflected(2, 5) == [0, 1, 0, 1, 0]
    assert reflected(7, 3) == [0, 1, 2]
    assert reflected(1, 1) == [0]
