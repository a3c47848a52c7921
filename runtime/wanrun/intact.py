"""Checks every byte that a manifest lists; needs neither JAX nor the build extra."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from wanrun.artifact.manifest import Component, Manifest, read_manifest
from wanrun.artifact.parameters import Parameter
from wanrun.artifact.programs import Program, ProgramSet
from wanrun.executables.entries import read_entry, read_program
from wanrun.files import check_digest, digest_found, origin_of
from wanrun.text.embeddings import ArtifactEmbeddings
from wanrun.timing.clock import now
from wanrun.units import in_bytes
from wanrun.weights.restore import Restore, default_threads

BATCH_BYTES = 256 * 2**20
"""Bytes of the parameters that are read at a time; a larger parameter is a batch of its own."""

MAX_SMALL_BYTES = 2**30
"""The largest tokenizer, record or file of requirements. The largest real one, UMT5's tokenizer, has 17
MB."""

Report = Callable[[str], None]


def check_signed(artifact: Path, public_key: Path) -> None:
    """Checks that an artifact was signed with a key, and that its files are those that were (extra ``sign``).

    Of a partial copy those that are there; others are compared as they come. Load it with ``verify="sha256"``
    then.

    Args:
        artifact: its folder, as of ``wanrun.artifact_folder``.
        public_key: an elliptic curve key, PEM.

    Raises:
        ArtifactError: if it is not signed, by another key, or if a file is missing or another one.
        UsageError: if the key is none, or the extra is not installed.
    """
    from wanhub.signature import check_signature

    check_signature(artifact, public_key)
    if origin_of(artifact):
        from wanhub.complete import check_copy

        check_copy(artifact)
    else:
        check_intact(artifact, read_manifest(artifact), lambda line: None)


def check_intact(artifact: Path, manifest: Manifest, report: Report) -> None:
    """Reads every file that the manifest lists and checks its sha256.

    Orbax's metadata beside the weights is not listed: ``wanbuild verify`` compares it. The report is one line
    per component, program set and target.

    Raises:
        ArtifactError: naming the first file that is missing or damaged.
    """
    check_weights(artifact, manifest, report)
    for _ in checked_programs(artifact, manifest, report):
        pass
    check_others(artifact, manifest, report)


def check_weights(artifact: Path, manifest: Manifest, report: Report) -> None:
    """Does so for the weights; one batch of parameters is in memory at a time."""
    with ThreadPoolExecutor(default_threads(artifact)) as pool:
        for name, component in manifest.components.items():
            started = now()
            for batch in batches(component):
                Restore(artifact, name, batch, pool, verify="sha256").result()
            rate = in_bytes(component.nbytes / (now() - started))
            report(f"{name:<14} {len(component.parameters):>4} parameters, {rate}/s, intact")


def checked_programs(
    artifact: Path, manifest: Manifest, report: Report
) -> Iterator[tuple[str, Program, ProgramSet, bytes]]:
    """Does so for the programs: yields each one's name, record, set and bytes."""
    for key, program_set in manifest.program_sets.items():
        for profile, programs in program_set.programs.items():
            for name, program in programs.items():
                yield name, program, program_set, read_program(artifact, name, program)
            report(f"{profile}: programs of {key} intact")


def check_others(artifact: Path, manifest: Manifest, report: Report) -> None:
    """Does so for everything else."""
    for target_name, target in manifest.targets.items():
        for entries in target.executables.values():
            for name, entry in entries.items():
                read_entry(artifact, target, name, entry)
        report(f"target {target_name}: executables intact")
    requirements = [target.requirements for target in manifest.targets.values()]
    for record in [manifest.tokenizer, *manifest.golden.values(), *requirements]:
        path, remedy = artifact / record.file, "copy the artifact again or rebuild it"
        check_digest(digest_found(path, MAX_SMALL_BYTES), record.sha256, f"{path} is damaged", remedy)
    embeddings = ArtifactEmbeddings(artifact, manifest)
    for key in manifest.embeddings:
        embeddings.read(key)
    if manifest.embeddings:
        report(f"{len(manifest.embeddings)} prompt embedding(s) intact")


def batches(component: Component) -> Iterator[Component]:
    """Yields parts of the component, each of at most ``BATCH_BYTES`` or of one parameter."""
    batch: dict[str, Parameter] = {}
    nbytes = 0
    for path, parameter in sorted(component.parameters.items()):
        if batch and nbytes + parameter.layout.nbytes > BATCH_BYTES:
            yield msgspec.structs.replace(component, parameters=batch)
            batch, nbytes = {}, 0
        batch[path] = parameter
        nbytes += parameter.layout.nbytes
    if batch:
        yield msgspec.structs.replace(component, parameters=batch)
