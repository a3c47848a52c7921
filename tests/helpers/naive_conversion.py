"""A naive conversion: every file of a component is loaded, renamed and stacked by hand, cast bit by bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from helpers.checkpoint_files import State, load_file
from helpers.naive import order_of_halves
from wanrun.artifact.manifest import read_manifest
from wanrun.weights.buffers import DTYPES

BF16 = np.dtype(ml_dtypes.bfloat16)


def load_state(folder: Path) -> State:
    state: State = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    return state


def rename_transformer(key: str) -> str:
    for old, new in (
        (".to_out.0.", ".to_out."),
        (".ffn.net.0.proj.", ".ffn.up."),
        (".ffn.net.2.", ".ffn.down."),
        (".image_embedder.ff.net.0.proj.", ".image_embedder.up."),
        (".image_embedder.ff.net.2.", ".image_embedder.down."),
        ("vace_blocks.0.proj_in.", "vace_proj_in."),
        (".act_fn.", "."),
        ("norm_out.", ""),
    ):
        key = key.replace(old, new)
    return key.replace(".", "/")


def rename_image_encoder(key: str) -> str:
    for old, new in (
        ("vision_model.", ""),
        ("embeddings.", ""),
        ("position_embedding.weight", "position_embedding"),
        ("pre_layrnorm", "pre_norm"),
        ("post_layernorm", "post_norm"),
        ("encoder.layers.", "blocks."),
        ("layer_norm1", "attn_norm"),
        ("layer_norm2", "mlp_norm"),
        ("self_attn.", ""),
        ("mlp.", ""),
        ("_proj.", "."),
    ):
        key = key.replace(old, new)
    return key.replace(".", "/")


def rename_text_encoder(key: str) -> str:
    if key == "shared.weight":
        return "shared"
    for old, new in (
        ("encoder.block.", "blocks."),
        ("layer.0.SelfAttention.relative_attention_bias.weight", "relative_attention_bias"),
        ("layer.0.SelfAttention.", ""),
        ("layer.0.layer_norm", "attn_norm"),
        ("layer.1.DenseReluDense.", ""),
        ("layer.1.layer_norm", "ff_norm"),
        ("encoder.final_layer_norm", "final_norm"),
    ):
        key = key.replace(old, new)
    return key.replace(".", "/")


def rename_vae(key: str) -> str:
    return (
        key.replace(".upsamplers.0.", ".upsampler.").replace(".resample.1.", ".resample.").replace(".", "/")
    )


def layout_transformer(path: str, x: np.ndarray) -> np.ndarray:
    if re.fullmatch(r"motion_encoder/(res_blocks/\d+/)?conv\w*/weight", path):
        return np.einsum("oihw->hwio", x)
    return (
        x.reshape(len(x), -1)
        if re.fullmatch(
            r"\w*patch_embedding/weight|patch_(short|mid|long)/weight|face_encoder/conv\w+/weight", path
        )
        else x
    )


def layout_vae(path: str, x: np.ndarray) -> np.ndarray:
    if path.endswith("gamma"):
        return x.reshape(-1)
    if path.endswith("bias"):
        return x
    if all(size == 1 for size in x.shape[2:]):  # a 1x1 convolution is a matrix
        return x.reshape(len(x), -1)
    return np.einsum("oi...->...io", x)


def layout_text_encoder(path: str, x: np.ndarray) -> np.ndarray:
    return x


RENAME: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {
        "transformer": rename_transformer,
        "transformer_2": rename_transformer,
        "vae": rename_vae,
        "text_encoder": rename_text_encoder,
        "image_encoder": rename_image_encoder,
    }
)
LAYOUT: Mapping[str, Callable[[str, np.ndarray], np.ndarray]] = MappingProxyType(
    {
        "transformer": layout_transformer,
        "transformer_2": layout_transformer,
        "vae": layout_vae,
        "text_encoder": layout_text_encoder,
        "image_encoder": layout_transformer,
    }
)
TRANSFORMER_KEPT = re.compile(r".*norm.*|condition_embedder/.*|.*scale_shift_table|.*motion_synthesis_weight")
KEPT: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "transformer": TRANSFORMER_KEPT,
        "transformer_2": TRANSFORMER_KEPT,
        "vae": re.compile(r".*"),
        "text_encoder": re.compile(r".*norm.*|.*relative_attention_bias"),
        "image_encoder": re.compile(r".*norm.*|class_embedding|position_embedding"),
    }
)
"""What stays in float32 where the weights are bfloat16."""

ROTATED = re.compile(r"(vace_)?blocks/attn1/(to_[qk]/(weight|bias)|norm_[qk]/weight)")
"""What has the even rows of each head first."""


def naive(component: str, folder: Path, all_float32: bool) -> State:
    """Parameter by path; the layers of a stack, in order, along a new first axis."""
    layers: dict[str, dict[int, np.ndarray]] = {}
    result: State = {}
    for key, value in load_state(folder).items():
        path = RENAME[component](key)
        match = re.fullmatch(r"(blocks|vace_blocks|face_adapter)/(\d+)/(.+)", path)
        path = f"{match[1]}/{match[3]}" if match else path
        kept = all_float32 or KEPT[component].fullmatch(path)
        value = LAYOUT[component](path, value)
        if ROTATED.fullmatch(path):
            head_dim = json.loads((folder / "config.json").read_text())["attention_head_dim"]
            value = value[order_of_halves(len(value), head_dim)]
        value = as_float32(value) if kept else as_bfloat16(value)
        if match:
            layers.setdefault(path, {})[int(match[2])] = value
        else:
            result[path] = value
    for path, rows in layers.items():
        result[path] = np.stack([rows[i] for i in range(len(rows))])
    return result


def as_float32(value: np.ndarray) -> np.ndarray:
    """float32, float16 or bfloat16, which is the upper half of a float32, to float32."""
    if value.dtype == BF16:
        return (value.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return value.astype(np.float32)


def as_bfloat16(value: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 of finite values, ties to even; torch's cast is held to give the same bits."""
    bits = as_float32(value).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype(np.uint16).view(BF16)


def assert_equals_naive(artifact: Path, checkpoint: Path, all_float32: bool) -> None:
    """Every component, as plain Orbax restores it, bit for bit."""
    manifest = read_manifest(artifact)
    assert set(manifest.components) == {path.parent.name for path in checkpoint.glob("*/*.safetensors")}
    for name, component in manifest.components.items():
        expected = naive(name, checkpoint / name, all_float32)
        leaves = jax.tree_util.tree_leaves_with_path(
            ocp.PyTreeCheckpointer().restore(artifact / component.folder)
        )
        found = {"/".join(key.key for key in path): leaf for path, leaf in leaves}
        assert found.keys() == expected.keys() == component.parameters.keys()
        for path, value in expected.items():
            assert found[path].dtype == value.dtype, path
            assert found[path].shape == value.shape, path
            assert found[path].tobytes() == value.tobytes(), path


def arrays_of(artifact: Path, name: str) -> dict[str, np.ndarray]:
    """A component's arrays, read file by file."""
    manifest = read_manifest(artifact)
    component = manifest.components[name]
    found = {}
    for path, parameter in component.parameters.items():
        layout = parameter.layout
        folder = artifact / component.folder / path.replace("/", ".")
        chunks = [(folder / layout.chunk_file(index)).read_bytes()[:-4] for index in range(layout.chunks)]
        found[path] = np.frombuffer(b"".join(chunks), DTYPES[layout.dtype]).reshape(layout.shape)
    return found
