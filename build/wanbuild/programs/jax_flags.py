"""Sets JAX's flags for a build, so that the user's settings change neither programs nor the names of entries.

The flags are those of the whole process, which a build has for itself. A runtime sets none of them: it hands
JAX the executable (``wanrun.executables.jax_hook``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanrun.machine.jax_process import check_process

FLAGS: Mapping[str, Any] = MappingProxyType(
    {
        "jax_enable_compilation_cache": True,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # Any other value puts a path into the key, so a moved artifact would miss.
        "jax_persistent_cache_enable_xla_caches": "none",
        "jax_compilation_cache_max_size": -1,
        "jax_compilation_cache_include_metadata_in_key": False,
        # By default JAX only warns of a cache entry that it cannot write, and keeps its first part.
        "jax_raise_persistent_cache_errors": True,
        "jax_enable_x64": False,
        "jax_default_matmul_precision": None,
        "jax_default_prng_impl": "threefry2x32",
        "jax_debug_nans": False,
        "jax_disable_jit": False,
        "jax_no_tracing": False,
        "jax_transfer_guard": "allow",
        # The other flags reach the compiler through its options; these are JAX's defaults.
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
"""The flags that programs are traced and compiled with, whatever the user's environment says."""


@contextlib.contextmanager
def pinned(platforms: str) -> Iterator[None]:
    """Holds JAX's flags at the build's values while a block runs, then sets them back.

    ``platforms`` are the platforms that JAX starts, comma-separated. Raises UsageError in a fork of a process
    that has used JAX.
    """
    check_process()
    flags = dict(FLAGS)
    if os.environ.get("JAX_PLATFORMS") in (None, "", platforms):
        flags["jax_platforms"] = platforms
    with jax_options(**flags):
        yield


@contextlib.contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """Makes JAX keep compiled programs in an empty folder, then sets its cache back."""
    from jax.experimental.compilation_cache import compilation_cache

    with jax_options(jax_compilation_cache_dir=str(folder)):
        # Once initialised, the cache keeps its folder until it is reset.
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            compilation_cache.reset_cache()


@contextlib.contextmanager
def jax_options(**options: Any) -> Iterator[None]:
    """Sets options of JAX while a block runs, then sets them back.

    Setting one option may change others, as the transfer guard does: they are set back too. Options that this
    JAX lacks are left out.
    """
    import jax

    before, changed = dict(jax.config.values), list[str]()
    try:
        for name, value in options.items():
            if name in before and before[name] != value:
                jax.config.update(name, value)
            changed = [name for name, found in jax.config.values.items() if before[name] != found]
        yield
    finally:
        # Options that change others come first.
        for name in sorted(changed, key=lambda name: name not in options):
            jax.config.update(name, before[name])
