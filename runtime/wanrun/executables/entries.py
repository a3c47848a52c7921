"""The user's own executables: programs that were compiled here, besides an artifact's."""

from __future__ import annotations

from wanrun.artifact.manifest import Manifest
from wanrun.cached import CacheFolder
from wanrun.files import canonical_json, sha256_of
from wanrun.machine.environment import host_environment


def overlay_folder(manifest: Manifest, target: str) -> CacheFolder:
    """Returns the user's cache folder of an artifact's programs that were compiled here.

    Each kind of host has its own folder: machines may share a home, and the cache key ignores the CPU model.
    """
    host = sha256_of(canonical_json(host_environment(manifest.targets[target].environment["platform"])))
    digest = manifest.content_digest.removeprefix("sha256:")
    return CacheFolder("executables", f"{digest[:16]}-{target}-{host[:8]}", "compiled programs")
