"""Remote artifacts: opened by their manifest, fetched, pinned to a revision, and signed.

The extra ``hub`` installs the packages for addresses such as ``hf://OWNER/NAME``. The exported names are
resolved on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False
__all__ = ["check_signed", "fetch", "find", "load", "open_artifact"]

if TYPE_CHECKING:
    from typing import Any

    from wanhub.loading import check_signed, fetch, find, load, open_artifact


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("wanhub.loading"), name)
    raise AttributeError(f"module 'wanhub' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
