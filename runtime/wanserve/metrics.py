"""What is counted, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from wanserve.video import Video

TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """The counters of a server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._videos = self._counter("videos", "Jobs that have ended.", "model", "status")
        self._failures = self._counter("failures", "Jobs that have failed.", "code")
        self._requests = self._counter("requests", "Answers over HTTP.", "method", "status")
        self._restarts = self._counter("worker_restarts", "Workers that were started again.")
        self._phases = Histogram(
            "wanserve_phase_seconds",
            "Seconds of a job's phases.",
            ["phase"],
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._wait = Histogram(
            "wanserve_wait_seconds",
            "Seconds that jobs have waited.",
            registry=self._registry,
            buckets=_SECONDS,
        )

        self._live_first = Histogram(
            "wanserve_live_first_frame_seconds",
            "Seconds from the request for a live video to its first frames.",
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._live_frames = self._counter("live_frames", "Frames of live videos.")
        self._live_late = self._counter("live_late_chunks", "Chunks that took longer than they play.")
        self._live_rate = Gauge(
            "wanserve_live_frames_per_second", "Of the newest chunk of a live video.", registry=self._registry
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"wanserve_{name}", text, labels, registry=self._registry)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Shows a value that is asked for whenever the metrics are."""
        Gauge(f"wanserve_{name}", text, registry=self._registry).set_function(value)

    def ended(self, video: Video) -> None:
        """Counts a video that has ended."""
        self._videos.labels(video.model, video.status).inc()
        if video.error is not None:
            self._failures.labels(video.error.code).inc()
        if video.started is not None:
            self._wait.observe(max(video.started - video.created, 0.0))

    def phases(self, seconds: Mapping[str, float]) -> None:
        """Takes what the phases of a video took."""
        for phase, value in seconds.items():
            self._phases.labels(phase).observe(value)

    def chunk(self, frames: int, seconds: float, late: bool, first_seconds: float | None) -> None:
        """Counts a chunk of a live video, and the seconds that it took.

        It is ``late`` if it took longer than it plays, and others before it were played meanwhile.
        ``first_seconds`` is, for the first chunk, the time from the request to its frames; None for others.
        """
        self._live_frames.inc(frames)
        self._live_late.inc(int(late))
        self._live_rate.set(frames / max(seconds, 1e-9))
        if first_seconds is not None:
            self._live_first.observe(first_seconds)

    def answered(self, method: str, status: int) -> None:
        """Counts an answer."""
        known = method if method in ("GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS") else "other"
        self._requests.labels(known, str(status)).inc()

    def restarted(self) -> None:
        """Counts a worker that was started again."""
        self._restarts.inc()

    def text(self) -> bytes:
        """Returns all of them in Prometheus' text format."""
        return generate_latest(self._registry)
