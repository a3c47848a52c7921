"""Hands a checked executable to JAX, or takes one from it: the one place that replaces a function of JAX's.

``jax.stages.Lowered.compile`` asks ``jax._src.compiler.compile_or_get_cached`` for the executable. That
function is replaced while one thread loads or compiles one program, only for this thread. Neither JAX's key
of the program nor the folder of JAX's cache matters then. So no flag of the process is changed, and the bytes
that were checked are those that are loaded. JAX has no public function for this; the versions that were
tried are in docs/notes/programs-and-cache.md.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from wanrun.errors import ArtifactError
from wanrun.machine.jax_process import REPLACING

if TYPE_CHECKING:
    import jax.stages

    Executable = Any


@contextlib.contextmanager
def replaced(module: Any, name: str, here: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function of a module for this thread; other threads go on with the module's own.

    One thread at a time; others wait, so that each puts back what it has found. ``here`` is given the
    module's own function, then the arguments.
    """
    thread = threading.get_ident()
    with REPLACING:
        own = getattr(module, name)

        def chosen(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return own(*args, **kwargs)
            return here(own, *args, **kwargs)

        setattr(module, name, chosen)
        try:
            yield
        finally:
            setattr(module, name, own)


def _through(
    lowered: jax.stages.Lowered, executable: Callable[[Any, Any, Any, Any, Any], Executable]
) -> jax.stages.Compiled:
    """Compiles a lowered program, whose executable `executable` makes; refuses a JAX that asks twice."""
    from jax._src import compiler

    asked: list[str] = []

    def instead(
        own: Any, backend: Any, module: Any, devices: Any, options: Any, callbacks: Any, where: Any, *_: Any
    ) -> Executable:
        del own, devices
        asked.append("once")
        return executable(backend, module, options, callbacks, where)

    with replaced(compiler, "compile_or_get_cached", instead):
        compiled = lowered.compile()
    if len(asked) != 1:
        raise ArtifactError(
            "wrong_machine",
            "JAX did not call the function that wanrun replaces",
            expected="jax 0.10.2 to 0.12",
            found=f"{len(asked)} calls",
            remedy="install the jax that the target was built with",
        )
    return compiled


def load(name: str, lowered: jax.stages.Lowered, entry: bytes) -> jax.stages.Compiled:
    """Loads a program's executable from an entry of JAX's compilation cache; compiles nothing.

    ``lowered`` is the program as it was lowered for the entry. The entry must have been checked: it holds
    machine code. Raises ArtifactError if it is not an entry, or not for this program, device or JAX; and as
    ``_through``.
    """
    from jax._src import compilation_cache

    def deserialized(backend: Any, module: Any, options: Any, callbacks: Any, where: Any) -> Executable:
        del module, callbacks
        try:
            whole = compilation_cache.decompress_executable(entry)
            executable, _ = compilation_cache.extract_executable_and_time(whole)
            return backend.deserialize_executable(executable, where, options)
        except MemoryError:
            raise
        except Exception as error:  # zlib's, zstandard's, and XLA's, which is a RuntimeError or a ValueError
            if "RESOURCE_EXHAUSTED" in str(error):  # which says nothing of the entry
                raise
            raise _unloadable(name, error) from error

    try:
        return _through(lowered, deserialized)
    except ValueError as error:  # the executable of another program, with other inputs or outputs
        raise _unloadable(name, error) from error


def _unloadable(name: str, error: Exception) -> ArtifactError:
    return ArtifactError(
        "wrong_machine",
        f"JAX cannot load the executable of {name}",
        expected="one for this program, this device and this version of JAX",
        found=" ".join(str(error).split())[:300] or type(error).__name__,
        remedy="run wanbuild compile here, or pass --allow-compile",
    )


def compile_here(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bytes]:
    """Compiles a program in this process, and returns its executable and the entry that ``load`` takes.

    JAX's own compilation cache is neither read nor written.
    """
    from jax._src import compilation_cache, compiler

    made: list[bytes] = []

    def built(backend: Any, module: Any, options: Any, callbacks: Any, where: Any) -> Executable:
        start = time.monotonic()
        executable = compiler.backend_compile_and_load(backend, module, where, options, callbacks)
        seconds = int(time.monotonic() - start)
        whole = compilation_cache.combine_executable_and_time(executable.serialize(), seconds)
        made.append(compilation_cache.compress_executable(whole))
        return executable

    compiled = _through(lowered, built)
    return compiled, made[0]
