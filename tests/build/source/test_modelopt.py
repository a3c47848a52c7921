"""A folder that NVIDIA ModelOpt has exported: diffusers' names, 8-bit floats, and a field of the config."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from helpers.checkpoint_files import State, save_file
from helpers.refusals import refuses
from helpers.single_files import state_of
from wanbuild.build import convert
from wanbuild.conversion.chosen import Quantise
from wanbuild.conversion.convert_request import ConvertRequest
from wanrun.errors import SourceError

SAID = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "producer": {"name": "modelopt"},
    "ignore": ["proj_out"],
}


def exported(checkpoint: Path, folder: Path, said: Any) -> State:
    """Writes it, and returns the transformer's tensors as they are stored."""
    shutil.copytree(checkpoint, folder)
    transformer = folder / "transformer"
    state = state_of(transformer)
    for key in [key for key, value in state.items() if key.startswith("blocks.") and value.ndim == 2]:
        base = key.removesuffix(".weight")
        scale = np.float32(np.abs(state[key]).max() / 448)
        state[key] = (state[key] / scale).astype(ml_dtypes.float8_e4m3fn)
        state |= {f"{base}.weight_scale": np.asarray(scale), f"{base}.input_scale": np.ones((), np.float32)}
    for file in transformer.glob("*.safetensors*"):
        file.unlink()
    save_file(state, transformer / "diffusion_pytorch_model.safetensors")
    config = json.loads((transformer / "config.json").read_text())
    (transformer / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return state


@pytest.mark.slow
def test_it_is_read_and_kept(toy_checkpoint: Path, tmp_path: Path) -> None:
    state = exported(toy_checkpoint, tmp_path / "source", SAID)
    eight = {key for key, value in state.items() if value.dtype == ml_dtypes.float8_e4m3fn}
    plain = tmp_path / "plain"
    shutil.copytree(toy_checkpoint, plain)
    large = {
        key: value.astype(np.float32) * state[f"{key.removesuffix('.weight')}.weight_scale"]
        if key in eight
        else value
        for key, value in state.items()
        if not key.endswith("_scale")
    }
    for file in (plain / "transformer").glob("*.safetensors*"):
        file.unlink()
    save_file(large, plain / "transformer" / "diffusion_pytorch_model.safetensors")
    expected, found = (
        convert(ConvertRequest(tmp_path / name, tmp_path / f"{name}-artifact"))
        for name in ("plain", "source")
    )
    assert found.components == expected.components and found.configs == expected.configs
    kept = convert(ConvertRequest(tmp_path / "source", tmp_path / "kept", quantise=Quantise("source")))
    assert set(kept.dtypes["transformer"].eight_bit.values()) == {"float8_e4m3fn"}
    layers = kept.dtypes["transformer"].eight_bit
    assert len(layers) == len({key.split(".", 2)[2] for key in eight})
    tree, cast = (
        ocp.PyTreeCheckpointer().restore(tmp_path / name / "weights/transformer")
        for name in ("kept", "source-artifact")
    )
    for layer in layers:
        *parents, last = layer.split("/")
        one, other = (
            functools.reduce(lambda node, part: node[part], [*parents, last], root) for root in (tree, cast)
        )
        values = np.asarray(one["weight"], np.float32) * np.asarray(one["scale"])[..., None]
        np.testing.assert_array_equal(values.astype(ml_dtypes.bfloat16), np.asarray(other["weight"]))
    weights = tmp_path / "source/transformer/diffusion_pytorch_model.safetensors"
    assert (
        convert(
            ConvertRequest(tmp_path / "plain", tmp_path / "file", files={"transformer": weights})
        ).components
        == expected.components
    )


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (SAID | {"quant_algo": "NVFP4"}, ["modelopt", "NVFP4"]),
        ({"quant_method": "bitsandbytes"}, ["bitsandbytes", None]),
        (3, 3),
    ],
)
def test_other_forms_are_refused_by_name(
    said: Any, found: object, toy_checkpoint: Path, tmp_path: Path
) -> None:
    exported(toy_checkpoint, tmp_path / "source", said)
    with refuses("unknown_name", SourceError, what="a quantization_config ", found=found):
        convert(ConvertRequest(tmp_path / "source", tmp_path / "artifact"))
