"""A profile's shape: with its build options, the model and the target, it determines its programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from wanrun.artifact.programs import Profile
from wanrun.artifact.record import MAX_SIZE
from wanrun.errors import UsageError, field

_OPTIONS: Mapping[str, str] = MappingProxyType(
    {"width": "size", "height": "size", "num_references": "reference_images"}
)
"""The options that decide a number of a shape, where they have another name."""


@dataclass(frozen=True)
class Shape:
    """The static shape of one generation, which a profile's name says.

    Width and height are pixels, ``num_frames`` is 4n + 1, and ``num_videos`` is per prompt; ``guidance`` is
    whether steps can have classifier-free guidance. Each reference image is a latent frame in front of the
    video's. Raises UsageError for a number that no manifest may hold.
    """

    width: int
    height: int
    num_frames: int
    num_videos: int
    guidance: bool
    num_references: int = 0

    def __post_init__(self) -> None:
        for size in fields(self):
            if getattr(self, size.name) > MAX_SIZE:
                option = field(_OPTIONS.get(size.name, size.name))
                raise UsageError("unsupported", f"{option} cannot be built", expected=f"{MAX_SIZE} at most")

    @classmethod
    def of(cls, profile: Profile) -> Shape:
        """Returns the shape of a profile."""
        return cls(**{size.name: getattr(profile, size.name) for size in fields(cls)})
