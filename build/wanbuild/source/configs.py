"""Configs that a user gives for the parts of a checkpoint, which replace its own or assumed ones."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanbuild.config import class_name_of, shown
from wanbuild.source.checkpoint_parts import ADDED, OPTIONS, TOKENIZER
from wanbuild.source.derived import classes_of, shown_fields
from wanbuild.source.experts import LOW_NOISE
from wanbuild.source.original_config import OriginalConfig, Shapes, derive_config, is_original
from wanbuild.source.safetensors import nothing_there
from wanbuild.source.scales import read_config
from wanbuild.source.scheduler import read_scheduler
from wanbuild.source.shards import is_checkpoint, weights_at
from wanbuild.variants.variant import WITH_IMAGES
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.errors import SourceError, UsageError, shortened

SCHEDULER = "scheduler"

FILES: Mapping[str, str] = MappingProxyType(
    {
        **{name: "config.json" for name in OPTIONS if name not in (TOKENIZER, *ADDED)},
        SCHEDULER: "scheduler_config.json",
    }
)
"""The parts that have a config, and its name in the part's folder."""

_CLASSES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: tuple(full.rpartition(".")[2] for full in WITH_IMAGES[name])
        for name in FILES
        if name not in TRANSFORMERS
    }
)
"""The classes that a config may name, by part; a transformer's follow from its weights."""


def parse_configs(texts: Iterable[str], folder: Path = Path()) -> dict[str, Path]:
    """Returns the config files that a user names, by part; relative paths start at ``folder``.

    Each text is a folder in the diffusers layout, whose configs are taken, or ``PART=FILE``, several of them
    separated by commas. Raises UsageError for an unknown part, one that is given twice, or a folder without
    any config.
    """
    found: dict[str, Path] = {}
    for name, file in _named(texts, folder):
        if name in found:
            raise UsageError(
                "conflict",
                f"--config gives {name} twice",
                found=f"{found[name]} and {file}",
                remedy="leave one out",
            )
        found[name] = file
    return found


def _named(texts: Iterable[str], folder: Path) -> Iterator[tuple[str, Path]]:
    for text in texts:
        if os.path.isdir(folder / text):  # noqa: PTH112  # false for what can be no path
            yield from _in_folder(folder / text)
            continue
        for item in text.split(","):
            name, equals, file = item.strip().partition("=")
            if (name := name.replace("-", "_")) not in FILES or not (equals and file):
                raise UsageError(
                    "invalid_value",
                    f"--config {shortened(item.strip())} names no config",
                    expected="an existing folder, or PART=FILE with PART one of " + ", ".join(FILES),
                    remedy="for example --config transformer=config.json,scheduler=scheduler_config.json",
                )
            yield name, folder / file


def _in_folder(folder: Path) -> Iterator[tuple[str, Path]]:
    files = {name: folder / name / file for name, file in FILES.items()}
    there = {name: file for name, file in files.items() if os.path.lexists(file)}
    if not there:
        raise UsageError(
            "missing_file",
            f"--config {folder} holds no config",
            expected=", ".join(f"{name}/{file}" for name, file in FILES.items()),
            remedy="for one part: --config transformer=FILE",
        )
    yield from there.items()


def beside(files: Mapping[str, Path]) -> dict[str, Path]:
    """Returns the config.json of each part that the user gives as a folder or an index, if one is there."""
    places = {name: weights_at(name, place) for name, place in files.items() if name in FILES}
    return {
        name: weights.with_name(FILES[name])
        for name, weights in places.items()
        if weights != files[name] or weights.suffix == ".json"
        if os.path.lexists(weights.with_name(FILES[name]))
    }


def scheduler_beside(files: Mapping[str, Path]) -> Path | None:
    """Returns the scheduler's config of a checkpoint that the user gives as the transformer, or None."""
    place = files.get(TRANSFORMERS[0])
    if place is None or not is_checkpoint(place):
        return None
    file = place / SCHEDULER / FILES[SCHEDULER]
    return file if os.path.lexists(file) else None


def scheduler_left(
    files: Mapping[str, Path], configs: Mapping[str, Path], own: Mapping[str, Any]
) -> Iterator[str]:
    """Yields a line if such a checkpoint's scheduler is not used, and differs from the used one, ``own``.

    Raises SourceError as ``read_json`` does.
    """
    file = scheduler_beside(files)
    if file is None or SCHEDULER in configs:
        return
    config = read_config(file)
    fields = {name for name in config.keys() | own.keys() if not name.startswith("_diffusers")}
    if any(config.get(name) != own.get(name) for name in fields):
        yield (
            f"{OPTIONS[TRANSFORMERS[0]]} gives weights and their config, and the source's scheduler stays; "
            f"to take the other one: --config {SCHEDULER}={file}"
        )


def of_parts(configs: Mapping[str, Path], parts: Collection[str]) -> dict[str, Path]:
    """Returns the given configs of a checkpoint's parts; one expert's config is for both.

    Raises UsageError for the config of a part that the checkpoint does not have.
    """
    if others := [name for name in configs if name not in parts and name != SCHEDULER]:
        raise UsageError(
            "unknown_parameter",
            f"--config gives {', '.join(others)}, which this checkpoint does not have",
            expected="configs of " + ", ".join(name for name in FILES if name in parts or name == SCHEDULER),
            remedy=f"leave it out, or give the weights: {OPTIONS[others[0]]} FILE",
        )
    both = {LOW_NOISE: configs["transformer"]} if "transformer" in configs and LOW_NOISE in parts else {}
    return {**both, **configs}


def given_scheduler(file: Path) -> dict[str, Any]:
    """Returns the content of a given scheduler_config.json.

    Raises SourceError if it is missing, not JSON, or not a supported scheduler's.
    """
    remedy = f"give --config {SCHEDULER}={FILES[SCHEDULER]} of the same model"
    config = _read(SCHEDULER, file, _CLASSES[SCHEDULER], remedy)
    read_scheduler(config, str(file))
    return config


def given_config(name: str, class_name: str, shapes: Shapes, file: Path, weights: str) -> dict[str, Any]:
    """Returns the content of a given config.json, in diffusers' and transformers' form.

    ``shapes`` is by diffusers' and transformers' key. Of a transformer, ``file`` may be the original
    repository's. Raises SourceError if it is missing, not JSON, of another class, or contradicts the shapes.
    """
    transformer = name in TRANSFORMERS
    own = classes_of(class_name)
    classes = (*own, *OriginalConfig.CLASS_NAMES) if transformer else _CLASSES[name]
    remedy = _remedy(name, file, weights)
    config = _read(name, file, classes, remedy)
    if transformer and is_original(config):
        return derive_config(class_name, shapes, weights, config, str(file))
    expected = shown_fields(name, shapes, weights)
    wrong = [field for field, value in expected.items() if config.get(field, value) != value]
    says = [f"{field} {shown(expected[field])}" for field in wrong]
    found = [f"{field} {shown(config[field])}" for field in wrong]
    heads, size = config.get("num_attention_heads"), config.get("attention_head_dim")
    if transformer and type(heads) is int and type(size) is int:
        shape = shapes["patch_embedding.weight"]
        if heads * size != shape[0]:
            says.append(f"{shape[0]} channels, of patch_embedding.weight {list(shape)}")
            found.append(f"num_attention_heads {heads} of attention_head_dim {size}")
    if found:
        raise SourceError(
            "conflict",
            f"{file} contradicts {weights}",
            expected=f"as its shapes say: {', '.join(says)}",
            found=", ".join(found),
            remedy=remedy,
        )
    return config


def _remedy(name: str, file: Path, weights: str) -> str:
    """Returns the remedy for a wrong config: one next to the weights is used if their folder is given."""
    other = f"give --config {name}={FILES[name]} of these weights"
    if file != Path(weights).with_name(FILES[name]) or weights.endswith(".json"):
        return f"{other}, or leave it out"
    return f"{other}, or only their file: {OPTIONS[name]} {weights}"


def _read(name: str, file: Path, classes: Collection[str], remedy: str) -> dict[str, Any]:
    if not os.path.lexists(file):
        raise nothing_there(file, remedy=f"check the path that --config gives for {name}")
    config = read_config(file)
    if (found := class_name_of(config)) is not None and found not in classes:
        raise SourceError(
            "wrong_kind",
            f"{file} is not the {name.replace('_', ' ')}'s config",
            expected=" or ".join(classes),
            found=shown(found),
            remedy=remedy,
        )
    return config
