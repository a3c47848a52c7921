"""The location of weights outside the artifact: a folder, or a URL that TensorStore reads."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from wanrun.errors import ArtifactError, UsageError

SCHEMES = ("gs", "s3", "http", "https")

CURL_LIMITS = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "20",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
"""TensorStore sets no time limit on a transfer, and reads limits only from the environment. Variables that
the user has set stay: https://google.github.io/tensorstore/environment.html."""


def weights_location(weights: str) -> Path | SplitResult:
    """Parses the location of weights outside the artifact: a local folder or a URL.

    Cheap: it reads nothing, so a wrong ``--weights`` is refused before any long work.

    Args:
        weights: a local folder or a URL with the contents of the artifact's ``weights`` folder.

    Raises:
        UsageError: if the local folder does not exist, the URL is of an unsupported kind, or TensorStore
            is not installed.
    """
    try:
        url = urlsplit(weights)
    except ValueError as error:
        raise UsageError(f"{weights!r} is not a URL: {error}", remedy="check --weights") from None
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", weights) or (url.scheme, url.netloc) == ("file", ""):
        path = Path(unquote(url.path) if url.scheme == "file" else weights)
        with contextlib.suppress(OSError, ValueError):  # nothing can have such a name
            if weights and (path := path.expanduser().resolve()).is_dir():
                return path
        what = f"there are no weights at {weights!r}"
        raise UsageError(what, expected="a folder", remedy="check --weights")
    if url.scheme not in SCHEMES or not url.netloc:
        raise UsageError(
            f"weights cannot be read from {weights!r}",
            expected="a folder, file:///FOLDER, or the URL of one with " + ", ".join(SCHEMES),
            remedy="check --weights",
        )
    import_tensorstore(urlunsplit(url))
    return url


def component_location(weights: str, folder: str) -> Path | str:
    """Returns where a component of ``weights_location`` is; errors are those of that function.

    It is a path for a local folder, which may hold plain chunk files; otherwise a URL. ``folder`` is the
    component's in the manifest, such as ``weights/transformer``.
    """
    name, location = folder.removeprefix("weights/"), weights_location(weights)
    if isinstance(location, Path):
        return location / name
    return urlunsplit(location._replace(path=f"{location.path.rstrip('/')}/{name}", fragment=""))


def import_tensorstore(location: Path | str) -> Any:
    """Imports TensorStore, with limits on its transfers.

    Raises:
        UsageError: if it is not installed and the weights are remote.
        ArtifactError: if it is not installed and a local folder holds weights in another form.
    """
    for variable, value in CURL_LIMITS.items():
        os.environ.setdefault(variable, value)
    try:
        import tensorstore
    except ImportError as error:
        remedy = "pip install tensorstore"
        if isinstance(location, Path):
            raise ArtifactError(
                f"the weights in {location} are not chunk files, which only TensorStore reads",
                found=error,
                remedy=f"{remedy}, or give the weights that wanbuild wrote",
            ) from None
        address = urlunsplit(urlsplit(location)._replace(query="", fragment=""))  # the query may hold a key
        raise UsageError(
            f"weights at {address!r} are read through TensorStore",
            found=error,
            remedy=f"{remedy}, or copy them into a folder",
        ) from None
    return tensorstore
