"""What a run makes of images and videos: read once, passed on, shared by jobs, recorded and compared."""

from __future__ import annotations

import errno
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import wanrun
from helpers.fake_pipeline import Fake, Run, run_here, write_lines
from helpers.manifests import with_profiles
from helpers.media_files import frames, image, make_task, pixels
from helpers.refusals import check_json, refuses
from wancli.jobs import media_sets
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import UsageError
from wanrun.files import file_sha256
from wanrun.media import prepare
from wanrun.media.inputs import Inputs
from wanrun.media.write_video import read_metadata
from wanrun.timing.timings import Timings

Call = Callable[..., Run]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The media that are read, in order."""
    reads: list[Any] = []
    load = prepare.load_media

    def count(manifest: Any, profile: Any, media: Any, **options: Any) -> Inputs:
        reads.append(media)
        return load(manifest, profile, media, **options)

    monkeypatch.setattr(prepare, "load_media", count)
    return reads


@pytest.fixture
def wan(artifact: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs wanrun here, with errors as JSON, which has to succeed; returns what it came to."""

    def call(*arguments: object, code: int = 0) -> Run:
        done = run_here(capsys, artifact, *arguments, "--json-errors")
        assert done.code == code, done.err
        return done

    return call


def lines_of(folder: Path, *lines: dict[str, Any]) -> Path:
    texts = [{"prompt": f"fox {index}", **line} for index, line in enumerate(lines)]
    return write_lines(folder / "p.jsonl", *(json.loads(json.dumps(text, default=str)) for text in texts))


@pytest.mark.slow
def test_an_image_is_read_once_and_given_to_load_and_to_generate(
    wan: Call, fake: Fake, reads: list[Any], artifact: Path, tmp_path: Path
) -> None:
    make_task(artifact, "i2v")
    one, two = image(tmp_path / "one.png", 1, 96, 64), image(tmp_path / "two.png", 2)
    files = ["--timing-json", tmp_path / "t.json", "--output", tmp_path / "o.gif"]
    wan("--prompt", "a", "--image", one, "--last-image", two, *files)
    (inputs,) = [made["inputs"] for made in fake.generations]
    assert fake.loads[0]["inputs"] is inputs and len(reads) == 1
    assert "-r" not in fake.loads[0]["profile"]
    assert np.array_equal(inputs.arrays["image"][0], pixels(1, 96, 64))  # the profile's size: not resized
    assert inputs.arrays["last_image"].shape == (1, 64, 96, 3) and inputs.arrays["has_last_image"] == 1
    facts = {"image": "one.png", "last_image": "two.png"}
    digests = {"image_sha256": file_sha256(one), "last_image_sha256": file_sha256(two)}
    assert read_metadata(tmp_path / "o.gif").items() >= {**facts, **digests}.items()
    assert json.loads((tmp_path / "t.json").read_text())["read_media_seconds"] > 0


@pytest.mark.slow
def test_without_media(wan: Call, fake: Fake, reads: list[Any], artifact: Path, tmp_path: Path) -> None:
    """Text alone is nothing to read, nor to pass on."""
    for task in ("t2v", "ti2v"):
        make_task(artifact, task)
        wan("--prompt", "a", "--overwrite", "--output", tmp_path / "o.gif")
        assert fake.generations[-1]["inputs"] is None and fake.loads[-1]["inputs"] is None
        assert reads == []
        names = {"image", "mode", "conditioning_scale", "segment_overlap"}
        assert not names & read_metadata(tmp_path / "o.gif").keys()
        assert not {"conditioning_scale", "segment_overlap"} & fake.generations[-1].keys()
    make_task(artifact, "ti2v")
    wan("--prompt", "a", "--image", image(tmp_path / "i.png"), "--output", tmp_path / "i.gif")
    assert fake.generations[-1]["inputs"].arrays["image"].shape == (1, 64, 96, 3)


@pytest.mark.slow
def test_control_of_vace(wan: Call, fake: Fake, artifact: Path, tmp_path: Path) -> None:
    make_task(artifact, "vace", references=(0, 2))
    video, mask = frames(tmp_path / "video", 9, 1), frames(tmp_path / "mask", 9, 2)
    references = [image(tmp_path / f"r{index}.png", index) for index in range(2)]
    given = ["--reference-image", references[0], "--reference-image", references[1]]
    wan("--prompt", "a", "--output", tmp_path / "plain.gif")
    wan("--prompt", "a", "--video", video, "--mask", mask, *given, "--output", tmp_path / "o.gif")
    wan("--prompt", "a", "--conditioning-scale", 0.5, *given, "--output", tmp_path / "half.gif")
    plain, full, half = fake.generations
    assert [made["conditioning_scale"] for made in fake.generations] == [1.0, 1.0, 0.5]
    assert [int(made["inputs"].arrays["has_video"]) for made in fake.generations] == [0, 1, 0]
    assert [load["profile"].endswith("-r2") for load in fake.loads] == [False, True, True]
    assert "references" not in plain["inputs"].arrays
    assert full["inputs"].arrays["references"].shape == (2, 64, 96, 3)
    assert half["inputs"].arrays["video"].shape == (9, 64, 96, 3)
    facts = read_metadata(tmp_path / "o.gif")
    assert (facts["video"], facts["video_file"], facts["conditioning_scale"]) == (0, "video", 1.0)
    assert read_metadata(tmp_path / "half.gif")["conditioning_scale"] == 0.5
    assert facts["reference_image"] == ["r0.png", "r1.png"] and facts["mask"] == "mask"
    arguments = ("--prompts", lines_of(tmp_path, {}), "--output", tmp_path / "again.gif")
    wan(*arguments)
    (line,) = wan(*arguments, "--conditioning-scale", 0.25, code=2).err
    check_json(line, "exists", message="again.gif", expected="conditioning_scale 0.25", found=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "segments"), [(1, 3), (5, 4)])
def test_segments_of_animate(
    wan: Call,
    fake: Fake,
    artifact: Path,
    tmp_path: Path,
    overlap: int,
    segments: int,
) -> None:
    """30 frames in segments of 13: the first 13, then 12 new ones each, or 8."""
    make_task(artifact, "animate", num_frames=13)
    poses, face = frames(tmp_path / "poses", 30, 1), frames(tmp_path / "face", 7, 2)
    media = ["--image", image(tmp_path / "i.png"), "--pose-video", poses, "--face-video", face]
    output = tmp_path / "o.gif"
    wan("--prompt", "a", *media, "--segment-overlap", overlap, "--steps", 4, "--output", output)
    (made,) = fake.generations
    assert made["segment_overlap"] == overlap
    assert made["inputs"].arrays["pose_video"].shape[0] == 13 + (segments - 1) * (13 - overlap)
    facts = read_metadata(output)
    assert (facts["num_frames"], facts["segment_overlap"], facts["mode"]) == (30, overlap, "animate")
    assert (facts["image"], facts["pose_video"], facts["face_video"]) == ("i.png", "poses", "face")


@pytest.fixture
def animate(artifact: Path, tmp_path: Path) -> dict[str, str]:
    """A line of 30 frames, for an artifact with profiles of 9 and 13 frames."""
    make_task(artifact, "animate", num_frames=13)
    manifest = read_manifest(artifact)
    (profile,) = manifest.profiles.values()
    shorter = msgspec.structs.replace(profile, num_frames=9, index=1)
    with_profiles(manifest, [profile, shorter]).write(artifact)
    videos = {name: str(frames(tmp_path / name, 30, len(name))) for name in ("pose_video", "face_video")}
    return {"image": str(image(tmp_path / "i.png")), **videos}


@pytest.mark.slow
def test_segments_of_another_length_make_another_video(
    wan: Call, fake: Fake, animate: dict[str, str], tmp_path: Path
) -> None:
    arguments = ("--prompts", lines_of(tmp_path, animate), "--output", tmp_path / "o-{index}.gif")
    wan(*arguments, "--frames", 13)
    facts = read_metadata(tmp_path / "o-1.gif")
    assert (facts["num_frames"], facts["segment_frames"]) == (30, 13)
    assert wan(*arguments, "--frames", 13).counts == (0, 1, 0)
    (line,) = wan(*arguments, "--frames", 9, code=2).err
    check_json(line, "exists", expected="segment_frames 9", found=13, remedy="--overwrite")


@pytest.mark.slow
@pytest.mark.parametrize(("poses", "matters"), [(9, False), (30, True)])
def test_the_seed_beside_initial_latents(
    wan: Call, fake: Fake, animate: dict[str, str], tmp_path: Path, poses: int, matters: bool
) -> None:
    """They are the noise of the first segment; that of the others is the seed's."""
    noise = np.random.default_rng(0).standard_normal((1, 16, 4, 8, 12), np.float32)
    np.save(tmp_path / "z.npy", noise)
    for file in list((tmp_path / "pose_video").iterdir())[poses:]:
        file.unlink()
    arguments = ("--prompts", lines_of(tmp_path, animate), "--output", tmp_path / "o.gif", "--frames", 9)
    arguments = (*arguments, "--latents", tmp_path / "z.npy")
    wan(*arguments, "--seed", 3)
    assert read_metadata(tmp_path / "o.gif")["seed"] == (3 if matters else None)
    done = wan(*arguments, "--seed", 4, code=2 if matters else 0)
    if matters:
        check_json(done.err[0], "exists", expected="seed 4", found=3)
    else:
        assert done.counts == (0, 1, 0)


@pytest.mark.slow
def test_animate_in_mode_replace(wan: Call, fake: Fake, artifact: Path, tmp_path: Path) -> None:
    make_task(artifact, "animate")
    videos = {name: frames(tmp_path / name, 9, 10 + index) for index, name in enumerate("pfbm")}
    media = ["--image", image(tmp_path / "i.png"), "--pose-video", videos["p"], "--face-video", videos["f"]]
    media += ["--background-video", videos["b"], "--mask-video", videos["m"], "--mode", "replace"]
    wan("--prompt", "a", *media, "--output", tmp_path / "o.gif")
    arrays = fake.generations[0]["inputs"].arrays
    assert arrays["replace"] == 1 and fake.generations[0]["segment_overlap"] == 1
    assert np.array_equal(arrays["background_video"][3], pixels(12_003, 96, 64))
    assert read_metadata(tmp_path / "o.gif")["mode"] == "replace"


# Prompts files.


@pytest.mark.slow
def test_lines_that_share_media_get_the_same_object(
    wan: Call, fake: Fake, reads: list[Any], artifact: Path, tmp_path: Path
) -> None:
    make_task(artifact, "i2v")
    one, two = image(tmp_path / "1.png", 1), image(tmp_path / "2.png", 2)
    file = lines_of(tmp_path, {}, {"image": one}, {"image": two}, {"image": two, "seed": 5}, {})
    wan("--prompts", file, "--image", one, "--output", tmp_path / "o.gif")
    inputs = [made["inputs"] for made in fake.generations]
    assert [inputs[0] is other for other in inputs] == [True, True, False, False, False]
    assert inputs[2] is inputs[3] and fake.loads[0]["inputs"] is inputs[0]
    names = [facts.facts["image"] for facts in inputs]
    assert names == ["1.png", "1.png", "2.png", "2.png", "1.png"]
    # Both once to check them; the first is kept, and it is not while the other is.
    assert [media.image for media in reads] == [one, two, two, one]


@pytest.mark.slow
def test_of_what_is_there_nothing_is_decoded(
    wan: Call, fake: Fake, reads: list[Any], artifact: Path, tmp_path: Path
) -> None:
    make_task(artifact, "vace")
    paths = [frames(tmp_path / str(index), 9, index) for index in range(3)]
    file = lines_of(tmp_path, *({"video": path} for path in (*paths, paths[0])))
    shared = ("--prompts", file, "--save-latents", tmp_path / "z-{index}.npy")
    wan(*shared, "--output", tmp_path / "o-{index}.gif")
    reads.clear()
    assert wan(*shared, "--output", tmp_path / "o-{index}.gif").counts == (0, 4, 0)
    assert reads == [] and len(fake.loads) == 1
    # Of the lines that are left the first one's is kept for load, and no other is read twice.
    for name in ("o-2.gif", "z-2.npy", "z-3.npy"):
        (tmp_path / name).unlink()
    fake.generations.clear()
    assert wan(*shared, "--output", tmp_path / "o-{index}.gif").counts == (2, 2, 0)
    assert [media.video for media in reads] == [paths[1], paths[2], paths[2]]
    assert fake.loads[1]["inputs"] is fake.generations[0]["inputs"]
    assert fake.generations[0]["inputs"].facts["video"] == "1"
    # All lines have one video, which is there and bad: it is not the one that the others were made from.
    file = lines_of(tmp_path, {}, {})
    one = ("--prompts", file, "--output", tmp_path / "one-{index}.gif", "--video", paths[0])
    wan(*one)
    reads.clear()
    assert wan(*one).counts == (0, 2, 0) and reads == []
    (paths[0] / "3.png").write_bytes(b"no image")
    check_json(wan(*one, code=2).err[0], "exists", expected="video_sha256 ")
    (paths[0] / "3.png").unlink()
    (paths[0] / "3.png").mkdir()
    (line,) = wan(*one, code=2).err
    check_json(line, "wrong_kind", message=f"--video {paths[0] / '3.png'}", expected="image", found="folder")


@pytest.mark.slow
def test_animate_is_decoded_to_compare_it(
    wan: Call, fake: Fake, reads: list[Any], animate: dict[str, str], tmp_path: Path
) -> None:
    """What is used of a folder is known then; the first line that is not there is kept."""
    file = lines_of(tmp_path, animate, {**animate, "segment_overlap": 1}, {**animate, "mode": "animate"})
    arguments = ("--prompts", file, "--output", tmp_path / "o-{index}.gif", "--frames", 9)
    wan(*arguments)
    reads.clear()
    (tmp_path / "o-3.gif").unlink()
    wan(*arguments)
    assert [media.mode for media in reads] == [None, "animate"]
    assert fake.loads[-1]["inputs"] is fake.generations[-1]["inputs"]


@pytest.mark.slow
def test_what_cannot_be_used_is_let_go(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is kept would keep the frames that were read before it was raised."""
    make_task(artifact, "i2v")
    held: list[Any] = []

    def load(*arguments: object, **options: object) -> Inputs:
        frames = np.zeros(1000)
        held.append(weakref.ref(frames))
        raise UsageError("out_of_range", "too long", expected=1, found=len(frames), remedy="cut it")

    monkeypatch.setattr(prepare, "load_media", load)
    sets = media_sets.MediaSets(Timings())
    generation = wanrun.resolve(artifact, "a", image=tmp_path / "i.png")
    for _ in range(2):
        with refuses("out_of_range", what="too long", expected=1, found=1000, remedy="cut it"):
            sets.facts(generation)
    gc.collect()
    assert len(held) == 1 and held[0]() is None


def test_what_fails_while_media_are_read_is_not_said_of_the_output(
    wan: Call, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> Inputs:
        raise OSError(errno.ENOSPC, "No space left on device")

    make_task(artifact, "i2v")
    monkeypatch.setattr(prepare, "load_media", full)
    arguments = ("--prompt", "a", "--image", image(tmp_path / "i.png"), "--output", tmp_path / "o.gif")
    (line,) = wan(*arguments, code=4).err
    assert str(tmp_path) not in check_json(line, "no_space")["message"]


@pytest.mark.slow
def test_bad_media_of_many_lines_are_read_once(
    wan: Call, fake: Fake, reads: list[Any], artifact: Path, tmp_path: Path
) -> None:
    make_task(artifact, "vace")
    short, good = frames(tmp_path / "short", 5), frames(tmp_path / "good", 9)
    file = lines_of(tmp_path, {"video": short}, {"video": good}, {"video": short, "seed": 3})
    done = wan("--prompts", file, "--output", tmp_path / "o.gif", code=2)
    for number, line in zip((1, 3), done.err, strict=True):
        named = (f"{file}:{number}: ", f"video {short}")
        check_json(line, "mismatch", message=named, expected=9, found=5, options="video")
    assert [media.video for media in reads] == [short, good]


@pytest.mark.slow
def test_what_is_there_already_was_made_from_the_same_media(
    wan: Call, fake: Fake, artifact: Path, tmp_path: Path
) -> None:
    make_task(artifact, "i2v")
    one, two = image(tmp_path / "1.png", 1), image(tmp_path / "2.png", 2)
    file = lines_of(tmp_path, {"image": one}, {"image": one, "last_image": two})
    arguments = ("--prompts", file, "--output", tmp_path / "o.gif")
    assert wan(*arguments).counts == (2, 0, 0)
    assert wan(*arguments).counts == (0, 2, 0)
    one.rename(tmp_path / "moved.png")  # the same image, and what has another name is said to be another
    file = lines_of(tmp_path, {"image": tmp_path / "moved.png"}, {"image": tmp_path / "moved.png"})
    done = wan(*arguments, code=2)
    for line in done.err[:2]:
        check_json(line, "exists", expected='image "moved.png"', found='"1.png"')
    image(one, 3)  # another image of the same name
    lines_of(tmp_path, {"image": one}, {"image": one, "last_image": two, "output": tmp_path / "new.gif"})
    done = wan(*arguments, code=2)
    assert done.counts == (1, 0, 1)
    check_json(done.err[0], "exists", expected=f'image_sha256 "{file_sha256(one)[:40]}')


@pytest.mark.slow
def test_media_that_change_or_go_while_others_are_made(
    wan: Call, fake: Fake, artifact: Path, tmp_path: Path
) -> None:
    """What was checked hours ago is checked again; the other lines are made."""
    make_task(artifact, "i2v")
    paths = [image(tmp_path / f"{index}.png", index) for index in range(4)]
    fake.happens["fox 0"] = lambda: (image(paths[1], 9), paths[2].unlink())
    file = lines_of(tmp_path, *({"image": path} for path in paths))
    digest = file_sha256(paths[1])
    done = wan("--prompts", file, "--output", tmp_path / "o.gif", code=2)
    assert done.counts == (2, 0, 2)
    changed, gone = done.err
    expected, found = f"image_sha256 {digest}", file_sha256(paths[1])
    check_json(changed, "changed", message=f"{file}:2: ", expected=expected, found=found, remedy="wanrun")
    check_json(gone, "missing_file", message=(f"{file}:3: ", paths[2]), options="image")
