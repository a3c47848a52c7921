"""JAX's state of this process: the platforms that it starts, and the process that started it."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import threading
from collections.abc import Iterator

from wanrun.errors import UsageError

REPLACING = threading.RLock()
"""Held while a function or a setting of JAX's is replaced, which is the whole process's. See
``wanrun.executables.jax_hook``."""


class _Started:
    """The number of the process that has started JAX; None before."""

    by: int | None = None


def check_process() -> None:
    """Notes which process uses JAX, before any lock is asked for: a fork may have inherited a held one.

    Raises UsageError in a fork of a process that has used it, where JAX would wait for threads for ever.
    """
    if _Started.by not in (None, os.getpid()):
        raise UsageError(
            "closed",
            "JAX was started before this process was forked, and cannot be used in it",
            expected=f"process {_Started.by}",
            found=os.getpid(),
            remedy="start the process by spawn, not by fork",
        )
    _Started.by = os.getpid()


@contextlib.contextmanager
def starting(*platforms: str) -> Iterator[None]:
    """Lets JAX start only these platforms, 'cpu', 'cuda' or 'tpu', the preferred one first.

    A process starts them once: what JAX has started stays for the rest of the process, and no other platform
    can start later. If the user's JAX_PLATFORMS names something else, it decides. Raises UsageError in a fork
    of a process that has used JAX.
    """
    check_process()
    if "cuda" in platforms:
        _name_mosaic_library()
    if os.environ.get("JAX_PLATFORMS") not in (None, "", platforms[0]):
        yield
        return
    import jax

    with REPLACING:
        before = jax.config.values["jax_platforms"]
        jax.config.update("jax_platforms", ",".join(dict.fromkeys(platforms)))
        try:
            yield
        finally:
            jax.config.update("jax_platforms", before)


def _name_mosaic_library() -> None:
    """Says where the library of loaded kernels in Mosaic GPU lies, as importing JAX's module would."""
    plugin = importlib.util.find_spec("jax_cuda13_plugin")
    for folder in (plugin and plugin.submodule_search_locations) or ():
        os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", f"{folder}/libmosaic_gpu_runtime.so")


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Runs a block without garbage collections: they take a sixth of the import of JAX, and find nothing.

    What the block has made counts as old afterwards, so that the next collection does not look at it either.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else it would thaw what another program froze
            gc.freeze()
            gc.unfreeze()
        gc.enable()


@contextlib.contextmanager
def own_options() -> Iterator[None]:
    """Runs a block whatever options of JAX a program that embeds this package has set, only in this thread.

    Executables are called, and programs lowered, as ``jax_disable_jit``, ``jax_no_tracing`` and
    ``jax_transfer_guard`` would forbid. Other options change neither.
    """
    import jax

    with jax.disable_jit(False), jax.no_tracing(False), jax.transfer_guard("allow"):
        yield
