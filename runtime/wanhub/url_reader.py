"""Reads URLs with limits on bytes, silence and time, and reports what it waits for."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import wanrun
from wanhub.address import Address, is_offline, unreachable
from wanrun.errors import ArtifactError, UsageError

Report = Callable[[str], None]
"""Gets the lines about waits."""

RETRY_SECONDS: Final = (0.3, 1.0, 3.0, 8.0)
"""Waits before another try of what was refused, broken off or silent."""

CONNECT_SECONDS: Final = 10
WAIT_SECONDS: Final = 5.0
"""After each such time with less than ``SLOWEST``, a line reports the wait."""

SILENT_WAITS: Final = 4
"""So many waits in a row end a try."""

SILENCES: Final = 2
"""Such tries after which it gives up."""

SLOWEST: Final = 1024
"""Bytes in a second. Less is silence: whoever sends a byte now and then would hold a run for ever."""

_PASSING: Final = (408, 425, 429, 500, 502, 503, 504)
"""HTTP's answers that another try may change."""


@dataclass
class _Came:
    """The part of an answer that has come; ``nbytes`` counts all bytes, also those before the range."""

    data: bytearray = field(default_factory=bytearray)
    nbytes: int = 0


class _AnswerError(Exception):
    """An HTTP answer other than a file."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


class _RefusedError(ValueError):
    """A failure that another try would not change."""


class _SilentError(OSError):
    """No bytes come, or next to none."""


class _LateError(_SilentError):
    """A small file has not come in its time."""


def quiet(line: str) -> None:
    """Reports nothing."""


class ForbiddenError(ArtifactError):
    """A file that may not be read; a bucket says so of a missing one too."""


class UrlReader:
    """Reads URLs of one scheme; several threads may call its methods.

    Args:
        scheme: the URLs'; ``file``, ``http``, ``https``, or one that fsspec reads (``s3``, ``gs``). Those two
            send no more than they are asked for, and their packages have their own time limits.
        headers: of each request over HTTP.
        address: for messages, which never have a URL: its query may be a key.
        report: gets a line about a wait, from any thread.

    Attributes:
        requests: the number of requests.
        nbytes: the bytes that came.

    Raises:
        UsageError: if the package that reads such URLs is not installed.
    """

    def __init__(self, scheme: str, headers: Mapping[str, str], address: Address, report: Report) -> None:
        self._address, self._report = address, report
        self.requests, self.nbytes = 0, 0
        self._headers = {**headers, "Accept-Encoding": "identity"}  # a range of what is stored
        self._said = 0.0
        self._http = scheme in ("http", "https")
        self._files = None if scheme == "file" else _file_system(scheme, address.text)

    def read(self, url: str, start: int, end: int, name: str, seconds: float | None = None) -> bytes:
        """Returns the bytes of a file from ``start`` to ``end``, or to its end; discards any beyond.

        ``name`` is the file's, for messages. ``seconds`` is the limit for a small file, whose waits are all
        reported; None for a range of a large one, which may take as long as ``SLOWEST`` allows. Raises
        FileNotFoundError if there is no such file, ForbiddenError if it may not be read, and ArtifactError if
        the store gives no answer, or refuses.
        """
        if self._address.repository and is_offline():
            raise unreachable(self._address, name, "HF_HUB_OFFLINE is set")
        silences = 0
        for wait in (*RETRY_SECONDS, None):
            self.requests += 1
            try:
                data = self._range(url, start, end, name, seconds)
            except FileNotFoundError:
                raise
            except Exception as error:  # aiohttp's, botocore's, gcsfs's and the system's
                silences += isinstance(error, _SilentError)
                if wait is None or silences == SILENCES or self._lasts(error):
                    raise self._failed(name, error) from None
                if wait >= WAIT_SECONDS / 2:
                    self._tell(f"waiting: {name} of {self._address.text}, which does not answer")
                time.sleep(wait)
                continue
            self.nbytes += len(data)
            return data
        raise AssertionError("unreachable")

    def _range(self, url: str, start: int, end: int, name: str, seconds: float | None) -> bytes:
        """Makes one request."""
        if self._files is None:
            with wanrun.open_regular(Path(url.removeprefix("file://"))) as file:
                file.seek(start)
                return file.read(end - start)
        from asyncio import run_coroutine_threadsafe  # light commands read no URL

        came = _Came() if self._http else None
        cat = self._files._cat_file
        asked = cat(url, start=start, end=end) if came is None else self._get(url, start, end, came)
        future = run_coroutine_threadsafe(asked, self._files.loop)
        begun, before, silent, waits = time.monotonic(), 0, 0, 0
        most = seconds or SILENT_WAITS * WAIT_SECONDS + (end - start) / SLOWEST
        try:
            while True:
                with suppress(TimeoutError):
                    data = future.result(WAIT_SECONDS)
                    return bytes(memoryview(data if came is None else came.data)[: end - start])
                if future.done():
                    future.result()  # its own error is one of time
                waited = time.monotonic() - begun
                nbytes = 0 if came is None else came.nbytes
                silent = 0 if nbytes - before >= SLOWEST * WAIT_SECONDS else silent + 1
                before = nbytes
                waits += 1
                if (silent or seconds) and waits & (waits - 1) == 0:  # at first, and then ever more rarely
                    self._tell(f"waiting: {name} of {self._address.text}, {_said(came, waited)}")
                if came is not None and silent >= SILENT_WAITS:
                    raise _SilentError(_said(came, waited))
                if waited > most:
                    raise _LateError(f"{_said(came, waited)}, and not its end")
        finally:
            future.cancel()

    async def _get(self, url: str, start: int, end: int, came: _Came) -> None:
        """Requests a range over HTTP, and hangs up at its end, even if more is sent."""
        import aiohttp

        assert self._files is not None
        headers = {**self._headers, "Range": f"bytes={start}-{end - 1}"}
        session = await self._files.set_session()
        try:
            async with session.get(self._files.encode_url(url), headers=headers) as answer:
                if answer.status == 416:  # the file ends where the range begins
                    return
                if answer.status == 404:
                    raise FileNotFoundError
                if answer.status not in (200, 206):
                    raise _AnswerError(answer.status)
                before = start if answer.status == 200 else 0  # a server that knows no ranges sends all
                async for block in answer.content.iter_chunked(2**16):
                    came.data += block[max(0, before - came.nbytes) :]
                    came.nbytes += len(block)
                    if len(came.data) >= end - start:
                        return
        except aiohttp.TooManyRedirects:
            raise _RefusedError("redirects without end") from None
        except (ValueError, aiohttp.NonHttpUrlClientError):  # they have the URL, which may have a key
            raise _RefusedError("an invalid URL, or a redirect to one") from None

    def _tell(self, line: str) -> None:
        """Reports a wait; of all threads' waits, one at a time."""
        now = time.monotonic()
        if now - self._said >= 0.9 * WAIT_SECONDS:
            self._said = now
            with suppress(OSError):  # who reads it has gone
                self._report(line)

    def _lasts(self, error: Exception) -> bool:
        """Whether another try would end in the same way."""
        status = getattr(error, "status", None)
        local = self._files is None or isinstance(error, _LateError)
        return local or _refused(error) or (status is not None and status not in _PASSING)

    def _failed(self, name: str, error: Exception) -> ArtifactError:
        status = getattr(error, "status", None)
        found = re.sub(r"\S*://\S*", "(a URL)", " ".join(str(error).split()))[:200]
        if status is not None:
            found = f"HTTP {status}"
        elif self._files is None:
            found = getattr(error, "strerror", None) or found
        elif not isinstance(error, _SilentError | _RefusedError):
            found = f"{type(error).__name__}: {found}"
        if status in _PASSING or (status is None and self._files is not None and not _refused(error)):
            return unreachable(self._address, name, found)
        log_in = "; log in (hf auth login) or set HF_TOKEN" if self._address.repository else ""
        kind = ForbiddenError if status in (401, 403) or isinstance(error, PermissionError) else ArtifactError
        return kind(
            "not_found",
            f"{name} of {self._address.text} may not be read",
            found=found,
            remedy=f"check the address and your right to read it{log_in}",
        )


def _said(came: _Came | None, seconds: float) -> str:
    """Returns a text of how much has come in how long."""
    bytes_ = "" if came is None else f"{came.nbytes or 'no'} {'byte' if came.nbytes == 1 else 'bytes'} in "
    return f"{bytes_}{seconds:.0f} s"


def _refused(error: Exception) -> bool:
    """Whether another try would be refused too."""
    return isinstance(error, PermissionError | ValueError | TypeError | NotImplementedError)


def _file_system(scheme: str, text: str) -> Any:
    """Returns fsspec's file system for a scheme, not a shared one, so that it keeps no listings."""
    needed = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs"}[scheme]
    try:
        import fsspec

        importlib.import_module(needed)
    except ImportError as error:
        extra = {"s3fs": "pip install s3fs", "gcsfs": "pip install gcsfs"}.get(str(error.name))
        raise UsageError(
            "not_installed",
            f"{text} cannot be read without {error.name}",
            remedy=extra or "pip install '.[hub]' in the checkout",
        ) from None
    options: dict[str, Any] = {"skip_instance_cache": True}
    if needed == "aiohttp":
        import aiohttp

        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        # An answer that is compressed without being asked for is not unpacked: it could be of any size.
        client = {"timeout": limits, "trust_env": True, "auto_decompress": False}
        options |= {"client_kwargs": client, "encoded": True}
    return fsspec.filesystem(scheme, **options)
