"""What the process that decodes images passes on."""

from __future__ import annotations

import io

import pytest

from helpers.pictures import picture, same
from wanrun.media.decoder import read_ppm
from wanrun.media.pillow import STRIP_BYTES, write_ppm


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
