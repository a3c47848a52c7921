"""The keys of clients: who a request is from, and how many of their videos may wait."""

from __future__ import annotations

__all__ = ["read_keys"]

import hashlib
import hmac
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request, cookie_parser

import wanrun
from wanrun.errors import UsageError

COOKIE: Final = "wanserve_key"
"""The cookie that carries the key for the page, whose videos and events a browser asks for by itself."""

LEAST: Final = 16
"""Characters of a key: shorter ones can be guessed."""

MAX_BYTES: Final = 1 << 20

_COUNT = re.compile("[0-9]{1,9}")


@dataclass(frozen=True)
class Client:
    """One who may use the server.

    Attributes:
        name: the name of the key, which the videos are noted under.
        digest: sha256 of the key.
        max_waiting: the most videos that may wait; None for no bound but the server's.
        max_live_seconds: of a live video; None for no bound but the server's.
    """

    name: str
    digest: bytes
    max_waiting: int | None = None
    max_live_seconds: int | None = None


class Keys:
    """The clients of a server; without any, everybody is the client without a name."""

    def __init__(self, clients: Iterable[Client] = ()) -> None:
        self._clients = tuple(clients)

    def __bool__(self) -> bool:
        return bool(self._clients)

    def find(self, key: str) -> Client | None:
        """Returns the client of a key. All keys are compared, in a time that does not depend on them."""
        digest, found = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest(), None
        for client in self._clients:
            if hmac.compare_digest(client.digest, digest):
                found = client
        return found

    def of(self, headers: Mapping[str, str]) -> Client | None:
        """Returns the client of a request; None if it has no key, or a wrong one."""
        if not self._clients:
            return Client("", b"")
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and key.strip():
            return self.find(key.strip())
        # Other programs of this host have cookies too, with values that http.cookies does not read.
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE)
        return None if cookie is None else self.find(cookie)


def client_of(request: Request) -> Client:
    """Returns who asks, whom the guard has found."""
    client = request.state.client
    assert isinstance(client, Client)  # the guard lets nobody else come here
    return client


def owner_of(request: Request) -> str | None:
    """Returns whose jobs a request may see; without keys everybody's."""
    return client_of(request).name or None


def read_keys(file: Path | None, variable: str | None) -> Keys:
    """Reads the keys of a file and of a variable of the environment.

    Each line has a name, a key, and perhaps the number of videos that may wait, and the seconds of a live
    one: ``alice sk-4f... 10 60``. Empty lines, and those that begin with ``#``, are left out. In the variable
    ``;`` may stand for a line's end.

    Raises:
        UsageError: for a line that is not understood, a name or a key that comes twice, a short key, and a
            live video of no seconds.
    """
    clients = list[Client]()
    if file is not None:
        try:
            text = wanrun.read_bounded(file, MAX_BYTES).decode("utf-8")
            readable = file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
        except (OSError, ValueError) as error:
            raise UsageError("unreadable", f"the keys {file} cannot be read", found=error) from None
        if readable:
            raise UsageError("untrusted", f"others can read the keys {file}", remedy=f"run chmod 600 {file}")
        clients += _lines(text, str(file))
        if not clients:
            raise UsageError(
                "invalid_value", f"there is no key in {file}", expected="lines of a name and a key"
            )
    if variable:
        clients += _lines(variable.replace(";", "\n"), "WANRUN_API_KEYS")
    for what in ("name", "digest"):
        seen = [getattr(client, what) for client in clients]
        if len(set(seen)) < len(seen):
            raise UsageError(
                "conflict", f"a {'key' if what == 'digest' else what} comes twice among the keys"
            )
    return Keys(clients)


def _lines(text: str, where: str) -> list[Client]:
    clients = list[Client]()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if not 2 <= len(words) <= 4 or not all(_COUNT.fullmatch(word) for word in words[2:]):
            expected = "NAME KEY [JOBS THAT MAY WAIT [SECONDS OF A LIVE VIDEO]]"
            raise UsageError("invalid_value", f"line {number} of {where} is no key", expected=expected)
        if words[3:] and not int(words[3]):
            expected = "1 or more, or none for the server's own limit"
            raise UsageError(
                "out_of_range", f"line {number} of {where} has 0 seconds of a live video", expected=expected
            )
        if len(words[1]) < LEAST:
            raise UsageError(
                "out_of_range",
                f"the key in line {number} of {where} is short",
                expected=f"{LEAST} characters",
            )
        digest = hashlib.sha256(words[1].encode()).digest()
        clients.append(Client(words[0], digest, *map(int, words[2:])))
    return clients
