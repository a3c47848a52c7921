"""Turns huggingface_hub's exceptions into one line: what failed, and to try again, log in or make room."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from wanrun.errors import SourceError, lacks_space

_ROOM = (
    "free some space (hf cache prune removes what killed downloads left), raise the limit (ulimit -f), or "
    "set HF_HOME to a larger folder that can be written"
)
_CANNOT_WRITE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR})
_REFUSED = frozenset({401, 403, 404})
"""The hub's answers for a repository that does not exist, is private, or is gated."""


class SilentHubError(SourceError):
    """The hub gives no answer or an unexpected one; a later try may succeed (exit 1)."""

    exit_code = 1


@contextlib.contextmanager
def explained(repository: str) -> Iterator[None]:
    """Turns the exceptions of huggingface_hub's functions into SourceError.

    It is a SilentHubError if the failure may pass, so not for a refused or unknown repository or a cache that
    cannot be written.
    """
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except (HTTPError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # All but the first: an answer that no hub gives, or a file that is too large without Xet.
        raise _explain(error, repository) from error
    except OSError as error:
        if error.errno is None or lacks_space(error) or error.errno in _CANNOT_WRITE:
            raise _explain(error, repository) from error
        raise


def _explain(error: Exception, repository: str) -> SourceError:
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, OSError) and error.errno is not None:
        what = f"the hub's cache {constants.HF_HUB_CACHE} cannot be written: {error.strerror}"
        return SourceError("no_space" if lacks_space(error) else "unwritable", what, remedy=_ROOM)
    if isinstance(error, LocalEntryNotFoundError):  # any failure before a file's first byte
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    absent, page = f"there is no folder {repository}", f"{constants.ENDPOINT}/{repository}"
    answer = getattr(error, "response", None)
    if answer is not None and answer.status_code in _REFUSED:
        return SourceError(
            "not_found",
            f"{absent}, and {page} answers HTTP {answer.status_code} to {answer.url.path}",
            remedy="check the name and the revision; if it is private or gated, accept the licence on"
            " that page, and log in (hf auth login) or set HF_TOKEN to a token of that account",
        )
    message = str(error).partition("\n")[0]
    return SilentHubError(
        "unreachable",
        f"{absent}, and {page} cannot be downloaded: {type(error).__name__}: {message}",
        remedy="try again (files that are whole are kept); check the network, HF_ENDPOINT and proxies; set "
        f"HF_HUB_OFFLINE=1 to use only the cache; or give the folder of: hf download {repository}",
    )
