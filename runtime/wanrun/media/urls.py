"""Images and videos that are named by a URL: none is fetched."""

from __future__ import annotations

__all__ = ["url_error"]

import re

from wanrun.errors import UsageError, shortened

_URL = re.compile(r"(https?|ftp|s3|gs):/|data:[\w.+/-]*[;,]")


def url_error(source: object, name: str) -> UsageError | None:
    """Returns the error of an image or a video that is named by a URL; None for another one.

    Args:
        source: what a user has given: a text as it is written, because a path has lost a slash.
        name: the option.
    """
    if not isinstance(source, str) or not _URL.match(source):
        return None
    return UsageError(
        "wrong_kind",
        f"{name} {shortened(source)} is a URL, and URLs are not fetched",
        remedy="download it first, and give the file",
    )
