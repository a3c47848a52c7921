"""A video as the API answers it: the record that is sent, of which its schema is made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from wanserve.progress import BUILD, CANCELLING, QUEUED, VideoProgress
from wanserve.route import FORMATS
from wanserve.video import Failure, LiveState, Status, Video

_PHASES = (QUEUED, BUILD, "loading", "media", "text", "steps", "decode", "encode", "live", CANCELLING)
Phase = Annotated[str, Meta(extra_json_schema={"enum": _PHASES})]


class VideoFile(Struct, frozen=True):
    """A file that came with a request."""

    option: str
    index: Annotated[int, Meta(description="Its number among the files of the option, from 0.")]
    name: Annotated[str, Meta(description="Its name at the client.")]
    kind: Literal["image", "video"]


class ShownVideo(Struct, frozen=True, kw_only=True):
    """A video as the API answers it: OpenAI's fields, and our own. Times are whole seconds since 1970."""

    id: str
    object: Literal["video"]
    model: str
    status: Status
    phase: Annotated[Phase | None, Meta(description="What is done for it.")]
    position: Annotated[int | None, Meta(description="Place among those that wait; 1 is next.")]
    progress: Annotated[
        int,
        Meta(ge=0, le=100, description="Percent of the time that it takes; of a live one, of its frames."),
    ]
    step: int | None
    steps: Annotated[int | None, Meta(description="Denoising steps; null of a live video.")]
    preview: Annotated[int | None, Meta(description="The step of its newest preview, while it is made.")]
    remaining_seconds: Annotated[float | None, Meta(description="From the times of earlier videos.")]
    created_at: int
    started_at: int | None
    completed_at: int | None
    ended_at: int | None
    expires_at: int | None
    prompt: str
    size: str
    seconds: str
    num_frames: int
    fps: float
    seed: int
    num_videos: int
    format: Annotated[str, Meta(extra_json_schema={"enum": tuple(FORMATS)})]
    options: Annotated[dict[str, Any], Meta(description="What was given, to send again.")]
    resolved: Annotated[dict[str, Any] | None, Meta(description="Every option, as the video's metadata.")]
    media: list[VideoFile]
    error: Failure | None
    warnings: list[str]
    stage_durations: dict[str, float]
    inference_time_s: float | None
    attempts: Annotated[int, Meta(description="How often it was begun.")]
    live: Annotated[LiveState | None, Meta(description="Of a live video, how far it plays.")]
    remixed_from_video_id: None


def shown(video: Video, progress: VideoProgress | None, expires: float | None = None) -> ShownVideo:
    """Returns a video as the API answers it.

    ``progress`` is how far one is that has not ended; None for others. ``expires`` are the seconds that ended
    videos are kept, or None.
    """
    given, shape = video.resolved or video.options, video.shape
    frames = given.get("num_frames", shape["num_frames"]) if video.live is None else video.live.made
    completed = video.status == "completed"
    far = progress or VideoProgress(video, phase="", percent=100 if completed else 0)
    return ShownVideo(
        id=video.id,
        object="video",
        model=video.model,
        status=video.status,
        phase=far.phase or None,
        position=far.position,
        progress=far.percent,
        step=far.step if video.status == "in_progress" and video.live is None else None,
        steps=(far.steps or shape["num_steps"]) if video.live is None else None,
        preview=None if far.preview is None else far.preview[0],
        remaining_seconds=None if far.remaining is None else round(far.remaining, 2),
        created_at=int(video.created),
        started_at=_whole(video.started),
        completed_at=_whole(video.ended) if completed else None,
        ended_at=_whole(video.ended),
        expires_at=None if video.ended is None or expires is None else int(video.ended + expires),
        prompt=video.options["prompt"],
        size=shape["size"],
        seconds=f"{frames / shape['fps']:.4g}",
        num_frames=frames,
        fps=shape["fps"],
        seed=video.options["seed"],
        num_videos=shape["num_videos"],
        format=video.format,
        options=video.options,
        resolved=video.resolved or None,
        media=_media(video),
        error=video.error,
        warnings=video.warnings,
        stage_durations={name: round(seconds, 4) for name, seconds in video.seconds.items()},
        inference_time_s=round(sum(video.seconds.values()), 4) if completed and video.seconds else None,
        attempts=video.attempts,
        live=video.live,
        remixed_from_video_id=None,
    )


def _whole(time: float | None) -> int | None:
    return None if time is None else int(time)


def _media(video: Video) -> list[VideoFile]:
    """The files of a video, each with its number among those of its option."""
    counts, listed = dict[str, int](), list[VideoFile]()
    for one in video.media:
        index = counts[one.option] = counts.get(one.option, -1) + 1
        listed.append(VideoFile(one.option, index, one.name, one.kind))
    return listed
