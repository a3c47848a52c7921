"""Writes a small random checkpoint in the published folder layout, offline and without torch.

Every parameter is random, of a size that keeps activations in range: a constant or saturated video would hide
errors. Overriding config fields gives other sizes, up to the published ones.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError

from wanbuild.published.base_configs import Config
from wanbuild.published.schedulers import SCHEDULER_CONFIGS, scheduler_config
from wanbuild.source.image_processor import FILE as IMAGE_PROCESSOR_FILE
from wanbuild.source.shapes import component_shapes
from wanbuild.source.shards import WEIGHT_NAMES
from wanbuild.toy.toy_configs import TOY_VARIANTS, check_toy_configs, toy_image_processor
from wanbuild.toy.toy_tokenizer import write_tokenizer
from wanbuild.toy.toy_weights import DTYPES, Stored, write_json, write_weights
from wanbuild.variants.table import variants
from wanbuild.variants.variant import IMAGE_ENCODER, IMAGE_PROCESSOR
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.errors import UsageError, errno_in, unwritable
from wanrun.replay.samples import samples
from wanrun.temporary import temporary_folder

MARKER = "wanbuild_toy.json"
"""Marks a folder that this module wrote, and that may therefore be replaced."""

_OWN = re.compile(
    rf"model_index\.json|{re.escape(MARKER)}|(scheduler|tokenizer|image_processor)/\w+\.json"
    r"|(transformer(_2)?|vae|text_encoder|image_encoder)/[\w.-]+\.(json|safetensors)"
    r"|media/(\w+/\d{3}|\w*image)\.png"
)
"""Names of a toy's files."""


def _override(name: str, base: Config, changes: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(changes.keys() - base.keys())
    if unknown:
        raise UsageError(
            "unknown_parameter",
            f"the {name} config has no field {', '.join(unknown)}",
            expected="one of " + ", ".join(base),
        )
    return {**base, **changes}


def _check_target(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise UsageError("wrong_kind", f"{directory} is not a folder", remedy="give another folder")
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    if not (directory / MARKER).exists():
        raise UsageError(
            "exists", f"{directory} is not empty, and not a toy checkpoint", remedy="give another folder"
        )
    files = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())
    if other := min((name for name in files if not _OWN.fullmatch(name)), default=None):
        raise UsageError(
            "exists",
            f"replacing the toy {directory} would delete files that are not the toy's",
            found=other,
            remedy="move it out of the folder",
        )


def _move_into_place(staging: Path, directory: Path) -> None:
    if not directory.exists():
        staging.rename(directory)
        return
    with temporary_folder(directory.parent) as aside:
        old = directory.rename(aside / "old")
        try:
            staging.rename(directory)
        except OSError:
            old.rename(directory)
            raise


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turns a file system error of rights or space, while a toy is written, into a UsageError of one line."""
    try:
        yield
    except OSError as error:
        raise unwritable(str(directory), error, "choose another folder") from error
    except SafetensorError as error:  # which has no number of the system's
        reason = OSError(errno_in(str(error)), str(error))
        raise unwritable(str(directory), reason, "choose another folder") from error


def write_toy(
    directory: Path,
    variant: str = "wan2.1-t2v",
    seed: int = 0,
    *,
    configs: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    scheduler: str | None = None,
    flow_shift: float = 3.0,
    stored: Stored | None = None,
) -> None:
    """Writes a random checkpoint; the same arguments give the same bytes.

    It is built in a sibling folder and renamed, so a failure leaves the old content.

    Args:
        directory: the folder to create. An existing toy in it is replaced, if nothing else is there.
        variant: one of ``TOY_VARIANTS``.
        seed: seed of the parameters; not negative.
        configs: fields of a component's config.json that differ from the variant's, by component. Those of
            ``transformer`` are for both experts if there are two; those of ``transformer_2`` are only for the
            second, which makes a checkpoint unusable. The image processor follows the image encoder's
            ``image_size``.
        scheduler: one of ``SCHEDULER_CONFIGS``; None: the variant's.
        stored: dtype and files of the weights; float32 in one file each where None.

    Raises UsageError if an argument has another value, the configs contradict each other, or the folder
    contains something else, and SourceError for a config that does not belong to its component.
    """
    stored = stored or Stored()
    _check_choices(variant, scheduler, seed, stored)
    settings = scheduler_config(scheduler or variants()[variant].scheduler, flow_shift)
    changed = _changed_configs(variant, configs, stored.dtype)
    directory = Path(directory).resolve()
    _check_target(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(directory.parent) as temporary:
        staging = temporary / directory.name
        for name, config in changed.items():
            folder, (library, _) = staging / name, TOY_VARIANTS[variant].index[name]
            folder.mkdir(parents=True)
            write_json(folder / "config.json", config)
            shapes = component_shapes(name, config)
            write_weights(folder, name, WEIGHT_NAMES[library], shapes, seed, stored)
        _write_settings(staging, variant, changed, settings)
        write_json(staging / MARKER, {"seed": seed, "variant": variant})
        _move_into_place(staging, directory)


def _check_choices(variant: str, scheduler: str | None, seed: int, stored: Stored) -> None:
    for what, value, known in (
        ("variant", variant, TOY_VARIANTS),
        ("scheduler", scheduler, SCHEDULER_CONFIGS),
        ("dtype", stored.dtype, DTYPES),
    ):
        if value is not None and value not in known:
            raise UsageError("unknown_name", f"unknown {what}", expected=" or ".join(known), found=value)
    if seed < 0 or stored.shards < 1:
        raise UsageError(
            "out_of_range",
            "seed or shards is out of range",
            expected="seed >= 0, shards >= 1",
            found=(seed, stored.shards),
        )


def _changed_configs(
    variant: str, changes: Mapping[str, Mapping[str, Any]], dtype: str
) -> dict[str, dict[str, Any]]:
    """Returns the variant's config.json by component, with fields changed."""
    toy = TOY_VARIANTS[variant]
    for component in changes.keys() - toy.configs.keys():
        others = [name for name, other in TOY_VARIANTS.items() if component in other.configs]
        remedy = f"leave it out, or use {' or '.join(others)}" if others else "leave it out"
        raise UsageError("unknown_name", f"{variant} has no {component}", remedy=remedy)
    configs: dict[str, dict[str, Any]] = {}
    for name, base in toy.configs.items():
        both = changes.get("transformer", {}) if name in TRANSFORMERS else {}
        configs[name] = _override(name, base, {**both, **changes.get(name, {})})
    for name in {"text_encoder", IMAGE_ENCODER} & configs.keys():
        configs[name]["torch_dtype"] = dtype
    check_toy_configs(variant, configs)
    return configs


def _write_settings(
    staging: Path,
    variant: str,
    configs: Mapping[str, Mapping[str, Any]],
    scheduler: Config,
) -> None:
    """Writes the files without weights: scheduler, tokenizer, image processor and model_index.json."""
    (staging / "scheduler").mkdir()
    write_json(staging / "scheduler" / "scheduler_config.json", scheduler)
    (staging / "tokenizer").mkdir()
    write_tokenizer(staging / "tokenizer")
    if IMAGE_ENCODER in configs:
        (staging / IMAGE_PROCESSOR).mkdir()
        processor = toy_image_processor(configs[IMAGE_ENCODER])
        write_json(staging / IMAGE_PROCESSOR / IMAGE_PROCESSOR_FILE, processor)
    index = {**TOY_VARIANTS[variant].index, "scheduler": ["diffusers", scheduler["_class_name"]]}
    write_json(staging / "model_index.json", index)


def write_samples(
    folder: Path, names: Collection[str], size: tuple[int, int], frames: int, face: int
) -> None:
    """Writes samples of options as files: an image as the option's name with ``.png``, a video as frames.

    The frames are in a folder of the option's name. ``size`` is the width and height of the videos in pixels,
    and ``face`` approximately those of a face video.
    """
    for name, sample in samples(names, size, frames, 1, face, seed=0).items():
        if name == "reference_image":
            (sample,) = sample
        target = folder / name if isinstance(sample, list) else folder
        target.mkdir(parents=True, exist_ok=True)
        if isinstance(sample, list):
            for index, frame in enumerate(sample):
                frame.save(target / f"{index:03}.png")
        else:
            sample.save(folder / f"{name}.png")
