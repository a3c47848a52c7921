"""Reads parts of files at an address: through fsspec, over HTTP also those of the Hugging Face hub."""

from __future__ import annotations

import importlib
import time
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from wanhub.address import Address, unreachable
from wanrun.errors import ArtifactError, UsageError

RETRY_SECONDS: Final = (0.3, 1.0, 3.0, 8.0)
"""Waits before another try of what was refused or broken off."""

CONNECT_SECONDS: Final = 10
SILENT_SECONDS: Final = 20
"""After that long without a byte a transfer is tried again."""

_PASSING: Final = (408, 425, 429, 500, 502, 503, 504)
"""HTTP's answers that another try may change."""


class Store:
    """The files below an address. Its methods may be called by several threads.

    Args:
        address: of a repository, at a commit.

    Attributes:
        requests: how often something was asked for.
        nbytes: the bytes that came.

    Raises:
        UsageError: if the package that reads such addresses is not installed.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self.requests, self.nbytes = 0, 0
        url, headers = address.url, dict[str, str]()
        if address.repository:
            from huggingface_hub import constants
            from huggingface_hub.utils import build_hf_headers

            url = f"{constants.ENDPOINT}/{address.repository}/resolve/{address.revision}"
            headers = build_hf_headers()
        parts = urlsplit(url)
        self._base, self._query = urlunsplit(parts._replace(query="")), parts.query
        self._files = _file_system(parts.scheme, headers, address.text)

    def read(self, name: str, start: int, end: int) -> bytes:
        """Returns the bytes of a file from ``start`` until ``end``, or until its end.

        Raises:
            FileNotFoundError: if there is no such file.
            ArtifactError: if the store does not answer, or refuses.
        """
        url = f"{self._base}/{name}" + (f"?{self._query}" if self._query else "")
        if self._address.repository and is_offline():
            raise unreachable(f"{self._address.text} ({name})", OSError("HF_HUB_OFFLINE is set"))
        for wait in (*RETRY_SECONDS, None):
            self.requests += 1
            try:
                data: bytes = self._files.cat_file(url, start=start, end=end)
            except FileNotFoundError:
                raise
            except Exception as error:  # aiohttp's, botocore's, gcsfs's and the system's
                status = getattr(error, "status", None)
                if status == 416:  # the file ends where the range begins
                    return b""
                if wait is None or (status is not None and status not in _PASSING) or _refused(error):
                    raise self._failed(name, error) from None
                time.sleep(wait)
                continue
            self.nbytes += len(data)
            # A server that knows no ranges sends the whole file.
            return data if len(data) <= end - start else data[start:end]
        raise AssertionError("unreachable")

    def _failed(self, name: str, error: Exception) -> ArtifactError:
        status = getattr(error, "status", None)
        if status in _PASSING:  # the error's own text has the URL, whose query may be a key
            return unreachable(f"{self._address.text} ({name})", OSError(f"HTTP {status}"))
        if status is None and not _refused(error):
            return unreachable(f"{self._address.text} ({name})", error)
        return ArtifactError(
            f"{name} of {self._address.text} may not be read",
            found=str(error)[:200] if status is None else f"HTTP {status}",
            remedy="check the address and your right to read it",
        )


def is_offline() -> bool:
    """Whether huggingface_hub is told to ask for nothing."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _refused(error: Exception) -> bool:
    """Whether another try would be refused too."""
    return isinstance(error, PermissionError | ValueError | TypeError | NotImplementedError)


def _file_system(scheme: str, headers: dict[str, str], text: str) -> Any:
    """Returns fsspec's file system for a scheme; it is no shared one, so that it keeps no listings."""
    needed = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs"}.get(scheme)
    try:
        import fsspec

        if needed is not None:
            importlib.import_module(needed)
    except ImportError as error:
        extra = {"s3fs": "pip install s3fs", "gcsfs": "pip install gcsfs"}.get(str(error.name))
        raise UsageError(
            f"{text} cannot be read without {error.name}",
            remedy=extra or "pip install '.[hub]' in the checkout",
        ) from None
    options: dict[str, Any] = {"skip_instance_cache": True}
    if needed == "aiohttp":
        import aiohttp

        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
        options |= {
            "headers": {**headers, "Accept-Encoding": "identity"},  # a range of what is stored
            "client_kwargs": {"timeout": limits, "trust_env": True},
            "encoded": True,
        }
    return fsspec.filesystem(scheme, **options)
