"""What is done to JAX's log and to its import of SciPy, while one thread loads an executable."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from jax import export

from helpers.opened import LIMIT_SECONDS
from wanrun.executables import jax_cache
from wanrun.executables.jax_cache import UnreadableProgramError

LOGGER = "jax._src.compiler"
MISS = "PERSISTENT COMPILATION CACHE MISS for '%s' with key %r"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What arrives at the handlers of JAX's logger."""
    logger, seen = logging.getLogger(LOGGER), list[str]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    handler, propagate = Handler(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    yield seen
    logger.propagate = propagate
    logger.removeHandler(handler)


@pytest.mark.parametrize("level", [logging.NOTSET, logging.DEBUG, logging.INFO, logging.ERROR])
def test_lines_pass_as_they_would_have(lines: list[str], level: int) -> None:
    """Of this thread and of another; a miss is refused in this one alone."""
    logger = logging.getLogger(LOGGER)
    before = logger.level
    logger.setLevel(level)
    expected = [
        name
        for name in ("debug", "info", "warning", "error")
        if logger.isEnabledFor(getattr(logging, name.upper()))
    ]

    def log() -> None:
        for name in ("debug", "info", "warning", "error"):
            getattr(logger, name)(name)

    def miss() -> None:
        logger.error(MISS, "jit_f", "key")

    try:
        with jax_cache._refuse_misses(), ThreadPoolExecutor(1) as pool:
            log()
            assert lines == expected
            pool.submit(log).result(LIMIT_SECONDS)
            assert lines == 2 * expected
            pool.submit(miss).result(LIMIT_SECONDS)
            assert lines[-1] == MISS % ("jit_f", "key")
            with pytest.raises(jax_cache._RefusedError):
                logger.debug(MISS, "jit_g", "key")
        assert logger.level == level and not logger.filters
        miss()
    finally:
        logger.setLevel(before)


@pytest.fixture(params=["dictConfig", "disable", "level"])
def silenced(request: pytest.FixtureRequest) -> Iterator[None]:
    """An application's logging, as it may be set after JAX was imported."""
    logger = logging.getLogger(LOGGER)
    level = logger.level
    if request.param == "dictConfig":
        logger.disabled = True  # as dictConfig does to each logger that it does not name
    elif request.param == "disable":
        logging.disable(logging.CRITICAL)
    else:
        logger.setLevel(logging.CRITICAL)
    yield
    logger.disabled = False
    logging.disable(logging.NOTSET)
    logger.setLevel(level)


@pytest.mark.usefixtures("silenced")
def test_an_application_s_logging_hides_no_line_from_us(lines: list[str]) -> None:
    logger = logging.getLogger(LOGGER)
    before = logger.disabled, logger.level, logger.manager.disable
    with jax_cache._refuse_misses():
        logger.error("a line that the application does not want")
        with pytest.raises(jax_cache._RefusedError):
            logger.debug(MISS, "jit_g", "key")
    assert lines == []
    assert (logger.disabled, logger.level, logger.manager.disable) == before


@pytest.mark.slow
def test_a_miss_ends_before_anything_is_compiled() -> None:
    """As this JAX says it: with a cache that is empty, and with one that is not."""
    code = """
import tempfile
import jax
from wanrun.machine.jax_process import JaxFlags, using_cache
from wanrun.executables.jax_cache import MISS_EVENT, cached
misses = []
jax.monitoring.register_event_listener(lambda name, **_: misses.append(name) if name == MISS_EVENT else None)
with JaxFlags("cpu"), tempfile.TemporaryDirectory() as folder:
    for write in (False, True, False):
        lowered = jax.jit(lambda x: 3 * x).lower(1.0)
        with using_cache(folder, write):
            found = lowered.compile() if write else cached(lowered)
        print(found is not None, len(misses))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # JAX counts a miss when it has compiled: the first one it did not.
    assert done.stdout.splitlines() == ["False 0", "True 1", "True 1"]


def test_another_thread_may_import_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.export import _export

    asked: list[int] = []
    monkeypatch.setattr(
        _export, "_ensure_backends_initialized", lambda platforms: asked.append(threading.get_ident())
    )
    replaced = _export._ensure_backends_initialized
    with jax_cache._without_lapack(), ThreadPoolExecutor(1) as pool:
        _export._ensure_backends_initialized(("cpu",))
        assert asked == []
        pool.submit(_export._ensure_backends_initialized, ("cpu",)).result(LIMIT_SECONDS)
    assert len(asked) == 1
    assert _export._ensure_backends_initialized is replaced


def test_a_program_that_jax_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no program at all, and what JAX 0.11.1 and newer say of an old one."""
    device = jax.devices("cpu")[0]
    for data in (b"", b"no program", bytes(200)):
        with pytest.raises(UnreadableProgramError, match="program prepare cannot be read; expected one that"):
            jax_cache.lower(data, "prepare", (), device)

    def expired(data: bytearray) -> None:
        raise ValueError("Exported seems to be older than the window. See https://docs.jax.dev/#guarantees.")

    monkeypatch.setattr(export, "deserialize", expired)
    with pytest.raises(UnreadableProgramError) as caught:
        jax_cache.lower(b"", "prepare", (), device)
    assert caught.value.found == "Exported seems to be older than the window"
    assert caught.value.exit_code == 3 and isinstance(caught.value.__cause__, ValueError)
