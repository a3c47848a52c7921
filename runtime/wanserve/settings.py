"""The settings of a server, as ``wanrun serve`` reads them."""

from __future__ import annotations

__all__ = ["Settings"]

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from wanrun import Artifact

WITHOUT_VIDEO_SECONDS: Final = 7 * 86400.0
"""How long those that failed or were cancelled are kept by default: they are not removed for room."""


@dataclass(frozen=True)
class Settings:
    """What is served, where, and within which limits.

    Attributes:
        artifacts: each artifact by the name of its model; the first is loaded at the start.
        data: the folder of the videos.
        loading: keywords of ``wanrun.load`` for every artifact.
        build: whether a shape that an artifact lacks is built for a request.
        build_limit: pixels of all frames of a shape that may be built; None for twice those of the model's
            largest profile.
        workers: processes with a device; None for one for each device, or one for a mesh.
        host: address to listen on.
        port: its port; 0 for a free one.
        hosts: names in the header Host under which requests are taken; empty for any.
        origins: other sites whose pages may call the API (CORS).
        certificate: files of the TLS certificate and of its key; None for plain HTTP.
        max_waiting: videos that may wait, of all clients.
        max_upload: bytes of a request's body.
        max_pixels: pixels of an uploaded image or frame.
        body_seconds: within which a request's header and then its body must come, and the longest pause of a
            client that reads an answer.
        grace_seconds: that a running video has to end after SIGTERM; after that it waits for the next start.
        attempts: how often a video is begun before it fails because its worker is killed each time.
        keep_seconds: how long ended videos are kept; None for ever, but see ``kept_seconds``.
        keep_bytes: bytes of videos that are kept, the newest first; None for no bound.
        max_live_seconds: of a live video; of its device ``live_wait_seconds`` more.
        live_wait_seconds: that a live video waits for a reader, at first and after the last one has gone.
        live_bytes: of a live video that are kept, its newest fragments.
    """

    artifacts: Mapping[str, Artifact]
    data: Path
    loading: Mapping[str, Any] = field(default_factory=dict)
    build: bool = False
    build_limit: int | None = None
    workers: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    certificate: tuple[Path, Path] | None = None
    max_waiting: int = 100
    max_upload: int = 64 << 20
    max_pixels: int = 50_000_000
    body_seconds: float = 30.0
    grace_seconds: float = 30.0
    attempts: int = 3
    keep_seconds: float | None = None
    keep_bytes: int | None = None
    max_live_seconds: float = 600.0
    live_wait_seconds: float = 10.0
    live_bytes: int = 10**9

    def kept_seconds(self, status: str) -> float | None:
        """Returns how long an ended video of this state is kept; None for ever."""
        if self.keep_seconds is None and status != "completed":
            return WITHOUT_VIDEO_SECONDS
        return self.keep_seconds
