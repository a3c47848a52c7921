"""GGUF files beside diffusers, which reads them itself: the same weight for every parameter."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from diffusers import GGUFQuantizationConfig, WanTransformer3DModel
from diffusers.quantizers.gguf.utils import dequantize_functions
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from helpers.single_files import original_transformer, write_with_published_heads
from wanbuild.source.component import open_part


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
