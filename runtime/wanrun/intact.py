"""Checks every byte that a manifest lists; needs neither JAX nor the build extra."""

from __future__ import annotations

__all__ = ["check_intact"]

from collections.abc import Callable

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.named import WEIGHTS
from wanrun.text.embeddings import ArtifactEmbeddings
from wanrun.timing.clock import now
from wanrun.units import in_bytes

Report = Callable[[str], None]


def check_intact(artifact: Artifact, report: Report) -> None:
    """Reads every file that the manifest lists and compares it; a block of each is in memory at a time.

    Orbax's metadata of the weights is not listed: ``wanbuild verify`` compares it. The report is one line
    per component, program set and target.

    Raises:
        ArtifactError: naming the first file that is missing or damaged.
    """
    manifest, names = artifact.manifest, list(artifact.named())
    for name, component in manifest.components.items():
        started = now()
        artifact.check_all(one for one in names if one.kind is WEIGHTS and one.of == name)
        rate = in_bytes(component.nbytes / (now() - started))
        report(f"{name:<14} {len(component.parameters):>4} parameters, {rate}/s, intact")
    artifact.check_all(one for one in names if one.kind is not WEIGHTS)
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
    if manifest.verdicts:
        report(f"{len(manifest.verdicts)} verdict(s) of other machines intact")
    for name in manifest.adapters:
        report(f"adapter {name}: intact")
