"""The checkpoint of a comparison, with diffusers' class names and the configs that an artifact was given."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wanbuild.config import read_json
from wanbuild.hub.repository import locate_source
from wanbuild.source.checkpoint import open_source
from wanbuild.source.configs import FILES, SCHEDULER
from wanbuild.source.former_names import with_names_of_index
from wanrun.artifact.manifest import Manifest
from wanrun.errors import UsageError


@contextmanager
def with_given_configs(checkpoint: Path, manifest: Manifest) -> Iterator[Path]:
    """Yields a checkpoint with an artifact's given configs and diffusers' names of pipeline and components.

    It is a folder of links, or the checkpoint itself if that has them all.

    ``checkpoint`` is in the diffusers layout.
    """
    given = [name for name in manifest.source.get("configs", ()) if (checkpoint / name).is_dir()]
    saved = read_json(checkpoint / "model_index.json")
    index = with_names_of_index(saved)
    if not given and index == saved:
        yield checkpoint
        return
    if SCHEDULER in given:
        index[SCHEDULER] = ["diffusers", manifest.configs[SCHEDULER]["_class_name"]]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        _link(checkpoint, folder, {"model_index.json", *given})
        (folder / "model_index.json").write_text(json.dumps(index))
        for name in given:
            (folder / name).mkdir()
            _link(checkpoint / name, folder / name, {FILES[name]})
            (folder / name / FILES[name]).write_text(json.dumps(dict(manifest.configs[name])))
        yield folder


def readable_source(manifest: Manifest, source: str) -> Path:
    """Returns the folder of a source that the reference can load, and that the artifact was made from.

    ``source`` is a checkpoint's folder or hub id. Raises SourceError for another folder, and UsageError if
    the artifact has LoRAs merged, or the reference cannot load the checkpoint's weights.
    """
    if manifest.loras:
        raise UsageError(
            "unsupported",
            "the artifact has LoRAs merged, which the reference would lack",
            remedy="compare an artifact of the same checkpoint without them",
        )
    located = locate_source(source, None if Path(source).exists() else manifest.source["revision"])
    with open_source(located.path) as opened:  # raises SourceError for a folder that is no checkpoint
        tensors = (one for part in opened.components.values() for one in part.tensors.values())
        if any(one.eight_bit is not None for one in tensors):
            raise UsageError(
                "unsupported",
                f"{source} has weights of 8 bits, which the reference cannot load",
                remedy="compare an artifact of a checkpoint with 16 or 32 bits",
            )
        if any(component.renamed for component in opened.components.values()):
            raise UsageError(
                "unsupported",
                f"{source} has original names, which the reference cannot load",
                remedy="give the same checkpoint in the diffusers layout",
            )
    return located.path


def _link(source: Path, target: Path, without: set[str]) -> None:
    for path in source.resolve().iterdir():
        if path.name not in without:
            (target / path.name).symlink_to(path)
