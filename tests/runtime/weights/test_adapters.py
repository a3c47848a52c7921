"""Adapters' files: what is read of them, how several are combined, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.manifests import plain_adapter, plain_manifest, plain_parameter
from wanrun.artifact.adapter import ADAPTER_METADATA
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.parameters import Component
from wanrun.errors import ArtifactError, UsageError
from wanrun.files import file_sha256, sha256_of
from wanrun.weights.adapters import (
    AdapterFile,
    check_fits,
    combined,
    open_adapter,
)

L, IN, OUT = 3, 6, 10
Q, HEAD, BIAS = "blocks/to_q", "proj_out", "blocks/to_q/bias"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def slots(rank: int) -> dict[str, tuple[int, ...]]:
    """The slots of a transformer of one product in a stack, and one outside."""
    return {
        f"{Q}/lora_a": (L, rank, IN),
        f"{Q}/lora_b": (L, OUT, rank),
        f"{HEAD}/lora_a": (rank, IN),
        f"{HEAD}/lora_b": (OUT, rank),
    }


def tensors(rank: int, seed: int, dtype: Any = np.float32, expert: str = "transformer") -> dict[str, Any]:
    """An adapter's tensors: of the product in the stack, and of its bias."""
    rng = np.random.default_rng(seed)
    return {
        f"{expert}/{Q}/lora_a": rng.standard_normal((L, rank, IN)).astype(dtype),
        f"{expert}/{Q}/lora_b": rng.standard_normal((L, OUT, rank)).astype(dtype),
        f"{expert}/{BIAS}": rng.standard_normal((L, OUT), np.float32),
    }


def write(path: Path, arrays: Mapping[str, Any], **content: Any) -> Path:
    """Writes an adapter's file with the safetensors package."""
    record = msgspec.to_builtins(plain_adapter(path.stem).content) | content
    save_file(dict(arrays), path, metadata={ADAPTER_METADATA: json.dumps(record)})
    return path


def made(folder: Path, *arguments: Any) -> AdapterFile:
    number = len(list(folder.iterdir()))
    return open_adapter(write(folder / f"a{number}.safetensors", tensors(*arguments)))


def model() -> Manifest:
    """The manifest of a model with these products."""
    shapes = {
        f"{Q}/weight": (L, OUT, IN),
        f"{Q}/bias": (L, OUT),
        f"{HEAD}/weight": (OUT, IN),
    }
    parameters = {path: plain_parameter(shape, "bfloat16") for path, shape in shapes.items()}
    components = plain_manifest().components | {"transformer": Component("weights/transformer", parameters)}
    return plain_manifest(components=components)


# --- reading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_what_a_file_has(dtype: Any, tmp_path: Path) -> None:
    arrays = tensors(4, 0, dtype)
    path = write(tmp_path / "a.safetensors", arrays)
    adapter = open_adapter(path)
    assert adapter.content == plain_adapter("a").content and adapter.sha256 == file_sha256(path)
    assert adapter.nbytes == path.stat().st_size
    assert adapter.tensors.keys() == arrays.keys()
    for name, array in adapter.tensors.items():
        assert array.dtype == arrays[name].dtype and np.array_equal(array, arrays[name])
        assert not array.flags.writeable and not array.flags.owndata
    assert adapter.of("transformer").keys() == {f"{Q}/lora_a", f"{Q}/lora_b", BIAS}
    assert adapter.of("transformer_2") == {}
    check_fits(adapter, model())


def test_what_is_no_adapter(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for data in (b"", b"1234567", b"\xff" * 100, (2).to_bytes(8, "little") + b"[]", bytes(8) + b"{}"):
        path.write_bytes(data)
        with pytest.raises(UsageError, match="wanbuild lora"):
            open_adapter(path)
    save_file({"blocks.0.lora_A.weight": np.ones((4, 6), np.float32)}, path, metadata={"format": "pt"})
    with pytest.raises(UsageError, match="wanbuild lora"):
        open_adapter(path)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError):
            open_adapter(missing)


def test_what_is_damaged(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.safetensors", tensors(4, 0)).read_bytes()
    path = tmp_path / "b.safetensors"
    for data in (whole[:-1], whole + b"1", whole.replace(b'"F32"', b'"F16"'), whole.replace(b"[3,", b"[2,")):
        assert sha256_of(data) != sha256_of(whole)
        path.write_bytes(data)
        with pytest.raises(ArtifactError):
            open_adapter(path)
    for wrong in ({"format": 2}, {"experts": ["vae"]}, {"loras": []}, {"colour": "red"}):
        with pytest.raises(ArtifactError):
            open_adapter(write(path, tensors(4, 0), **wrong))
    good = tensors(4, 0)
    with pytest.raises(ArtifactError):  # before the numbers are multiplied
        open_adapter(write(path, {"many": np.ones((1,) * 9, np.float32)}))
    a, b, bias = good
    for arrays in (
        {a: good[a]},
        {a: good[a], b: good[b][:2]},
        {a: good[a], b: good[b][..., :3]},
        {a: good[a][0, 0], b: good[b]},
        {bias: good[bias].astype(BFLOAT16)},
    ):
        with pytest.raises(ArtifactError):
            open_adapter(write(path, {name: np.ascontiguousarray(one) for name, one in arrays.items()}))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({f"transformer/{Q}/lora_a": (L, 4, 8), f"transformer/{Q}/lora_b": (L, OUT, 4)}, "8"),
        ({f"transformer/{Q}/lora_a": (4, 4, IN), f"transformer/{Q}/lora_b": (4, OUT, 4)}, "4"),
        ({f"transformer/{Q}/lora_a": (L, 4, IN), f"transformer/{Q}/lora_b": (L, 12, 4)}, "12"),
        ({f"transformer/{BIAS}": (L, 12)}, "12"),
        ({"transformer/blocks/to_k/bias": (L, OUT)}, "no transformer/blocks/to_k/bias"),
        ({f"transformer_2/{BIAS}": (L, OUT)}, "no transformer_2"),
    ],
)
def test_one_for_another_model(change: dict[str, tuple[int, ...]], found: str, tmp_path: Path) -> None:
    arrays = {name: np.ones(shape, np.float32) for name, shape in change.items()}
    adapter = open_adapter(write(tmp_path / "a.safetensors", arrays))
    with pytest.raises(UsageError, match=found):
        check_fits(adapter, model())
    other = write(tmp_path / "b.safetensors", tensors(4, 0), variant="wan2.1-i2v")
    with pytest.raises(UsageError, match=r"wan2\.1-t2v.*wan2\.1-i2v"):
        check_fits(open_adapter(other), model())


# --- combining --------------------------------------------------------------------------------------------


def product(slot: Mapping[str, np.ndarray], path: str) -> np.ndarray:
    return slot[f"{path}/lora_b"].astype(np.float64) @ slot[f"{path}/lora_a"].astype(np.float64)


def test_several_are_one_behind_the_other(tmp_path: Path) -> None:
    """Strengths are in B and in the changes of small parameters; what is behind them is zero."""
    one, two = made(tmp_path, 4, 0), made(tmp_path, 2, 1)
    changes = combined([(one, 0.3), (two, -1.5)], "transformer", slots(8), np.dtype(np.float32))
    a, b = one.of("transformer"), two.of("transformer")
    expected = 0.3 * product(a, Q) - 1.5 * product(b, Q)
    found = product(changes.slots, Q)
    assert np.abs(found - expected).max() < 1e-6 * np.abs(expected).max()
    assert {name: array.shape for name, array in changes.slots.items()} == slots(8)
    assert not changes.slots[f"{Q}/lora_a"][:, 6:].any() and not changes.slots[f"{Q}/lora_b"][..., 6:].any()
    assert np.array_equal(changes.slots[f"{Q}/lora_a"][:, :4], a[f"{Q}/lora_a"])
    assert not changes.slots[f"{HEAD}/lora_a"].any() and not changes.slots[f"{HEAD}/lora_b"].any()
    assert changes.deltas.keys() == {BIAS} and changes.deltas[BIAS].dtype == np.float32
    expected = 0.3 * a[BIAS].astype(np.float64) - 1.5 * b[BIAS]
    assert np.abs(changes.deltas[BIAS] - expected).max() < 1e-6 * np.abs(expected).max()


def test_strengths_are_folded_in_before_the_cast(tmp_path: Path) -> None:
    one = made(tmp_path, 4, 0, ml_dtypes.bfloat16)
    changes = combined([(one, 0.3)], "transformer", slots(4), BFLOAT16)
    b = one.of("transformer")[f"{Q}/lora_b"]
    assert np.array_equal(
        changes.slots[f"{Q}/lora_b"], (b.astype(np.float32) * np.float32(0.3)).astype(BFLOAT16)
    )
    wide = combined([(one, 1.0)], "transformer", slots(4), np.dtype(np.float32))
    assert np.array_equal(wide.slots[f"{Q}/lora_b"], b.astype(np.float32))


def test_one_that_fills_its_slots_is_not_copied(tmp_path: Path) -> None:
    one = made(tmp_path, 4, 0)
    changes = combined([(one, 1)], "transformer", slots(4), np.dtype(np.float32))
    for name in (f"{Q}/lora_a", f"{Q}/lora_b"):
        assert np.shares_memory(changes.slots[name], one.of("transformer")[name])


def test_what_takes_no_rank(tmp_path: Path) -> None:
    """An adapter of strength 0, and one of the other expert."""
    one, other = made(tmp_path, 4, 0), made(tmp_path, 4, 1, np.float32, "transformer_2")
    alone = combined([(one, 1)], "transformer", slots(4), np.dtype(np.float32))
    both = combined([(one, 1), (other, 1), (one, 0)], "transformer", slots(4), np.dtype(np.float32))
    for name, array in alone.slots.items():
        assert np.array_equal(both.slots[name], array)
    none = combined([], "transformer", slots(4), BFLOAT16)
    assert not none.deltas
    assert all(array.dtype == BFLOAT16 and not array.any() for array in none.slots.values())


def test_ranks_that_are_too_many(tmp_path: Path) -> None:
    one, two = made(tmp_path, 4, 0), made(tmp_path, 3, 1)
    with pytest.raises(UsageError, match=r"= 7.*--lora-rank 7"):
        combined([(one, 1), (two, 1)], "transformer", slots(6), np.dtype(np.float32))
    with pytest.raises(UsageError, match=r"found 4;.*--lora-rank 4"):
        combined([(one, 1)], "transformer", slots(2), np.dtype(np.float32))


def test_a_product_without_a_slot(tmp_path: Path) -> None:
    few = {name: shape for name, shape in slots(4).items() if name.startswith(HEAD)}
    with pytest.raises(UsageError, match=Q):
        combined([(made(tmp_path, 4, 0), 1)], "transformer", few, np.dtype(np.float32))
