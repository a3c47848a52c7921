"""The class names of a model's first upload, where diffusers has others; the tensors have the same names.

NVlabs uploaded AnyFlow with the classes of its own repository (github.com/NVlabs/AnyFlow), where one
transformer is both of diffusers' two.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_TRANSFORMER = ("far.models.transformer_far_wan_model", "FAR_Wan_Transformer3DModel")
_SCHEDULER = ("far.schedulers.scheduling_flowmap_euler_discrete", "FlowMapDiscreteScheduler")
_NEW_SCHEDULER = "FlowMapEulerDiscreteScheduler"
_ONE, _IN_CHUNKS = "AnyFlowTransformer3DModel", "AnyFlowFARTransformer3DModel"

_PIPELINES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "WanAnyFlowPipeline": ("AnyFlowPipeline", _ONE),
        "FARWanAnyFlowPipeline": ("AnyFlowFARPipeline", _IN_CHUNKS),
    }
)
"""diffusers' pipeline and transformer, by NVlabs' pipeline."""

_SWITCHES = frozenset({"init_far_model", "init_flowmap_model"})
_OF_CHUNKS = frozenset({"chunk_partition", "compressed_patch_size", "full_chunk_limit"})
"""Fields that mean nothing where the model makes a video at once."""


def with_names_of_index(index: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a model_index.json with diffusers' names of its classes."""
    named = index.get("_class_name")
    for former, (pipeline, transformer) in _PIPELINES.items():
        if named in (former, pipeline):
            new = ((_TRANSFORMER, transformer), (_SCHEDULER, _NEW_SCHEDULER))
            return {**{name: _entry(value, new) for name, value in index.items()}, "_class_name": pipeline}
    return dict(index)


def _entry(value: Any, new: tuple[tuple[tuple[str, str], str], ...]) -> Any:
    """Returns a [library, class] pair of a model_index.json with the class's new name, if it has one."""
    return next((["diffusers", name] for former, name in new if value == list(former)), value)


def with_names_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a transformer's or scheduler's config as diffusers' class would have saved it.

    Fields of training are left out. A transformer that is no flow map stays as it is.
    """
    named = config.get("_class_name")
    if named == _SCHEDULER[1]:
        return {**_without(config, frozenset({"weight_type"})), "_class_name": _NEW_SCHEDULER}
    if named != _TRANSFORMER[1] or config.get("init_flowmap_model") is not True:
        return dict(config)
    fields = {"gate_value": 0, **_without(config, _SWITCHES)}
    if config.get("init_far_model") is True:
        return {**fields, "_class_name": _IN_CHUNKS}
    return {**_without(fields, _OF_CHUNKS), "_class_name": _ONE}


def _without(config: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}
