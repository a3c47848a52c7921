"""Loads an artifact's executables from its files, whose digests it checks.

A program is ``jax.export.deserialize`` -> a named function around ``.call`` -> ``jit(...).lower(abstract
arguments)``. The build compiles that into an entry of JAX's compilation cache. The runtime hands JAX the
entry's bytes (``wanrun.executables.jax_hook``): those that were checked are those that are loaded.
"""

from __future__ import annotations

__all__ = ["unreadable"]

import shlex
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.programs import Profile, Program, ProgramSet
from wanrun.artifact.roles import ROLES
from wanrun.errors import ArtifactError, UsageError, shortened
from wanrun.executables.compiled_here import keep, kept_file, options_here, overlay_folder, read_kept
from wanrun.executables.jax_hook import compile_here, load
from wanrun.executables.lowering import UnreadableProgramError, lower
from wanrun.machine.jax_process import own_options
from wanrun.opened.opened_artifact import OpenedArtifact
from wanrun.timing.clock import now
from wanrun.user_cache import CacheFolder

if TYPE_CHECKING:
    import jax.stages


class LoadedProgram:
    """An executable, or another such function, that takes its inputs by name.

    ``called`` says whether it has run.
    """

    def __init__(self, compiled: Callable[..., Any], inputs: Sequence[str]) -> None:
        self._compiled, self.inputs, self.called = compiled, tuple(inputs), False

    def __call__(self, **arguments: Any) -> Any:
        """Runs the executable; arguments that it does not take are ignored.

        Raises ArtifactError if an input is missing or of another kind: then the manifest is wrong.
        """
        remedy = "run wanbuild verify, or build the artifact again"
        if missing := [name for name in self.inputs if name not in arguments]:
            raise ArtifactError(
                "damaged", f"a program takes {missing[0]}, which no program before it returns", remedy=remedy
            )
        self.called = True
        try:
            return self._compiled(**{name: arguments[name] for name in self.inputs})
        except TypeError as error:  # JAX compares names, shapes and dtypes with those of the executable
            found = shortened(" ".join(str(error).split()), 300)
            raise ArtifactError(
                "damaged", "a program is given what it does not take", found=found, remedy=remedy
            ) from None


@dataclass(frozen=True)
class Native:
    """A program compiled here; ``keep`` stores it in the user's cache and says where, for a report."""

    compiled: Callable[..., Any]
    keep: Callable[[], str]


class Beside(Protocol):
    """Runs executables and those that are compiled here with the same inputs: see ``wanrun.attest``."""

    unusable: dict[str, str]

    def beside(
        self, name: str, program: Program, shipped: Callable[..., Any], native: Callable[[], Native]
    ) -> Callable[..., Any]:
        """Returns a function that calls both."""
        ...


class LeftToChipError(ArtifactError):
    """A program that is compiled here in any case, and why."""


_Key = tuple[str, str, tuple[str, ...], tuple[int, ...]]


def _key(name: str, program: Program) -> _Key:
    """Returns an executable's identity: programs with the same StableHLO and call share one executable."""
    return name, program.sha256, program.inputs, program.donate


@dataclass(frozen=True)
class _Files:
    """A program and its checked bytes.

    ``entry`` is its executable, or the reason why the program is compiled here instead.
    """

    name: str
    program: Program
    data: bytes
    entry: bytes | ArtifactError


class Executables:
    """Loads an opened artifact's executables on request, each once for all profiles.

    The artifact's policy says whether a program without a fitting executable is compiled. A program that a
    build without the chip had to leave to the chip is compiled and kept in any case.
    """

    def __init__(self, opened: OpenedArtifact) -> None:
        self._opened = opened
        self._lock = threading.Lock()
        self._files: dict[_Key, _Files] = {}  # checked, not loaded yet
        self._loaded: dict[_Key, Future[LoadedProgram]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="executables")
        self._closed = False
        self._beside: Beside | None = None

    def run_twice(self, beside: Beside) -> None:
        """Has executables that are loaded from now on compared with those that are compiled here.

        One that cannot be loaded is compiled here, and reported.
        """
        self._beside = beside

    def check(self, profile: Profile, names: Collection[str] | None = None) -> Mapping[str, Program]:
        """Reads a profile's programs of these names, or all that generations run, and their executables.

        Their digests are checked, so damage is found before any computation, even in a program that is loaded
        late. Raises ArtifactError if a program is missing or damaged; if an executable is, unless compiling
        is on.
        """
        programs = self._opened.programs(profile)
        if not self._opened.policy.allow_compile:
            self._opened.check_trust(profile)
        if names is None:
            names = [name for name, program in programs.items() if ROLES[program.role].generates]
        programs = {name: programs[name] for name in names}
        for name, program in programs.items():
            key = _key(name, program)
            with self._lock:
                known = key in self._files or key in self._loaded
            if not known:  # another profile may have read it
                files = self._read(profile, name, program)
                with self._lock:
                    self._files.setdefault(key, files)
        return programs

    def request(self, profile: Profile, names: Iterable[str]) -> list[Future[LoadedProgram]]:
        """Starts to load programs of a profile, in this order; returns one future per program.

        A future raises ArtifactError if the executable is missing or damaged, or if JAX does not load it.
        """
        programs = self._opened.programs(profile)
        futures = []
        with self._lock:
            for name in names:
                key = _key(name, programs[name])
                if key not in self._loaded:
                    files = self._files.pop(key, None)
                    self._loaded[key] = self._pool.submit(self._load, profile, name, files)
                futures.append(self._loaded[key])
        return futures

    def idle(self, profile: Profile) -> list[str]:
        """Returns the names of a profile's programs that have not run, of those that generations run."""
        programs = self._opened.programs(profile)
        with self._lock:
            loaded = {key: future for key, future in self._loaded.items() if future.done()}
        keys = {
            name: _key(name, program) for name, program in programs.items() if ROLES[program.role].generates
        }
        return [name for name, key in keys.items() if key not in loaded or not loaded[key].result().called]

    def close(self) -> None:
        """Cancels queued loads and releases all executables."""
        with self._lock:
            self._closed = True
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._loaded.clear()
            self._files.clear()

    def _read(self, profile: Profile, name: str, program: Program) -> _Files:
        """Reads a program and its executable, and checks both."""
        data = self._opened.artifact.program(program)
        entry: bytes | ArtifactError
        try:
            entry = self._entry(profile, name)
        except LeftToChipError as error:
            entry = error
        except ArtifactError as error:
            if not self._opened.policy.allow_compile:
                raise
            entry = error.again()
        return _Files(name, program, data, entry)

    def _entry(self, profile: Profile, name: str) -> bytes:
        """Returns a program's executable after checking it, and that it may be used on this chip."""
        executables = self._opened.target.executables.get(profile.name, {})
        if name not in executables:
            if executables and self._opened.selected.built_elsewhere:  # left out by ``wanbuild compile``
                raise LeftToChipError("wrong_machine", "XLA compiles calls of cuDNN only on a GPU")
            raise ArtifactError(
                "wrong_machine",
                f"profile {profile.name} has no executable of {name} for this machine",
                remedy="run wanbuild compile, or pass --allow-compile",
            )
        if name in self._opened.check_trust(profile):
            raise LeftToChipError(
                "wrong_machine", "the artifact's executable gives other results on this chip"
            )
        return self._opened.artifact.executable(self._opened.target, executables[name])

    @own_options()
    def _load(self, profile: Profile, name: str, files: _Files | None) -> LoadedProgram:
        program, policy = self._opened.programs(profile)[name], self._opened.policy
        with self._opened.recorder.phase("executables", name) as loading:
            if files is None:  # the profile is not checked yet
                files = self._read(profile, name, program)
            compiled: Callable[..., Any]
            compared = True
            try:
                compiled = self._handed(files, files.entry, self._opened.target.options_of(name))
                loading.nbytes = len(files.entry) if isinstance(files.entry, bytes) else 0
            except ArtifactError as error:
                compared = program.plain is not None  # what is compiled here of it may be wrong too
                if isinstance(files.entry, bytes) and self._beside is None and not policy.allow_compile:
                    raise
                if isinstance(files.entry, bytes) and self._beside is not None and not compared:
                    self._beside.unusable[name] = str(error.found)
                compiled = self._compiled_here(files, error.what)
            if self._beside is not None and compared:
                compiled = self._beside.beside(name, program, compiled, partial(self._native, files))
        return LoadedProgram(compiled, program.inputs)

    def _handed(
        self, files: _Files, entry: bytes | ArtifactError, options: Mapping[str, Any]
    ) -> jax.stages.Compiled:
        """Loads an executable from the bytes of its entry."""
        if isinstance(entry, ArtifactError):
            raise entry
        compiled = load(files.name, self._lower(files, options), entry)
        self._opened.recorder.count(cache_hits=1)
        return compiled

    def _lower(self, files: _Files, options: Mapping[str, Any]) -> jax.stages.Lowered:
        """Lowers a program with these options of the compiler; raises CancelledError after ``close``."""
        name, program = files.name, files.program
        try:
            lowered = lower(files.data, name, program.donated, self._opened.device.where, options)
        except UnreadableProgramError as error:
            artifact, programs = self._opened.artifact, self._opened.program_set
            raise unreadable(artifact, programs, name, error.reader, error.found) from error
        if self._closed:
            raise CancelledError
        return lowered

    def _compiled_here(self, files: _Files, reason: str) -> jax.stages.Compiled:
        """Loads the executable that an earlier run has compiled here, or compiles and keeps it."""
        folder = overlay_folder(self._opened.manifest, self._opened.selected.name)
        options = options_here(self._opened.target.options_of(files.name))
        path = kept_file(folder.make(), files.program, options, self._opened.device.devices)
        if (entry := read_kept(path)) is not None:
            try:
                return self._handed(files, entry, options)
            except ArtifactError:
                path.unlink(missing_ok=True)  # of a driver that is gone
        start = now()
        with self._opened.recorder.phase("compile", files.name):
            compiled, entry = compile_here(self._lower(files, options))
        seconds = now() - start
        self._opened.recorder.count(cache_misses=1)
        told = self._keep(folder, path, entry)
        self._opened.warn(f"compiled {files.name} in {seconds:.1f} s, {told}: {reason}")
        return compiled

    @own_options()
    def _native(self, files: _Files) -> Native:
        """Compiles here what a program should give: of one that has it the plain form, which is not kept."""
        folder = overlay_folder(self._opened.manifest, self._opened.selected.name)
        options = options_here(self._opened.target.options_of(files.name))
        if (plain := files.program.plain) is not None:
            files = replace(files, data=self._opened.artifact.program(plain))
        path = kept_file(folder.path, files.program, options, self._opened.device.devices)
        compiled, entry = compile_here(self._lower(files, options))
        return Native(compiled, partial(self._keep, folder, path, entry))

    def _keep(self, folder: CacheFolder, path: Path, entry: bytes) -> str:
        """Keeps an executable that was compiled here, if it can be, and says where."""
        told = f"kept in {path.parent}"
        try:
            with folder.held():
                folder.make()  # another process may have made room
                keep(path, entry)
                folder.make_room()
        except OSError as error:
            return f"which cannot be {told}: {error.strerror}"
        except UsageError as error:  # of the folder
            return f"which cannot be {told}: {error.found}"
        return told


def unreadable(
    artifact: Artifact, programs: ProgramSet, name: str, reader: str, reason: object
) -> ArtifactError:
    """Returns the error for a program of a set that the JAX of version ``reader`` cannot read."""
    return ArtifactError(
        "other_release",
        f"program {name} of {artifact}, which jax {programs.jax} exported, cannot be read",
        expected=f"one that jax {reader} reads",
        found=reason,
        remedy=f"run wanbuild compile {shlex.quote(str(artifact))} --again",
    )
