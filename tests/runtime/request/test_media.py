"""The images and videos of a request: the files that it names, or what is given beside it, in one way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.refusals import refuses
from wanrun.media.inputs import Inputs, Media
from wanrun.request.media import given_media, media_of
from wanrun.request.request import Request


def test_the_media_of_a_request() -> None:
    assert media_of(Request(prompt="a fox", conditioning_scale=2.0)) == Media()
    assert media_of(Request(prompt="a", reference_image="r.png")).reference_image == (Path("r.png"),)
    media = media_of(
        Request(prompt="a", image="i.png", reference_image=("r.png", "s.png"), segment_overlap=5)
    )
    assert (media.image, media.last_image, media.mode) == (Path("i.png"), None, None)
    assert (media.reference_image, media.segment_overlap) == ((Path("r.png"), Path("s.png")), 5)
    same = media_of(
        Request(prompt="b", seed=3, image="./i.png", reference_image=("r.png", "s.png"), segment_overlap=5)
    )
    assert media == same and hash(media) == hash(same)
    for other in ({"image": "j.png"}, {"reference_image": ("s.png", "r.png")}, {"segment_overlap": 1}):
        fields: dict[str, Any] = {
            "image": "i.png",
            "reference_image": ("r.png", "s.png"),
            "segment_overlap": 5,
        }
        assert media_of(Request(prompt="a", **{**fields, **other})) != media
    assert media_of(Request(prompt="a", mode="replace")) == Media(mode="replace")


def test_media_in_one_way() -> None:
    plain, media = Request(prompt="a fox"), Media(image="a.png")
    assert given_media(plain, None, None) is None
    assert given_media(plain, media, None) is media
    named = Request(prompt="a fox", image="b.png", segment_overlap=5, mode="replace")
    found = Media(image=Path("b.png"), mode="replace", segment_overlap=5)
    assert given_media(named, None, None) == found
    with refuses("conflict", what="image"):
        given_media(named, media, None)
    with refuses("conflict", what="image"):
        given_media(named, None, Inputs())
    with refuses("conflict", what="media and inputs"):
        given_media(plain, media, Inputs())


def test_an_overlap_may_be_given_beside_media() -> None:
    five = Request(prompt="a fox", segment_overlap=5)
    assert given_media(five, Media(image="a.png"), None) == Media(image="a.png", segment_overlap=5)
    assert given_media(five, None, None) == Media(segment_overlap=5)
    assert given_media(five, None, Inputs(segment_overlap=5)) is None
    with refuses("mismatch", what="segment_overlap", expected=1, found=5):
        given_media(five, None, Inputs())
