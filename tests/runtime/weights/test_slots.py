"""Slots on the device: zeros of what programs take, of an expert, of what is in no stack, and of one layer.

On a mesh they are where programs take them: ``tests/commands/test_mesh.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import wanrun
from helpers.manifests import built_with
from helpers.opened import Opened
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.parameters import Tree, flat
from wanrun.artifact.slots import slots_of
from wanrun.replay.samples import sample_media
from wanrun.weights.slots import Slots

pytestmark = pytest.mark.slow

Toys = Callable[[str], tuple[Path, Path]]

RANK = 4


def opened_with(opened: Any, bits: bool) -> Any:
    """What slots read of an opened artifact, with these stacks of layers and this form of weights."""
    kernels = msgspec.structs.replace(opened.program_set.kernels, weight_bits=bits)
    programs = msgspec.structs.replace(opened.program_set, kernels=kernels, layers={"blocks": (0, 1, 2)})
    return SimpleNamespace(manifest=opened.manifest, device=opened.device, program_set=programs)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "bits", "passed"),
    [("bfloat16", True, np.uint16), ("bfloat16", False, jnp.bfloat16), ("float32", True, np.float32)],
)
def test_zeros_of_what_programs_take(
    shared: Path, open_here: Callable[..., Opened], dtype: str, bits: bool, passed: Any
) -> None:
    opened = open_here(shared).opened
    options = built_with(dtype=dtype, lora_rank=RANK)
    slots = Slots(opened_with(opened, bits), options)
    whole, outside = flat(slots.zeros), flat(slots.zeros_of(""))
    expected = slots_of(opened.manifest.components["transformer"], RANK)
    assert {path: one.shape for path, one in whole.items()} == {
        path: one.shape for path, one in expected.items()
    }
    assert outside.keys() == {path for path in whole if not path.startswith("blocks/")}
    layer = {f"blocks/{path}": one for path, one in flat(slots.zeros_of("blocks")).items()}
    assert {path: one.shape for path, one in layer.items()} == {
        path: one.shape[1:] for path, one in expected.items() if path.startswith("blocks/")
    }
    arrays = [*whole.values(), *outside.values(), *layer.values()]
    assert all(one.dtype == passed and not np.any(one) for one in arrays)
    assert all(isinstance(one, jax.Array) and one.committed for one in arrays)


def test_experts_and_layers_share_them(shared: Path, open_here: Callable[..., Opened]) -> None:
    """So do the programs of profiles that are built alike."""
    weights = open_here(shared).weights
    slots = weights.slots(built_with(lora_rank=RANK))
    alike, other = (
        weights.slots(built_with(lora_rank=RANK, max_steps=7)),
        weights.slots(built_with(lora_rank=5)),
    )
    assert same(slots.of("transformer"), slots.of("transformer_2"))
    assert same(slots.of("transformer"), alike.of("transformer"))
    assert not same(slots.of("transformer"), other.of("transformer"))
    assert weights.slots(built_with()).of("transformer") == {}


def same(one: Tree, other: Tree) -> bool:
    return all(array is flat(other)[path] for path, array in flat(one).items())


@pytest.mark.thorough
@pytest.mark.parametrize(("memory", "loop"), [("auto", "step"), ("auto", "scan"), ("stream", "stream")])
def test_videos_have_the_bits_of_an_artifact_without_slots(
    media_toy: Toys, slots_toy: Toys, memory: Any, loop: str
) -> None:
    """Of two experts with control blocks, in every form of the loop."""

    def made(artifact: Path) -> wanrun.Result:
        manifest = read_manifest(artifact)
        (profile,) = manifest.profiles
        with wanrun.load(artifact, profile=profile, memory=memory, embeddings="none") as pipeline:
            media = sample_media(manifest, pipeline.profile)
            form: Any = loop
            return pipeline.generate(
                "a fox", seed=3, num_steps=3, boundary=0.9, guidance_scale=3.0, media=media, loop=form
            )

    plain, slots = made(media_toy("wan2.2-vace")[1]), made(slots_toy("wan2.2-vace")[1])
    assert slots.timings.loop == loop and slots.timings.cache_misses == 0
    np.testing.assert_array_equal(slots.latents.view(np.uint32), plain.latents.view(np.uint32))
    np.testing.assert_array_equal(slots.frames, plain.frames)
