"""Addresses of artifacts: a repository of the Hugging Face hub, or the URL of a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from wanrun.errors import ArtifactError, UsageError

HUB: Final = "hf"
SCHEMES: Final = (HUB, "gs", "s3", "http", "https", "file")
_PART: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REVISION: Final = r"(?!.*\.\.)[A-Za-z0-9._-]{1,100}(?:/[A-Za-z0-9._-]{1,100}){0,5}"
_REPOSITORY: Final = re.compile(rf"({_PART}/{_PART})(?:@({_REVISION}))?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Address:
    """The place of an artifact.

    Attributes:
        text: the address for messages, without a URL's query, user and password, which may be keys.
        url: the URL of the folder; of a repository ``hf://OWNER/NAME``.
        revision: the branch, tag or commit of a repository; empty for its main branch, and of a URL.
    """

    text: str
    url: str
    revision: str = ""

    @property
    def repository(self) -> str:
        """The repository, ``OWNER/NAME``; empty for a URL."""
        return self.url.removeprefix(f"{HUB}://") if self.url.startswith(f"{HUB}://") else ""

    @property
    def fixed(self) -> bool:
        """Whether the address names a commit, which never changes."""
        return is_commit(self.revision)

    def at(self, revision: str) -> Address:
        """Returns the address of a revision of the repository."""
        return Address(f"{self.url}@{revision}", self.url, revision)


def parse_address(text: str) -> Address:
    """Parses ``hf://OWNER/NAME[@REVISION]``, or the URL of an artifact's folder; raises UsageError."""
    try:
        url = urlsplit(text)
    except ValueError:
        url = urlsplit("")
    if url.scheme == HUB:
        if (match := _REPOSITORY.fullmatch(text.removeprefix(f"{HUB}://"))) is None:
            raise UsageError(
                "invalid_value",
                f"{text!r} is no address",
                expected=f"{HUB}://OWNER/NAME or {HUB}://OWNER/NAME@REVISION",
            )
        return Address(text, f"{HUB}://{match[1]}", match[2] or "")
    if url.scheme not in SCHEMES or not (url.netloc or (url.scheme == "file" and url.path)):
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise UsageError(
            "invalid_value",
            f"{text!r} is no address of an artifact",
            expected=f"a folder, or one of {schemes}",
        )
    plain = url._replace(path=url.path.rstrip("/"), fragment="")
    told = urlunsplit(plain._replace(query="", netloc=plain.netloc.rpartition("@")[2]))
    return Address(told, urlunsplit(plain) if url.scheme in ("http", "https") else told)


def is_commit(text: str) -> bool:
    """Whether a text is the name of a commit."""
    return _COMMIT.fullmatch(text) is not None


def is_offline() -> bool:
    """Whether huggingface_hub is in its offline mode."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


class UnreachableError(ArtifactError):
    """An address gives no answer; a later try may succeed (exit 1)."""

    exit_code = 1


def no_such(address: Address, status: int) -> ArtifactError:
    """Returns the error of a repository that does not exist, or that this user may not read."""
    return ArtifactError(
        "not_found",
        f"there is no {address.text}, or it may not be read",
        found=f"HTTP {status}",
        remedy="check the name and the revision; if it is private or gated, log in (hf auth login) or set"
        " HF_TOKEN",
    )


def unreachable(address: Address, name: str, found: str) -> UnreachableError:
    """Returns the error of a file that cannot be requested."""
    check = "the network and HF_ENDPOINT" if address.repository else "the address and the network"
    return UnreachableError(
        "unreachable",
        f"{address.text} ({name}) does not answer",
        found=found,
        remedy=f"check {check}, and try again; what was fetched before runs offline",
    )
