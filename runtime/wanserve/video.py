"""One video: a request for videos, its state, and how a client sees it."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled"]

ENDED: tuple[Status, ...] = ("completed", "failed", "cancelled")
"""The states that do not change any more."""


class Upload(Struct, frozen=True):
    """A file that came with a request.

    Attributes:
        option: the option that it is given for.
        file: its name in the video's folder.
        name: its name at the client.
        kind: ``image`` or ``video``.
        digest: sha256 of its bytes.
    """

    option: str
    file: str
    name: str
    kind: Literal["image", "video"]
    digest: str


class Failure(Struct, frozen=True):
    """Why a video failed."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class Steered(Struct, frozen=True):
    """A prompt of a live video, and the number of the first frame that was made by it."""

    first: int
    prompt: str


Stopped = Literal["client", "limit", "no_reader", "server"]


class LiveState(Struct, kw_only=True):
    """What makes a video live, and how far it has come."""

    frames: Annotated[int | None, Meta(description="Frames that were asked for; null for no end.")] = None
    seconds: Annotated[float, Meta(description="The most seconds of the video.")]
    bytes: Annotated[int, Meta(description="Of its newest fragments, which are kept at most.")]
    made: Annotated[int, Meta(description="Frames that are made.")] = 0
    dropped: Annotated[int, Meta(description="Frames at the beginning that are not kept any more.")] = 0
    media_type: Annotated[str, Meta(description="With its codecs; empty before the first frames.")] = ""
    prompts: Annotated[list[Steered], Meta(description="The newest prompts, each with its first frame.")] = []
    first_seconds: Annotated[float | None, Meta(description="From the request to the first frames.")] = None
    late: Annotated[int, Meta(description="Chunks that took longer than they play.")] = 0
    stopped: Annotated[Stopped | None, Meta(description="What ended it before its length.")] = None


class Video(Struct, kw_only=True):
    """A video as it is stored. Times are seconds since 1970.

    Attributes:
        id: its name, which cannot be guessed.
        owner: the name of the key that asked for it; empty without keys.
        model: the name of the artifact.
        options: what was given, by the options' Python names, with the seed that was drawn; without media.
        media: the files that came with it.
        format: suffix of the videos, without the dot.
        shape: facts of the built profile: profile, size, num_frames, num_videos, fps, num_steps of all clips;
            and guided, how many steps have guidance, and windows, those of its steps or its clips, which a
            video that was stored before does not have.
        status: its state.
        rank: the order among the waiting videos.
        created: when it was accepted.
        started: when a worker last began it.
        ended: when it was completed, failed or cancelled.
        attempts: how often a worker began it.
        resolved: every option of the videos, as their metadata has them.
        seconds: what each phase took.
        bytes: of its files.
        warnings: of ``wanrun``, one line each.
        error: why it failed.
        unwanted: whether it is to be cancelled, while it runs.
        idempotency: the client's key for it.
        fingerprint: digest of the request, to compare with another one under the same key.
        live: what makes it live; None for a video that is answered once it is made.
    """

    id: str = field(default_factory=lambda: f"video_{secrets.token_hex(16)}")
    owner: str
    model: str
    options: dict[str, Any]
    media: list[Upload] = []
    format: str = "mp4"
    shape: dict[str, Any]
    status: Status = "queued"
    rank: float = 0.0
    created: float
    started: float | None = None
    ended: float | None = None
    attempts: int = 0
    resolved: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    bytes: int = 0
    warnings: list[str] = []
    error: Failure | None = None
    unwanted: bool = False
    idempotency: str | None = None
    fingerprint: str = ""
    live: LiveState | None = None

    @property
    def took(self) -> float | None:
        """Seconds from the last begin to the end; None before the end, and if it was never begun."""
        return None if self.started is None or self.ended is None else round(self.ended - self.started, 2)

    @property
    def plays(self) -> bool:
        """Whether there are frames to answer: all of a video that is completed, or those of a live one."""
        return self.status == "completed" or (self.live is not None and self.live.made > 0)

    @property
    def wants_no_more(self) -> bool:
        """Whether it is to be cancelled, or is a live one whose frames are all there: no worker is missed."""
        return self.unwanted or (self.live is not None and self.live.made == self.live.frames)

    def stopped_by(self, what: Stopped) -> None:
        """Notes what ends a live video before its length; the first one counts."""
        if (live := self.live) is not None and live.stopped is None and live.made != live.frames:
            live.stopped = what

    @property
    def over(self) -> bool:
        """Whether its state does not change any more."""
        return self.status in ENDED
