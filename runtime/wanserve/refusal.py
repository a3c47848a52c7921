"""What a client gets when a request cannot be served: a status and one line, in OpenAI's form."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, cast

from wanrun.errors import WanError, escaped, field, quoted
from wanserve.codes import AnyCode
from wanserve.video import Failure, Video

_PATH = re.compile(r"(?<![\w.~/-])(?:file://)?~?/(?:[^\s/;,'\")]+/)*([^\s/;,'\")]*)")


_NO_NAMES: Mapping[str, str] = MappingProxyType({})


def without_paths(text: str, names: Mapping[str, str] = _NO_NAMES) -> str:
    """Returns a text with only the last name of each absolute path: no answer has a path of the server.

    ``names`` has what stands for known paths: a client's own names, and paths that have spaces.
    """
    for path in sorted(names, key=len, reverse=True):
        text = text.replace(path, names[path])
    return _PATH.sub(lambda match: match[1] or "/", text)


class RefusedError(Exception):
    """A request that is answered with an error, an HTTP status and one line.

    Args:
        what: what is wrong.
        status: the HTTP status.
        code: the kind of error, for programs.
        param: the field that is wrong; None for no single one.
        headers: headers of the answer.
        expected: what should have been there.
        found: what was there.
        remedy: what to do about it.
    """

    def __init__(
        self,
        what: str,
        status: int = 400,
        *,
        code: AnyCode = "invalid_value",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        expected: str | None = None,
        found: str | None = None,
        remedy: str | None = None,
    ) -> None:
        given = {"expected": expected, "found": found, "remedy": remedy}
        self.fields = {name: text for name, text in given.items() if text is not None}
        told = (text if name == "remedy" else f"{name} {text}" for name, text in self.fields.items())
        super().__init__("; ".join([what, *told]))
        self.status, self.code, self.param, self.headers = status, code, param, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON, which the openai client reads."""
        texts = {"message": str(self), **self.fields}
        shown = {name: escaped(without_paths(text)) for name, text in texts.items()}
        return {"error": {**shown, "type": kind(self.status), "param": self.param, "code": self.code}}


@contextlib.contextmanager
def told_with(names: Mapping[str, str]) -> Iterator[None]:
    """Puts names in the place of paths into the message of a refusal; see ``without_paths``."""
    try:
        yield
    except RefusedError as error:
        error.args = (without_paths(str(error), names),)
        error.fields = {name: without_paths(text, names) for name, text in error.fields.items()}
        raise


def whole(text: object, least: int, most: int, param: str) -> int:
    """Returns a number that a client has written; raises RefusedError if it is not one, or out of range."""
    digits = str(text) if isinstance(text, str) or (type(text) is int and abs(text) < 1 << 60) else ""
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18 and least <= int(digits) <= most):
        found = escaped(text[:20]) if isinstance(text, str) else quoted(text)
        raise RefusedError(f"{param} cannot be {found}", param=param, expected=f"{least} to {most}")
    return int(digits)


def one_of(text: str, choices: Sequence[str], param: str) -> str:
    """Returns a text that is one of the choices; raises RefusedError if it is none of them."""
    if text not in choices:
        raise RefusedError(f"{param} cannot be {text[:20]!r}", param=param, expected=", ".join(choices))
    return text


def kind(status: int) -> str:
    """Returns OpenAI's type of an error."""
    special = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return special.get(status, "server_error" if status >= 500 else "invalid_request_error")


def unknown(name: str, expected: str | None = None, remedy: str | None = None) -> RefusedError:
    """Returns the error of an unknown field."""
    what = f"unknown field {name[:60]!r}"
    return RefusedError(what, param=name[:60], code="unknown_parameter", expected=expected, remedy=remedy)


def full(number: int, limit: int, owner: str | None, retry: str) -> RefusedError:
    """Returns the error for ``number`` new jobs that have no room: at most ``limit`` may wait.

    The limit is that of an ``owner``; None for everybody's. After ``retry`` seconds there may be room.
    """
    if number > max(limit, 1):
        return RefusedError(
            f"{number} jobs are more than may wait",
            429,
            code="queue_full",
            expected=f"at most {limit}",
            remedy="send fewer seeds",
        )
    whose = "the queue is full" if owner is None else "too many jobs of this key wait"
    expected, headers = f"at most {limit}", {"Retry-After": retry}
    return RefusedError(
        whose, 429, code="queue_full", headers=headers, expected=expected, remedy="try again later"
    )


def failed(failure: Failure, id: str) -> RefusedError:
    """Returns the answer about a video that has failed."""
    code = cast(AnyCode, failure.code)  # as a release before this one may have named it
    return RefusedError(failure.message, 500, code=code, headers={"x-video-id": id})


def absent(what: str, video: Video) -> RefusedError:
    """Returns the answer about what a video does not have in its status, such as content."""
    codes: dict[str, AnyCode] = {"completed": "already_ended", "failed": "failed", "cancelled": "cancelled"}
    code = codes.get(video.status, "not_ready")
    return RefusedError(f"there is no {what}: the video is {video.status}", 409, code=code)


def closing() -> RefusedError:
    """Returns the error of a request that comes to a server that ends."""
    return RefusedError("the server is ending", 503, code="closing", headers={"Retry-After": "10"})


def withheld(problem: str, id: str) -> RefusedError:
    """Returns the error of a request that waits for a video, which waits for the next start of the server."""
    headers = {"x-video-id": id}
    return RefusedError(f"{problem}; the video waits for that", 503, code="withheld", headers=headers)


def refused(
    error: WanError,
    spell: Callable[[str], str],
    asked: Sequence[str] = (),
    builds: bool = False,
) -> RefusedError:
    """Returns the answer for a request that ``wanrun`` refuses, with its own line.

    ``spell`` returns the name under which a client knows an option. ``asked`` are the options that the error
    is about, if it names none. ``builds`` says whether the server builds what is lacking.
    """
    told = type(error)(**{**error.parts, "expected": _of_clients(error.expected, " or ")})
    told.remedy = _of_clients(error.remedy, ", or ", builds)
    named = told.fields or asked
    what = type(error)(error.code, told.what).spelled(spell)
    param, words = spell(named[0]) if named else None, told.words(spell)
    expected, found, remedy = map(words.get, ("expected", "found", "remedy"))
    return RefusedError(what, code=error.code, param=param, expected=expected, found=found, remedy=remedy)


def _of_clients(text: Any, between: str, builds: bool = False) -> Any:
    """Returns a text without what a client cannot do: build, or name a folder; None if nothing is left."""
    if not isinstance(text, str):
        return text
    own = ("wanbuild", "" if builds else "build one", field("build"), "folder of images")
    kept = [one for one in text.split(between) if not any(word and word in one for word in own)]
    return between.join(kept) or None
