"""LoRA files of random values, in the layouts and names of those that are published."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from wanbuild.mapping.original import MODULES, PARAMETERS
from wanbuild.source.shapes import component_shapes
from wanrun.artifact.artifact import named_weights, open_artifact
from wanrun.artifact.layout import CRC_BYTES
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.named import ADAPTER
from wanrun.weights.adapters import AdapterFile, open_adapter

Arrays = dict[str, np.ndarray]

RANK = 4


@dataclass(frozen=True)
class Published:
    """How a publisher writes LoRAs.

    Attributes:
        name: a file's name, with {} for the expert.
        spell: the name of a module of diffusers' name and Wan's own.
        down: the name of the down matrix, of which that of the up matrix follows.
        alpha: the alpha beside each pair; None for none.
        dtype: of the matrices.
        small: whether there are changes of biases, norms and tables.
        outside: whether layers outside the blocks have pairs too.
        config: PEFT's configuration beside the file.
    """

    name: str
    spell: Callable[[str, str], str]
    down: str = "lora_down.weight"
    alpha: float | None = None
    dtype: Any = np.float32
    small: bool = False
    outside: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def up(self) -> str:
        """The name of the up matrix."""
        return self.down.replace("lora_A", "lora_B").replace("down", "up")


def _original(_: str, name: str) -> str:
    return f"diffusion_model.{name}"


def _of_diffusers(module: str, _: str) -> str:
    return f"transformer.{module}"


def _underscored(_: str, name: str) -> str:
    return f"lora_unet_{name.replace('.', '_')}"


def _peft(module: str, _: str) -> str:
    return f"base_model.model.{module}"


PUBLISHED: Mapping[str, Published] = {
    "diffusers": Published("pytorch_lora_weights", _of_diffusers, "lora_A.weight", small=True, outside=True),
    "lightx2v": Published(
        "Wan21_lightx2v_cfg_step_distill_lora_rank4", _original, alpha=2.0, small=True, outside=True
    ),
    "Lightning": Published("Seko-V1/{}_noise_model", _original, alpha=8.0, dtype=ml_dtypes.bfloat16),
    "Kijai": Published(
        "Wan22_A14B_T2V_{upper}_Lightning_4steps_lora_rank4_fp16", _original, alpha=4.0, dtype=np.float16
    ),
    "CausVid": Published(
        "Wan21_CausVid_14B_T2V_lora_rank4_v2", _original, "lora_A.weight", dtype=np.float16, small=True
    ),
    "FastWan": Published(
        "FastWan_T2V_14B_480p_lora_rank_4_bf16", _original, dtype=ml_dtypes.bfloat16, outside=True
    ),
    "musubi": Published("my_style", _underscored, alpha=1.0, dtype=ml_dtypes.bfloat16),
    "kohya": Published("last", _underscored, alpha=3.0, outside=True),
    "PEFT": Published(
        "adapter_model", _peft, "lora_A.weight", config={"peft_type": "LORA", "r": RANK, "lora_alpha": 6}
    ),
    "ai-toolkit": Published(
        "my_first_lora_v1_{}_noise", _original, "lora_A.weight", dtype=ml_dtypes.bfloat16
    ),
}
"""By publisher or tool."""


def transformer_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """The published tensors of an artifact's transformer."""
    return component_shapes("transformer", manifest.configs["transformer"])


def linear_modules(manifest: Manifest) -> list[str]:
    """The modules that have slots, in diffusers' names: all but the convolutions of the motion encoder."""
    return [
        key.removesuffix(".weight")
        for key, shape in transformer_shapes(manifest).items()
        if key.endswith(".weight") and len(shape) > 1 and not (len(shape) == 4 and "motion_encoder" in key)
    ]


def lora(published: Published, manifest: Manifest, seed: int = 0, rank: int = RANK) -> Arrays:
    """The tensors of a LoRA of all that a publisher's files have, with random values."""
    rng, tensors = np.random.default_rng(seed), Arrays()
    shapes = transformer_shapes(manifest)
    names = dict(_original_names(shapes))
    modules = linear_modules(manifest)
    for module in modules:
        if not published.outside and not module.startswith(("blocks.", "vace_blocks.", "face_adapter.")):
            continue
        outputs, *inputs = shapes[f"{module}.weight"]
        name = published.spell(module, names.get(module, module))
        down = rng.standard_normal((rank, *inputs), np.float32) / np.prod(inputs) ** 0.5
        up = rng.standard_normal((outputs, rank, *[1] * (len(inputs) - 1)), np.float32)
        tensors |= {f"{name}.{published.down}": down, f"{name}.{published.up}": up}
        if published.alpha is not None:
            tensors[f"{name}.alpha"] = np.array(published.alpha)
    for key, shape in shapes.items() if published.small else ():
        module, _, leaf = key.rpartition(".")
        if leaf == "weight" and len(shape) > 1:
            continue
        table = leaf not in ("weight", "bias")
        name = published.spell(*(key, names.get(key, key)) if table else (module, names.get(module, module)))
        values = rng.standard_normal(shape, np.float32) / 4
        if name.endswith(".modulation"):
            tensors[f"{name.removesuffix('.modulation')}.diff_m"] = values
        else:
            tensors[f"{name}.diff_b" if leaf == "bias" else f"{name}.diff"] = values
    return {key: np.ascontiguousarray(value, published.dtype) for key, value in tensors.items()}


def _original_names(shapes: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields diffusers' name and Wan's own of each module and table."""
    known = {*shapes, *(key.rpartition(".")[0] for key in shapes)}
    for original, diffusers in (*MODULES, *PARAMETERS):
        pattern = re.escape(diffusers).replace(r"\{blocks\}", r"(?P<blocks>(?:vace_)?blocks\.\d+)")
        pattern = pattern.replace(r"\{i\}", r"(?P<i>\d+)")
        for name in known:
            if match := re.fullmatch(pattern, name):
                yield name, original.format(**match.groupdict())


def write(folder: Path, published: Published, tensors: Arrays, noise: str = "") -> Path:
    """Writes a LoRA's file, with the configuration that is beside it."""
    path = folder / (published.name.format(noise, upper=noise.upper()) + ".safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    if published.config:
        path.with_name("adapter_config.json").write_text(json.dumps(published.config))
    return path


def stored_weights(artifact: Path, name: str = "transformer") -> Arrays:
    """A component's parameters by path, as its files have them."""
    component = read_manifest(artifact).components[name]
    parts = dict[str, list[np.ndarray]]()
    layouts = {path: parameter.layout for path, parameter in component.parameters.items()}
    for named in named_weights(name, component):
        path = Path(named.group).name.replace(".", "/")
        data = (artifact / named.name).read_bytes()[:-CRC_BYTES]
        dtype = ml_dtypes.bfloat16 if layouts[path].dtype == "bfloat16" else layouts[path].dtype
        parts.setdefault(path, []).append(np.frombuffer(data, dtype))
    return {path: np.concatenate(own).reshape(layouts[path].shape) for path, own in parts.items()}


def listed_adapter(folder: Path, name: str) -> AdapterFile:
    """Opens an artifact's adapter, after a comparison of its bytes with the manifest."""
    artifact = open_artifact(folder)
    (named,) = (one for one in artifact.named() if one.kind is ADAPTER and one.of == name)
    named.check(artifact.path(named))
    return open_adapter(artifact.path(named))
