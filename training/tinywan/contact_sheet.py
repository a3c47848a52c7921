"""A contact sheet: a few frames of a video in a row, and a line of text below."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFont

MARGIN = 8
"""Around every frame, in pixels."""

FRAME_HEIGHT = 128
"""To which frames are enlarged, in pixels; larger ones stay as they are."""

TEXT_SIZE = 20

PAPER, INK = (250, 250, 248), (30, 30, 30)


def contact_sheet(frames: np.ndarray, text: str, count: int = 6) -> Image.Image:
    """Puts evenly spaced frames into a row, the first and the last among them.

    Args:
        frames: uint8 (T, H, W, 3).
        text: what is written below; cut where it is wider than the row.
        count: frames in the row; fewer if the video has fewer.
    """
    scale = max(1, round(FRAME_HEIGHT / frames.shape[1]))
    height, width = frames.shape[1] * scale, frames.shape[2] * scale
    chosen = frames[np.unique(np.linspace(0, len(frames) - 1, count).round().astype(int))]
    row = len(chosen) * (width + MARGIN) + MARGIN
    sheet = Image.new("RGB", (row, height + 3 * MARGIN + TEXT_SIZE), PAPER)
    for index, frame in enumerate(chosen):
        picture = Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)
        sheet.paste(picture, (MARGIN + index * (width + MARGIN), MARGIN))
    font = ImageFont.load_default(TEXT_SIZE)
    while font.getlength(text) > row - 2 * MARGIN:
        text = text.rstrip("…")[:-1].rstrip() + "…"
    ImageDraw.Draw(sheet).text((MARGIN, height + 2 * MARGIN - 2), text, INK, font)
    return sheet
