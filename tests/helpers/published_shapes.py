"""Key lists of published weight files, from the reference classes."""

from __future__ import annotations

import functools
import inspect
import json
from typing import Any

import diffusers
import torch
import transformers

from wanbuild.published.base_configs import Config

_TRANSFORMERS = {
    "text_encoder": (transformers.UMT5Config, transformers.UMT5EncoderModel),
    "image_encoder": (transformers.CLIPVisionConfig, transformers.CLIPVisionModel),
}


def diffusers_class(name: str) -> Any:
    """A component's class; that of Self-Forcing, which diffusers lacks, has the tensors of Wan's."""
    return getattr(diffusers, name.replace("CausalWan", "Wan"))


def reference_shapes(component: str, config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that the published weight file of a component holds.

    The model is built on torch's meta device, so that nothing is allocated, and once for a config.
    """
    return dict(_shapes(component, json.dumps(config, default=dict)))


@functools.cache
def _shapes(component: str, serialized: str) -> dict[str, tuple[int, ...]]:
    config = json.loads(serialized)
    with torch.device("meta"):
        if component in _TRANSFORMERS:
            config_class, model_class = _TRANSFORMERS[component]
            model = model_class(config_class(**config))
        else:
            cls = diffusers_class(config["_class_name"])
            fields = set(inspect.signature(cls.__init__).parameters)  # as from_config drops the others
            model = cls(**{name: value for name, value in config.items() if name in fields})
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    # transformers lists both names of a tied tensor; the published file has one.
    shapes.pop("encoder.embed_tokens.weight", None)
    if component == "image_encoder":  # as published; transformers 5 saves them without the prefix
        shapes = {f"vision_model.{name.removeprefix('vision_model.')}": s for name, s in shapes.items()}
    return shapes
