"""The requirements files of an artifact, for ``pip install -r``: the versions with which executables load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from wanrun.artifact.targets import Requirements, Target
from wanrun.files import read_bounded, replace_file, sha256_of

_HEADER = "# What the executables of this artifact were compiled with: they load with these versions alone.\n"


def requirements_of(environment: Mapping[str, Any], file: str = "requirements.txt") -> Requirements:
    """Returns the record of the requirements file for a target of this environment."""
    return Requirements(file=file, sha256=sha256_of(_text(environment)))


def with_requirements(targets: Mapping[str, Target]) -> dict[str, Target]:
    """Returns the targets with one requirements file for all, or one for each if their packages differ."""
    texts = {name: _text(target.environment) for name, target in targets.items()}
    alike = len(set(texts.values())) == 1
    files = {name: "requirements.txt" if alike else f"requirements-{name}.txt" for name in targets}
    return {
        name: msgspec.structs.replace(target, requirements=requirements_of(target.environment, files[name]))
        for name, target in targets.items()
    }


def write_requirements(artifact: Path, targets: Mapping[str, Target]) -> None:
    """Writes the requirements files that targets name, unless they are up to date.

    A build does this right before it commits the manifest, which has the files' digests.
    """
    for target in targets.values():
        path, data = artifact / target.requirements.file, _text(target.environment)
        if not _holds(path, data):
            replace_file(path, data)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return read_bounded(path, len(data)) == data
    except OSError:
        return False


def _text(environment: Mapping[str, Any]) -> bytes:
    """Returns a line per package in the cache's key; of zstandard only the presence counts."""
    lines = [f"{name}=={version}" for name, version in sorted(environment["packages"].items())]
    if environment["zstandard"]:
        lines.append("zstandard")
    return (_HEADER + "".join(f"{line}\n" for line in lines)).encode("ascii")
