"""What images and videos were encoded to last, kept for the next generation that is given the same ones."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wanrun.media.types import Inputs


@dataclass(frozen=True)
class Encoded:
    """What the encoding programs made, on the device, by the names of their outputs.

    Attributes:
        once: what is the same for all windows.
        window: what is the first window's own.
    """

    once: Mapping[str, Any]
    window: Mapping[str, Any]


class LastEncoded:
    """What the encoding programs made of the last inputs: one entry, on the device, for all profiles.

    The key is the ``Inputs`` object itself, by identity, and the digests of the programs. Its arrays may be
    gigabytes and are the caller's: they are neither compared nor kept alive.
    """

    def __init__(self) -> None:
        self._entry: tuple[weakref.ref[Inputs], tuple[str, ...], Encoded] | None = None

    def find(self, inputs: Inputs, programs: Sequence[str]) -> Encoded | None:
        """What these programs made of this object, if that was the last."""
        entry = self._entry
        if entry is None:
            return None
        last, made_by, encoded = entry
        return encoded if last() is inputs and made_by == tuple(programs) else None

    def keep(self, inputs: Inputs, programs: Sequence[str], encoded: Encoded) -> None:
        """Takes the place of what was kept before."""
        self._entry = weakref.ref(inputs), tuple(programs), encoded

    def forget(self) -> None:
        """Lets go of it."""
        self._entry = None
