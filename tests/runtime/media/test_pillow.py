"""What the process that decodes images passes on."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from helpers.pictures import picture, same
from wanrun.media.decoder import read_ppm
from wanrun.media.pillow import STRIP_BYTES, mask, write_ppm

BLACK, WHITE, GREY = (0, 0, 0), (255, 255, 255), (90, 160, 90)


@pytest.mark.parametrize(
    ("drawn", "rest", "expected"),
    [
        ((*WHITE, 255), (*BLACK, 0), (255, 0)),  # painted in white on a transparent layer
        ((*WHITE, 0), (*BLACK, 255), (255, 0)),  # a black picture with a hole
        ((*BLACK, 0), (*GREY, 255), (255, 0)),  # a photo of which a part was erased
        ((*WHITE, 255), (*BLACK, 255), (255, 0)),  # no transparency: the colours count
        ((*BLACK, 0), (*WHITE, 0), (0, 0)),  # no paint on this frame's layer
    ],
)
def test_a_mask_that_is_drawn_as_transparency(
    drawn: tuple[int, ...], rest: tuple[int, ...], expected: tuple[int, int]
) -> None:
    image = Image.new("RGBA", (6, 4), rest)
    image.paste(drawn, (0, 0, 2, 2))
    found = mask(image, "--mask")
    assert found.mode == "RGB" and found.getpixel((0, 0)) == (expected[0],) * 3
    assert found.getpixel((5, 3)) == (expected[1],) * 3
    assert same(mask(image.convert("RGB"), "--mask"), image.convert("RGB"))


@pytest.mark.slow
@pytest.mark.parametrize("colour", [None, (1, 2, 3), b"\x01\x00", 7])
def test_a_frame_is_passed_on(colour: object) -> None:
    image, stream = picture(1500, 1100), io.BytesIO()
    assert 3 * image.width * image.height > STRIP_BYTES
    if colour is not None:
        image.info["transparency"] = colour
    write_ppm(image, stream)
    stream.seek(0)
    assert stream.readline() == b"P6\n"
    read = read_ppm(stream, "--video")
    assert read is not None and same(read, image) and read.info.get("transparency") == colour
    assert stream.read() == b""
