"""Compiling for tests: fast where the code is not the subject, and once for all artifacts of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import jax
import msgspec
from filelock import FileLock

from wanbuild import build
from wanbuild.programs import entry_compiler, export, xla
from wanbuild.programs.preview import with_preview
from wanbuild.programs.spec import ProgramSpec
from wanbuild.programs.xla import compile_into
from wanbuild.targets.target import TargetSpec
from wanrun.artifact.artifact import Artifact
from wanrun.files import canonical_json, sha256_of
from wanrun.machine.environment import host_environment

FAST_COMPILE: Mapping[str, Any] = MappingProxyType(
    {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
)
"""The same operations and buffers, in machine code that takes a seventh of the time to make (of a VAE)."""

ARTIFACT_COMPILE: Mapping[str, Any] = MappingProxyType({"xla_backend_optimization_level": 0})
"""For steps of artifacts: half of the time of the options that ship. Without fusion emitters the loop of all
steps would differ in its last bits from single steps."""


def fast_jit(function: Callable[..., Any], **options: Any) -> Any:
    """``jax.jit`` with ``FAST_COMPILE``."""
    return jax.jit(function, compiler_options=dict(FAST_COMPILE), **options)


@contextmanager
def compiled_once(store: Path) -> Iterator[None]:
    """Takes from a folder what was compiled of the same StableHLO, and keeps there what is compiled.

    By the same code: it says which figures there are of an executable.
    """
    host = [host_environment("cpu"), sha256_of(Path(xla.__file__).read_bytes())]

    def compile_or_copy(
        cache: Path, target: TargetSpec, name: str, data: bytes, donate: Sequence[str]
    ) -> Mapping[str, Any]:
        facts = canonical_json([host, dict(target.mesh), target.options_of(name), name, list(donate)])
        folder = store / sha256_of(facts + data)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                building = folder.with_suffix(".building")
                shutil.rmtree(building, ignore_errors=True)
                building.mkdir()
                figures = compile_into(building, target, name, data, donate)
                (building / "figures.json").write_text(json.dumps(figures))
                building.rename(folder)
        for entry in folder.glob("*-cache"):
            shutil.copyfile(entry, cache / entry.name)
        kept: Mapping[str, Any] = json.loads((folder / "figures.json").read_text())
        return kept

    store.mkdir(parents=True, exist_ok=True)

    def fit_or_copy(artifact: Artifact, report: Callable[[str], None]) -> Artifact:
        manifest = artifact.manifest
        if "vae" not in manifest.components or manifest.preview:
            return artifact
        facts = [manifest.configs["vae"], msgspec.to_builtins(manifest.components["vae"])]
        file = store / f"{sha256_of(canonical_json(facts))}.preview"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_text(json.dumps(with_preview(artifact, report).manifest.preview))
        return artifact.changed(preview=tuple(map(tuple, json.loads(file.read_text()))))

    with (
        mock.patch.object(entry_compiler, "compile_into", compile_or_copy),
        mock.patch.object(build, "with_preview", fit_or_copy),
    ):
        yield


@contextmanager
def exported_once() -> Iterator[None]:
    """Exports a program once where artifacts of one model have the same options in every shape."""
    own, kept = export.export_program, dict[Any, bytes]()

    def export_or_take(spec: ProgramSpec, platform: str) -> bytes:
        arguments = str(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), spec.arguments))
        key = platform, spec.name, spec.inputs, spec.function is spec.plain, arguments
        if key not in kept:
            kept[key] = own(spec, platform)
        return kept[key]

    with mock.patch.object(export, "export_program", export_or_take):
        yield
