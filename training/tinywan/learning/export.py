"""Writes what was trained in the published layout: one folder a variant, with links to what they share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import CLIPImageProcessor, CLIPVisionModel, UMT5EncoderModel

from tinywan.learning.causal import CONFIG
from wanbuild.published.base_configs import MODEL_INDEXES, PUBLISHED_IMAGE_PROCESSOR
from wanbuild.published.schedulers import scheduler_config
from wanbuild.toy.toy_weights import write_json

SHARED = "shared"
"""The folder of components that several variants use."""


@dataclass(frozen=True)
class Layout:
    """A variant's checkpoint.

    Args:
        flow_shift: in its scheduler's config, as published.
        transformers: what was trained, by component.
        shared: its other components with files.
        solver: whose config its scheduler's is.
    """

    flow_shift: float
    transformers: Mapping[str, str]
    shared: tuple[str, ...] = ("vae", "text_encoder", "tokenizer")
    solver: str = "unipc"


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "wan2.1-t2v": Layout(3.0, {"transformer": "text"}),
        "wan2.2-t2v": Layout(12.0, {"transformer": "high", "transformer_2": "low"}),
        "wan2.1-i2v": Layout(
            3.0,
            {"transformer": "image"},
            ("vae", "text_encoder", "tokenizer", "image_encoder", "image_processor"),
        ),
    }
)

LIVE = Layout(5.0, {"transformer": "live"}, solver="self-forcing")
"""Of the causal model, which shares everything else with the text to video that it begins with."""

IMAGE_PROCESSOR = {
    **PUBLISHED_IMAGE_PROCESSOR,
    "crop_size": {"height": 32, "width": 32},
    "size": {"shortest_edge": 32},
}


def image_processor() -> CLIPImageProcessor:
    """What prepares a first frame for the image encoder."""
    return CLIPImageProcessor(**IMAGE_PROCESSOR)


def write(trained: Path, target: Path) -> None:
    """Writes the checkpoints whose transformers are trained, weights in float16.

    Args:
        trained: the folder of the trained models.
        target: the folder to create; one that is there is replaced.
    """
    shutil.rmtree(target, ignore_errors=True)
    for variant, layout in LAYOUTS.items():
        if all((trained / name).is_dir() for name in layout.transformers.values()):
            _write(trained, target / variant, layout, MODEL_INDEXES[variant])


def write_live(trained: Path, folder: Path) -> None:
    """Writes the causal model next to the other checkpoints, weights in float16.

    Args:
        trained: the folder of the trained models.
        folder: to create, next to ``SHARED``; an existing one is replaced.
    """
    shutil.rmtree(folder, ignore_errors=True)
    index = MODEL_INDEXES["self-forcing-wan2.1"]
    _write(trained, folder, LIVE, index)
    config = folder / "transformer" / "config.json"
    fields = {"_class_name": index["transformer"][1], **CONFIG}
    write_json(config, {**json.loads(config.read_text(encoding="utf-8")), **fields})


def _write(trained: Path, folder: Path, layout: Layout, index: Mapping[str, Any]) -> None:
    (folder / "scheduler").mkdir(parents=True)
    for component, name in layout.transformers.items():
        _halve(WanTransformer3DModel, trained / name, folder / component)
    for name in layout.shared:
        _share(trained, folder.parent / SHARED, name)
        (folder / name).symlink_to(Path("..", SHARED, name), target_is_directory=True)
    scheduler = scheduler_config(layout.solver, layout.flow_shift)
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    write_json(folder / "model_index.json", index)


def _share(trained: Path, shared: Path, name: str) -> None:
    """Writes a component that several variants use, once."""
    if (shared / name).exists():
        return
    kinds = {"vae": AutoencoderKLWan, "text_encoder": UMT5EncoderModel, "image_encoder": CLIPVisionModel}
    if name in kinds:
        _halve(kinds[name], trained / name, shared / name)
    elif name == "image_processor":
        (shared / name).mkdir(parents=True)
        write_json(shared / name / "preprocessor_config.json", IMAGE_PROCESSOR)
    else:
        shutil.copytree(trained / name, shared / name)


def _halve(kind: Any, source: Path, target: Path) -> None:
    model = kind.from_pretrained(source, torch_dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.half()
    model.save_pretrained(target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)  # a folder of the machine that trained it
    write_json(target / "config.json", config)
