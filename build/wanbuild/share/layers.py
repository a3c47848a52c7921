"""The parts of an artifact that are stored and fetched one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wanhub.signature import SIGNATURE
from wanrun.artifact.manifest import MANIFEST, Manifest
from wanrun.files import plain_relative


@dataclass(frozen=True)
class Layer:
    """Files that are stored together.

    Attributes:
        title: what they are, in words.
        files: their paths relative to the artifact, sorted.
    """

    title: str
    files: tuple[str, ...]


def layers_of(artifact: Path, manifest: Manifest, signed: bool = False) -> Iterator[Layer]:
    """Yields an artifact's parts, those first that change least often; ``signed``: with its signature.

    A part depends on nothing but what it is of: it is the same beside others, and a file of two is in both.

    These are each component's weights with Orbax's metadata; the tokenizer; the programs of each set; the
    executables of each target with its file of requirements; and last what describes and checks them:
    embeddings, recorded results and the manifest.
    """

    def layer(title: str, *files: str) -> Layer:
        return Layer(title, tuple(sorted(set(files))))

    for name, component in manifest.components.items():
        yield layer(f"weights of {name}", *_below(artifact, component.folder))
    yield layer("tokenizer", manifest.tokenizer.file)
    for key, program_set in manifest.program_sets.items():
        programs = (each.file for named in program_set.programs.values() for each in named.values())
        yield layer(f"programs {key}", *programs)
    for name, target in manifest.targets.items():
        entries = {entry.file for named in target.executables.values() for entry in named.values()}
        files = (f"{target.folder}/{file}" for file in entries)
        yield layer(f"target {name}", *files, target.requirements.file)
    records = (*manifest.embeddings.values(), *manifest.golden.values())
    signature = [SIGNATURE] if signed else []
    yield layer("records", *(record.file for record in records), *signature, MANIFEST)


def _below(artifact: Path, folder: str) -> Iterator[str]:
    """Yields the files in a folder of the artifact, at any depth."""
    for path in (artifact / folder).rglob("*"):
        if path.is_file():
            name = path.relative_to(artifact).as_posix()
            plain_relative(name, "a file of the weights")
            yield name
