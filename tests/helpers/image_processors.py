"""Files of settings of an image processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wanbuild.source.image_processor import FILE

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
