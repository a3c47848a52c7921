"""Imports of torch, and of what is there for torch, fail in a process that finds this file on its path.

They fail as if the packages were not installed. Python imports a ``sitecustomize`` at its start.
"""

from __future__ import annotations

import sys

PACKAGES = frozenset({"torch", "diffusers", "transformers", "peft", "accelerate"})


class WithoutTorch:
    """A finder that comes before all others."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Says nothing of other packages.

        Raises:
            ModuleNotFoundError: for a package of ``PACKAGES``, or a part of one.
        """
        if name.partition(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r} in tests without torch", name=name)


sys.meta_path.insert(0, WithoutTorch)  # type: ignore[arg-type]
