"""What huggingface_hub raises and logs, as one line that says what to do."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
from collections.abc import Iterator

from wanrun.errors import SourceError

_CANNOT_WRITE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR})


def hub_token() -> str | None:
    """The token that huggingface_hub would send: of HF_TOKEN, or of a login."""
    from huggingface_hub import constants, get_token

    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()


def not_a_hub() -> SourceError:
    """The error for an answer that no hub gives."""
    from huggingface_hub import constants

    return SourceError(
        f"{constants.ENDPOINT} does not answer as the hub does", remedy="check HF_ENDPOINT and proxies"
    )


class _Warnings(logging.Handler):
    """Prints a record as one line that begins with ``warning:``."""

    def emit(self, record: logging.LogRecord) -> None:
        print("warning:", " ".join(record.getMessage().split()), file=sys.stderr, flush=True)


@contextlib.contextmanager
def own_log() -> Iterator[None]:
    """While it lasts, huggingface_hub's warnings, such as that it tries again, look like ours."""
    import huggingface_hub.file_download  # noqa: F401  the import sets its handlers up

    log = logging.getLogger("huggingface_hub")
    handlers, log.handlers = log.handlers, [_Warnings()]
    try:
        yield
    finally:
        log.handlers = handlers


@contextlib.contextmanager
def explained(repository: str, revision: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into a SourceError.

    Args:
        repository: the hub id, for messages.
        revision: what was asked for.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import FileMetadataError, HTTPError, LocalEntryNotFoundError

    try:
        yield
    except LocalEntryNotFoundError as error:  # its word for any failure before a file's first byte
        if not isinstance(error.__cause__, HTTPError):
            raise not_a_hub() from error
        raise _explanation(error.__cause__, repository, revision) from error
    except FileMetadataError as error:
        raise not_a_hub() from error
    except HTTPError as error:  # the base of all that the HTTP client raises
        raise _explanation(error, repository, revision) from error
    except OSError as error:
        explanation = _os_error(error, repository, constants.HF_HUB_CACHE)
        if explanation is None:
            raise
        raise explanation from error


def _os_error(error: OSError, repository: str, cache: str) -> SourceError | None:
    if error.errno is None:  # raised by huggingface_hub: fewer bytes than were announced
        return SourceError(
            f"the download of {repository} ended early: {error}",
            remedy="run it again; what has arrived is kept",
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SourceError(
            f"the disk of the hub's cache {cache} is full",
            remedy="free some space, or set HF_HOME to a folder on another disk",
        )
    if error.errno in _CANNOT_WRITE:
        return SourceError(
            f"the hub's cache {cache} cannot be written: {error.strerror}",
            remedy="set HF_HOME to a folder that can",
        )
    return None


def _explanation(error: Exception, repository: str, revision: str) -> SourceError:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RevisionNotFoundError

    page = f"{constants.ENDPOINT}/{repository}"
    if not isinstance(error, HfHubHTTPError):
        return SourceError(
            f"{constants.ENDPOINT} cannot be reached: {type(error).__name__}: {error}",
            remedy="check the network and run it again, what has arrived is kept; or set HF_HUB_OFFLINE=1"
            " to use the cache alone",
        )
    status = error.response.status_code
    if isinstance(error, GatedRepoError) or status in (401, 403):
        if hub_token() is None:
            return SourceError(
                f"{page} refuses access without a token (HTTP {status})",
                remedy="accept the licence on that page, and set HF_TOKEN to a token of the account that did;"
                " or check the name, for a repository that does not exist answers the same",
            )
        return SourceError(
            f"{page} refuses the token that was sent (HTTP {status})",
            remedy="accept the licence on that page with the token's own account, and check that the token,"
            " from HF_TOKEN or hf auth login, is valid and may read gated repositories",
        )
    if isinstance(error, RevisionNotFoundError):
        return SourceError(f"{page} has no revision {revision}", remedy="give a branch, tag or commit of it")
    if status == 404:
        return SourceError(
            f"there is no folder {repository}, and no repository {page}",
            remedy="check the name; a private repository needs HF_TOKEN",
        )
    return SourceError(
        f"{constants.ENDPOINT} answered HTTP {status} {error.response.reason_phrase}",
        remedy="try again later; what has arrived is kept",
    )
