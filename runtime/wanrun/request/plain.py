"""Converts values of NumPy and paths to plain values of Python."""

from __future__ import annotations

import os
from typing import Any


def as_plain(value: Any) -> Any:
    """Returns a value of NumPy, alone or in a list or tuple, as Python's, and a path as a string."""
    if type(value) in (list, tuple):
        return type(value)(one.tolist() if hasattr(one, "tolist") else one for one in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value
