"""Lowers a program, and takes its executable from JAX's compilation cache without ever compiling it.

Three things here have no public form in JAX (BUILD_NOTES.md, "What we touch of JAX"): the names of the
cache's events, the log line that says a miss, and the function that imports SciPy.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    import jax.stages

HIT_EVENT = "/jax/compilation_cache/cache_hits"
MISS_EVENT = "/jax/compilation_cache/cache_misses"
MISS_WORDS = "CACHE MISS"
"""What JAX's log line of a miss says."""


class CacheEvents:
    """Counts what JAX's compilation cache reports of this thread while ``observe`` is active."""

    def __init__(self) -> None:
        self.hits = self.misses = 0
        self._thread = threading.get_ident()

    def _record(self, event: str, **_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if event == HIT_EVENT:
            self.hits += 1
        elif event == MISS_EVENT:
            self.misses += 1

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        from jax import monitoring

        monitoring.register_event_listener(self._record)
        try:
            yield
        finally:
            monitoring.unregister_event_listener(self._record)


class _CacheMissError(Exception):
    """Raised from JAX's own log line, before it starts to compile."""


class _RefuseMiss(logging.Filter):
    """Raises in the thread that makes it when JAX logs a miss, and lets all other lines be as they were.

    JAX says a miss only in a log line, before a compilation that may take minutes. Should the line change,
    the counters still tell after the compilation.

    Args:
        level: what the logger's level was before it was lowered for this filter to see the line.
    """

    def __init__(self, level: int) -> None:
        super().__init__()
        self._thread, self._level = threading.get_ident(), level

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread == self._thread and MISS_WORDS in str(record.msg):
            raise _CacheMissError
        return record.levelno >= self._level


@contextlib.contextmanager
def _refuse_misses() -> Iterator[None]:
    logger = logging.getLogger("jax._src.compiler")
    level, refuse = logger.level, _RefuseMiss(logger.getEffectiveLevel())
    logger.addFilter(refuse)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeFilter(refuse)


def lower(data: bytes, name: str, donate: Sequence[int], device: jax.Device) -> jax.stages.Lowered:
    """Lowers an exported program for one device: the same on the build host and at run time.

    Args:
        data: the serialized program.
        name: what its cache entry is called.
        donate: indices of donated arguments; through an exported call nothing is donated by itself.
        device: where it will run. The sharding is on the abstract arguments because a program lowered
            without it and called with committed arrays misses the cache.
    """
    import jax
    from jax import export

    exported = export.deserialize(bytearray(data))
    sharding = jax.sharding.SingleDeviceSharding(device)
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in exported.in_avals]
    args, kwargs = jax.tree.unflatten(exported.in_tree, avals)

    def call(*args: Any, **kwargs: Any) -> Any:
        return exported.call(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    with contextlib.nullcontext() if b"lapack" in data else _without_lapack():
        return jax.jit(call, donate_argnums=tuple(donate)).lower(*args, **kwargs)


def cached(lowered: jax.stages.Lowered) -> jax.stages.Compiled | None:
    """The executable of a lowered program from the folder of ``using_cache``; None if it is not there."""
    events = CacheEvents()
    with contextlib.suppress(_CacheMissError), events.observe(), _refuse_misses():
        compiled = lowered.compile()
        if events.hits == 1 and events.misses == 0:
            return compiled
    return None


@contextlib.contextmanager
def _without_lapack() -> Iterator[None]:
    """Keeps JAX from importing scipy.linalg when this thread lowers an exported program for the CPU.

    It does so to register LAPACK, a quarter of what ``import jax`` takes, for programs that call none of it.
    There is no public way to say so; where a version of JAX does it otherwise, this changes nothing.
    """
    from jax._src.export import _export

    name, thread = "_ensure_backends_initialized", threading.get_ident()
    initialize = getattr(_export, name, None)
    if initialize is None:
        yield
        return

    def unless_ours(platforms: Sequence[str]) -> None:
        if threading.get_ident() != thread:
            initialize(platforms)

    setattr(_export, name, unless_ours)
    try:
        yield
    finally:
        setattr(_export, name, initialize)
