"""Files of checkpoints: weights of every dtype, an image processor's settings, AnyFlow's first names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save_file as save_arrays

from wanbuild.source.image_processor import FILE

State = dict[str, np.ndarray]

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "U8": np.dtype(np.uint8),
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    }
)


def load_file(path: Path) -> State:
    """Reads a file with the safetensors package."""
    tensors = safetensors.deserialize(path.read_bytes())
    return {
        name: np.frombuffer(bytearray(item["data"]), DTYPES[item["dtype"]]).reshape(item["shape"])
        for name, item in tensors
    }


def save_file(state: Mapping[str, np.ndarray], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a file with the safetensors package."""
    save_arrays(dict(state), path, metadata={"format": "pt", **(metadata or {})})


SCHEDULER = ("far.schedulers.scheduling_flowmap_euler_discrete", "FlowMapDiscreteScheduler")
TRANSFORMER = ("far.models.transformer_far_wan_model", "FAR_Wan_Transformer3DModel")
OF_CHUNKS: Mapping[str, Any] = {
    "chunk_partition": None,
    "compressed_patch_size": [1, 4, 4],
    "full_chunk_limit": 3,
}


def as_first_uploaded(checkpoint: Path, folder: Path) -> Path:
    """Copies a checkpoint of AnyFlow or AnyFlow-FAR, in diffusers' names, and returns the copy."""
    shutil.copytree(checkpoint, folder)
    index = json.loads((folder / "model_index.json").read_text())
    chunks = index["_class_name"] == "AnyFlowFARPipeline"
    pipeline = "FARWanAnyFlowPipeline" if chunks else "WanAnyFlowPipeline"
    edited(folder / "model_index.json", _class_name=pipeline, scheduler=SCHEDULER, transformer=TRANSFORMER)
    edited(folder / "scheduler/scheduler_config.json", _class_name=SCHEDULER[1], weight_type="gaussian")
    edited(
        folder / "transformer/config.json",
        _class_name=TRANSFORMER[1],
        init_far_model=chunks,
        init_flowmap_model=True,
        qk_norm="rms_norm_across_heads",
        added_kv_proj_dim=None,
        **({} if chunks else OF_CHUNKS),
    )
    return folder


def edited(file: Path, **fields: Any) -> None:
    """Sets fields of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


PROCESSOR_FORMS: tuple[Mapping[str, Any], ...] = (
    {"size": 50, "crop_size": 42},
    {"size": {"shortest_edge": 50}, "crop_size": {"height": 42, "width": 42}},
    {"size": 50, "crop_size": 42, "feature_extractor_type": "CLIPFeatureExtractor"},
    {"size": {"shortest_edge": 50, "longest_edge": None}, "crop_size": 42, "do_pad": None},
    {"size": 50, "crop_size": 42, "do_resize": True, "resample": 3, "_valid_processor_keys": ["images"]},
    {"size": 50, "crop_size": 42, "image_processor_type": "CLIPImageProcessorFast", "device": None},
)
"""The same settings in older and newer forms of the file."""


def write_processor(folder: Path, content: Mapping[str, Any]) -> Path:
    """Writes the file into a folder; returns the folder."""
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(json.dumps(content))
    return folder
