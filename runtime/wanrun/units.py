"""Quantities in the unit that fits: three digits, and a decimal prefix."""

from __future__ import annotations

__all__ = ["in_hours"]

PREFIXES = ("", "k", "M", "G", "T", "P")


def in_bytes(number: float) -> str:
    """Returns a number of bytes, such as ``3.28 GB``."""
    return scaled(number, "B")


def scaled(number: float, unit: str) -> str:
    """Returns a number that is not negative with three digits and a prefix before its unit.

    Below 1 000 it has no prefix, and an integer no decimals.
    """
    for prefix in PREFIXES:
        if number < 999.5 or prefix == PREFIXES[-1]:
            break
        number /= 1000
    whole = not prefix and float(number).is_integer()
    decimals = 0 if whole or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{decimals}f} {prefix}{unit}"


def in_hours(seconds: float) -> str:
    """Returns a long time roughly, such as ``25 min``, ``2.5 h`` or ``11 h``."""
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 9.95 else f"{hours:.0f} h"


def in_minutes(seconds: float) -> str:
    """Returns a time as minutes and seconds, such as ``1:48``; from an hour on with hours, ``2:03:11``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
