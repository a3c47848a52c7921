"""Compiles a program once for all artifacts of a test run: variants share text encoders, VAEs and shapes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from filelock import FileLock

from wanbuild.programs.compile import CompiledProgram, _Compiler
from wanrun.artifact.targets import Executable
from wanrun.files import canonical_json, file_sha256, sha256_of
from wanrun.machine.environment import host_environment


@contextmanager
def compiled_once(store: Path) -> Iterator[None]:
    """Takes from a folder what was compiled of the same StableHLO, and keeps there what is compiled."""
    compile_now, host = _Compiler.compile, canonical_json(host_environment("cpu"))

    def compile_or_copy(self: _Compiler, name: str, data: bytes, donate: Sequence[str]) -> CompiledProgram:
        folder = store / sha256_of(host + f"{name} {list(donate)} ".encode() + data)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                compiled = compile_now(self, name, data, donate)
                building = folder.with_suffix(".building")
                building.mkdir()
                placed = self._artifact / self.folder / compiled.executable.file
                shutil.copyfile(placed, building / placed.name)
                (building / "statistics.json").write_text(json.dumps(compiled.statistics))
                building.rename(folder)
                return compiled
        (entry,) = folder.glob("*-cache")
        placed = self._artifact / self.folder / entry.name
        placed.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(entry, placed)
        statistics = json.loads((folder / "statistics.json").read_text())
        record = Executable(entry.name, entry.stat().st_size, file_sha256(entry))
        return CompiledProgram(record, statistics)

    store.mkdir(parents=True, exist_ok=True)
    with mock.patch.object(_Compiler, "compile", compile_or_copy):
        yield
