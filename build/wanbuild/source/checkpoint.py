"""Reads a checkpoint folder in the published diffusers layout: model_index.json and one folder per component.

A transformer may also have the original Wan-Video key names, in one file of any name, in its folder or next
to model_index.json, and so may VAE and text encoder, in their folders; callers always see diffusers' names.
Before any tensor is read, everything is opened once and checked: the components and their classes, that the
shards hold exactly the keys that their index lists, and that the tokenizer is complete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np

from wanbuild.config import read_json, shown
from wanbuild.mapping.original import diffusers_names
from wanbuild.mapping.original_parts import NAMES
from wanbuild.source.experts import LOW_NOISE, check_boundary, read_boundary
from wanbuild.source.images import FILE as IMAGE_PROCESSOR_FILE
from wanbuild.source.images import ImageProcessorConfig, open_image_processor
from wanbuild.source.original_config import derive_config, is_original
from wanbuild.source.safetensors import WEIGHT_DTYPES, TensorEntry, TensorFile
from wanbuild.source.shards import WEIGHT_NAMES, check_shards, find_weights, read_weight_map
from wanbuild.source.tokenizer import SourceTokenizer, open_tokenizer
from wanbuild.variants.table import MODULES, variants_of_pipeline
from wanbuild.variants.variant import IMAGE_ENCODER, IMAGE_PROCESSOR, NO_WEIGHTS, Variant
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.errors import SourceError

# Components that a checkpoint may list as absent, [null, null].
_OPTIONAL = frozenset({LOW_NOISE, IMAGE_ENCODER, IMAGE_PROCESSOR})
_TRANSFORMERS = frozenset(TRANSFORMERS)


@dataclass(frozen=True)
class SourceComponent:
    """One component with weights.

    Args:
        name: its folder's name, e.g. ``transformer``.
        class_name: its class in model_index.json, without the library.
        folder: its folder.
        config: the content of its config.json, not yet interpreted; derived from the weights if they are in
            the original naming and have no config.
        config_file: the source of the config: config.json, or the weight file it was derived from.
        files: its weight files, ordered by name.
        keys: the file of each tensor, in key order. Keys are diffusers' and transformers'.
        stored: a tensor's name in its file, if it differs from the key.
        index: the index file of a sharded component, or None.
    """

    name: str
    class_name: str
    folder: Path
    config: Mapping[str, Any]
    config_file: Path
    files: tuple[Path, ...]
    keys: Mapping[str, TensorFile]
    stored: Mapping[str, str]
    index: Path | None

    @property
    def recorded_config(self) -> dict[str, Any]:
        """The config as a manifest records it: a transformer's names its class, which programs depend on."""
        named = {"_class_name": self.class_name} if self.name in TRANSFORMERS else {}
        return {**self.config, **named}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(self.entry(key).nbytes for key in self.keys)

    def entry(self, key: str) -> TensorEntry:
        """Returns shape, dtype and place of a tensor; KeyError if there is no such tensor."""
        return self.keys[key].entries[self.stored.get(key, key)]

    def array(self, key: str) -> np.ndarray:
        """Returns a whole tensor; see ``TensorFile.array``."""
        return self.keys[key].array(self.stored.get(key, key))

    def read(self, key: str, begin: int, out: np.ndarray) -> None:
        """Reads a part of a tensor; see ``TensorFile.read``."""
        self.keys[key].read(self.stored.get(key, key), begin, out)


@dataclass(frozen=True)
class Source:
    """An open checkpoint folder; a context manager. Made by ``open_source``.

    Args:
        path: the folder.
        repository: the hub repository it was downloaded from, or None.
        revision: the commit of that repository, or None.
        pipeline_class: ``_class_name`` of model_index.json.
        boundary_ratio: the share of the timesteps below which the low-noise expert runs, or None.
        expand_timesteps: whether the transformer takes a timestep per token.
        component_names: every component of the checkpoint, sorted.
        components: the components with weights.
        scheduler_config: the content of scheduler/scheduler_config.json.
        tokenizer: the tokenizer folder.
        image_processor: the image encoder's preprocessing; None if there is none.
    """

    path: Path
    repository: str | None
    revision: str | None
    pipeline_class: str
    boundary_ratio: float | None
    expand_timesteps: bool
    component_names: tuple[str, ...]
    components: Mapping[str, SourceComponent]
    scheduler_config: Mapping[str, Any]
    tokenizer: SourceTokenizer
    image_processor: ImageProcessorConfig | None

    def component(self, name: str) -> SourceComponent:
        """Returns a component; KeyError if the source has none of this name, or it has no weights."""
        return self.components[name]

    def files(self) -> dict[str, Path]:
        """Returns every file that conversion reads, and digests cover, by relative name, sorted."""
        paths = [
            self.path / "model_index.json",
            self.path / "scheduler" / "scheduler_config.json",
            self.tokenizer.file,
        ]
        if self.image_processor is not None:
            paths.append(self.path / IMAGE_PROCESSOR / IMAGE_PROCESSOR_FILE)
        for component in self.components.values():
            paths += [component.config_file, *component.files]
            paths += [component.index] if component.index else []
        tokenizer_config = self.tokenizer.folder / "tokenizer_config.json"
        paths += [tokenizer_config] if tokenizer_config.exists() else []
        return {path.relative_to(self.path).as_posix(): path for path in sorted(paths)}

    def close(self) -> None:
        """Closes every weight file."""
        for component in self.components.values():
            for file in component.keys.values():
                file.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_folder(path: Path) -> None:
    if path.is_dir():
        if not (path / "model_index.json").exists():
            raise SourceError(
                f"{path} holds no model_index.json",
                expected="a checkpoint in the diffusers layout",
                remedy="use the repository whose name ends in -Diffusers",
            )
        return
    if path.exists():
        raise SourceError(f"{path} is not a folder", remedy="give the checkpoint's folder")
    raise SourceError(f"there is no folder {path}", remedy="give the checkpoint's folder or its hub id")


def _read_pair(name: str, value: Any, where: Path) -> tuple[str, str] | None:
    """Returns the [library, class] pair of a model_index.json entry, or None if it is [null, null]."""
    if value is None or value == [None, None]:
        return None
    if isinstance(value, list) and len(value) == 2 and all(isinstance(item, str) for item in value):
        return value[0], value[1]
    raise SourceError(
        f"{name} in {where} is not understood", expected="[library, class]", found=repr(value)[:80]
    )


def read_classes(
    index: Mapping[str, Any], rows: tuple[Variant, ...], where: Path
) -> dict[str, tuple[str, str]]:
    """Returns component name -> (library, class) of the components that are not null.

    Args:
        index: the content of model_index.json.
        rows: the possible variants of its pipeline.
        where: the file, for messages.

    Raises:
        SourceError: naming all components that are unknown, missing or of another class; or if the index
            has only one of a second expert and a boundary.
    """
    problems = []
    classes = {}
    for name, value in sorted(index.items()):
        if name.startswith("_") or name in ("boundary_ratio", "expand_timesteps"):
            continue
        pair = _read_pair(name, value, where)
        accepted = sorted({cls for variant in rows for cls in variant.components.get(name, ())})
        if pair is None:
            if not accepted and name not in _OPTIONAL:
                problems.append(f"{name} is unknown")
        elif not accepted:
            problems.append(f"{name} ({'.'.join(pair)}) is not supported")
        elif ".".join(pair) not in accepted:
            problems.append(f"{name} is {'.'.join(pair)}, not {' or '.join(accepted)}")
        else:
            classes[name] = pair
    for name in sorted(set.intersection(*(set(variant.components) for variant in rows)) - classes.keys()):
        if not any(problem.startswith(f"{name} ") for problem in problems):
            problems.append(f"{name} is missing")
    if problems:
        raise SourceError(
            f"{where} does not describe a supported checkpoint: {', '.join(problems)}",
            expected="one of " + ", ".join(MODULES),
            remedy="use a published checkpoint of a supported variant",
        )
    check_boundary(read_boundary(index, where), LOW_NOISE in classes, where)
    return classes


def _read_expand_timesteps(index: Mapping[str, Any], where: Path) -> bool:
    value = index.get("expand_timesteps")
    if value is not None and type(value) is not bool:
        raise SourceError(
            f"expand_timesteps in {where} has a wrong type", expected="true or false", found=shown(value)
        )
    return bool(value)


def _check_unlisted(path: Path, classes: Mapping[str, tuple[str, str]]) -> None:
    """Refuses a second expert that exists but is not listed, because half of the model would be left out."""
    if LOW_NOISE not in classes and os.path.lexists(path / LOW_NOISE):
        raise SourceError(
            f"{path} holds {LOW_NOISE}, which its model_index.json does not list",
            expected="a low-noise expert that is listed, with a boundary_ratio",
            remedy="use the model_index.json of this checkpoint, or move the folder away",
        )


def _open_component(
    name: str, pair: tuple[str, str], folder: Path, beside: Path | None, stack: ExitStack
) -> SourceComponent:
    """Opens a component's files; ``beside`` is a second folder in which a transformer's weights may be."""
    library, class_name = pair
    transformer = name in _TRANSFORMERS
    any_name = transformer or name in NAMES
    weights = find_weights(folder, WEIGHT_NAMES[library], beside if transformer else None, any_name)
    if weights.suffix == ".json":
        weight_map = read_weight_map(weights)
        names = sorted(set(weight_map.values()))
        files = {shard: stack.enter_context(TensorFile(weights.parent / shard)) for shard in names}
        check_shards(weights, weight_map, files)
        holders = {key: files[shard] for key, shard in weight_map.items()}
        index: Path | None = weights
    else:
        file = stack.enter_context(TensorFile(weights))
        files, holders, index = {weights.name: file}, dict.fromkeys(file.entries, file), None
    if transformer:
        _refuse_quantized(holders)
        names_of = diffusers_names(sorted(holders), str(weights))
    elif name in NAMES:
        names_of = NAMES[name](sorted(holders), str(weights))
    else:
        names_of = {key: key for key in holders}
    keys = {names_of[key]: holders[key] for key in sorted(names_of, key=names_of.__getitem__)}
    stored = {new: key for key, new in names_of.items() if new != key}
    shapes = {new: holders[key].entries[key].shape for key, new in names_of.items()}
    derived = shapes if stored and transformer else None
    config_file, config = _read_config(class_name, folder, weights, derived)
    return SourceComponent(
        name=name,
        class_name=class_name,
        folder=folder,
        config=config,
        config_file=config_file,
        files=tuple(weights.parent / shard for shard in files),
        keys=MappingProxyType(keys),
        stored=MappingProxyType(stored),
        index=index,
    )


def _refuse_quantized(holders: Mapping[str, TensorFile]) -> None:
    """Refuses quantized weights, such as 8-bit ones, before their scales are reported as unknown keys."""
    for key, file in holders.items():
        if (found := file.entries[key].dtype_name) not in WEIGHT_DTYPES:
            raise SourceError(
                f"{key} in {file.path} is not a plain weight",
                expected=" or ".join(sorted(WEIGHT_DTYPES)),
                found=found,
                remedy="use the published checkpoint, not a quantized one",
            )


def _read_config(
    class_name: str, folder: Path, weights: Path, shapes: Mapping[str, tuple[int, ...]] | None
) -> tuple[Path, dict[str, Any]]:
    """Returns the file of a component's config, and the config.

    Args:
        class_name: the component's class.
        folder: the component's folder.
        weights: its weight file or index.
        shapes: shape of every tensor of a transformer in the original naming; None for other components.
    """
    places = dict.fromkeys((folder / "config.json", weights.with_name("config.json")))
    place = next((path for path in places if os.path.lexists(path)), None)
    if shapes is None:
        place = place or folder / "config.json"
        return place, read_json(place)
    if place is None:
        return weights, derive_config(class_name, shapes, str(weights))
    config = read_json(place)
    if is_original(config):
        config = derive_config(class_name, shapes, str(weights), config, str(place))
    return place, config


def open_source(path: Path, repository: str | None = None, revision: str | None = None) -> Source:
    """Opens a checkpoint folder in the diffusers layout.

    Args:
        path: the folder that holds model_index.json.
        repository: the hub repository that the folder was downloaded from, or None.
        revision: the commit of that repository.

    Raises:
        SourceError: if the folder or a file is missing, damaged or pickled; the class of the pipeline or of a
            component is not supported; model_index.json has an unknown entry; it has only one of a second
            expert and a boundary; or the shards do not hold exactly what their index lists.
    """
    try:
        return _open_source(Path(path), repository, revision)
    except OSError as error:  # for a folder; errors of files have their own messages
        raise SourceError(
            f"{error.filename or path} cannot be read: {error.strerror}", remedy="check that it is readable"
        ) from None


def _open_source(path: Path, repository: str | None, revision: str | None) -> Source:
    _check_folder(path)
    where = path / "model_index.json"
    index = read_json(where)
    pipeline_class = index.get("_class_name")
    rows = variants_of_pipeline(pipeline_class, str(where))
    classes = read_classes(index, rows, where)
    expand_timesteps = _read_expand_timesteps(index, where)
    _check_unlisted(path, classes)
    # With two experts, one file would not say which expert it is.
    beside = path if len(classes.keys() & _TRANSFORMERS) == 1 else None
    with ExitStack() as stack:
        components = {
            name: _open_component(name, pair, path / name, beside, stack)
            for name, pair in classes.items()
            if name not in NO_WEIGHTS
        }
        source = Source(
            path=path,
            repository=repository,
            revision=revision,
            pipeline_class=str(pipeline_class),
            boundary_ratio=read_boundary(index, where),
            expand_timesteps=expand_timesteps,
            component_names=tuple(classes),
            components=MappingProxyType(components),
            scheduler_config=_read_scheduler_config(path, classes["scheduler"]),
            tokenizer=open_tokenizer(path / "tokenizer"),
            image_processor=(
                open_image_processor(path / IMAGE_PROCESSOR) if IMAGE_PROCESSOR in classes else None
            ),
        )
        stack.pop_all()
    return source


def _read_scheduler_config(path: Path, pair: tuple[str, str]) -> dict[str, Any]:
    file = path / "scheduler" / "scheduler_config.json"
    config = read_json(file)
    if config.get("_class_name", pair[1]) != pair[1]:
        raise SourceError(
            f"{file} and model_index.json disagree",
            expected=pair[1],
            found=str(config["_class_name"])[:80],
            remedy="use the published checkpoint's files",
        )
    return {"_class_name": pair[1], **config}
