"""One video: a request for videos, its state, and how a client sees it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, field

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


class Video(Struct, kw_only=True):
    """A video as it is stored. Times are seconds since 1970.

    Attributes:
        id: its name, which cannot be guessed.
        owner: the name of the key that asked for it; empty without keys.
        model: the name of the artifact.
        options: what was given, by the options' Python names, with the seed that was drawn; without media.
        media: the files that came with it.
        format: suffix of the videos, without the dot.
        shape: facts of the built profile: profile, size, num_frames, num_videos, fps, num_steps.
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

    @property
    def over(self) -> bool:
        """Whether its state does not change any more."""
        return self.status in ENDED


class Live(Struct, kw_only=True):
    """What is known of a video that waits or runs, beside what is stored.

    Attributes:
        phase: what its worker does; ``queued``, and ``cancelling`` once that was asked for.
        position: 1 for the video that is begun next; None for one that runs.
        step: denoising steps that are done.
        steps: denoising steps, of all windows.
        progress: percent of the time that it takes.
        remaining: seconds until its end; None if nothing was measured yet.
    """

    phase: str
    position: int | None = None
    step: int = 0
    steps: int | None = None
    progress: int = 0
    remaining: float | None = None


def shown(video: Video, live: Live | None, expires: float | None = None) -> dict[str, Any]:
    """Returns a video as the API answers it: OpenAI's fields, and our own beside them.

    Args:
        video: the video.
        live: what is known of one that has not ended; None for others.
        expires: seconds that ended videos are kept, or None.
    """
    given, shape = video.resolved or video.options, video.shape
    live = live or Live(phase="", progress=100 if video.status == "completed" else 0)
    return {
        "id": video.id,
        "object": "video",
        "model": video.model,
        "status": video.status,
        "phase": live.phase or None,
        "position": live.position,
        "progress": live.progress,
        "step": live.step if video.status == "in_progress" else None,
        "steps": live.steps or shape["num_steps"],
        "remaining_seconds": None if live.remaining is None else round(live.remaining, 2),
        "created_at": int(video.created),
        "started_at": _whole(video.started),
        "completed_at": _whole(video.ended) if video.status == "completed" else None,
        "ended_at": _whole(video.ended),
        "expires_at": None if video.ended is None or expires is None else int(video.ended + expires),
        "prompt": video.options["prompt"],
        "size": shape["size"],
        "seconds": f"{given.get('num_frames', shape['num_frames']) / shape['fps']:.4g}",
        "num_frames": given.get("num_frames", shape["num_frames"]),
        "fps": shape["fps"],
        "seed": video.options["seed"],
        "num_videos": shape["num_videos"],
        "format": video.format,
        "options": video.options,
        "resolved": video.resolved or None,
        "media": _media(video),
        "error": None if video.error is None else {"code": video.error.code, "message": video.error.message},
        "warnings": video.warnings,
        "stage_durations": {name: round(seconds, 4) for name, seconds in video.seconds.items()},
        "inference_time_s": round(sum(video.seconds.values()), 4) if video.status == "completed" else None,
        "attempts": video.attempts,
        "remixed_from_video_id": None,
    }


def _whole(time: float | None) -> int | None:
    return None if time is None else int(time)


def _media(video: Video) -> list[Mapping[str, Any]]:
    """The files of a video, each with its number among those of its option."""
    counts, listed = dict[str, int](), list[Mapping[str, Any]]()
    for one in video.media:
        index = counts[one.option] = counts.get(one.option, -1) + 1
        listed.append({"option": one.option, "index": index, "name": one.name, "kind": one.kind})
    return listed
