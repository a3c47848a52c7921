"""Thin runtime for ahead-of-time artifacts of Wan video-diffusion models.

Importing this package loads no jax, numpy or orbax: ``wanrun --help`` has to answer at once.
``wanrun.load`` and ``wanrun.Pipeline`` are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Pipeline", "__version__", "load"]

if TYPE_CHECKING:
    from wanrun.generation.pipeline import Pipeline, load


def __getattr__(name: str) -> Any:
    if name in ("load", "Pipeline"):
        from wanrun.generation import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'wanrun' has no attribute {name!r}")
