"""The user's own executables: programs that were compiled here, beside an artifact's."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from wanrun.artifact.manifest import Manifest
from wanrun.errors import UsageError
from wanrun.files import canonical_json, sha256_of, user_cache
from wanrun.machine.environment import host_environment


def overlay_folder(manifest: Manifest, target: str) -> Path:
    """Makes the user's cache folder of an artifact's programs that were compiled here.

    Each kind of host has its own folder: machines may share a home, and the cache key ignores the CPU model.

    Raises:
        UsageError: if the folder cannot be written.
    """
    host = sha256_of(canonical_json(host_environment(manifest.targets[target].environment["platform"])))
    digest = manifest.content_digest.removeprefix("sha256:")
    folder = user_cache() / "executables" / f"{digest[:16]}-{target}-{host[:8]}"
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
