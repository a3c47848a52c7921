"""The images and videos of a run's jobs: each distinct set is read once for its checks, and one is kept.

A set whose outputs all exist is not decoded if digests suffice for the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wanrun import Generation, Media, Timings
from wanrun.errors import UsageError
from wanrun.media.inputs import Inputs

_Set = tuple[str, Media]
"""The name of the profile that media are prepared for, and the media."""


class MediaSets:
    """Reads the media of jobs; jobs that share media get the same object, so that it is encoded once.

    The arrays of one set are kept: those that ``inputs`` returned last, or before its first call those that
    were read first, which are probably the first job's.
    """

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._decoded: dict[_Set, Inputs] = {}  # without arrays
        self._digested: dict[_Set, Inputs] = {}
        self._refused: dict[_Set, UsageError] = {}
        self._kept: tuple[_Set, Inputs] | None = None

    def facts(self, generation: Generation, digests: bool = False) -> Inputs | None:
        """Returns a generation's media without arrays, and reads them at the first call; None for text only.

        If ``digests`` are enough, the media may turn out to be unusable later. Raises UsageError if they
        cannot be used, or with digests if they cannot be read.
        """
        if (key := _set_of(generation)) is None:
            return None
        if key in self._refused:
            raise self._refused[key].again()
        if (known := self._decoded.get(key) or (self._digested.get(key) if digests else None)) is not None:
            return known
        try:
            return self._digest(key, generation) if digests else self._decode(key, generation)
        except UsageError as error:
            self._refused[key] = error.again()  # the traceback would keep the arrays that were read
            raise

    def inputs(self, generation: Generation) -> Inputs | None:
        """Returns checked media as arrays, one object for jobs in a row that share them; None for text only.

        Raises UsageError if the media can no longer be read, or have changed since the check.
        """
        checked, key = self.facts(generation), _set_of(generation)
        if checked is None or key is None:
            return None
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # never two sets in memory
            inputs = self._read(generation)
            _check_unchanged(checked.facts, inputs.facts)
            self._kept = key, inputs
        return self._kept[1]

    def spare(self, generation: Generation) -> None:
        """Drops the arrays of a generation that is not to be made."""
        if self._kept is not None and self._kept[0] == _set_of(generation):
            self._kept = None

    def _decode(self, key: _Set, generation: Generation) -> Inputs:
        inputs = self._read(generation)
        self._kept = self._kept or (key, inputs)
        self._decoded[key] = replace(inputs, arrays={})
        return self._decoded[key]

    def _digest(self, key: _Set, generation: Generation) -> Inputs:
        """Returns the facts of media by their digests, or by decoding them if these are not enough."""
        with self._timings.phase("read_media"):
            from wanrun.media.facts import media_facts  # imports Pillow

            facts = media_facts(generation.manifest, generation.profile, key[1])
        if facts is None:
            return self._decode(key, generation)
        self._digested[key] = Inputs(facts=facts)
        return self._digested[key]

    def _read(self, generation: Generation) -> Inputs:
        with self._timings.phase("read_media"):
            inputs = generation.read_media()
        assert inputs is not None  # there are media to read
        return inputs


def _set_of(generation: Generation) -> _Set | None:
    """Returns a key that generations with the same arrays share; None if no media are read."""
    return None if generation.media is None else (generation.profile.name, generation.media)


def _check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UsageError if media have changed since the check, which may be hours ago."""
    for name in before:
        if now[name] != before[name]:
            raise UsageError(
                "changed",
                "an image or video was changed while the run was going on",
                expected=f"{name} {before[name]}",
                found=now[name],
                remedy="run wanrun again",
            )
