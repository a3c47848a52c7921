"""The parts of an artifact that are stored and fetched one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from wanhub.signature import SIGNATURE
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import MANIFEST
from wanrun.artifact.named import ADAPTER, EXECUTABLE, PROGRAM, REQUIREMENTS, TOKENIZER, WEIGHTS, Kind
from wanrun.files import plain_relative


@dataclass(frozen=True)
class Layer:
    """Files that are stored together: their paths relative to the artifact, sorted, under a title."""

    title: str
    files: tuple[str, ...]


_TITLES: Mapping[Kind, str] = MappingProxyType(
    {
        WEIGHTS: "weights of {}",
        TOKENIZER: "tokenizer",
        PROGRAM: "programs {}",
        EXECUTABLE: "target {}",
        REQUIREMENTS: "target {}",
        ADAPTER: "adapter {}",
    }
)
"""The part of each kind of file; files of other kinds describe and check these."""

RECORDS = "records"


def layers_of(artifact: Artifact, signed: bool = False) -> Iterator[Layer]:
    """Yields an artifact's parts, those first that change least often; ``signed``: with its signature.

    A part does not depend on the other parts, so a file of two parts is in both.

    These are each component's weights with Orbax's metadata; the tokenizer; the programs of each set; the
    executables of each target with its file of requirements; each adapter; and last what describes and checks
    them: embeddings, recorded results and verdicts, and the manifest.
    """
    files: dict[str, set[str]] = {}
    for one in artifact.named():
        files.setdefault(_TITLES.get(one.kind, RECORDS).format(one.of), set()).add(one.name)
    for name, component in artifact.manifest.components.items():
        files[_TITLES[WEIGHTS].format(name)] |= set(_below(artifact.folder, component.folder))
    records = files.pop(RECORDS, set()) | {MANIFEST} | ({SIGNATURE} if signed else set())
    for title, names in {**files, RECORDS: records}.items():
        yield Layer(title, tuple(sorted(names)))


def _below(artifact: Path, folder: str) -> Iterator[str]:
    """Yields the files in a folder of the artifact, at any depth."""
    for path in (artifact / folder).rglob("*"):
        if path.is_file():
            name = path.relative_to(artifact).as_posix()
            plain_relative(name, "a file of the weights")
            yield name
