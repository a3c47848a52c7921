"""The server's log: one line for each event of a job, a request or a worker, for people or as JSON.

No line above the level debug has a prompt, or the words of a search.
"""

from __future__ import annotations

import json
import logging
import re
from logging import DEBUG, INFO, WARNING
from typing import Any, Final

from wanrun.errors import escaped

__all__ = ["DEBUG", "INFO", "LOG", "WARNING", "start_log", "tell"]

LOG: Final = logging.getLogger("wanserve")


def tell(event: str, level: int = INFO, **facts: Any) -> None:
    """Logs an event.

    Args:
        event: what has happened, in a word or two that are the same each time.
        level: of ``logging``.
        facts: what it has happened to, by name; without None.
    """
    LOG.log(level, event, extra={"facts": {name: one for name, one in facts.items() if one is not None}})


class TextLines(logging.Formatter):
    """A line for people: time, level, event, and ``name=value`` for each fact."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        facts = getattr(record, "facts", {})
        shown = [f"{name}={_shown(str(facts[name]))}" for name in facts]
        return escaped(" ".join([super().formatMessage(record), *shown]))


def _shown(text: str) -> str:
    """Returns the text of a fact, in quotes where it could be taken for several facts."""
    return json.dumps(text, ensure_ascii=False) if re.search(r"[\s\"=]", text) else text


class JsonLines(logging.Formatter):
    """An object of JSON in each line: ``time`` (seconds since 1970), ``level``, ``event``, and the facts."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(record.created, 3), "level": record.levelname.lower()}
        line |= {"event": record.getMessage(), **getattr(record, "facts", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # in ASCII: a file's name may have bytes that are no text


def start_log(level: str, format: str) -> None:
    """Has the log written to standard error.

    Args:
        level: debug, info, warning or error. Libraries are heard from warnings on.
        format: text or json.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    least = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(handlers=[handler], level=max(least, WARNING))
    LOG.setLevel(least)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # clients get an error for a broken form
