"""A checkpoint of AnyFlow as NVlabs uploaded it first, with the classes and fields of its own repository."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
