"""Loads programs as executables from the artifact's compilation cache, and observes that they were hits.

A program is ``jax.export.deserialize`` -> a named function around ``.call`` -> ``jit(...).lower(abstract
arguments).compile()``. The build does exactly this once with an empty cache; here it finds the entry.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanrun.artifact.environment import host_environment, using_cache
from wanrun.artifact.manifest import Manifest, Profile, Target
from wanrun.artifact.programs import Program
from wanrun.artifact.targets import Executable
from wanrun.errors import ArtifactError, UsageError
from wanrun.files import canonical_json, check_digest, digest_found, sha256_of, user_cache

if TYPE_CHECKING:
    import jax
    import jax.stages

HIT_EVENT = "/jax/compilation_cache/cache_hits"
MISS_EVENT = "/jax/compilation_cache/cache_misses"

RECOMPILE = "copy the artifact again, or run wanbuild compile"

_LOADING = threading.Lock()
"""Held while JAX's cache folder, log and events are ours: all three belong to the process."""


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
    """JAX says a miss only in a log line, before a compilation that may take minutes: stop it there.

    Should the line change, the counters still tell after the compilation. Other threads may compile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        if "CACHE MISS" in str(record.msg) and record.thread == self._thread:
            raise _CacheMissError
        return record.levelno >= logging.WARNING


@contextlib.contextmanager
def _refuse_misses() -> Iterator[None]:
    logger, refuse = logging.getLogger("jax._src.compiler"), _RefuseMiss()
    level = logger.level
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


def check_entries(artifact: Path, target: Target, profile: str) -> None:
    """Checks that every cache entry of a profile is there with its size.

    Raises:
        ArtifactError: naming the first that is missing or has another size.
    """
    for name, entry in sorted(target.executables.get(profile, {}).items()):
        path = artifact / target.folder / entry.file
        try:
            size = path.stat().st_size
        except OSError:
            raise ArtifactError(
                f"the executable of {name} for profile {profile} is missing: {path}",
                remedy=RECOMPILE,
            ) from None
        if size != entry.nbytes:
            raise ArtifactError(
                f"the executable of {name} for profile {profile} is damaged: {path}",
                expected=f"{entry.nbytes} bytes",
                found=f"{size} bytes",
                remedy=RECOMPILE,
            )


def check_entry(artifact: Path, target: Target, name: str, entry: Executable) -> None:
    """Checks an entry's digest before it is loaded: it is code.

    Raises:
        ArtifactError: if it is missing or differs.
    """
    path = artifact / target.folder / entry.file
    what, remedy = f"the executable of {name} is damaged: {path}", RECOMPILE
    check_digest(digest_found(path), entry.sha256, what, remedy)


def read_program(artifact: Path, name: str, program: Program) -> bytes:
    """Reads a serialized program and checks its digest.

    Raises:
        ArtifactError: if it is missing or differs.
    """
    path = artifact / program.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(
            f"program {name} cannot be read: {path}: {error.strerror}", remedy="copy the artifact again"
        ) from None
    check_digest(sha256_of(data), program.sha256, f"program {name} is damaged: {path}", RECOMPILE)
    return data


def overlay_folder(manifest: Manifest, target: str) -> Path:
    """Where ``--allow-compile`` keeps what it compiled: a cache that the user can write to.

    One folder a kind of host: machines may share a home, and the cache's key does not tell CPUs apart.

    Raises:
        UsageError: if it cannot be written.
    """
    host = sha256_of(canonical_json(host_environment(manifest.targets[target].environment["platform"])))
    digest = manifest.content_digest.removeprefix("sha256:")
    folder = user_cache() / "executables" / f"{digest[:16]}-{target}-{host[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"compiled programs cannot be kept in {folder}",
            found=error.strerror,
            remedy="set XDG_CACHE_HOME to a folder that can be written",
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            f"compiled programs cannot be kept in {folder}",
            expected="a writable folder",
            remedy="set XDG_CACHE_HOME to another",
        )
    return folder


class LoadedProgram:
    """An executable that takes its inputs by name.

    Args:
        compiled: the executable.
        inputs: argument names in order.
    """

    def __init__(self, compiled: jax.stages.Compiled, inputs: Sequence[str]) -> None:
        self._compiled, self.inputs = compiled, tuple(inputs)

    def __call__(self, **arguments: Any) -> Any:
        """Runs it; arguments that it does not take are left out."""
        return self._compiled(*(arguments[name] for name in self.inputs))


class Executables:
    """The executables of one profile, loaded when they are asked for.

    Every program's StableHLO and every cache entry is checked against its digest here, so that one that is
    damaged is found before anything is computed, also when it is loaded late.

    Args:
        artifact: the artifact's folder.
        target: the chosen target.
        profile: the chosen profile.
        programs: its programs for that target, by name.
        device: where they run.
        overlay: makes the cache to compile into where the artifact has no fitting entry; None is strict.
        warn: told when something had to be compiled.

    Raises:
        ArtifactError: if a program or a cache entry is missing or damaged; the entry only without an overlay.
    """

    def __init__(
        self,
        artifact: Path,
        target: Target,
        profile: Profile,
        programs: Mapping[str, Program],
        device: jax.Device,
        overlay: Callable[[], Path] | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._artifact, self._target = artifact, target
        self._profile, self._device, self._overlay, self._warn = profile, device, overlay, warn
        self.hits = 0
        self.misses = 0
        self._programs = programs
        self._data = {name: read_program(artifact, name, program) for name, program in self._programs.items()}
        if overlay is None:
            for name in self._programs:
                self._entry(name)

    def load(self, name: str) -> LoadedProgram:
        """Loads one program.

        Raises:
            ArtifactError: if the entry is missing, damaged, or the cache does not find it.
        """
        program, data = self._programs[name], self._data[name]
        with _LOADING:
            try:
                compiled = self._load_entry(name, data, program)
            except ArtifactError as error:
                if self._overlay is None:
                    raise
                compiled = self._compile_to_overlay(name, data, program, self._overlay(), error.what)
        return LoadedProgram(compiled, program.inputs)

    def _entry(self, name: str) -> Executable:
        """The checked cache entry of a program."""
        entry = self._target.executables.get(self._profile.name, {}).get(name)
        if entry is None:
            raise ArtifactError(
                f"profile {self._profile.name} has no executable of {name} for this machine",
                remedy="run wanbuild compile, or pass --allow-compile",
            )
        check_entry(self._artifact, self._target, name, entry)
        return entry

    def _load_entry(self, name: str, data: bytes, program: Program) -> jax.stages.Compiled:
        """The executable from the artifact's cache."""
        self._entry(name)  # again, right before it is loaded
        try:
            with warnings.catch_warnings(), using_cache(self._artifact / self._target.folder, write=False):
                # JAX warns of an entry that it cannot read, and takes it for a miss.
                warnings.simplefilter("ignore")
                return self._from_cache(name, data, program)
        finally:
            self._entry(name)  # JAX opened it by its name: it must not have changed meanwhile

    def _from_cache(self, name: str, data: bytes, program: Program) -> jax.stages.Compiled:
        lowered = lower(data, name, program.donate, self._device)
        events = CacheEvents()
        with contextlib.suppress(_CacheMissError), events.observe(), _refuse_misses():
            compiled = lowered.compile()
            if events.hits == 1 and events.misses == 0:
                self.hits += 1
                return compiled
        raise ArtifactError(
            f"the compilation cache has no entry for {name} under this process's key, though every recorded "
            "fact of the target agrees",
            expected="a hit",
            found="a miss",
            remedy="unset JAX_* variables, run wanbuild compile here, or pass --allow-compile",
        )

    def _compile_to_overlay(
        self, name: str, data: bytes, program: Program, overlay: Path, reason: str
    ) -> jax.stages.Compiled:
        with contextlib.suppress(ArtifactError), warnings.catch_warnings(), using_cache(overlay):
            # JAX warns of an entry that a killed run left incomplete, and would leave it there.
            warnings.simplefilter("ignore")
            return self._from_cache(name, data, program)
        with tempfile.TemporaryDirectory(prefix=".compiling-", dir=overlay) as folder:
            with using_cache(Path(folder)):
                compiled = lower(data, name, program.donate, self._device).compile()
            for entry in Path(folder).iterdir():
                entry.replace(overlay / entry.name)
        self.misses += 1
        self._warn(f"compiled {name}, kept in {overlay}: {reason}")
        return compiled
