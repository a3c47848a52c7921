"""Lowers a program, and loads its executable from JAX's compilation cache without ever compiling.

JAX has no public API for four things used here (BUILD_NOTES.md, "What we touch of JAX"): the names of the
cache's events, the log lines of a cache miss and of an entry that is opened, and the function that imports
SciPy.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from wanrun.errors import ArtifactError

if TYPE_CHECKING:
    import jax
    import jax.stages
    from jax.export import Exported

HIT_EVENT = "/jax/compilation_cache/cache_hits"
MISS_EVENT = "/jax/compilation_cache/cache_misses"
MISS_WORDS = "CACHE MISS"
"""The words of JAX's log line for a cache miss."""
OPEN_WORDS = "Cache hit for key"
"""The words of JAX's log line before it reads an entry; they are followed by the key, quoted."""


class UnreadableProgramError(ArtifactError):
    """A serialized program that this JAX does not take: it is too old, too new, or not a program.

    Args:
        name: the program.
        reason: what JAX raised.
    """

    def __init__(self, name: str, reason: Exception) -> None:
        import jax

        self.reader = jax.__version__
        text = str(reason) if isinstance(reason, ValueError) else f"{type(reason).__name__}: {reason}"
        super().__init__(
            f"program {name} cannot be read",
            expected=f"one that jax {self.reader} reads",
            found=text.partition(" See https://")[0].rstrip("."),
            remedy="run wanbuild refresh",
        )


class CacheEvents:
    """Counts this thread's hits and misses in JAX's compilation cache while ``observe`` is active."""

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


class _RefusedError(Exception):
    """Raised from a line of JAX's log: a cache miss before compilation starts, or another entry."""


class _Refuse(logging.Filter):
    """Raises at a line of JAX's log in the thread that made the filter; other log lines are unaffected.

    JAX reports a miss before compiling only in a log line, and compiling may take minutes. If that line
    changes, the event counters still reveal the miss after the compilation. JAX names the entry that it is
    about to read in a log line too.

    Args:
        level: the least level of a line that was shown before this filter had to see all.
        refused: whether this line is refused.
    """

    def __init__(self, level: int, refused: Callable[[logging.LogRecord], bool]) -> None:
        super().__init__()
        self._thread, self._level, self._refused = threading.get_ident(), level, refused

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread == self._thread and self._refused(record):
            raise _RefusedError
        return record.levelno >= self._level


@contextlib.contextmanager
def _refusing(name: str, refused: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Refuses lines of a logger of JAX's that this thread writes.

    The lines are written whatever the application's logging is: ``logging.config.dictConfig`` disables the
    loggers that it does not name, and ``logging.disable`` all of them. Then no line goes to its handlers.
    """
    logger = logging.getLogger(name)
    level, disabled, least = logger.level, logger.disabled, logger.manager.disable
    shown = sys.maxsize if disabled else max(logger.getEffectiveLevel(), least + 1)
    refuse = _Refuse(shown, refused)
    logger.addFilter(refuse)
    logger.setLevel(logging.DEBUG)
    logger.disabled = False
    logging.disable(logging.NOTSET)
    try:
        yield
    finally:
        logging.disable(least)
        logger.disabled = disabled
        logger.setLevel(level)
        logger.removeFilter(refuse)


def _refuse_misses() -> contextlib.AbstractContextManager[None]:
    return _refusing("jax._src.compiler", lambda record: MISS_WORDS in str(record.msg))


class _Opened:
    """The entries that JAX opens: none but the one whose digest was checked.

    Args:
        file: its name; None for any.

    Attributes:
        files: the names of the entries that JAX was about to read.
    """

    def __init__(self, file: str | None) -> None:
        self._file, self.files = file, list[str]()

    def refusing(self) -> contextlib.AbstractContextManager[None]:
        return _refusing("jax._src.lru_cache", self._is_another)

    def _is_another(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if OPEN_WORDS not in text:
            return False
        self.files.append(text.partition(OPEN_WORDS)[2].strip(": '\"") + "-cache")
        return self._file is not None and self.files[-1] != self._file

    def check(self, hit: bool) -> None:
        """Raises OtherEntryError if JAX was about to open another, or did not say what it has opened."""
        if self._file is not None and (hit or self.files) and set(self.files) != {self._file}:
            raise OtherEntryError(self._file, ", ".join(self.files) or "one that JAX does not name")


class OtherEntryError(ArtifactError):
    """JAX's key of a program is that of another entry than the one that was checked.

    Args:
        recorded: the entry that was checked.
        opened: the one that JAX would open.
    """

    def __init__(self, recorded: str, opened: str) -> None:
        super().__init__(
            "the executable that JAX would load is not the one that the manifest lists",
            expected=recorded,
            found=opened,
            remedy="run wanbuild compile, or pass --allow-compile",
        )


def lower(
    data: bytes,
    name: str,
    donate: Sequence[str],
    where: jax.Device | jax.sharding.Mesh,
    check: Callable[[Exported], None] = lambda exported: None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> jax.stages.Lowered:
    """Lowers an exported program for a device or a mesh, in the same way on the build host and at run time.

    Args:
        data: the serialized program.
        name: the name of its cache entry.
        donate: names of donated arguments; an exported call does not donate any by itself.
        where: the device or the mesh that the program will run on. The abstract arguments carry the sharding,
            because a program lowered without it misses the cache when called with committed arrays.
        check: raises for a program that is not what the caller takes it for.
        options: the compiler's options for this program.

    Raises:
        UnreadableProgramError: if this JAX does not take the program.
    """
    import jax

    exported = _deserialized(data, name)
    check(exported)
    given, made = _shardings(exported, where)
    avals = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        for a, sharding in zip(exported.in_avals, given, strict=True)
    ]
    args, kwargs = jax.tree.unflatten(exported.in_tree, avals)

    def call(*args: Any, **kwargs: Any) -> Any:
        return exported.call(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    with contextlib.nullcontext() if b"lapack" in data else _without_lapack():
        try:
            made["compiler_options"] = dict(options) or None
            return jax.jit(call, donate_argnames=tuple(donate), **made).lower(*args, **kwargs)
        except (ValueError, NotImplementedError, RuntimeError) as error:  # JAX reads the StableHLO here
            raise UnreadableProgramError(name, error) from error


def _shardings(
    exported: Exported, where: jax.Device | jax.sharding.Mesh
) -> tuple[Sequence[jax.sharding.Sharding], dict[str, Any]]:
    """Returns the shardings of a program's arguments, flat, and what ``jit`` is told of its results."""
    import jax

    if not isinstance(where, jax.sharding.Mesh):
        return [jax.sharding.SingleDeviceSharding(where)] * len(exported.in_avals), {}
    whole = jax.sharding.NamedSharding(where, jax.sharding.PartitionSpec())
    given, made = exported.in_shardings_jax(where), exported.out_shardings_jax(where)
    tree = jax.tree.unflatten(exported.out_tree, [sharding or whole for sharding in made])
    return [sharding or whole for sharding in given], {"out_shardings": tree}


def _deserialized(data: bytes, name: str) -> Exported:
    """A serialized program, whose digest was checked: what it raises says that this JAX cannot take it."""
    from jax import export

    try:
        return export.deserialize(bytearray(data))
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # an older JAX raises what comes of reading a newer layout
        raise UnreadableProgramError(name, error) from error


def asked_key(lowered: jax.stages.Lowered) -> str | None:
    """Returns the name of the entry that JAX looks for in the folder of ``using_cache``, which must be empty.

    JAX says it in its log line of a miss, where this stops it; None if it does not.
    """
    names = list[str]()

    def missed(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if MISS_WORDS not in text:
            return False
        names.append(text.rpartition("with key ")[2].strip("'\" ") + "-cache")
        return True

    with contextlib.suppress(_RefusedError), _refusing("jax._src.compiler", missed):
        lowered.compile()
    return names[0] if names else None


def cached(lowered: jax.stages.Lowered, file: str | None = None) -> jax.stages.Compiled | None:
    """Loads a lowered program's executable from the folder of ``using_cache``; None on a cache miss.

    Args:
        lowered: the program.
        file: the one entry that JAX may open, because its digest was checked; None for a trusted folder.

    Raises:
        OtherEntryError: if JAX's key is that of another entry. It is not read.
    """
    events, opened = CacheEvents(), _Opened(file)
    compiled = None
    with contextlib.suppress(_RefusedError), events.observe(), _refuse_misses(), opened.refusing():
        compiled = lowered.compile()
    hit = compiled is not None and events.hits == 1 and events.misses == 0
    opened.check(hit)
    return compiled if hit else None


@contextlib.contextmanager
def _without_lapack() -> Iterator[None]:
    """Keeps JAX from importing scipy.linalg when this thread lowers an exported program for the CPU.

    JAX imports it to register LAPACK, which takes a quarter of the time of ``import jax``, even for programs
    that do not call LAPACK. There is no public switch; in a JAX without the function, this does nothing.
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
