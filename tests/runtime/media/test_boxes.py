"""The boxes of a fragmented MP4: places in them, and the type that a browser is told."""

from __future__ import annotations

import struct
from fractions import Fraction

from wanrun.media.boxes import fragment, init_segment, mime_type


def test_a_fragment_says_where_its_frames_are_and_when() -> None:
    data = fragment(7, 2**33, [b"abc", b"de"])
    moof, where = data.index(b"moof") - 4, data.index(b"trun") + 8
    count, offset = struct.unpack_from(">Ii", data, where)
    assert data[moof + offset :] == b"abcde" and count == 2
    assert struct.unpack_from(">II", data, where + 12) == (3, 2)
    assert struct.unpack_from(">Q", data, data.index(b"tfdt") + 8) == (2**33,)
    assert struct.unpack_from(">I", data, data.index(b"mfhd") + 8) == (7,)


def test_the_type_is_read_from_the_init_segment() -> None:
    init = init_segment(b"\1\x64\0\x1f\xff", 64, 32, Fraction(16), "avcC" * 9)
    assert mime_type(init + fragment(1, 0, [b"abc"])).endswith(' codecs="avc1.64001f"')
