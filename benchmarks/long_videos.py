"""Scores long videos of the trained tiny models: clips from a first image, and windows of text to video.

Of clips: the judge's score of each, the drift of the ground's colour, with the first image as anchor and
without, and the peak of memory by the number of clips. Of windows: the score of the whole and of each part
of a trained length, against a profile of all frames; and the seams of decoding in windows, of which a decoder
that passes on its history has none: build T2V with --vae-tile 96, of one tile, to see them.

    wanbuild convert artifacts/tiny/wan2.1-i2v --artifact I2V --default steps=30
    wanbuild compile --artifact I2V --target cpu --size 96x64 --frames 17
    wanbuild convert artifacts/tiny/wan2.1-t2v --artifact T2V --default steps=30
    wanbuild compile --artifact T2V --target cpu --size 96x64 --frames 17 --frames 65
    PYTHONPATH=training python benchmarks/long_videos.py I2V T2V [--sheets FOLDER]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from tinywan.contact_sheet import contact_sheet
from tinywan.judge import judge
from tinywan.yardstick import captions, first_frame, psnr

import wanrun
from wanrun.denoising.noise import clip_seed
from wanrun.media.prepare import load_media

CLIPS, LENGTH, LONG = 5, 17, 65

MEMORY = """
import re, sys, tempfile
from pathlib import Path
import wanrun
from tinywan.yardstick import first_frame
text = "a green triangle moves in a circle over brown ground"
with tempfile.TemporaryDirectory() as folder, wanrun.load(sys.argv[1], prompts=[text, ""]) as pipeline:
    media = wanrun.Media(image=first_frame(text))
    spool = Path(folder) / "spool" if sys.argv[3] == "folder" else None
    result = pipeline.generate(text, "", clips=int(sys.argv[2]), num_steps=2, media=media, spool=spool)
    result.save(Path(folder) / "video.mp4")
    status = Path("/proc/self/status").read_text()
    print(*(int(re.search(name + r":\\s*(\\d+)", status)[1]) / 1024 for name in ("VmHWM", "RssAnon")))
"""
"""Prints the peak of resident memory, and the memory of its own at the end, in MiB."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("i2v", type=Path)
    parser.add_argument("t2v", type=Path)
    parser.add_argument("--captions", type=int, default=6)
    parser.add_argument("--sheets", type=Path, help="a folder for contact sheets")
    options = parser.parse_args()
    texts = [text for text, _ in captions() if text.count("circle") == 1 and " and " not in text]
    texts = texts[: options.captions]
    print("\n".join(clips_table(options.i2v, texts, options.sheets)), flush=True)
    print("\n".join(windows_table(options.t2v, texts, options.sheets)), flush=True)
    print("\n".join(memory_table(options.i2v)))


def clips_table(artifact: Path, texts: list[str], sheets: Path | None) -> Iterator[str]:
    """Yields the rows of clips: the means over captions, by clip."""
    scores, drifts = ({name: list[list[float]]() for name in ("anchor", "none")} for _ in range(2))
    with wanrun.load(artifact, prompts=[*texts, ""]) as pipeline:
        for number, text in enumerate(texts):
            image = first_frame(text)
            whole = pipeline.generate(text, clips=CLIPS, media=wanrun.Media(image=image), seed=number)
            without = np.stack(unanchored(pipeline, text, np.asarray(image), number))
            steps = range(0, CLIPS * (LENGTH - 1), LENGTH - 1)
            anchored = np.stack([whole.frames[0, start : start + LENGTH] for start in steps])
            for name, clips in (("anchor", anchored), ("none", without)):
                scores[name].append([judge(clip, text).score for clip in clips])
                drifts[name].append([drift(clip[-1], np.asarray(image)) for clip in clips])
            if sheets is not None:
                contact_sheet(whole.frames[0], f"{text}, {CLIPS} clips", 11).save(
                    sheets / f"clips-{number}.png", optimize=True
                )
    yield f"| {len(texts)} captions, by clip | " + " | ".join(str(clip + 1) for clip in range(CLIPS)) + " |"
    yield "|---" * (CLIPS + 1) + "|"
    for name, title in (("anchor", "the first image's tokens"), ("none", "the last frame's tokens")):
        yield row(f"score, {title}", np.mean(scores[name], 0), 2)
        yield row(f"drift of the ground, levels, {title}", np.mean(drifts[name], 0), 1)


def unanchored(pipeline: wanrun.Pipeline, text: str, image: np.ndarray, seed: int) -> list[np.ndarray]:
    """Returns clips each of which the image encoder sees begin."""
    clips = list[np.ndarray]()
    for clip in range(CLIPS):
        last = clips[-1][-1] if clips else image
        inputs = load_media(pipeline.manifest, pipeline.profile, wanrun.Media(image=last))
        clips.append(pipeline.generate(text, inputs=replace(inputs), seed=clip_seed(seed, clip)).frames[0])
    return clips


def drift(frame: np.ndarray, first: np.ndarray) -> float:
    """Returns how far the ground's colour is from that of the first image: the median's mean distance."""
    return float(np.abs(np.median(frame, (0, 1)) - np.median(first, (0, 1))).mean())


def windows_table(artifact: Path, texts: list[str], sheets: Path | None) -> Iterator[str]:
    """Yields the rows of windows: by overlap, and of a profile of all frames."""
    yield f"| {LONG} frames | score | by {LENGTH} frames | beside a whole decoder, dB: all, at seams |"
    yield "|---|---|---|---|"
    with wanrun.load(artifact, num_frames=LENGTH, prompts=[*texts, ""]) as pipeline:
        for overlap in (4, 8, 12, 0):
            scores, parts, seams = [], [], []
            how = {"window_frames": LENGTH, "window_overlap": overlap} if overlap else {}
            for number, text in enumerate(texts):
                result = pipeline.generate(text, num_frames=LONG, seed=number, **how)
                frames = result.frames[0]
                scores.append(judge(frames, text).score)
                starts = range(0, LONG - 1, LENGTH - 1)
                parts.append([judge(frames[start : start + LENGTH], text).score for start in starts])
                if overlap:
                    seams.append(seam(artifact, result, frames, overlap))
                if sheets is not None:
                    name = f"windows-{overlap}-{number}.png" if overlap else f"whole-{number}.png"
                    title = f"windows of {LENGTH} that share {overlap}" if overlap else f"a profile of {LONG}"
                    contact_sheet(frames, f"{text}, {title}", 11).save(sheets / name, optimize=True)
            title = f"windows of {LENGTH}, {overlap} shared" if overlap else "a profile of all frames"
            decibels = " / ".join(f"{value:.1f}" for value in np.mean(seams, 0)) if seams else ""
            yield f"| {title} | {np.mean(scores):.2f} | {np.mean(parts):.2f} | {decibels} |"


def seam(artifact: Path, result: wanrun.Result, frames: np.ndarray, overlap: int) -> tuple[float, float]:
    """Returns the PSNR of frames with those of a whole decoder: of all, and of the first of windows."""
    with wanrun.load(artifact, num_frames=LONG, prompts=[""]) as whole:
        expected = whole.decode(result.latents)[0]
    starts = range(LENGTH, LONG, LENGTH - overlap)
    first = [frame for start in starts for frame in range(start, min(start + 4, LONG))]
    return psnr(frames, expected), psnr(frames[first], expected[first])


def memory_table(artifact: Path) -> Iterator[str]:
    """Yields the rows of memory by the number of clips."""
    yield "| clips, two steps | peak with a folder | own memory at the end | peak in memory | own |"
    yield "|---|---|---|---|---|"
    for clips in (1, CLIPS, 100):
        figures = [
            subprocess.run(
                [sys.executable, "-c", MEMORY, str(artifact), str(clips), how],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
            for how in ("folder", "memory")
        ]
        yield f"| {clips} | " + " | ".join(f"{float(one):.0f} MiB" for both in figures for one in both) + " |"


def row(title: str, values: np.ndarray, digits: int) -> str:
    return f"| {title} | " + " | ".join(f"{value:.{digits}f}" for value in values) + " |"


if __name__ == "__main__":
    main()
