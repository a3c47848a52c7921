"""Turns huggingface_hub's exceptions into one line that says what to do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from wanrun.errors import SourceError, lacks_space

ROOM = "free some space (hf cache prune removes what killed downloads left), or set HF_HOME to a larger disk"
_CANNOT_WRITE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR})


@contextlib.contextmanager
def explained(repository: str, revision: str) -> Iterator[None]:
    """Turns huggingface_hub's exceptions into SourceError.

    Args:
        repository: the hub id, for messages.
        revision: the requested revision.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import FileMetadataError, HTTPError, LocalEntryNotFoundError

    try:
        yield
    except LocalEntryNotFoundError as error:  # any failure before a file's first byte
        if not isinstance(error.__cause__, HTTPError):
            raise not_a_hub() from error
        raise _http_error(error.__cause__, repository, revision) from error
    except FileMetadataError as error:
        raise not_a_hub() from error
    except HTTPError as error:  # the base class of the HTTP client's exceptions
        raise _http_error(error, repository, revision) from error
    except OSError as error:
        explanation = _os_error(error, repository, constants.HF_HUB_CACHE)
        if explanation is None:
            raise
        raise explanation from error


def not_a_hub() -> SourceError:
    """Returns the error for an answer that no hub gives."""
    from huggingface_hub import constants

    return SourceError(
        f"{constants.ENDPOINT} does not answer as the hub does", remedy="check HF_ENDPOINT and proxies"
    )


def _os_error(error: OSError, repository: str, cache: str) -> SourceError | None:
    if error.errno is None:  # raised by huggingface_hub for fewer bytes than announced
        return SourceError(
            f"a download of {repository} ended early: {error}",
            remedy="run it again; files that are whole are kept",
        )
    if error.errno == errno.EFBIG:
        return SourceError(
            f"a download of {repository} reaches the largest size of a file",
            remedy="raise the limit (ulimit -f)",
        )
    if lacks_space(error):
        return SourceError(f"the disk of the hub's cache {cache} is full", remedy=ROOM)
    if error.errno in _CANNOT_WRITE:
        return SourceError(
            f"the hub's cache {cache} cannot be written: {error.strerror}",
            remedy="set HF_HOME to a folder that can",
        )
    return None


def _http_error(error: Exception, repository: str, revision: str) -> SourceError:
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RevisionNotFoundError

    page = f"{constants.ENDPOINT}/{repository}"
    if not isinstance(error, HfHubHTTPError):
        what = (
            f"there is no folder {repository}, so it is taken for a hub id; {constants.ENDPOINT} cannot be "
            f"reached: {type(error).__name__}: {error}"
        )
        remedy = (
            "check the network and run it again, files that are whole are kept; or set HF_HUB_OFFLINE=1 to"
            " use the cache alone"
        )
        return SourceError(what, remedy=remedy)
    status = error.response.status_code
    if isinstance(error, GatedRepoError) or status in (401, 403):
        if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN or get_token() is None:
            what = f"{page} refuses access without a token (HTTP {status})"
            remedy = (
                "accept the licence on that page, and set HF_TOKEN to a token of the account that did; or"
                " check the name, for a repository that does not exist answers the same"
            )
        else:
            what = f"{page} refuses the token that was sent (HTTP {status})"
            remedy = (
                "accept the licence on that page with the token's own account, and check that the token, from"
                " HF_TOKEN or hf auth login, is valid and may read gated repositories"
            )
    elif isinstance(error, RevisionNotFoundError):
        what, remedy = f"{page} has no revision {revision}", "give a branch, tag or commit of it"
    elif status == 404 and "/api/" not in error.response.url.path:
        what = f"{page} lists a file and does not have it (HTTP 404): {error.response.url}"
        remedy = "try again later, or give another --revision"
    elif status == 404:
        what = f"there is no folder {repository}, and no repository {page}"
        remedy = "check the name; a private repository needs HF_TOKEN"
    else:
        what = f"{constants.ENDPOINT} answered HTTP {status} {error.response.reason_phrase}"
        remedy = "try again later; files that are whole are kept"
    return SourceError(what, remedy=remedy)
