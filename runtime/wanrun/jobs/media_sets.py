"""The media of a run's jobs: every distinct set is read once for its checks, and one set at a time is kept.

A set whose outputs all exist is not decoded if digests suffice for the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.errors import UsageError
from wanrun.media.types import Inputs, Media, check_media
from wanrun.media.windows import num_segments
from wanrun.timing.timings import Timings


@dataclass(frozen=True)
class Checked:
    """The facts about checked media.

    Attributes:
        facts: their entries of the metadata.
        num_frames: frames of the result if the media decide their number, else None.
        num_segments: the number of windows; the steps run once for each window.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    num_frames: int | None = None
    num_segments: int = 1


@dataclass(frozen=True)
class MediaSet:
    """The media of a job, and the profile that they are prepared for.

    Attributes:
        profile: the profile's name.
        media: the given images and videos.
    """

    profile: str
    media: Media


class MediaSets:
    """Reads the media of jobs; jobs that share media get the same object, so that it is encoded once.

    Args:
        manifest: the artifact's manifest.
        timings: where the time is recorded.
    """

    def __init__(self, manifest: Manifest, timings: Timings) -> None:
        self._manifest, self._timings = manifest, timings
        self._checked: dict[MediaSet, Checked] = {}
        self._digested: dict[MediaSet, Checked] = {}
        # Not the errors themselves: their tracebacks keep the arrays that were read.
        self._refused: dict[MediaSet, Callable[[], UsageError]] = {}
        self._kept: tuple[MediaSet, Inputs | None] | None = None
        self._keeps = False

    def check(self, media: MediaSet) -> Checked:
        """Reads and checks media at the first call for them, and returns the facts.

        Args:
            media: the media of a job.

        Raises:
            UsageError: if the model does not take them, or if they cannot be used.
        """
        return self._once(media, self._checked, self._check)

    def digest(self, media: MediaSet) -> Checked:
        """Returns the same facts, without decoding if digests suffice. Then the media may be unusable.

        Raises:
            UsageError: if the model does not take them, or if they cannot be read.
        """
        if media in self._checked:
            return self._checked[media]
        return self._once(media, self._digested, self._digest)

    def keep(self, media: MediaSet) -> None:
        """Notes that the first job to make takes these checked media.

        Their arrays are kept for ``inputs`` if they were read last. Later calls of ``check`` keep no arrays.
        """
        if not self._keeps:
            self._keeps = True
            if self._kept is not None and self._kept[0] != media:
                self._kept = None

    def _once(
        self,
        media: MediaSet,
        found: dict[MediaSet, Checked],
        find: Callable[[MediaSet], Checked],
    ) -> Checked:
        """Returns the facts found about media, or raises the error of the first attempt again."""
        if media not in found and media not in self._refused:
            try:
                found[media] = find(media)
            except UsageError as error:
                self._refused[media] = partial(
                    UsageError, error.what, expected=error.expected, found=error.found, remedy=error.remedy
                )
        if media in self._refused:
            raise self._refused[media]()
        return found[media]

    def _check(self, media: MediaSet) -> Checked:
        if not self._keeps:
            self._kept = None  # never two sets in memory
        inputs = self._read(media)
        if not self._keeps:
            self._kept = media, inputs
        return self._facts(media, inputs)

    def _digest(self, media: MediaSet) -> Checked:
        facts = None
        if self._manifest.model.task.inputs:
            with self._timings.phase("read_media"):
                from wanrun.media.prepare import media_facts  # imports Pillow

                facts = media_facts(self._manifest, self._profile(media), media.media)
        return self.check(media) if facts is None else Checked(facts)

    def inputs(self, media: MediaSet) -> Inputs | None:
        """Returns checked media as arrays for the pipeline; None if there are none.

        Raises:
            UsageError: if the media can no longer be read, or have changed since the check.
        """
        checked = self.check(media)
        if self._kept is None or self._kept[0] != media:
            self._kept = None  # never two sets in memory
            inputs = self._read(media)
            _check_unchanged(checked.facts, self._facts(media, inputs).facts)
            self._kept = media, inputs
        return self._kept[1]

    def _profile(self, media: MediaSet) -> Profile:
        return self._manifest.profiles[media.profile]

    def _facts(self, media: MediaSet, inputs: Inputs | None) -> Checked:
        if inputs is None:
            return Checked()
        segments = 1
        if inputs.num_frames is not None:
            segments = num_segments(
                inputs.num_frames, self._profile(media).num_frames, inputs.segment_overlap
            )
        return Checked(dict(inputs.facts), inputs.num_frames, segments)

    def _read(self, media: MediaSet) -> Inputs | None:
        if not self._manifest.model.task.inputs:
            check_media(self._manifest, media.media)
            return None
        with self._timings.phase("read_media"):
            from wanrun.media.prepare import load_media

            inputs = load_media(self._manifest, self._profile(media), media.media)
        return inputs if inputs.arrays else None


def _check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UsageError if media have changed since the check, which may be hours ago."""
    for name in before:
        if now[name] != before[name]:
            raise UsageError(
                "an image or video was changed while the run was going on",
                expected=f"{name} {before[name]}",
                found=now[name],
                remedy="run wanrun again",
            )
