"""Keeps the encodings of the last images and videos for a next generation with the same ones."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wanrun.media.types import Inputs


@dataclass(frozen=True)
class Encoded:
    """The outputs of the encoding programs, on the device, by name.

    Attributes:
        once: outputs that are the same for all windows.
        window: outputs for the first window only.
    """

    once: Mapping[str, Any]
    window: Mapping[str, Any]


class LastEncoded:
    """The encodings of the last inputs: one entry, on the device, for all profiles.

    The key is the identity of the ``Inputs`` object, with the digests of the programs. The object's arrays
    may take gigabytes and belong to the caller: they are neither compared nor kept alive.
    """

    def __init__(self) -> None:
        self._entry: tuple[weakref.ref[Inputs], tuple[str, ...], Encoded] | None = None

    def find(self, inputs: Inputs, programs: Sequence[str]) -> Encoded | None:
        """Returns these programs' encodings of this object, if it was the last one, else None."""
        entry = self._entry
        if entry is None:
            return None
        last, made_by, encoded = entry
        return encoded if last() is inputs and made_by == tuple(programs) else None

    def keep(self, inputs: Inputs, programs: Sequence[str], encoded: Encoded) -> None:
        """Keeps encodings, instead of those kept before."""
        self._entry = weakref.ref(inputs), tuple(programs), encoded

    def forget(self) -> None:
        """Releases the entry."""
        self._entry = None
