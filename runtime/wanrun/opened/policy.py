"""The options of loading an artifact: one typed record, with a row for each option.

The keywords of ``wanrun.load``, the command line's options under "Loading" and the table in docs/commands.md
derive from ``LoadPolicy`` (``wanrun.rows``). A new option is one row here, and the line that uses it.
"""

from __future__ import annotations

__all__ = ["LoadPolicy"]

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from msgspec import Struct, field

from wanrun.errors import UsageError
from wanrun.errors import field as named
from wanrun.rows import option, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    Size = str | Sequence[int]
else:  # as ``wanrun.request.arguments.policy_of`` makes it of these
    Size = tuple[int, int]

LOADING: Final = "Loading"
"""The help's section of those options that the command line has too."""

SHAPE: Final = ("size", "num_frames", "num_videos", "guidance", "num_references")
"""The options that choose a profile by its shape."""


class LoadPolicy(Struct, frozen=True, kw_only=True):
    """The options of loading: what of an artifact is loaded, and how.

    Field names are the keywords of ``wanrun.load``. The order is that of the command's help.
    """

    size: Annotated[
        Size | None, option("(width, height) in pixels, or 832x480.", default="the first built")
    ] = None
    num_frames: Annotated[int | None, option("Frames of a video.", default="the first built")] = None
    num_videos: Annotated[int, option("Videos per prompt, as built.")] = 1
    guidance: Annotated[
        bool | None, option("Whether steps can have guidance, as built.", default="as the model is published")
    ] = None
    num_references: Annotated[int, option("Reference images, as built.")] = 0
    profile: Annotated[
        str | None,
        option("A built profile's name, instead of its shape.", default="the first built one that fits"),
    ] = None
    target: Annotated[
        str | None, option("A built target.", default="the one that matches this machine", section=LOADING)
    ] = None
    allow_compile: Annotated[
        bool, option("Compile programs without a fitting executable, into the user's cache.", section=LOADING)
    ] = False
    build: Annotated[
        bool,
        option(
            "Build a missing shape, like the nearest one, with wanbuild and into the user's cache.",
            section=LOADING,
        ),
    ] = False
    verify: Annotated[
        Literal["fast", "sha256"], option("Checksums of the weights to check while reading.", section=LOADING)
    ] = "fast"
    """'fast' checks every row's crc32c; 'sha256' also every parameter's sha256."""
    memory: Annotated[
        Literal["auto", "low", "stream"],
        option(
            "low: release the text encoder after the prompts are encoded, and hold one expert at a time; "
            "stream: also hold only some of its layers, and load the others in each step.",
            section=LOADING,
        ),
    ] = "auto"
    """'auto' keeps everything loaded, and as much of two experts as fits; 'stream' needs a profile that is
    built with --loop stream."""
    transfer: Annotated[
        Literal["auto", "direct", "staged"],
        option(
            "staged: each device of a mesh gets some rows of large weights, and devices exchange the rest; "
            "direct: each gets all that it needs.",
            section=LOADING,
        ),
    ] = "auto"
    """'auto' is 'staged' where the devices have their own memory or belong to several processes. CPU devices
    of one process share the host's copy, which costs nothing."""
    text_encoder_device: Annotated[
        str | None,
        option(
            "cpu: run the artifact's CPU program of the text encoder, not the accelerator's.",
            default="where the other programs run",
            value="DEVICE",
            section=LOADING,
        ),
    ] = None
    embeddings: Annotated[
        Literal["all", "artifact", "none"],
        option(
            "Neither read nor write the user's cache of prompt embeddings.", section=LOADING, sets="artifact"
        ),
    ] = field(default="all", name="no_embedding_cache")
    """The stored prompt embeddings that may be used: the artifact's and the user's cache ('all'), the
    'artifact' ones, or 'none'."""
    weights: Annotated[
        str | None,
        option("Folder of the weights.", default="in the artifact", value="DIR", section=LOADING),
    ] = None
    """It holds the components instead of the artifact's ``weights`` folder."""
    loop: Annotated[
        str | None,
        option(
            "'step', 'scan' or 'stream', the form of the denoising loop.",
            default="step if the profile has it",
        ),
    ] = None
    first_expert: Annotated[
        str | None, option("The transformer that is needed first.", default="the high-noise one")
    ] = None
    lazy: Annotated[bool, option("Load nothing before it is used.")] = False
    trial: Annotated[
        bool,
        option(
            "Use executables that were built elsewhere and have not been tried on this chip. It is for the "
            "trial itself: see ``wanrun.trust``."
        ),
    ] = False

    def check(self) -> None:
        """Checks the choices, and that the weights are there.

        Raises:
            UsageError: for an unknown choice, weights that do not exist, or a profile chosen in two ways.
        """
        for row in rows_of(LoadPolicy):
            if row.choices and getattr(self, row.name) not in row.choices:
                raise UsageError(
                    "invalid_value",
                    f"{row.name} cannot be {getattr(self, row.name)!r}",
                    expected="one of " + ", ".join(row.choices),
                )
        if self.text_encoder_device not in (None, "cpu"):
            what = f"{named('text_encoder_device')} cannot be {self.text_encoder_device!r}"
            raise UsageError("invalid_value", what, expected="cpu, or nothing")
        if self.weights is not None:
            weights_folder(self.weights)

    @property
    def low_memory(self) -> bool:
        """Whether as little as possible is kept in memory."""
        return self.memory != "auto"

    @property
    def form(self) -> str | None:
        """The form of the denoising loop, where one is chosen."""
        return "stream" if self.memory == "stream" else self.loop


def weights_folder(weights: str) -> Path:
    """Returns the folder that ``--weights`` names, with the contents of an artifact's ``weights`` folder.

    Cheap: it reads nothing, so a wrong ``--weights`` is refused before any long work. Raises UsageError if
    there is no such folder.
    """
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # nothing can have such a name
        if weights and (path := Path(weights).expanduser().resolve()).is_dir():
            return path
    remedy = "check --weights"
    if "://" in weights:
        weights, remedy = weights.partition("?")[0], "give the artifact's address: it is read from there"
    raise UsageError(
        "missing_file", f"there are no weights at {weights!r}", expected="a folder", remedy=remedy
    )
