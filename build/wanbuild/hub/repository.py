"""Locates a source: a local folder, or the needed files of a repository on the Hugging Face hub.

Only the files that conversion reads are downloaded, into the hub's own cache, which other tools share. First
comes model_index.json, then configs and indexes, then tokenizer and weights. Each part is checked before the
next, so a repository of an unsupported variant costs a few kilobytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from wanbuild.config import read_json
from wanbuild.hub.snapshot import Snapshot, open_snapshot
from wanbuild.source.former_names import with_names_of_index
from wanbuild.source.image_processor import FILE as IMAGE_PROCESSOR_FILE
from wanbuild.source.image_processor import open_image_processor
from wanbuild.source.recognise import no_checkpoint
from wanbuild.source.shards import WEIGHT_NAMES, find_weights, read_weight_map
from wanbuild.variants.table import variants_of_pipeline
from wanbuild.variants.variant import IMAGE_PROCESSOR, NO_WEIGHTS
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.errors import SourceError, UsageError
from wanrun.terminal.lines import report as report_line

_INDEX = "model_index.json"
_TRANSFORMERS = frozenset(TRANSFORMERS)
"""The components whose weights may be next to model_index.json."""
_TOKENIZERS = ("", "tokenizer/", "google/umt5-xxl/")
"""The folders of repositories that hold a tokenizer: its own, the diffusers layout, and Wan's own."""
_PLAIN = re.compile(r"[\w-][\w.-]{0,200}", re.ASCII)
"""File names without special characters in paths and in huggingface_hub's patterns."""


@dataclass(frozen=True)
class Located:
    """The local folder of a source; repository and commit (``revision``) are None without a download."""

    path: Path
    repository: str | None
    revision: str | None


def locate_source(
    source: str | Path,
    revision: str | None = None,
    report: Callable[[str], object] = report_line,
    without: Collection[str] = (),
) -> Located:
    """Returns a local folder, or downloads the files of a hub repository that conversion reads.

    ``source`` is a folder, or a hub id ``owner/name``, as the user wrote it: ``./owner/name`` is a folder.
    ``revision`` is a branch, tag or commit; None is the main branch. ``without`` names components whose
    weights are not downloaded, and ``tokenizer``. ``HF_ENDPOINT``, ``HF_HOME``, ``HF_TOKEN`` and
    ``HF_HUB_OFFLINE`` have their meaning in huggingface_hub.

    Raises UsageError for a revision that is malformed or given with a folder. Raises SourceError if there is
    no such folder or repository, access is refused, the hub cannot be reached, the repository's variant is
    not supported, or a file in the hub's cache is cut off.
    """
    text, path = str(source), Path(source)
    try:
        if path.is_dir():
            if revision is not None:
                raise UsageError(
                    "no_effect",
                    f"--revision is for a hub id, and {text} is a folder",
                    remedy="leave --revision out",
                )
            return Located(path, None, None)
        if path.exists():
            raise no_checkpoint(path)
    except OSError as error:  # for example no permission, or a name that is too long
        raise SourceError("unreadable", f"{text} cannot be read: {error.strerror}") from None
    if not is_hub_id(text):
        raise SourceError(
            "missing_file",
            f"there is no folder {text}",
            remedy="give the checkpoint's folder or its hub id, owner/name",
        )
    return _locate_repository(open_snapshot(text, "main" if revision is None else revision), report, without)


def locate_tokenizer(place: Path) -> Path:
    """Returns a tokenizer's folder or file; downloads it if ``place`` is a hub id, not an existing path.

    Raises SourceError if the repository has no tokenizer.json at its top, in ``tokenizer/`` or, as Wan's own,
    in ``google/umt5-xxl/``; or as ``locate_source`` does.
    """
    if place.exists() or not is_hub_id(str(place)):
        return place
    snapshot = open_snapshot(str(place), "main")
    folder = next((name for name in _TOKENIZERS if f"{name}tokenizer.json" in snapshot.files), None)
    if folder is None:
        raise SourceError(
            "missing_file",
            f"{snapshot.name} holds no tokenizer",
            expected=" or ".join(f"{name}tokenizer.json" for name in _TOKENIZERS),
            remedy="give a repository that has one, or a folder",
        )
    names = [f"{folder}{name}" for name in ("tokenizer.json", "tokenizer_config.json")]
    snapshot.fetch([name for name in names if name in snapshot.files])
    return snapshot.folder / folder


def is_hub_id(text: str) -> bool:
    """Returns whether a text has the form of a hub id, ``owner/name``."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if text.count("/") != 1 or text.endswith((".safetensors", ".json")):
        return False
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def _locate_repository(
    snapshot: Snapshot, report: Callable[[str], object], without: Collection[str]
) -> Located:
    """Downloads the files that conversion reads, the large ones last."""
    from wanbuild.source.checkpoint import read_classes

    if _INDEX not in snapshot.files:
        raise SourceError(
            "missing_file",
            f"{snapshot.name} holds no {_INDEX}",
            expected="a repository in the diffusers layout",
            remedy="use the one whose name ends in -Diffusers",
        )
    snapshot.fetch([_INDEX])
    folder = snapshot.folder
    index = with_names_of_index(read_json(folder / _INDEX))
    rows = variants_of_pipeline(index.get("_class_name"), f"{_INDEX} of {snapshot.name}")
    classes = read_classes(index, rows, folder / _INDEX)
    weights = {
        name: _find_weights(snapshot, name, library, beside=classes.keys() & _TRANSFORMERS == {name})
        for name, (library, _) in classes.items()
        if name not in NO_WEIGHTS
    }
    indexes = [file for file in weights.values() if file.endswith(".json")]
    configs = {name: _config(snapshot, name, file) for name, file in weights.items()}
    tables = [name for name in ("tokenizer/tokenizer_config.json",) if name in snapshot.files]
    settings = ["scheduler/scheduler_config.json", *filter(None, configs.values())]
    if IMAGE_PROCESSOR in classes:
        settings.append(f"{IMAGE_PROCESSOR}/{IMAGE_PROCESSOR_FILE}")
    snapshot.fetch([*indexes, *settings, *tables])
    _check_configs(folder, configs, {name: class_name for name, (_, class_name) in classes.items()})
    if IMAGE_PROCESSOR in classes:
        open_image_processor(folder / IMAGE_PROCESSOR)
    wanted = {file for name, file in weights.items() if name not in without}
    large = [] if "tokenizer" in without else ["tokenizer/tokenizer.json"]
    large += wanted - set(indexes)
    for file in wanted & set(indexes):
        shards = set(read_weight_map(folder / file).values())
        large += [Path(file).with_name(shard).as_posix() for shard in shards]
    snapshot.fetch(large, report)
    return Located(folder, snapshot.id, snapshot.commit)


def _find_weights(snapshot: Snapshot, component: str, library: str, *, beside: bool) -> str:
    """Finds a component's weight file or index by the rule for folders; `beside`: also at the top."""
    root = Path(snapshot.name)  # stands for the repository, also in messages

    def names_in(place: Path) -> list[str] | None:
        paths = [root / name for name in snapshot.files]
        names = [path.name for path in paths if path.parent == place]
        return sorted(name for name in names if _PLAIN.fullmatch(name)) or None

    found = find_weights(root / component, WEIGHT_NAMES[library], root if beside else None, names_in)
    return found.relative_to(root).as_posix()


def _config(snapshot: Snapshot, component: str, weights: str) -> str | None:
    """Returns the config file of a component; None if its weights, in the original naming, have none."""
    plain, beside = f"{component}/config.json", Path(weights).with_name("config.json").as_posix()
    published = weights.startswith(tuple(f"{component}/{base}" for base in WEIGHT_NAMES.values()))
    return next((name for name in (plain, beside) if name in snapshot.files), plain if published else None)


def _check_configs(folder: Path, files: Mapping[str, str | None], classes: Mapping[str, str]) -> None:
    """Refuses configs before the download as conversion would; None for one derived from the weights."""
    from wanbuild.components import KINDS, kind_of
    from wanbuild.source.experts import check_same_config
    from wanbuild.source.original_config import is_original
    from wanbuild.source.scales import read_config

    transformers = {}
    for component, file in files.items():
        if file is None or component not in KINDS:
            continue
        data = read_config(folder / file)
        if not is_original(data):
            config = kind_of(component, classes[component]).parse(data, str(folder / file))
            if component in _TRANSFORMERS:
                transformers[folder / file] = config
    if len(transformers) > 1:
        check_same_config(transformers)
