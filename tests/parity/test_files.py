"""Files as torch, diffusers, transformers and gguf write, read and understand them."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import diffusers
import gguf
import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from diffusers import GGUFQuantizationConfig, WanTransformer3DModel
from diffusers.quantizers.gguf.utils import dequantize_functions
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file as load_torch
from transformers import CLIPImageProcessor

from helpers.checkpoint_files import PROCESSOR_FORMS, load_file, save_file, write_processor
from helpers.naive_conversion import as_bfloat16, as_float32
from helpers.single_files import original_transformer, write_with_published_heads
from wanbuild.published.schedulers import SCHEDULER_CONFIGS
from wanbuild.source.component import open_part
from wanbuild.source.image_processor import ImageProcessorConfig, open_image_processor
from wanbuild.source.scheduler import (
    DPMSolverConfig,
    FlowMapEulerConfig,
    FlowMatchEulerConfig,
    SchedulerDefaults,
    UniPCConfig,
    read_scheduler,
)
from wanbuild.variants.table import variants
from wanrun.denoising.solvers import solver_table


@pytest.mark.parametrize("solver", sorted(SCHEDULER_CONFIGS.keys() - {"self-forcing"}))
def test_schedulers_as_diffusers_saves_them(tmp_path: Path, solver: str) -> None:
    config = SCHEDULER_CONFIGS[solver]
    cls = getattr(diffusers, config["_class_name"])
    cls.from_config(dict(config)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "scheduler_config.json").read_text())
    assert {k: v for k, v in saved.items() if k != "_diffusers_version"} == dict(config)
    if (row := variants().get(solver)) is not None:  # Helios', but for what no file says
        assert row.pyramid is not None
        plain = msgspec.structs.replace(row.pyramid, doubled=False)
        assert read_scheduler(saved) == SchedulerDefaults(row.solver, row.flow_shift, pyramid=plain)
        return
    assert read_scheduler(saved) == SchedulerDefaults(solver, 5.0 if solver == "flow-map" else 3.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config_class", [UniPCConfig, DPMSolverConfig, FlowMatchEulerConfig, FlowMapEulerConfig]
)
def test_fields_that_are_left_out_are_the_classes_defaults(config_class: Any) -> None:
    (name,) = config_class.CLASS_NAMES
    scheduler = getattr(diffusers, name)
    reference = inspect.signature(scheduler.__init__).parameters
    fixed = {field: reference[field].default for field in config_class.FIXED}
    assert fixed == {**config_class.FIXED}
    solver, flow = config_class.SOLVER, {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    euler = solver in ("euler", "flow-map")
    least = {"_class_name": name, **({} if euler else flow)}
    found = read_scheduler(least)
    assert found == SchedulerDefaults(solver, 1.0, assumed=True)
    null = {"shift" if euler else "flow_shift": None}  # with it, diffusers makes no step
    assert read_scheduler({**least, **null}) == found
    judge = scheduler.from_config(least)
    judge.set_timesteps(7)
    table = solver_table(solver, 7, found.flow_shift)
    assert table.timesteps.tolist() == judge.timesteps.float().tolist()
    assert table.sigmas.tolist() == judge.sigmas.float().tolist()


def test_a_processor_as_transformers_saves_it(tmp_path: Path) -> None:
    settings = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "rescale_factor": 0.5}
    CLIPImageProcessor(size={"shortest_edge": 50}, crop_size=42, **settings).save_pretrained(tmp_path)
    expected = ImageProcessorConfig(50, 42, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), 0.5)
    assert open_image_processor(tmp_path) == expected


@pytest.mark.parametrize("content", PROCESSOR_FORMS)
def test_older_and_newer_forms_of_a_processor(tmp_path: Path, content: Mapping[str, Any]) -> None:
    """What is left out has the class's default, which the reference itself states."""
    found = open_image_processor(write_processor(tmp_path, content))
    reference = CLIPImageProcessor(size=content["size"], crop_size=content["crop_size"])
    assert found.size == reference.size["shortest_edge"] == 50
    assert found.crop_size == reference.crop_size["height"] == 42
    assert list(found.image_mean) == list(reference.image_mean)
    assert list(found.image_std) == list(reference.image_std)
    assert found.rescale_factor == reference.rescale_factor
    assert reference.resample == 3


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def finite(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of up to two bytes; a million of four bytes, half of them between two bfloat16s."""
    if dtype.itemsize < 4:
        bits = torch.arange(256**dtype.itemsize, dtype=torch.int32).to(BITS[dtype.itemsize])
    else:
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(-(2**31), 2**31, (1_000_000,), dtype=torch.int32, generator=generator)
        bits[::2] = (bits[::2] & ~0xFFFF) | 0x8000
    values = bits.view(dtype)
    return values[values.float().isfinite() & values.to(torch.bfloat16).isfinite()]


def same_bits(found: np.ndarray, expected: torch.Tensor) -> bool:
    return found.tobytes() == expected.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_casts_have_torch_s_bits(dtype: str, tmp_path: Path) -> None:
    values = finite(DTYPES[dtype])
    assert len(values) > 60_000
    stored = values.view(BITS[values.itemsize]).numpy().view(np.dtype(f"u{values.itemsize}"))
    save_file({"x": stored.view(_numpy_dtype(dtype))}, tmp_path / "x.safetensors")
    ours = load_file(tmp_path / "x.safetensors")["x"]
    assert same_bits(as_float32(ours), values.to(torch.float32))
    assert same_bits(as_bfloat16(ours), values.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_are_read_and_written_as_by_torch(dtype: str, tmp_path: Path) -> None:
    values = finite(DTYPES[dtype])[:240].reshape(2, 3, 40)
    array = values.view(BITS[values.itemsize]).numpy().view(_numpy_dtype(dtype))
    save_file({"a": array, "b": array[1]}, tmp_path / "x.safetensors")
    theirs, ours = load_torch(tmp_path / "x.safetensors"), load_file(tmp_path / "x.safetensors")
    assert theirs.keys() == ours.keys() == {"a", "b"}
    for name, value in theirs.items():
        assert str(value.dtype) == f"torch.{dtype}" and ours[name].dtype.name == dtype
        assert tuple(value.shape) == ours[name].shape and same_bits(ours[name], value)
    assert same_bits(ours["a"], values)


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def exact(stored: torch.Tensor, kind: Kind) -> np.ndarray:
    """The values of blocks by diffusers' functions, in float32: it computes in float16 itself."""
    items, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = stored.view(torch.uint8).reshape(-1, nbytes)
    return dequantize_functions[kind](blocks, items, nbytes, dtype=torch.float32).numpy().reshape(-1)


@pytest.mark.parametrize("kind", dequantize_functions, ids=lambda kind: kind.name)
def test_each_type(kind: Kind) -> None:
    nbytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(kind).integers(0, 48, (64, nbytes), np.uint8)  # scales that are finite
    np.testing.assert_allclose(
        dequantize(blocks, kind).reshape(-1), exact(torch.from_numpy(blocks), kind), rtol=1e-6, atol=1e-9
    )


HALF = {f"condition_embedder.time_embedder.linear_{number}.weight" for number in (1, 2)}
KINDS = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)


def test_each_weight_is_that_of_diffusers(tmp_path: Path) -> None:
    checkpoint, path = tmp_path / "checkpoint", tmp_path / "wan.gguf"
    write_with_published_heads(checkpoint, "wan2.1-t2v")
    state = original_transformer(checkpoint / "transformer")
    writer, count = gguf.GGUFWriter(path, "wan"), 0
    for key, value in state.items():
        if value.ndim == 2 and key.endswith(".weight") and value.shape[1] % 32 == 0:
            kind, count = random.Random(key).choice(KINDS), count + 1
            writer.add_tensor(key, quantize(value.astype(np.float32), kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert count > 10
    model = WanTransformer3DModel.from_single_file(
        str(path),
        config=str(checkpoint),
        subfolder="transformer",
        quantization_config=GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
    )
    with ExitStack() as stack:
        source = open_part("transformer", "WanTransformer3DModel", path, None, stack)
        expected = dict(model.named_parameters())
        assert source.tensors.keys() == expected.keys()
        for key, parameter in expected.items():
            found = source.array(key).astype(np.float32).reshape(-1)
            if (kind := getattr(parameter, "quant_type", None)) is not None:
                own, most = exact(parameter.as_tensor(), kind), 1e-6
            else:  # what it keeps in float32 was dequantised in float16
                own, most = parameter.detach().float().numpy().reshape(-1), 2.0**-9 if key in HALF else 0.0
            np.testing.assert_allclose(found, own, rtol=0, atol=most * float(np.abs(own).max()))
