"""Checks where an artifact may be made, and keeps the valid parts of the one that it replaces."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wanbuild.programs.requirements import with_requirements, write_requirements
from wanbuild.variants.from_video import with_start
from wanrun.artifact.manifest import MANIFEST, Embedding, Manifest, read_manifest
from wanrun.artifact.named import ADAPTER, EMBEDDING, EXECUTABLE, KINDS, PROGRAM
from wanrun.claims import Claims
from wanrun.errors import ArtifactError, UsageError
from wanrun.files import digest_found
from wanrun.temporary import NAME
from wanrun.text.embeddings import EmbeddingFormat

_PROGRAM_FACTS = (
    *("variant", "task", "text_width", "latent_channels", "vae_spatial"),
    *("vae_temporal", "leading_latents", "expand_timesteps", "flow_map", "chunks"),
)
"""The facts of a model that its programs depend on."""

_FOLDERS = frozenset(kind.folder for kind in KINDS)

_OWN = re.compile(
    "|".join(
        (
            re.escape(MANIFEST),
            *(f"{kind.folder}/{kind.names}" if kind.folder else kind.names for kind in KINDS),
            rf"(.+/)?{NAME.pattern}(/.+)?",
        )
    )
)
"""Names of an artifact's files, listed or left by a killed build."""


def check_place(artifact: Path, force: bool) -> None:
    """Raises UsageError if an artifact may not be made at this place; ``force`` lets it replace one."""
    Claims().write([artifact], "", artifact=True)
    if artifact.resolve() == Path.cwd():
        raise UsageError(
            "exists",
            f"the artifact {artifact} is the working folder",
            remedy="give a folder in it, or another",
        )
    if not artifact.exists() or (artifact.is_dir() and not any(artifact.iterdir())):
        return
    if not (artifact / MANIFEST).is_file():
        raise UsageError(
            "exists",
            f"{artifact} exists and is not an artifact",
            remedy="choose another folder; it is left as it is",
        )
    if not force:
        raise UsageError("exists", f"the artifact {artifact} exists", remedy="pass --force to replace it")
    _check_own(artifact)


def _check_own(artifact: Path) -> None:
    """Raises UsageError if an artifact's folder has foreign files: replacing the artifact deletes them."""
    others = sorted(_others(artifact))
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise UsageError(
            "exists",
            f"replacing the artifact {artifact} would delete files that are not the artifact's",
            found=", ".join(others[:3]) + more,
            remedy="move it out of the folder",
        )


def _others(artifact: Path) -> Iterator[str]:
    """Yields foreign files, and foreign folders among the artifact's; relative names."""
    for parent, folders, names in os.walk(artifact):
        if Path(parent) == artifact:
            yield from (name for name in folders if name not in _FOLDERS)
            folders[:] = [name for name in folders if name in _FOLDERS]
        inside = Path(parent).relative_to(artifact)
        yield from (path for name in names if not _OWN.fullmatch(path := (inside / name).as_posix()))


def keep_valid(old: Path, new: Manifest, building: Path) -> Manifest:
    """Keeps the parts of the replaced artifact that still fit; returns the new manifest with them.

    These are programs, executables, embeddings and adapters, and for the same VAE the map of previews.
    Weights and a solver's numbers are arguments of a program, so it stays valid as long as the facts of the
    model, its components' configs, dtypes and parameters' shapes and axes are the same. So does an adapter,
    which has changes of weights.

    ``old`` is the replaced artifact's folder, ``building`` that of the new one.
    """
    try:
        previous = read_manifest(old)
    except ArtifactError:
        return new  # whatever is wrong with the old artifact, it is being replaced
    new = _keep_embeddings(old, previous, new, building)

    def signature(manifest: Manifest) -> Any:
        layouts = {
            name: {path: (one.layout, one.axes) for path, one in component.parameters.items()}
            for name, component in manifest.components.items()
        }
        facts = {name: getattr(manifest.model, name) for name in _PROGRAM_FACTS}
        # Not the scheduler's: timesteps and the solver's coefficients are arguments too.
        configs = {name: config for name, config in manifest.configs.items() if name in manifest.components}
        return facts, configs, manifest.dtypes, manifest.tokenizer.max_length, layouts

    starts = any(profile.options.video_to_video for profile in previous.profiles.values())
    kept = new.changed(**with_start(new, starts))
    if signature(previous) != signature(kept):
        return new
    for folder in (PROGRAM.folder, EXECUTABLE.folder, ADAPTER.folder):
        if (old / folder).is_dir():
            _take_over(old / folder, building / folder)
    targets = with_requirements(previous.targets)
    write_requirements(building, targets)
    same_vae = previous.components["vae"] == new.components["vae"]
    return kept.changed(
        preview=previous.colours if same_vae else (),
        profiles=previous.profiles,
        program_sets=previous.program_sets,
        targets=targets,
        adapters=previous.adapters,
    )


def _take_over(old: Path, new: Path) -> None:
    """Takes over a folder's files. Its folders are made anew: a read-only artifact's are read-only."""
    for parent, _, names in os.walk(old):
        folder = new / Path(parent).relative_to(old)
        folder.mkdir()
        for name in names:
            _link_or_copy(f"{parent}/{name}", f"{folder}/{name}")


def _keep_embeddings(old: Path, previous: Manifest, new: Manifest, building: Path) -> Manifest:
    """Takes over the embeddings with the new artifact's keys: its text encoder would make the same ones."""
    kept, names = dict[str, Embedding](), EmbeddingFormat(new)
    for key, record in previous.embeddings.items():
        source = old / record.file
        fits = names.key(record.prompt, record.dtype) == key
        if fits and digest_found(source, EMBEDDING.most) == record.sha256:
            target = building / record.file
            target.parent.mkdir(exist_ok=True)
            _link_or_copy(str(source), str(target))
            kept[key] = record
    return new.changed(embeddings=kept)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # not every file system has hard links
        shutil.copyfile(source, target)
