"""The files below an address: through fsspec, including those of the Hugging Face hub over HTTP."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

import wanrun
from wanhub.address import Address, is_commit, no_such
from wanhub.url_reader import Report, UrlReader, quiet
from wanrun.errors import ArtifactError

SMALL_SECONDS: Final = 120.0
"""The most seconds for a file that is read whole before the manifest gives the sizes of the others."""

MAX_ANSWER_BYTES: Final = 2**24
"""The limit of the hub's answer about a repository, which may list all of its files."""


class RemoteFiles:
    """The files below an address, of a repository at a commit; several threads may call its methods.

    ``report`` gets a line about a wait, from any thread. The constructor raises UsageError if the package
    that reads such addresses is not installed.
    """

    def __init__(self, address: Address, report: Report = quiet) -> None:
        self._address = address
        url, headers = address.url, dict[str, str]()
        if address.repository:
            endpoint, headers = _hub()
            url = f"{endpoint}/{address.repository}/resolve/{address.revision}"
        parts = urlsplit(url)
        self._base, self._query = urlunsplit(parts._replace(query="")), parts.query
        self._reader = UrlReader(parts.scheme, headers, address, report)

    @property
    def requests(self) -> int:
        """The number of requests."""
        return self._reader.requests

    @property
    def nbytes(self) -> int:
        """The bytes that came."""
        return self._reader.nbytes

    def read(self, name: str, start: int, end: int) -> bytes:
        """Returns the bytes of a file from ``start`` to ``end``, or to its end.

        Raises FileNotFoundError if there is no such file, and ArtifactError if the store gives no answer, or
        refuses.
        """
        return self._reader.read(self._url(name), start, end, name)

    def small(self, name: str, most: int) -> bytes:
        """Returns a file of unknown size, of at most ``most`` bytes.

        Raises as ``read`` does, and ArtifactError if it is larger, or takes too long.
        """
        data = self._reader.read(self._url(name), 0, most + 1, name, SMALL_SECONDS)
        if len(data) > most:
            raise ArtifactError(
                "too_large",
                f"{name} of {self._address.text} is too large",
                expected=f"at most {most} bytes",
                remedy="check the address, or make the file smaller",
            )
        return data

    def _url(self, name: str) -> str:
        return f"{self._base}/{name}" + (f"?{self._query}" if self._query else "")


class _Info(msgspec.Struct):
    """The field that is read of the hub's answer about a repository."""

    sha: str


def resolved(address: Address, report: Report = quiet) -> Address:
    """Returns the address at the commit of a repository's branch or tag now; a URL as it is.

    Raises ArtifactError if the hub gives no answer, or has no such repository or revision.
    """
    if not address.repository or address.fixed:
        return address
    endpoint, headers = _hub()
    revision = quote(address.revision or "main", safe="")
    url = f"{endpoint}/api/models/{address.repository}/revision/{revision}?expand=sha"
    reader = UrlReader(urlsplit(endpoint).scheme, headers, address, report)
    try:
        data = reader.read(url, 0, MAX_ANSWER_BYTES, "the revision", SMALL_SECONDS)
        commit = msgspec.json.decode(data, type=_Info).sha
    except FileNotFoundError:
        raise no_such(address, 404) from None
    except (ValueError, RecursionError):
        commit = ""
    if not is_commit(commit):
        raise ArtifactError(
            "unreadable",
            f"the hub's answer about {address.text} is not understood",
            expected="a commit",
            found=commit[:80] or "something else",
            remedy="check HF_ENDPOINT",
        )
    return address.at(commit)


def _hub() -> tuple[str, dict[str, str]]:
    """Returns the hub's URL, and the headers of each request."""
    # The library's own headers would ask the hub for a list first, without a bound.
    from huggingface_hub import constants, get_token

    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    given = {} if token is None else {"Authorization": f"Bearer {token}"}
    return constants.ENDPOINT, {"User-Agent": f"wanrun/{wanrun.__version__}", **given}
