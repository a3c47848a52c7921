"""The boxes of a fragmented MP4 (ISO/IEC 14496-12) of one H.264 video, which plays while it grows.

The init segment, ``ftyp`` and ``moov``, comes first: how the frames are encoded, and no frame's place.
A fragment, ``moof`` and ``mdat``, says its frames' places, so it plays without the ones before.
"""

from __future__ import annotations

__all__ = ["mime_type"]

import struct
from collections.abc import Sequence
from fractions import Fraction

_TRACK = 1
_MATRIX = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
_COLOURS = b"nclx" + struct.pack(">HHHB", 1, 1, 1, 0)  # BT.709 three times, limited range
_KEY_FRAME, _OTHER_FRAME = (
    0x02000000,
    0x01010000,
)  # depends on no other; depends on others, and is no key frame
_BEFORE_BOXES = {b"stsd": 8, b"avc1": 78}  # bytes of a box's own fields


def init_segment(config: bytes, width: int, height: int, rate: Fraction, comment: str = "") -> bytes:
    """Returns ``ftyp`` and ``moov`` of a video in H.264, with an open length.

    ``config`` is the encoder's AVCDecoderConfigurationRecord, ``rate`` frames per second, ``comment`` ASCII.
    """
    kind = _box(b"ftyp", b"iso6\0\0\2\0", b"iso6iso5mp41")
    times, scale = bytes(8), struct.pack(">I", rate.numerator)  # neither created nor changed
    length, language = bytes(4), b"\x55\xc4\0\0"  # "und"
    header = _full(
        b"mvhd", 0, times, scale, length, b"\0\1\0\0\1\0", bytes(10), _MATRIX, bytes(24), b"\0\0\0\2"
    )
    size = struct.pack(">II", width << 16, height << 16)
    track = _full(b"tkhd", 3, times, struct.pack(">I", _TRACK), bytes(4), length, bytes(16), _MATRIX, size)
    media = _box(
        b"mdia",
        _full(b"mdhd", 0, times, scale, length, language),
        _full(b"hdlr", 0, bytes(4), b"vide", bytes(12), b"VideoHandler\0"),
        _box(
            b"minf",
            _full(b"vmhd", 1, bytes(8)),
            _box(b"dinf", _full(b"dref", 0, b"\0\0\0\1", _full(b"url ", 1))),
            _samples(config, width, height),
        ),
    )
    defaults = struct.pack(">5I", _TRACK, 1, rate.denominator, 0, _OTHER_FRAME)
    more = _box(b"mvex", _full(b"trex", 0, defaults))
    return kind + _box(b"moov", header, _box(b"trak", track, media), more, _comment(comment))


def fragment(number: int, start: int, frames: Sequence[bytes]) -> bytes:
    """Returns ``moof`` and ``mdat`` of encoded frames, of which the first one is a key frame.

    ``number`` counts fragments from 1. ``start`` is when its first frame is shown, in units of the rate's
    numerator. Each frame is in units with lengths in front.
    """
    sizes = struct.pack(f">{len(frames)}I", *map(len, frames))

    def about(offset: int) -> bytes:
        # A place of the data, the first frame's flags, and sizes; the rest is as in trex.
        run = _full(b"trun", 0x205, struct.pack(">IiI", len(frames), offset, _KEY_FRAME), sizes)
        of_track = _full(b"tfhd", 0x20000, struct.pack(">I", _TRACK))  # places count from moof's begin
        when = _box(b"tfdt", struct.pack(">IQ", 1 << 24, start))
        return _box(b"moof", _full(b"mfhd", 0, struct.pack(">I", number)), _box(b"traf", of_track, when, run))

    return about(len(about(0)) + 8) + _box(b"mdat", *frames)


def mime_type(init: bytes) -> str:
    """Returns the type by which a browser's Media Source Extensions take a video, from its init segment.

    Args:
        init: the bytes of ``init_segment``, or of a file that begins with them.
    """
    content = init
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd", b"avc1", b"avcC"):
        content = _child(content, kind)[_BEFORE_BOXES.get(kind, 0) :]
    return f'video/mp4; codecs="avc1.{content[1:4].hex()}"'


def _child(content: bytes, kind: bytes) -> bytes:
    """Returns the content of the first of these boxes that has a kind."""
    place = 0
    while content[place + 4 : place + 8] != kind:
        place += struct.unpack_from(">I", content, place)[0]
    return content[place + 8 : place + struct.unpack_from(">I", content, place)[0]]


def _box(kind: bytes, *parts: bytes) -> bytes:
    return b"".join((struct.pack(">I", 8 + sum(map(len, parts))), kind, *parts))


def _full(kind: bytes, flags: int, *parts: bytes) -> bytes:
    """Returns a box of version 0 with flags."""
    return _box(kind, struct.pack(">I", flags), *parts)


def _samples(config: bytes, width: int, height: int) -> bytes:
    """Returns ``stbl``: how the frames are encoded, and that none are listed here."""
    resolution = struct.pack(">II", 72 << 16, 72 << 16)
    fields = (bytes(6), b"\0\1", bytes(16), struct.pack(">HH", width, height), resolution, bytes(4), b"\0\1")
    name, depth = bytes(32), struct.pack(">Hh", 24, -1)
    encoding = _box(b"avc1", *fields, name, depth, _box(b"avcC", config), _box(b"colr", _COLOURS))
    none = (_full(kind, 0, bytes(4)) for kind in (b"stts", b"stsc"))
    sizes, places = _full(b"stsz", 0, bytes(8)), _full(b"stco", 0, bytes(4))
    return _box(b"stbl", _full(b"stsd", 0, b"\0\0\0\1", encoding), *none, sizes, places)


def _comment(text: str) -> bytes:
    """Returns ``udta`` with a comment, as players and ffmpeg know it; nothing without one."""
    if not text:
        return b""
    value = _box(b"data", b"\0\0\0\1\0\0\0\0", text.encode("ascii"))  # of text, of no country
    handler = _full(b"hdlr", 0, bytes(4), b"mdirappl", bytes(9))
    return _box(b"udta", _full(b"meta", 0, handler, _box(b"ilst", _box(b"\xa9cmt", value))))
