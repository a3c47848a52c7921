"""Loads an artifact's executables from its compilation cache, after checking its files.

A program is ``jax.export.deserialize`` -> a named function around ``.call`` -> ``jit(...).lower(abstract
arguments).compile()``. The build runs this once with an empty cache; the runtime finds the cache entry.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanrun.artifact.environment import host_environment
from wanrun.artifact.export_age import unreadable
from wanrun.artifact.jax_process import using_cache
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile, Program
from wanrun.artifact.targets import Executable, Target
from wanrun.errors import ArtifactError, UsageError
from wanrun.files import canonical_json, check_digest, digest_found, read_bounded, sha256_of, user_cache
from wanrun.loading.jax_cache import UnreadableProgramError, asked_key, cached, lower
from wanrun.loading.opened import OpenedArtifact
from wanrun.loading.signature import check_signature
from wanrun.temporary import temporary_folder

if TYPE_CHECKING:
    import jax
    import jax.stages

MAX_PROGRAM_BYTES = 2**30
"""Of a serialized program, which holds no weights: the largest are some megabytes."""

_NOT_WRITTEN = "Error writing persistent compilation cache entry"
"""The words of JAX's warning."""

RECOMPILE = "copy the artifact again, or run wanbuild compile"


def check_entries(artifact: Path, target: Target, profile: str) -> None:
    """Checks that every cache entry of a profile exists and has its recorded size.

    Raises:
        ArtifactError: naming the first entry that is missing or has another size.
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
    """Checks a cache entry's digest before the entry is loaded, because it holds machine code.

    Raises:
        ArtifactError: if the entry is missing or differs.
    """
    path = artifact / target.folder / entry.file
    what, remedy = f"the executable of {name} is damaged: {path}", RECOMPILE
    check_digest(digest_found(path, entry.nbytes), entry.sha256, what, remedy)


def read_program(artifact: Path, name: str, program: Program) -> bytes:
    """Reads a serialized program and checks its digest.

    Raises:
        ArtifactError: if the program is missing or differs.
    """
    path = artifact / program.file
    try:
        data = read_bounded(path, MAX_PROGRAM_BYTES)
    except OSError as error:
        raise ArtifactError(
            f"program {name} cannot be read: {path}: {error.strerror}", remedy="copy the artifact again"
        ) from None
    check_digest(sha256_of(data), program.sha256, f"program {name} is damaged: {path}", RECOMPILE)
    return data


def overlay_folder(manifest: Manifest, target: str) -> Path:
    """Returns the user's cache folder in which ``--allow-compile`` keeps compiled programs.

    Each kind of host has its own folder: machines may share a home, and the cache key ignores the CPU model.

    Raises:
        UsageError: if the folder cannot be written.
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
        """Runs the executable; arguments that it does not take are ignored."""
        return self._compiled(**{name: arguments[name] for name in self.inputs})


@dataclass(frozen=True)
class _Distinct:
    """Identity of an executable: programs with the same StableHLO and call share one executable."""

    name: str
    sha256: str
    inputs: tuple[str, ...]
    donate: tuple[int, ...]

    @classmethod
    def of(cls, name: str, program: Program) -> _Distinct:
        return cls(name, program.sha256, program.inputs, program.donate)


class Executables:
    """Loads an opened artifact's executables on request, each once for all profiles.

    Args:
        opened: the artifact. Its policy says whether a program without a fitting executable is compiled.
    """

    def __init__(self, opened: OpenedArtifact) -> None:
        self._opened, self._target = opened, opened.target
        self._lock = threading.Lock()
        self._data: dict[_Distinct, bytes] = {}  # checked, not loaded yet
        self._loaded: dict[_Distinct, Future[LoadedProgram]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="executables")  # JAX's cache is process-wide
        self._closed = False

    def check(self, profile: Profile) -> Mapping[str, Program]:
        """Checks every program and every cache entry of a profile against its digest.

        So damage is found before any computation, even in a program that is loaded late.

        Returns:
            The profile's programs by name.

        Raises:
            ArtifactError: if a program is missing or damaged; if a cache entry is, unless compiling is on.
        """
        programs = self._opened.programs(profile)
        for name, program in programs.items():
            key = _Distinct.of(name, program)
            with self._lock:
                known = key in self._data or key in self._loaded
            if not known:  # another profile may have read it
                data = read_program(self._opened.folder, name, program)
                with self._lock:
                    self._data.setdefault(key, data)
        if not self._opened.policy.allow_compile:
            for name in programs:
                self._entry(profile, name)
        return programs

    def request(self, profile: Profile, names: Iterable[str]) -> list[Future[LoadedProgram]]:
        """Starts to load programs of a profile, in this order; returns one future per program.

        A future raises ArtifactError if the cache entry is missing or damaged, or if JAX's cache misses.
        """
        programs = self._opened.programs(profile)
        futures = []
        with self._lock:
            for name in names:
                key = _Distinct.of(name, programs[name])
                if key not in self._loaded:
                    data = self._data.pop(key, None)
                    self._loaded[key] = self._pool.submit(self._load, profile, name, data)
                futures.append(self._loaded[key])
        return futures

    def close(self) -> None:
        """Cancels queued loads and releases all executables."""
        with self._lock:
            self._closed = True
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._loaded.clear()
            self._data.clear()

    def _load(self, profile: Profile, name: str, data: bytes | None) -> LoadedProgram:
        program = self._opened.programs(profile)[name]
        with self._opened.recorder.phase("executables", name):
            if data is None:  # the profile is not checked yet
                data = read_program(self._opened.folder, name, program)
            try:
                compiled = self._load_entry(profile, name, data, program)
            except ArtifactError as error:
                if not self._opened.policy.allow_compile:
                    raise
                compiled = self._from_overlay(name, data, program, error.what)
        return LoadedProgram(compiled, program.inputs)

    def _check_open(self) -> None:
        """Raises CancelledError after ``close``, when JAX's flags may have changed."""
        if self._closed:
            raise CancelledError

    @contextlib.contextmanager
    def _using(self, folder: Path, write: bool = True) -> Iterator[None]:
        """Points JAX's cache at a folder, exclusively."""
        # Warning filters are process-wide too.
        with using_cache(folder, write), warnings.catch_warnings():
            self._check_open()
            # JAX warns about an unreadable entry and treats it as a miss.
            warnings.simplefilter("ignore")
            yield

    def _entry(self, profile: Profile, name: str) -> Executable:
        """Returns a program's cache entry after checking it."""
        entry = self._target.executables.get(profile.name, {}).get(name)
        if entry is None:
            raise ArtifactError(
                f"profile {profile.name} has no executable of {name} for this machine",
                remedy="run wanbuild compile, or pass --allow-compile",
            )
        check_entry(self._opened.folder, self._target, name, entry)
        return entry

    def _load_entry(self, profile: Profile, name: str, data: bytes, program: Program) -> jax.stages.Compiled:
        """Loads the executable from the artifact's cache."""
        entry = self._entry(profile, name)  # check again just before loading
        path = self._opened.folder / self._target.folder / entry.file
        if self._opened.device.company is not None:
            return self._from_alias(name, data, program, path, entry)
        try:
            with self._using(path.parent, write=False):
                return self._from_cache(self._lower(name, data, program), name, path.name)
        finally:
            self._entry(profile, name)  # JAX opens the entry by name: check that it did not change meanwhile

    def _from_alias(
        self, name: str, data: bytes, program: Program, path: Path, entry: Executable
    ) -> jax.stages.Compiled:
        """Loads the executable from a copy of its entry, under the key that JAX has for it in this process.

        The key of a program contains the numbers of its devices. The build had one process; in a run of
        several the devices of the second and later ones have other numbers, at least on CPUs. The executable
        is the same: JAX gives it the devices when it opens it.
        """
        lowered = self._lower(name, data, program)
        with temporary_folder(Path(tempfile.gettempdir())) as folder:
            with self._using(folder, write=False):
                key = asked_key(lowered)
            if key is None:
                raise ArtifactError(
                    f"JAX does not say under which key it looks for {name}",
                    remedy="install the jax that the target was built with",
                )
            copy = folder / key
            shutil.copyfile(path, copy)
            check_digest(
                digest_found(copy, entry.nbytes),
                entry.sha256,
                f"the executable of {name} is damaged: {path}",
                RECOMPILE,
            )
            with self._using(folder, write=False):
                return self._from_cache(lowered, name, key)

    def _lower(self, name: str, data: bytes, program: Program) -> jax.stages.Lowered:
        programs, components = self._opened.program_set, self._opened.manifest.components
        check = partial(check_signature, name, program, components, programs.kernels.weight_bits)
        try:
            return lower(data, name, program.donated, self._opened.device.where, check, self._target.options)
        except UnreadableProgramError as error:
            folder = self._opened.folder
            raise unreadable(folder, programs, name, error.reader, error.found) from error

    def _from_cache(
        self, lowered: jax.stages.Lowered, name: str, file: str | None = None
    ) -> jax.stages.Compiled:
        compiled = cached(lowered, file)
        if compiled is None:
            raise ArtifactError(
                f"the compilation cache has no entry for {name} under this process's key, though every "
                "recorded fact of the target agrees",
                expected="a hit",
                found="a miss",
                remedy="unset JAX_* variables, run wanbuild compile here, or pass --allow-compile",
            )
        self._opened.recorder.count_cache(hits=1)
        return compiled

    def _from_overlay(self, name: str, data: bytes, program: Program, reason: str) -> jax.stages.Compiled:
        """Loads the executable from the user's cache; on a miss, compiles it into that cache."""
        overlay = overlay_folder(self._opened.manifest, self._opened.selected.name)
        with contextlib.suppress(ArtifactError), self._using(overlay):
            return self._from_cache(self._lower(name, data, program), name)
        with temporary_folder(overlay) as folder:
            with using_cache(folder), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                self._check_open()
                compiled = self._lower(name, data, program).compile()
            # JAX warns of an entry that it cannot write, and its first part stays.
            failed = [str(one.message) for one in said if _NOT_WRITTEN in str(one.message)]
            for entry in () if failed else folder.iterdir():
                entry.replace(overlay / entry.name)
        self._opened.recorder.count_cache(misses=1)
        kept = f"kept in {overlay}"
        if failed:
            kept = f"which cannot be {kept}: {failed[0].rpartition('] ')[2]}"
        self._opened.warn(f"compiled {name}, {kept}: {reason}")
        return compiled
