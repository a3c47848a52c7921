"""Scores video to video of the trained tiny model: how far a strength moves a video to another prompt.

A video is drawn of one caption, and made anew with that caption and with the next one: the judge's score by
the prompt, and the PSNR to the input.

    wanbuild convert artifacts/tiny/wan2.1-t2v --artifact T2V --default steps=30
    wanbuild compile --artifact T2V --target cpu --size 96x64 --frames 17 --video-to-video
    PYTHONPATH=training python benchmarks/video_to_video.py T2V [--sheets FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tinywan.captions import read_caption
from tinywan.contact_sheet import contact_sheet
from tinywan.drawing import FRAMES, HEIGHT, WIDTH, draw
from tinywan.judge import judge
from tinywan.yardstick import captions, psnr

import wanrun

STRENGTHS = (0.3, 0.6, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--captions", type=int, default=6)
    parser.add_argument("--sheets", type=Path, help="a folder for contact sheets")
    options = parser.parse_args()
    texts = [text for text, _ in captions() if " and " not in text][: options.captions + 1]
    print("\n".join(table(options.artifact, texts, options.sheets)))


def table(artifact: Path, texts: list[str], sheets: Path | None) -> Iterator[str]:
    """Yields the rows, the means over captions."""
    yield "| strength | own caption: score | PSNR to the input, dB | another: score | PSNR, dB |"
    yield "|---|---|---|---|---|"
    with wanrun.load(artifact, prompts=[*texts, ""]) as pipeline:
        for strength in STRENGTHS:
            rows = []
            for number, (old, new) in enumerate(itertools.pairwise(texts)):
                given = draw(read_caption(old), FRAMES, HEIGHT, WIDTH, np.random.default_rng(number))
                media = wanrun.Media(video=given)
                found = list[float]()
                for text in (old, new):
                    frames = pipeline.generate(text, media=media, strength=strength, seed=number).frames[0]
                    found += [judge(frames, text).score, psnr(frames, given)]
                rows.append(found)
                if sheets is not None:
                    title = f"{new}, from {old}, strength {strength:g}"
                    sheet = contact_sheet(frames, title, 6)
                    sheet.save(sheets / f"strength-{strength:g}-{number}.png", optimize=True)
            own, own_psnr, other, other_psnr = np.mean(rows, 0)
            yield f"| {strength:g} | {own:.2f} | {own_psnr:.1f} | {other:.2f} | {other_psnr:.1f} |"


if __name__ == "__main__":
    main()
