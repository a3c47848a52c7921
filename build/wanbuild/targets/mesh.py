"""Meshes as users write them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from wanrun.artifact.mesh import AXES, MAX_DEVICES, normal
from wanrun.errors import UsageError, shortened

USES: Mapping[str, str] = MappingProxyType(
    {
        "data": "the guidance pair, then videos",
        "ring": "the sequence, with keys that go round",
        "fsdp": "the sequence, and parameters that are gathered layer by layer",
        "context": "the sequence, with heads that are exchanged",
        "tensor": "heads and feed-forward",
    }
)
"""What the devices along each axis share, for the help."""


def parse_mesh(text: str) -> dict[str, int]:
    """Parses ``data=2,context=4``; axes of one device are left out.

    Raises UsageError for an unknown axis, one that is named twice, or a size that is not a positive number.
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text.strip() else ():
        axis, _, size = part.strip().partition("=")
        if axis not in AXES:
            raise UsageError(
                "unknown_name",
                "there is no such axis",
                expected=f"one of {', '.join(AXES)}",
                found=shortened(axis),
            )
        if axis in sizes:
            raise UsageError("conflict", f"{axis} is given twice", found=shortened(text))
        if not (size.isascii() and size.isdigit() and 1 <= int(size[:9]) <= MAX_DEVICES):
            raise UsageError(
                "missing_parameter",
                f"there is no number of devices for {axis}",
                expected=f"{axis}=2",
                found=shortened(part),
            )
        sizes[axis] = int(size)
    return normal(sizes)
