"""Sets JAX's process-wide state and restores it: its flags and its compilation cache.

The cache key depends on the flags, so build and runtime must use the same ones. JAX has one set of flags per
process, so this module counts their holders. That count and the previous values are this package's only
process-wide state, and they mirror JAX's own.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from wanrun.errors import UsageError

JAX_FLAGS: Mapping[str, Any] = MappingProxyType(
    {
        "jax_enable_compilation_cache": True,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # Any other value puts a path into the key, so a moved artifact would miss.
        "jax_persistent_cache_enable_xla_caches": "none",
        "jax_compilation_cache_max_size": -1,
        "jax_compilation_cache_include_metadata_in_key": False,
        "jax_raise_persistent_cache_errors": False,
        "jax_enable_x64": False,
        "jax_default_matmul_precision": None,
        "jax_default_prng_impl": "threefry2x32",
        "jax_debug_nans": False,
        "jax_disable_jit": False,
        "jax_no_tracing": False,
        "jax_transfer_guard": "allow",
        # The other flags enter the key through the compile options; these are JAX's defaults.
        "jax_use_shardy_partitioner": True,
        "jax_optimization_level": "UNKNOWN",
        "jax_memory_fitting_level": "O2",
        "jax_exec_time_optimization_effort": 0.0,
        "jax_memory_fitting_effort": 0.0,
        "jax_disable_most_optimizations": False,
        "jax_compiler_enable_remat_pass": True,
        "jax_xla_profile_version": 0,
        "jax_enable_pgle": False,
        "jax_compilation_cache_expect_pgle": False,
    }
)
"""Set by build and runtime, whatever the user's environment says; flags that this JAX lacks are skipped."""


class _Process:
    """The holders of JAX's flags, and the flags' previous values.

    Attributes:
        changing: held while the cache's folder or a flag is changed, and while an executable is loaded.
        counting: held while holders are counted.
        holders: the number of holders.
        before: previous values of the changed flags.
        ours: the values they were changed to, as JAX returns them.
        number: of the process that first held the flags, and so started JAX; None before.
    """

    def __init__(self) -> None:
        self.changing, self.counting = threading.Lock(), threading.Lock()
        self.holders = 0
        self.before: dict[str, Any] = {}
        self.ours: dict[str, Any] = {}
        self.number: int | None = None

    def enter(self) -> None:
        """Notes which process uses JAX, before any lock is asked for: a fork may have inherited a held one.

        Raises:
            UsageError: in a fork of a process that has used it, where JAX would wait for threads for ever.
        """
        if self.number not in (None, os.getpid()):
            raise UsageError(
                "JAX was started before this process was forked, and cannot be used in it",
                expected=f"process {self.number}",
                found=os.getpid(),
                remedy="start the process by spawn, not by fork",
            )
        self.number = os.getpid()

    def set(self, flags: Mapping[str, Any]) -> None:
        """Changes the flags that have other values, and records the previous values."""
        import jax

        before = jax.config.values
        try:
            for name, value in flags.items():
                if name in before and before[name] not in (value, self.ours.get(name, value)):
                    jax.config.update(name, value)
        finally:
            # Setting one flag may change others, as the transfer guard does. If somebody else has changed a
            # flag since this module set it, that change is the previous value.
            after = jax.config.values
            changed = {name for name in after if after[name] != before[name]}
            self.before |= {name: before[name] for name in changed}
            self.ours |= {name: after[name] for name in changed}

    def put_back(self) -> None:
        """Restores the previous values; a flag that somebody else has changed since keeps its value."""
        if not self.before:
            return
        import jax
        from jax.experimental.compilation_cache import compilation_cache

        now = jax.config.values
        # Flags that change other flags come first.
        for name in sorted(self.before, key=lambda name: name not in JAX_FLAGS):
            if now[name] == self.ours[name]:
                jax.config.update(name, self.before[name])
        self.before.clear()
        self.ours.clear()
        compilation_cache.reset_cache()  # the cache remembers whether it was enabled


_PROCESS = _Process()


class JaxFlags:
    """Holds JAX's flags at the values that the cache key needs, until every holder has released them.

    Then every flag returns to its previous value, but ``jax_platforms`` has no effect any more: the platforms
    that JAX has started stay for the rest of the process, and no others can start. Functions compiled
    meanwhile keep their compiled form.

    Args:
        platform_name: 'cpu', 'cuda' or 'tpu'; others are not started, unless JAX_PLATFORMS names some.
        beside: a platform that is started too.

    Raises:
        UsageError: in a fork of a process that has held them.
    """

    def __init__(self, platform_name: str, beside: str | None = None) -> None:
        flags = dict(JAX_FLAGS)
        if os.environ.get("JAX_PLATFORMS") in (None, "", platform_name):
            names = dict.fromkeys(filter(None, (platform_name, beside)))
            flags["jax_platforms"] = ",".join(names)
        _PROCESS.enter()
        with _PROCESS.changing, _PROCESS.counting:
            try:
                _PROCESS.set(flags)
            except BaseException:
                if not _PROCESS.holders:
                    _PROCESS.put_back()
                raise
            _PROCESS.holders += 1
        self._held = True

    def release(self) -> None:
        """Releases the flags; a second call does nothing."""
        with _PROCESS.counting:
            held, self._held = self._held, False
            _PROCESS.holders -= held
            if not held or _PROCESS.holders:
                return
        # Waits until an executable that is being loaded is done with the flags.
        with _PROCESS.changing, _PROCESS.counting:
            if not _PROCESS.holders:
                _PROCESS.put_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@contextlib.contextmanager
def using_cache(cache: Path, write: bool = True) -> Iterator[None]:
    """Points JAX's compilation cache at a folder, then back; other compilations of the process stay out.

    One thread at a time; others wait.

    Args:
        cache: the folder.
        write: whether programs compiled meanwhile, by any thread, are written to it.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    with _PROCESS.changing:
        before = {name: jax.config.values[name] for name in names}
        try:
            jax.config.update("jax_compilation_cache_dir", str(cache))
            if not write:
                jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
            # Once initialised, the cache keeps its folder until it is reset.
            compilation_cache.reset_cache()
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
