"""The record of images and videos, from which a request, a manifest's closed set and messages derive."""

from __future__ import annotations

from typing import Any, cast, get_args

from helpers.pictures import picture
from wanrun.artifact.media import MEDIA_KINDS, SEVERAL, Media, MediaOption
from wanrun.request.schema import rows


def test_media_are_rows() -> None:
    """What is given as files on the command line is given in memory as ``Media``, under the same names."""
    names = [row.name for row in rows()]
    assert set(Media.__struct_fields__) == {*MEDIA_KINDS, "mode", "segment_overlap", "fit"} <= set(names)
    assert names[:3] == ["prompt", "negative_prompt", "image"]


def test_images_come_first() -> None:
    assert ["video" in kind for kind in MEDIA_KINDS.values()] == [False] * 3 + [True] * 6
    assert set(get_args(cast(Any, MediaOption))) == MEDIA_KINDS.keys()


def test_one_option_takes_several() -> None:
    assert [row.name for row in rows() if row.many and not row.record] == [SEVERAL] == ["reference_image"]


def test_media_may_be_in_memory() -> None:
    image = picture(8, 8)
    media = Media(image, video=[image], reference_image=(image, "a.png"))
    assert media.image is image and media.last_image is None and media.mode is None
    assert media == Media(image=image, video=[image], reference_image=(image, "a.png"))
    assert Media("a.png") == Media(image="a.png") and len({Media("a.png"), Media("a.png")}) == 1
