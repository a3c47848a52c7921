"""Images and videos at URLs are refused with the address as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanrun.errors import UsageError
from wanrun.media.inputs import url_error
from wanrun.request.prompts_file import Line
from wanrun.request.reading import read_request


@pytest.mark.parametrize("url", ["https://example.com/a.png", "s3://bucket/a.png", "data:image/png;base64,"])
def test_an_address_is_shown_as_it_is_given(url: str) -> None:
    error = url_error(url, "image")
    assert error is not None and url in error.what
    with pytest.raises(UsageError) as raised:
        read_request([("prompt", "a fox"), ("image", url)], Line)
    assert url in raised.value.what and raised.value.fields == ("image",)


@pytest.mark.parametrize("source", ["a.png", "C:/a.png", Path("https://x"), 5, "data:1.png", "http:.png"])
def test_what_is_no_address(source: object) -> None:
    assert url_error(source, "image") is None
