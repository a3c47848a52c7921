"""The files of programs and executables: the artifact's, checked before use, and the user's own."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Program
from wanrun.artifact.targets import Executable, Target
from wanrun.errors import UsageError
from wanrun.files import canonical_json, read_listed, sha256_of, user_cache
from wanrun.machine.environment import host_environment

MAX_PROGRAM_BYTES = 2**30
"""Of a serialized program, which holds no weights: the largest are some megabytes."""

RECOMPILE = "copy the artifact again, or run wanbuild compile"


def read_entry(artifact: Path, target: Target, name: str, entry: Executable) -> bytes:
    """Reads an executable's entry and checks its digest, because it holds machine code.

    Raises:
        ArtifactError: if the entry is missing or differs.
    """
    path = artifact / target.folder / entry.file
    what = f"the executable of {name} is damaged: {path}"
    return read_listed(path, entry.nbytes, entry.sha256, what, RECOMPILE)


def read_program(artifact: Path, name: str, program: Program) -> bytes:
    """Reads a serialized program and checks its digest.

    Raises:
        ArtifactError: if the program is missing or differs.
    """
    path = artifact / program.file
    what = f"program {name} is damaged: {path}"
    return read_listed(path, MAX_PROGRAM_BYTES, program.sha256, what, RECOMPILE)


def overlay_path(manifest: Manifest, target: str) -> Path:
    """Returns the user's cache folder of programs that were compiled here.

    Each kind of host has its own folder: machines may share a home, and the cache key ignores the CPU model.
    """
    host = sha256_of(canonical_json(host_environment(manifest.targets[target].environment["platform"])))
    digest = manifest.content_digest.removeprefix("sha256:")
    return user_cache() / "executables" / f"{digest[:16]}-{target}-{host[:8]}"


def overlay_folder(manifest: Manifest, target: str) -> Path:
    """Makes the folder of ``overlay_path``, in which programs that were compiled here are kept.

    Raises:
        UsageError: if the folder cannot be written.
    """
    folder = overlay_path(manifest, target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(
            f"compiled programs cannot be kept in {folder}",
            found=error.strerror,
            remedy="set XDG_CACHE_HOME to a folder that can be written",
        ) from None
    return folder
