"""Values that Python code gives, as plain ones."""

from __future__ import annotations

import os
from typing import Any


def as_plain(value: Any) -> Any:
    """Values of NumPy as Python's, alone or in a list or tuple, and a path as text."""
    if type(value) in (list, tuple):
        return type(value)(one.tolist() if hasattr(one, "tolist") else one for one in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value
