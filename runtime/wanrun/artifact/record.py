"""The base of all records of a manifest: they are immutable, and an unknown field is an error."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from msgspec import Meta, Struct

from wanrun.files import plain_relative


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """One record of the manifest; msgspec checks names and types of its fields while it decodes."""


class ListedFile(Record, frozen=True, kw_only=True):
    """A file of the artifact.

    Attributes:
        file: its path relative to the artifact's folder.
        sha256: digest of its bytes, hexadecimal.
    """

    what: ClassVar[str] = "a recorded output"
    """The kind of file, for messages."""

    file: str
    sha256: str

    def __post_init__(self) -> None:
        plain_relative(self.file, self.what)


MAX_SIZE: Final = 2**20
"""The largest count in a manifest: four times the largest published one, a vocabulary."""

AtLeastOne = Annotated[int, Meta(ge=1, le=MAX_SIZE)]
NotNegative = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
FileBytes = Annotated[int, Meta(ge=0, le=2**53)]

Dtype = Literal["bfloat16", "float32"]
"""A dtype for stored weights and for computing."""
