"""Reads alpha and rank of a LoRA's modules from a PEFT adapter's configuration.

diffusers stores it in the file's own metadata, PEFT in adapter_config.json in the same folder. A field that
may change the merged weights must have a value that rules this out (false, none or empty).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanbuild.config import read_json, unique_object
from wanbuild.source.safetensors import TensorFile
from wanrun.errors import SourceError

METADATA_KEY = "lora_adapter_metadata"
PEFT_FILE = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"

_READ = frozenset({"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"})
# What was trained and how, and where; the tensors name the modules that they change.
_NO_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_bias",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "target_parameters",
        "task_type",
    }
)
# Other initialisations change the base weights too, which the adapter does not have.
_INIT = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterConfig:
    """Alpha and rank of every module, read from ``where``.

    ``ranks`` and ``alphas`` are by pattern, of which the first that matches applies; ``rank`` and ``alpha``
    if none does. ``rank_stabilized`` is whether the scale is alpha / sqrt(rank).
    """

    where: str
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rank_stabilized: bool

    def scale(self, module: str, rank: int) -> float:
        """Returns the factor of the product of a module's matrices, whose rank is ``rank``.

        ``module`` has its name in the file, without prefixes. Raises ValueError if the configuration states
        another rank.
        """
        expected = _match(self.ranks, module, self.rank)
        if rank != expected:
            raise ValueError(f"{module} has rank {rank}, {self.where} says {expected}")
        alpha = _match(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def _match(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Returns the value of the first pattern that ends a module's name or, with a ^, equals the name."""
    for pattern, value in patterns.items():
        name = pattern.removeprefix("^")
        if module == name or (name == pattern and module.endswith(f".{name}")):
            return value
    return default


def read_adapter_config(file: TensorFile) -> AdapterConfig | None:
    """Reads a LoRA's configuration from its metadata or from PEFT's file; returns None if there is none.

    Raises SourceError if it is not understood, or the adapter is not a plain LoRA.
    """
    path = file.path.with_name(PEFT_CONFIG)
    if METADATA_KEY in file.metadata:
        where = f"{METADATA_KEY} of {file.path.name}"
        fields = _unprefixed(_parse(file.metadata[METADATA_KEY], where))
    elif uses_config_file(file.path):
        where = str(path)
        fields = dict(read_json(path))
    else:
        return None
    problems = list(_problems(fields))
    if problems:
        raise SourceError(
            "unreadable",
            f"{where} does not describe a LoRA that can be merged: {', '.join(problems)}",
            remedy="merge it with PEFT, and convert the merged checkpoint",
        )
    return AdapterConfig(
        where,
        fields["r"],
        float(fields["lora_alpha"]),
        dict(fields.get("rank_pattern") or {}),
        dict(fields.get("alpha_pattern") or {}),
        bool(fields.get("use_rslora")),
    )


def uses_config_file(path: Path) -> bool:
    """Returns whether PEFT saved this LoRA, with its configuration in the same folder."""
    return path.name == PEFT_FILE and path.with_name(PEFT_CONFIG).is_file()


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(text, object_pairs_hook=unique_object)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            "unreadable", f"{where} is not JSON: {error}", remedy="download the LoRA again"
        ) from None
    if not isinstance(fields, dict):
        raise SourceError(
            "unreadable", f"{where} is not understood", expected="a JSON object", found=repr(fields)[:80]
        )
    return fields


def _unprefixed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Removes prefixes: diffusers writes ``transformer.r``, or ``r`` for a model saved by itself."""
    own = {
        name.removeprefix("transformer."): v for name, v in fields.items() if name.startswith("transformer.")
    }
    return own or dict(fields)


def _problems(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields the problems of the fields."""
    if fields.get("peft_type", "LORA") != "LORA":
        yield f"peft_type is {fields['peft_type']!r}"
    if fields.get("init_lora_weights") not in _INIT:
        yield f"init_lora_weights is {fields['init_lora_weights']!r}, which changes the base weights"
    for name in ("r", "lora_alpha"):
        if not _is_size(fields.get(name), whole=name == "r"):
            yield f"{name} is {fields.get(name)!r}"
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = fields.get(name) or {}
        if not isinstance(patterns, dict):
            yield f"{name} is {patterns!r}"
            continue
        for pattern, value in patterns.items():
            if not _is_size(value, whole=name == "rank_pattern"):
                yield f"{name} of {pattern} is {value!r}"
            if not re.fullmatch(r"\^?[\w.-]+", pattern):
                yield f"{name} has the regular expression {pattern!r}, where only names are read"
    known = _READ | _NO_EFFECT | {"peft_type", "init_lora_weights"}
    yield from (f"{name} is {value!r}"[:80] for name, value in fields.items() if value and name not in known)


def _is_size(value: Any, whole: bool) -> bool:
    """Returns whether a value is positive and at most 2^53, up to which a float holds integers exactly."""
    kinds = (int,) if whole else (int, float)
    return type(value) in kinds and 0 < value <= 2**53
