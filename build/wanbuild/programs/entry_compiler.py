"""Compiles programs for one target into entries of the artifact's compilation cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanbuild.programs.instructions import beyond, record_cpu_level
from wanbuild.programs.limited import LimitedProcesses
from wanbuild.programs.xla import TooLargeError, compile_into
from wanbuild.targets.target import TargetSpec
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.mesh import name_suffix
from wanrun.artifact.programs import Program
from wanrun.artifact.targets import Executable
from wanrun.errors import UsageError
from wanrun.files import file_sha256, fsync_directory
from wanrun.machine.environment import built_elsewhere
from wanrun.temporary import temporary_folder
from wanrun.timing.spans import Spans

MOSAIC = b"mosaic_gpu"
"""Text in a program that has a kernel in Mosaic GPU."""


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program's cache entry and the compiler's statistics.

    A program whose compilation only the chip can finish has no entry.
    """

    executable: Executable | None
    statistics: Mapping[str, Any]


class EntryCompiler:
    """A compiler of programs for one target, which moves each cache entry into the artifact.

    Args:
        folder: the folder of cache entries, relative to the artifact.
        ledger: usable executables by program name and the digest of their StableHLO; gets those that are
            compiled. Their entries in the folder stay unchanged.
        processes: the processes that compile with a limit on the instruction set, or kernels in Mosaic GPU.
        report: gets a line for a program that is compiled again with a lower limit.
        spans: gets the programs that are compiled.
    """

    def __init__(
        self,
        artifact: Artifact,
        target: TargetSpec,
        folder: str,
        ledger: dict[tuple[str, str], CompiledProgram],
        processes: LimitedProcesses,
        report: Callable[[str], None],
        spans: Spans,
    ) -> None:
        self._artifact, self.target, self.folder = artifact, target, folder
        self._ledger, self._kept = ledger, {c.executable.file: c for c in ledger.values() if c.executable}
        self._processes, self._report, self._spans = processes, report, spans

    def usable(self, name: str, program: Program) -> CompiledProgram | None:
        """Returns a program's executable, if there is one."""
        return self._ledger.get((name, program.sha256))

    def add(self, name: str, program: Program, last_time: str) -> CompiledProgram:
        """Compiles a program of the artifact. One that profiles share has one entry, made once.

        ``last_time`` says in words how long it took the last time, or nothing. Raises TooLargeError if the
        program does not fit the device's memory.
        """
        data = self._artifact.program(program)
        with self._spans.phase("compile", name + last_time):
            compiled = self.compile(name, data, program.donated)
        self._ledger[name, program.sha256] = compiled
        return compiled

    def compile(self, name: str, data: bytes, donate: Sequence[str]) -> CompiledProgram:
        """Compiles one exported program.

        Raises TooLargeError if it does not fit the device's memory, and UsageError if this CPU cannot compile
        it for the target's CPU level.
        """
        final = self._artifact.folder / self.folder
        final.mkdir(parents=True, exist_ok=True)
        with temporary_folder(final.parent) as cache:
            entry, figures = self._compiled(cache, name, data, donate)
            statistics = self._statistics(name, figures)
            if figures["calls_cudnn"] and built_elsewhere(self.target.environment):
                return CompiledProgram(None, statistics)
            if entry.name in self._kept:  # StableHLO of another digest that compiles to an existing entry
                return self._kept[entry.name]
            with entry.open("rb+") as file:
                os.fsync(file.fileno())
            placed = final / entry.name
            entry.replace(placed)
        fsync_directory(final)
        fsync_directory(final.parent)
        record = Executable(placed.name, placed.stat().st_size, file_sha256(placed))
        return CompiledProgram(record, statistics)

    def _compiled(
        self, cache: Path, name: str, data: bytes, donate: Sequence[str]
    ) -> tuple[Path, Mapping[str, Any]]:
        """Compiles a program; returns its entry in a folder under the cache's, and the compiler's figures."""
        level, mesh = self.target.cpu_level, self.target.mesh
        if level is None and MOSAIC in data and built_elsewhere(self.target.environment):
            chip = self.target.name.removesuffix(name_suffix(mesh))
            figures = self._processes.compile(chip, "", cache, mesh, name, data, donate)
            return _entry_in(cache), figures
        if level is None:
            figures = compile_into(cache, self.target, name, data, donate)
            return _entry_in(cache), figures
        for limit, following in zip(level.limits, [*level.limits[1:], None], strict=True):
            folder = cache / limit
            folder.mkdir()
            figures = self._processes.compile("cpu", limit, folder, mesh, name, data, donate)
            entry = _entry_in(folder)
            if not (more := beyond(entry, level.instructions)):
                record_cpu_level(entry, level)
                return entry, figures
            if following is not None:
                lacks = f"needs {' '.join(more)}, which {level.name} lacks"
                self._report(f"{name}: code for {limit} {lacks}; compiled for {following}")
        raise UsageError(
            "unsupported",
            f"{name} cannot be compiled for {level.name} on this CPU",
            expected=f"only code for {level.limits[-1]}",
            found=" ".join(more),
            remedy="build it on another CPU",
        )

    def _statistics(self, name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the manifest records of the figures; refuses a program too large for the memory."""
        kept = {key: value for key, value in figures.items() if key not in ("alias_bytes", "calls_cudnn")}
        parts = ("argument_bytes", "output_bytes", "temporary_bytes", "code_bytes")
        kept["output_bytes"] -= figures["alias_bytes"]  # they lie where donated arguments were
        used = sum(kept[part] for part in parts)
        if used > self.target.memory_bytes:
            raise TooLargeError(name, self.target, used)
        return kept


def _entry_in(cache: Path) -> Path:
    """Returns the single entry of a cache folder."""
    (entry,) = (path for path in cache.iterdir() if path.name.endswith("-cache"))
    return entry
