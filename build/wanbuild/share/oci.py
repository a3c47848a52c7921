"""Writes an artifact as an OCI image layout, which standard tools push and clusters mount.

Sources: the OCI image specification 1.1 (image-layout, manifest, config, layer, annotations). Each layer is
an uncompressed tar archive: Kubernetes' image volumes unpack only tar, and weights do not compress.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wanbuild.conversion.orbax import add_metadata
from wanbuild.progress_line import ProgressLine
from wanbuild.share.card import licence_of
from wanbuild.share.oci_layers import layers_of
from wanbuild.share.share_options import OciRequest
from wanbuild.share.tar import write_tar
from wanhub.signature import is_signed
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import MANIFEST, Manifest
from wanrun.errors import UsageError, unwritable
from wanrun.files import canonical_json, fsync_directory, read_bounded, replace_file, sha256_of
from wanrun.intact import check_intact
from wanrun.temporary import temporary_path
from wanrun.units import in_bytes

MARKER = "oci-layout"
VERSION = {"imageLayoutVersion": "1.0.0"}
TYPES = "application/vnd.oci.image"
NAME = "org.opencontainers.image.ref.name"
"""The annotation that names an image of a layout."""
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""The tags that a registry accepts."""
ARCHITECTURES: Mapping[str, str] = {"x86_64": "amd64", "aarch64": "arm64"}
"""OCI's names of machines."""
MAX_INDEX_BYTES = 2**24
"""The largest small file of a layout."""

Descriptor = dict[str, Any]
Report = Callable[[str], None]


def write_layout(request: OciRequest, report: Report) -> str:
    """Writes an artifact as an image, and returns the digest of its manifest.

    The same artifact gives the same bytes. The layout's index is replaced last: if this is killed, the layout
    has the images that it had. Raises ArtifactError if the artifact is damaged, and UsageError for a folder
    that is something else, an invalid tag, or an unknown target.
    """
    folder = request.output
    if TAG.fullmatch(request.tag) is None:
        raise UsageError(
            "invalid_value",
            "the tag is not valid in a registry",
            expected="letters, digits, '.', '_' and '-', 128 at most",
            found=request.tag,
        )
    _index(folder)
    signed = not request.targets and is_signed(request.artifact)  # byte for byte
    artifact = open_artifact(request.artifact).only(targets=request.targets or None)
    artifact = artifact if signed else artifact.renewed()
    check_intact(artifact, report)
    add_metadata(artifact)
    try:
        (folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        if not (folder / MARKER).exists():
            replace_file(folder / MARKER, canonical_json(VERSION))
        image = _write_image(request, artifact, signed, report)
        _list(folder, request.tag, image)
    except OSError as error:
        raise unwritable(f"the layout {folder}", error, "choose another folder") from error
    return str(image["digest"])


def _list(folder: Path, tag: str, image: Descriptor) -> None:
    """Lists an image in the index, replacing one of its name; another process waits meanwhile."""
    with (folder / MARKER).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        others = [one for one in _index(folder) if (one.get("annotations") or {}).get(NAME) != tag]
        listed = [*others, {**image, "annotations": {NAME: tag}}]
        text = {"schemaVersion": 2, "mediaType": f"{TYPES}.index.v1+json", "manifests": listed}
        replace_file(folder / "index.json", canonical_json(text))


def _index(folder: Path) -> list[Descriptor]:
    """Returns the images of a layout; none if the folder is new or empty."""
    try:
        if not folder.exists() or not any(folder.iterdir()):
            return []
        if not (folder / MARKER).exists():
            raise UsageError(
                "exists",
                f"{folder} has other files than an OCI image layout's",
                expected=f"a folder with {MARKER}, or a new or empty one",
                remedy="choose another folder",
            )
        if json.loads(read_bounded(folder / MARKER, MAX_INDEX_BYTES)) != VERSION:
            raise ValueError("another version")
        path = folder / "index.json"
        found = json.loads(read_bounded(path, MAX_INDEX_BYTES))["manifests"] if path.exists() else []
        if not all(isinstance(one, dict) for one in found):
            raise ValueError("images that are none")
        return list(found)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            "wrong_kind",
            f"{folder} is not an OCI image layout",
            expected="one, or a new or empty folder",
            found=str(error)[:200],
            remedy="choose another folder",
        ) from None


def _write_image(request: OciRequest, artifact: Artifact, signed: bool, report: Report) -> Descriptor:
    """Writes an image's layers, its config and its manifest; returns the manifest's descriptor."""
    layers: list[Descriptor] = []
    for layer in layers_of(artifact, signed):
        content: dict[str, Path | bytes] = {name: artifact.folder / name for name in layer.files}
        if MANIFEST in content and not signed:
            content[MANIFEST] = artifact.manifest.encoded()
        layers.append(_write_layer(request.output, layer.title, content))
        report(f"{layer.title:<24} {in_bytes(layers[-1]['size'])}")
    config = {
        "architecture": _architecture(artifact.manifest),
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
    }
    image = {
        "schemaVersion": 2,
        "mediaType": f"{TYPES}.manifest.v1+json",
        "config": _write_json(request.output, config, f"{TYPES}.config.v1+json"),
        "layers": layers,
        "annotations": _annotations(artifact.manifest, request.licence),
    }
    return _write_json(request.output, image, f"{TYPES}.manifest.v1+json")


def _architecture(manifest: Manifest) -> str:
    """Returns OCI's name of the targets' CPU architecture: runtimes refuse images of another one."""
    machines = {str(target.environment.get("machine")) for target in manifest.targets.values()}
    return ARCHITECTURES.get(next(iter(machines), ""), "amd64") if len(machines) == 1 else "amd64"


def _annotations(manifest: Manifest, licence: str | None) -> dict[str, str]:
    """Returns the annotations of the image: OCI's keys, then ours."""
    repository, revision = (manifest.source.get(key) for key in ("repository", "revision"))
    said = {
        "org.opencontainers.image.title": manifest.model.variant,
        "org.opencontainers.image.source": repository,
        "org.opencontainers.image.revision": revision,
        "org.opencontainers.image.licenses": licence or licence_of(manifest),
        "wan-artifact.content-digest": manifest.content_digest,
        "wan-artifact.manifest-digest": manifest.manifest_digest,
        "wan-artifact.targets": ",".join(sorted(manifest.targets)),
        "wan-artifact.profiles": ",".join(sorted(manifest.profiles)),
    }
    return {key: str(value) for key, value in said.items() if value}


def _write_layer(folder: Path, title: str, content: Mapping[str, Path | bytes]) -> Descriptor:
    """Writes files as a layer; returns its descriptor."""
    total = sum(len(one) if isinstance(one, bytes) else one.stat().st_size for one in content.values())
    with (
        ProgressLine(total, "write") as progress,
        temporary_path(folder / "blobs" / "sha256" / "layer") as path,
    ):
        with path.open("wb") as file:
            digest, size = write_tar(file, content, progress.advance)
            file.flush()
            os.fsync(file.fileno())
        path.replace(path.with_name(digest))
        fsync_directory(path.parent)
    return {
        "mediaType": f"{TYPES}.layer.v1.tar",
        "digest": f"sha256:{digest}",
        "size": size,
        "annotations": {"org.opencontainers.image.title": title},
    }


def _write_json(folder: Path, value: Mapping[str, Any], kind: str) -> Descriptor:
    """Writes a document; returns its descriptor."""
    data = canonical_json(value)
    digest = sha256_of(data).removeprefix("sha256:")
    replace_file(folder / "blobs" / "sha256" / digest, data)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}
