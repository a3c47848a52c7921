"""Loads an artifact's executables from its compilation cache, after checking its files.

A program is ``jax.export.deserialize`` -> a named function around ``.call`` -> ``jit(...).lower(abstract
arguments).compile()``. The build runs this once with an empty cache; the runtime finds the cache entry.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanrun.artifact.export_age import unreadable
from wanrun.artifact.manifest import NEEDED
from wanrun.artifact.programs import Profile, Program
from wanrun.artifact.staged import SPREAD
from wanrun.artifact.targets import Executable
from wanrun.errors import ArtifactError
from wanrun.executables.entries import RECOMPILE, check_entry, overlay_folder, overlay_path, read_program
from wanrun.executables.jax_cache import OtherEntryError, UnreadableProgramError, asked_key, cached, lower
from wanrun.executables.signature import check_signature
from wanrun.executables.tolerance import TOLERANCES
from wanrun.executables.tuning import Contest, Outcome, keep_tuned, read_tuned, tuned_file, tuned_options
from wanrun.files import check_digest, digest_found
from wanrun.machine.jax_process import using_cache
from wanrun.opened.artifact import OpenedArtifact
from wanrun.terminal.temporary import temporary_folder
from wanrun.timing.timings import now

if TYPE_CHECKING:
    import jax
    import jax.stages

_NOT_WRITTEN = "Error writing persistent compilation cache entry"
"""The words of JAX's warning."""


def is_tuned(name: str, program: Program) -> bool:
    """Whether ``--retune`` compares a program.

    The bits of embeddings, which are cached, are those of the artifact's text encoder. Programs that spread
    weights run once.
    """
    return NEEDED[0] not in program.inputs and not name.startswith(SPREAD)


def tolerance_of(profile: Profile) -> float:
    """Returns the relative error that is allowed between two executables of a profile's programs."""
    return max(TOLERANCES[dtype] for dtype in (profile.options.dtype, profile.options.vae_dtype))


class LoadedProgram:
    """An executable that takes its inputs by name.

    Args:
        compiled: the executable, or another function of such arguments.
        inputs: argument names in order.
    """

    def __init__(self, compiled: Callable[..., Any], inputs: Sequence[str]) -> None:
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
        self._trusted: set[str] = set()  # profiles
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="executables")  # JAX's cache is process-wide
        self._closed = False

    def check(self, profile: Profile, names: Collection[str] | None = None) -> Mapping[str, Program]:
        """Checks every program and every cache entry of a profile against its digest.

        So damage is found before any computation, even in a program that is loaded late.

        Args:
            profile: the profile.
            names: the programs that are used; None for all.

        Returns:
            These programs by name.

        Raises:
            ArtifactError: if a program is missing or damaged; if a cache entry is, unless compiling is on.
        """
        programs = self._opened.programs(profile)
        if names is not None:
            programs = {name: programs[name] for name in names}
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
            if (tuned := self._from_tuned(profile, name, data, program)) is not None:
                return LoadedProgram(tuned, program.inputs)
            try:
                compiled = self._load_entry(profile, name, data, program)
            except ArtifactError as error:
                if not self._opened.policy.allow_compile:
                    raise
                compiled = self._from_overlay(name, data, program, error.what)
                return LoadedProgram(compiled, program.inputs)
        loaded = LoadedProgram(compiled, program.inputs)
        if self._opened.policy.retune and is_tuned(name, program):
            return self._contest(profile, name, data, program, loaded)
        return loaded

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
        """Returns a program's cache entry after checking it, and that it may be used on this chip."""
        entry = self._target.executables.get(profile.name, {}).get(name)
        if entry is None:
            raise ArtifactError(
                f"profile {profile.name} has no executable of {name} for this machine",
                remedy="run wanbuild compile, or pass --allow-compile",
            )
        if profile.name not in self._trusted:
            self._opened.check_trust(profile)
            self._trusted.add(profile.name)
        check_entry(self._opened.folder, self._target, name, entry)
        return entry

    def _load_entry(self, profile: Profile, name: str, data: bytes, program: Program) -> jax.stages.Compiled:
        """Loads the executable from the artifact's cache."""
        entry = self._entry(profile, name)  # check again just before loading
        path = self._opened.folder / self._target.folder / entry.file
        if self._opened.device.group is not None or self._opened.selected.has_other_keys:
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

        The key of a program contains the numbers of its devices, and the compiler's text about itself. The
        build had one process; in a run of several the devices of the second and later ones have other
        numbers, at least on CPUs. A compiler without its chip calls itself by another name, and that of a CPU
        by all of its features. The executable is the same: JAX gives it the devices when it opens it.
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
                compiled = cached(lowered, key)
        if compiled is None:
            raise ArtifactError(
                f"JAX cannot load the executable of {name} on this device: {path}",
                expected="an executable for it",
                found="an entry of another chip or compiler, or none at all",
                remedy=RECOMPILE,
            )
        self._opened.recorder.count_cache(hits=1)
        return compiled

    def _from_tuned(
        self, profile: Profile, name: str, data: bytes, program: Program
    ) -> jax.stages.Compiled | None:
        """Loads what an earlier ``--retune`` has kept in the user's cache; None if that is nothing."""
        entry, policy = self._target.executables.get(profile.name, {}).get(name), self._opened.policy
        if entry is None or not policy.tuned or policy.retune or self._opened.device.group is not None:
            return None
        overlay = overlay_path(self._opened.manifest, self._opened.selected.name)
        record = read_tuned(tuned_file(overlay, program, entry))
        if record is None:
            return None
        options = tuned_options(self._target.options_of(name))
        with contextlib.suppress(OtherEntryError), self._using(overlay, write=False):
            compiled = cached(self._lower(name, data, program, options), record.file)
            self._opened.recorder.count_cache(hits=int(compiled is not None))
            return compiled
        return None  # another device's

    def _contest(
        self, profile: Profile, name: str, data: bytes, program: Program, built: LoadedProgram
    ) -> LoadedProgram:
        """Compiles a program here, to be compared with the artifact's executable at the first call."""
        overlay = overlay_folder(self._opened.manifest, self._opened.selected.name)
        path = tuned_file(overlay, program, self._entry(profile, name))
        options = tuned_options(self._target.options_of(name))
        with temporary_folder(overlay) as folder:
            with using_cache(folder):
                self._check_open()
                compiled = self._lower(name, data, program, options).compile()
            (file,) = folder.glob("*-cache")
            entry = file.read_bytes()

        def decided(outcome: Outcome) -> None:
            times = f"{outcome.seconds:.3g} s a call here, {outcome.built_seconds:.3g} s as it was built"
            if outcome.better:
                keep_tuned(path, file.name, entry, outcome.seconds, outcome.built_seconds)
                said = f"kept in {overlay}"
            else:
                path.unlink(missing_ok=True)
                differs = outcome.difference and f"differs {outcome.difference}, so "
                said = f"{differs}the artifact's is used"
            self._opened.report(f"retuned {name}: {times}; {said}")

        here = LoadedProgram(compiled, program.inputs)
        weights, tolerance = self._opened.manifest.components.keys(), tolerance_of(profile)
        contest = Contest(built, here, weights, tolerance, decided)
        return LoadedProgram(contest, program.inputs)

    def _lower(
        self, name: str, data: bytes, program: Program, options: Mapping[str, Any] | None = None
    ) -> jax.stages.Lowered:
        """Lowers a program with the target's options, or with others."""
        programs, components = self._opened.program_set, self._opened.manifest.components
        options = self._target.options_of(name) if options is None else options
        check = partial(check_signature, name, program, components, programs.kernels.weight_bits)
        try:
            return lower(data, name, program.donated, self._opened.device.where, check, options)
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
        # There is a chip here to tune kernels on, which there was not where the target was built.
        options = tuned_options(self._target.options_of(name))
        with contextlib.suppress(ArtifactError), self._using(overlay):
            return self._from_cache(self._lower(name, data, program, options), name)
        with temporary_folder(overlay) as folder:
            with using_cache(folder), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                self._check_open()
                start = now()
                with self._opened.recorder.activities.during("compile", name):
                    compiled = self._lower(name, data, program, options).compile()
                seconds = now() - start
            # JAX warns of an entry that it cannot write, and its first part stays.
            failed = [str(one.message) for one in said if _NOT_WRITTEN in str(one.message)]
            for entry in () if failed else folder.iterdir():
                entry.replace(overlay / entry.name)
        self._opened.recorder.count_cache(misses=1)
        kept = f"kept in {overlay}"
        if failed:
            kept = f"which cannot be {kept}: {failed[0].rpartition('] ')[2]}"
        self._opened.warn(f"compiled {name} in {seconds:.1f} s, {kept}: {reason}")
        return compiled
