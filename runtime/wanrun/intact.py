"""Checks every byte that a manifest lists; needs neither JAX nor the build extra."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.named import WEIGHTS
from wanrun.files import origin_of
from wanrun.machine.environment import usable_cores
from wanrun.text.embeddings import ArtifactEmbeddings
from wanrun.timing.clock import now
from wanrun.units import in_bytes

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
    opened = open_artifact(artifact)
    opened.check_all(opened.named(), usable_cores(), missing=bool(origin_of(artifact)))


def check_intact(artifact: Artifact, report: Report) -> None:
    """Reads every file that the manifest lists and compares it; a block of each is in memory at a time.

    Orbax's metadata beside the weights is not listed: ``wanbuild verify`` compares it. The report is one line
    per component, program set and target.

    Raises:
        ArtifactError: naming the first file that is missing or damaged.
    """
    threads, manifest, others = usable_cores(), artifact.manifest, list(artifact.named())
    for name, component in manifest.components.items():
        started = now()
        artifact.check_all([one for one in others if one.kind is WEIGHTS and one.of == name], threads)
        rate = in_bytes(component.nbytes / (now() - started))
        report(f"{name:<14} {len(component.parameters):>4} parameters, {rate}/s, intact")
    artifact.check_all([one for one in others if one.kind is not WEIGHTS], threads)
    for key, program_set in manifest.program_sets.items():
        for profile in program_set.programs:
            report(f"{profile}: programs of {key} intact")
    for name in manifest.targets:
        report(f"target {name}: executables intact")
    embeddings = ArtifactEmbeddings(artifact)
    for key in manifest.embeddings:
        embeddings.read(key)  # also what its bytes say
    if manifest.embeddings:
        report(f"{len(manifest.embeddings)} prompt embedding(s) intact")
