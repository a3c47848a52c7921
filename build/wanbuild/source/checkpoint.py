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
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanbuild.config import read_json, shown
from wanbuild.source.checkpoint_parts import ADDED, OPTIONS
from wanbuild.source.component import SourceComponent, open_component, open_part
from wanbuild.source.configs import FILES, SCHEDULER, beside, given_scheduler, of_parts
from wanbuild.source.experts import LOW_NOISE, NOISE, check_boundary, read_boundary
from wanbuild.source.former_names import with_names_of_index
from wanbuild.source.image_processor import FILE as IMAGE_PROCESSOR_FILE
from wanbuild.source.image_processor import ImageProcessorConfig, open_image_processor
from wanbuild.source.safetensors import nothing_there
from wanbuild.source.scales import read_config
from wanbuild.source.tokenizer import SourceTokenizer, open_tokenizer
from wanbuild.variants.table import MODULES, variants_of_pipeline
from wanbuild.variants.variant import IMAGE_ENCODER, IMAGE_PROCESSOR, NO_WEIGHTS, Variant
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.errors import SourceError, UsageError

# Components that a checkpoint may list as absent, [null, null].
_OPTIONAL = frozenset({LOW_NOISE, IMAGE_ENCODER, IMAGE_PROCESSOR})
_TRANSFORMERS = frozenset(TRANSFORMERS)


@dataclass(frozen=True)
class Source:
    """An open checkpoint, from ``open_source`` or ``open_files``; a context manager.

    Attributes:
        path: the folder; of single files, the first transformer's.
        layout: whether that is a folder in the diffusers layout.
        repository: the hub repository it was downloaded from, or None.
        revision: the commit of that repository, or None.
        pipeline_class: ``_class_name`` of model_index.json, or of the variant's.
        boundary_ratio: the share of the timesteps below which the low-noise expert runs, or None.
        expand_timesteps: whether the transformer takes a timestep per token.
        component_names: every component of the checkpoint, sorted.
        components: the components with weights.
        scheduler_config: the content of scheduler/scheduler_config.json, or of the given one.
        image_processor: the image encoder's preprocessing; None if there is none.
        image_processor_file: its file; None if there is none, or for the published preprocessing.
        assumed: the facts that are taken as published, because files of weights do not say them.
        configs: the config files that the user has given, by part.
        given: what the user has given for parts, by component.
    """

    path: Path
    layout: bool
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
    image_processor_file: Path | None
    assumed: tuple[str, ...] = ()
    configs: Mapping[str, Path] = field(default_factory=dict)
    given: Mapping[str, Path] = field(default_factory=dict)

    def component(self, name: str) -> SourceComponent:
        """Returns a component; KeyError if the source has none of this name, or it has no weights."""
        return self.components[name]

    def files(self) -> dict[str, Path]:
        """Returns every file that conversion reads, and digests cover, by relative name, sorted.

        A file outside of the folder has the name that it would have inside of it.
        """
        settings = self.configs.get(SCHEDULER) or self.path / SCHEDULER / FILES[SCHEDULER]
        paths = [("", self.path / "model_index.json")] if self.layout else []
        paths += [(SCHEDULER, settings)] if self.layout or SCHEDULER in self.configs else []
        paths.append(("tokenizer", self.tokenizer.file))
        if self.image_processor is not None and self.image_processor_file is not None:
            paths.append((IMAGE_PROCESSOR, self.image_processor_file))
        for component in self.components.values():
            files = [component.config_file, *component.files, *filter(None, [component.index])]
            paths += [(component.name, file) for file in files]
        tokenizer_config = self.tokenizer.folder / "tokenizer_config.json"
        paths += [("tokenizer", tokenizer_config)] if tokenizer_config.exists() else []
        return dict(sorted((self.name_of(folder, path), path) for folder, path in paths))

    def name_of(self, folder: str, path: Path) -> str:
        """Returns the relative name of a component's file in ``files``."""
        if self.layout and path.is_relative_to(self.path):
            return path.relative_to(self.path).as_posix()
        return f"{folder}/{path.name}"

    def close(self) -> None:
        """Closes every weight file."""
        for component in self.components.values():
            for tensor in component.tensors.values():
                tensor.file.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_folder(path: Path) -> None:
    if path.is_dir():
        if not (path / "model_index.json").exists():
            if any(path.glob("*_VAE.pth")) or any(path.glob("models_t5_*.pth")):
                raise _official(path)
            raise SourceError(
                "missing_file",
                f"{path} holds no model_index.json",
                expected="a checkpoint in the diffusers layout",
                remedy="use the repository whose name ends in -Diffusers",
            )
        return
    if path.exists():
        raise SourceError("wrong_kind", f"{path} is not a folder", remedy="give the checkpoint's folder")
    raise nothing_there(path, "folder", "give the checkpoint's folder or its hub id")


def _official(path: Path) -> SourceError:
    """Returns the error of a folder in the layout of Wan's own repositories, where two parts are pickles."""
    experts = [path / f"{noise}_noise_model" for noise in NOISE.values()]
    places = experts if all(map(Path.is_dir, experts)) else [path]
    given = " ".join(f"{OPTIONS[name]} {place}" for name, place in zip(TRANSFORMERS, places, strict=False))
    return SourceError(
        "untrusted",
        f"{path} is in Wan's own layout, whose VAE and text encoder are pickles, which are never loaded",
        expected="a checkpoint in the diffusers layout",
        remedy=f"take the repository whose name ends in -Diffusers, or single files: {given} with --vae and "
        "--text-encoder from Comfy-Org's repackaged safetensors and --tokenizer "
        f"{path}/google/umt5-xxl",
    )


def _read_pair(name: str, value: Any, where: Path) -> tuple[str, str] | None:
    """Returns the [library, class] pair of a model_index.json entry, or None if it is [null, null]."""
    if value is None or value == [None, None]:
        return None
    if isinstance(value, list) and len(value) == 2 and all(isinstance(item, str) for item in value):
        return value[0], value[1]
    raise SourceError(
        "unreadable",
        f"{name} in {where} is not understood",
        expected="[library, class]",
        found=repr(value)[:80],
    )


_SETTINGS = ("boundary_ratio", "expand_timesteps", "is_cfg_zero_star", "is_distilled")
"""Entries of a model_index.json other than components. The last two follow from the scheduler."""


def read_classes(
    index: Mapping[str, Any], rows: tuple[Variant, ...], where: Path
) -> dict[str, tuple[str, str]]:
    """Returns component name -> (library, class) of the components that are not null.

    ``index`` is the content of model_index.json, ``rows`` are the possible variants of its pipeline. Raises
    SourceError with all components that are unknown, missing or of another class, or if the index has only
    one of a second expert and a boundary.
    """
    problems = []
    classes = {}
    for name, value in sorted(index.items()):
        if name.startswith("_") or name in _SETTINGS:
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
            "unsupported",
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
            "wrong_type",
            f"expand_timesteps in {where} has a wrong type",
            expected="true or false",
            found=shown(value),
        )
    return bool(value)


def _check_unlisted(path: Path, classes: Mapping[str, tuple[str, str]]) -> None:
    """Refuses a second expert that exists but is not listed, because half of the model would be left out."""
    if LOW_NOISE not in classes and os.path.lexists(path / LOW_NOISE):
        raise SourceError(
            "mismatch",
            f"{path} holds {LOW_NOISE}, which its model_index.json does not list",
            expected="a low-noise expert that is listed, with a boundary_ratio",
            remedy="use the model_index.json of this checkpoint, or move the folder away",
        )


def open_source(
    path: Path,
    repository: str | None = None,
    revision: str | None = None,
    files: Mapping[str, Path] = MappingProxyType({}),
    configs: Mapping[str, Path] = MappingProxyType({}),
) -> Source:
    """Opens a checkpoint folder in the diffusers layout.

    ``repository`` and ``revision`` are the hub's that the folder was downloaded from. ``files`` are weight
    files that replace the folder's, by component; the folder's configs stay. ``configs`` are config files
    that replace the folder's, by part.

    Raises SourceError if the folder or a file is missing, damaged or pickled; the class of the pipeline or of
    a component is not supported; model_index.json has an unknown entry, or only one of a second expert and a
    boundary; or the shards do not hold exactly what their index lists.
    """
    try:
        return _open_source(Path(path), repository, revision, files, configs)
    except OSError as error:  # for a folder; errors of files have their own messages
        raise SourceError(
            "unreadable",
            f"{error.filename or path} cannot be read: {error.strerror}",
            remedy="check that it is readable",
        ) from None


def _open_source(
    path: Path,
    repository: str | None,
    revision: str | None,
    files: Mapping[str, Path],
    configs: Mapping[str, Path],
) -> Source:
    _check_folder(path)
    where = path / "model_index.json"
    index = with_names_of_index(read_json(where))
    pipeline_class = index.get("_class_name")
    rows = variants_of_pipeline(pipeline_class, str(where))
    classes = read_classes(index, rows, where)
    expand_timesteps = _read_expand_timesteps(index, where)
    _check_unlisted(path, classes)
    check_replaced(files, classes, str(path))
    configs = of_parts({**beside(files), **configs}, classes)
    # With two experts, one file would not say which expert it is.
    second = path if len(classes.keys() & _TRANSFORMERS) == 1 else None
    with_processor = IMAGE_PROCESSOR in classes
    with ExitStack() as stack:
        components = {
            name: (
                open_part(name, pair[1], files[name], path / name / "config.json", stack, configs.get(name))
                if name in files
                else open_component(name, pair, path / name, second, stack, configs.get(name))
            )
            for name, pair in classes.items()
            if name not in NO_WEIGHTS
        }
        for name in sorted(files.keys() & ADDED):
            components[name] = open_part(name, None, files[name], None, stack)
        source = Source(
            path=path,
            layout=True,
            repository=repository,
            revision=revision,
            pipeline_class=str(pipeline_class),
            boundary_ratio=read_boundary(index, where),
            expand_timesteps=expand_timesteps,
            component_names=tuple(classes),
            components=MappingProxyType(components),
            scheduler_config=_read_scheduler_config(path, classes[SCHEDULER], configs.get(SCHEDULER)),
            tokenizer=open_tokenizer(files.get("tokenizer", path / "tokenizer")),
            image_processor=open_image_processor(path / IMAGE_PROCESSOR) if with_processor else None,
            image_processor_file=path / IMAGE_PROCESSOR / IMAGE_PROCESSOR_FILE if with_processor else None,
            configs=MappingProxyType(configs),
            given=MappingProxyType(dict(files)),
        )
        stack.pop_all()
    return source


def check_replaced(files: Mapping[str, Path], classes: Mapping[str, object], where: str) -> None:
    """Raises UsageError for files that neither replace a component of the checkpoint nor may be added."""
    if others := [OPTIONS[name] for name in files if name not in {*classes, *ADDED}]:
        raise UsageError(
            "unknown_name",
            f"{where} has no such component: {', '.join(others)}",
            expected="one of " + ", ".join(OPTIONS[name] for name in sorted(classes) if name in OPTIONS),
            remedy="leave it out",
        )


def _read_scheduler_config(path: Path, pair: tuple[str, str], given: Path | None) -> dict[str, Any]:
    if given is not None:
        return given_scheduler(given)
    file = path / SCHEDULER / FILES[SCHEDULER]
    config = read_config(file)
    if config.get("_class_name", pair[1]) != pair[1]:
        raise SourceError(
            "mismatch",
            f"{file} and model_index.json disagree",
            expected=pair[1],
            found=str(config["_class_name"])[:80],
            remedy="use the published checkpoint's files",
        )
    return {"_class_name": pair[1], **config}
