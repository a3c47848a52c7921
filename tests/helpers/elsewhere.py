"""Artifacts with a target that was built elsewhere, or looks so: its chip is this CPU."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from helpers.compiling import FAST_COMPILE
from helpers.damage import PROFILE, own
from helpers.manifests import programs_of
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Attested, Recorded, read_manifest
from wanrun.artifact.select import select_target
from wanrun.artifact.targets import Executable, Target
from wanrun.files import sha256_of
from wanrun.trust.verdict import Verdict, trial_facts, verdict_key

TARGET = "v9"
"""The target that looks as if it had been built elsewhere."""

BREAKPOINT = b"\xcc"
"""An instruction of x86 that ends the process with SIGTRAP."""


def put_golden(artifact: Path, golden: Mapping[str, Any] | None, profile: str = PROFILE) -> None:
    """Gives the artifact this recorded result of a profile, and no other; None: no result."""
    manifest = read_manifest(artifact)
    if golden is None:
        manifest.changed(golden={}).write(artifact)
        return
    data = json.dumps(golden).encode()
    own(artifact, "golden")
    (artifact / "golden").mkdir(exist_ok=True)
    file = f"golden/{sha256_of(data)[:12]}.json"
    (artifact / file).write_bytes(data)
    manifest.changed(golden={profile: Recorded(file=file, sha256=sha256_of(data))}).write(artifact)


def record_verdict(artifact: Path, verdict: Verdict, data: bytes = b"", **other: Any) -> dict[str, Any]:
    """Records a verdict about the target's profile in the artifact; returns the facts that it is about.

    Args:
        artifact: its folder, with a manifest of its own.
        data: the bytes of the file, instead of the verdict's.
        other: facts of another machine than this one.
    """
    manifest = read_manifest(artifact)
    profile = manifest.profiles[PROFILE]
    selected = select_target(Artifact(manifest, artifact), profile, TARGET, allow_compile=True)
    facts = trial_facts(manifest, selected, profile) | other
    data = data or msgspec.structs.replace(verdict, facts=facts).encoded()
    digest = sha256_of(data)
    (artifact / "verdicts").mkdir(exist_ok=True)
    file = f"verdicts/{TARGET}-{PROFILE}-{digest[:12]}.json"
    (artifact / file).write_bytes(data)
    told = Attested(
        file=file, sha256=digest, target=TARGET, profile=PROFILE, device_kind="CPU v9", made="2026-11-29"
    )
    manifest.changed(verdicts={**manifest.verdicts, verdict_key(facts): told}).write(artifact)
    return facts


def record(artifact: Path, profile: str = PROFILE, steps: int | None = None) -> dict[str, Any]:
    """Runs a profile on the artifact's CPU target; returns the result to record, of so many steps."""
    from wanrun.generation.load import load
    from wanrun.replay.golden import replayed

    with load(artifact, embeddings="none", target="cpu", profile=profile) as pipeline:
        return replayed(pipeline, pipeline.environment, steps=steps).golden.as_json()


def build_elsewhere(artifact: Path, beside: bool = False, **facts: Any) -> None:
    """Makes the CPU target one that was built without its chip, under names that JAX has not.

    What is compiled here, to be compared, is compiled with other options.

    Args:
        artifact: its folder, with a manifest of its own.
        beside: whether the CPU target stays as well.
        facts: other facts of the environment.
    """
    own(artifact, "executables")
    manifest = read_manifest(artifact)
    target = manifest.targets["cpu"]
    said = {"topology": "cpu:1", "device_kinds": ["cpu", "CPU v9"], "platform_version": "a compiler"}
    entries: dict[str, dict[str, Executable]] = {}
    for profile, name, entry in _entries(target):
        file = entry.file.replace("-cache", "-elsewhere-cache")
        entries.setdefault(profile, {})[name] = msgspec.structs.replace(entry, file=file)
        path = artifact / target.folder / entry.file
        path.with_name(file).write_bytes(path.read_bytes())
    for path in {artifact / target.folder / entry.file for _, _, entry in _entries(target)}:
        if not beside:
            path.unlink()
    changed = msgspec.structs.replace(
        target,
        environment={**target.environment, **said, **facts},
        executables=entries,
        options={**target.options, **FAST_COMPILE},
    )
    targets = {TARGET: changed, **({"cpu": target} if beside else {})}
    manifest.changed(targets=targets).write(artifact)


def _entries(target: Target) -> list[tuple[str, str, Executable]]:
    return [(profile, *one) for profile, each in target.executables.items() for one in each.items()]


def put_executable(artifact: Path, name: str, data: bytes, profile: str = PROFILE) -> None:
    """Gives the target other bytes as a program's executable, with a digest that fits."""
    manifest = read_manifest(artifact)
    target = manifest.targets[TARGET]
    entries = dict(target.executables[profile])
    file = f"put-{name}-{sha256_of(data)[:12]}-cache"
    (artifact / target.folder / file).write_bytes(data)
    entries[name] = Executable(file, len(data), sha256_of(data))
    changed = msgspec.structs.replace(target, executables={**target.executables, profile: entries})
    manifest.changed(targets={**manifest.targets, TARGET: changed}).write(artifact)


def leave_to_the_chip(artifact: Path, name: str) -> None:
    """Leaves a program's executable out, as a build without its GPU does."""
    manifest = read_manifest(artifact)
    target = manifest.targets[TARGET]
    executables = {
        profile: {key: entry for key, entry in each.items() if key != name}
        for profile, each in target.executables.items()
    }
    changed = msgspec.structs.replace(target, executables=executables)
    manifest.changed(targets={**manifest.targets, TARGET: changed}).write(artifact)


def entry_of(artifact: Path, name: str) -> bytes:
    """The bytes of a program's executable."""
    target = read_manifest(artifact).targets[TARGET]
    return (artifact / target.folder / target.executables[PROFILE][name].file).read_bytes()


def compiled_of(artifact: Path, name: str) -> bytes:
    """Compiles a program of the artifact, and returns the bytes of its entry in JAX's cache."""
    import jax

    from wanrun.executables.jax_hook import compile_here
    from wanrun.executables.lowering import lower

    record = programs_of(read_manifest(artifact), PROFILE, TARGET)[name]
    data = (artifact / record.file).read_bytes()
    return compile_here(lower(data, name, record.donated, jax.devices("cpu")[0], dict(FAST_COMPILE)))[1]


def impostor(artifact: Path, name: str) -> bytes:
    """Compiles another program of the same signature: all its outputs are one number, made of all inputs.

    Args:
        artifact: its folder.
        name: the program.

    Returns:
        The bytes of its entry in JAX's cache.
    """
    import jax
    import jax.numpy as jnp

    from wanrun.executables.jax_hook import compile_here
    from wanrun.executables.lowering import lower

    record = programs_of(read_manifest(artifact), PROFILE, TARGET)[name]
    real = jax.export.deserialize(bytearray((artifact / record.file).read_bytes()))

    def other(**inputs: Any) -> Any:
        total = sum(jnp.sum(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(inputs))
        made = [jnp.full(one.shape, total % 200).astype(one.dtype) for one in real.out_avals]
        return jax.tree.unflatten(real.out_tree, made)

    _, given = jax.tree.unflatten(real.in_tree, real.in_avals)
    other.__name__ = name
    data = jax.export.export(jax.jit(other), platforms=["cpu"])(**given).serialize()
    _, entry = compile_here(lower(bytes(data), name, record.donated, jax.devices("cpu")[0]))
    return entry


def doctored(artifact: Path, name: str, patch: AbstractContextManager[Any], profile: str = PROFILE) -> bytes:
    """Compiles the profile's program of this name with something of the models replaced.

    Args:
        artifact: its folder.
        name: the program.
        patch: replaces it while it is entered.

    Returns:
        The bytes of its entry in JAX's cache.
    """
    import jax

    from wanbuild.programs.export import builder_of, export_program
    from wanbuild.targets.target import resolve_target
    from wanrun.executables.jax_hook import compile_here
    from wanrun.executables.lowering import lower

    manifest = read_manifest(artifact)
    builder = builder_of(manifest, manifest.profiles[profile], resolve_target("cpu", {}))
    (spec,) = (spec for spec in builder.programs() if spec.name == name)
    with patch:
        data = export_program(spec, "cpu")
    record = programs_of(manifest, profile, TARGET)[name]
    return compile_here(lower(data, name, record.donated, jax.devices("cpu")[0], dict(FAST_COMPILE)))[1]


def with_breakpoints(entry: bytes) -> bytes:
    """An entry of JAX's cache whose machine code is breakpoints alone: it loads, and ends who calls it."""
    import zstandard

    data = bytearray(zstandard.ZstdDecompressor().decompress(entry, max_output_size=2**30))
    found, start = 0, data.find(b"\x7fELF")
    while start >= 0:
        found += _fill_code(data, start)
        start = data.find(b"\x7fELF", start + 4)
    assert found
    return zstandard.ZstdCompressor().compress(bytes(data))


def _fill_code(data: bytearray, start: int) -> int:
    """Fills the executable sections of an object file with breakpoints; returns how many there are."""
    offset, size, count = (
        struct.unpack_from("<Q", data, start + 40)[0],
        *struct.unpack_from("<HH", data, start + 58),
    )
    found = 0
    for number in range(count):
        _, _, flags, _, begin, length = struct.unpack_from("<IIQQQQ", data, start + offset + number * size)
        if flags & 4:  # SHF_EXECINSTR
            data[start + begin : start + begin + length] = BREAKPOINT * length
            found += length > 0
    return found
