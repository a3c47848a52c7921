"""The requests of the commands that share artifacts: typed records, with a row for each option."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from wanrun.claims import ARTIFACT, FOLDER
from wanrun.errors import UsageError, quoted
from wanrun.rows import ARGUMENT, option

Targets = Annotated[Sequence[str], option("Repeatable; a built target.", default="all", flag="--target")]
"""The targets that are shared; empty for all."""

Licence = Annotated[
    str | None,
    option("Of the weights, such as Apache-2.0.", default="that of a known source", value="SPDX"),
]


class OciRequest(Struct, frozen=True):
    """What ``wanbuild oci`` writes."""

    artifact: Annotated[Path, ARGUMENT]
    """The artifact's folder."""
    output: Annotated[
        Path,
        option(
            "The layout's folder: a new one, or a layout, whose other images stay.", short="-o", writes=FOLDER
        ),
    ]
    tag: Annotated[str, option("The image's name in the layout.")] = "latest"
    targets: Targets = ()
    licence: Licence = None


class PushRequest(Struct, frozen=True):
    """What ``wanbuild push`` publishes; raises UsageError for a name that no repository can have."""

    artifact: Annotated[Path, ARGUMENT]
    """The artifact's folder."""
    repository: Annotated[str, ARGUMENT]
    """``OWNER/NAME``; it is made if it is not there."""
    targets: Targets = ()
    private: Annotated[bool, option("Make a new repository private.")] = False
    licence: Licence = None
    """As the hub names licences (``apache-2.0``)."""
    example: Annotated[
        Path | None, option("A video that wanrun made from it, for the model card.", value="VIDEO")
    ] = None

    def __post_init__(self) -> None:
        from wanbuild.hub.repository import is_hub_id

        if not is_hub_id(self.repository):
            raise UsageError(
                "invalid_value",
                "the hub has no repository of this name",
                expected="OWNER/NAME",
                found=quoted(self.repository),
            )


class PullRequest(Struct, frozen=True):
    """What ``wanbuild pull`` fetches."""

    address: Annotated[str, ARGUMENT]
    """``hf://OWNER/NAME[@REVISION]``, or the URL of an artifact's folder."""
    output: Annotated[
        Path | None,
        option("A folder.", default="the user's cache", value="DIR", short="-o", writes=ARTIFACT),
    ] = None
    """A new or empty one, or one that an earlier pull has begun."""
    targets: Annotated[
        Sequence[str],
        option("Repeatable; a built target.", default="those that fit this machine", flag="--target"),
    ] = ()
    whole: Annotated[bool, option("Fetch all of the artifact.", flag="--all-targets")] = False
