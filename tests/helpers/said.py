"""What a command has said on standard error."""

from __future__ import annotations


def complaints(errors: str) -> list[str]:
    """Its lines, but for what it was waiting for, which a slow machine has it say every 10 s."""
    return [line for line in errors.splitlines() if not line.startswith("waiting: ")]
