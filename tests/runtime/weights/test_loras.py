"""LoRAs on the device: slots, which they fill, small parameters that they change, and what stays there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
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
from wanrun.artifact.parameters import Component, flat, nest
from wanrun.artifact.slots import slots_of
from wanrun.errors import UsageError
from wanrun.replay.samples import sample_media
from wanrun.weights.adapters import AdapterFile, combined
from wanrun.weights.loras import AppliedLora, FilledSlots, KeptLoras
from wanrun.weights.slots import Slots

# --- loras ---


RANK = 4
EXPERT = "transformer"
SMALL = ("blocks/norm2/bias", "condition_embedder/time_embedder/linear_1/bias")


def opened_with(opened: Any, bits: bool) -> Any:
    """What slots read of an opened artifact, with these stacks of layers and this form of weights."""
    kernels = msgspec.structs.replace(opened.program_set.kernels, weight_bits=bits)
    programs = msgspec.structs.replace(opened.program_set, kernels=kernels, layers={"blocks": (0, 1, 2)})
    return SimpleNamespace(manifest=opened.manifest, device=opened.device, program_set=programs)


class Made:
    """Slots of an opened artifact, and LoRAs with random values of everything."""

    def __init__(self, opened: Any, folder: Path, dtype: str, bits: bool) -> None:
        self.components: Mapping[str, Component] = opened.manifest.components
        self.slots = Slots(opened_with(opened, bits), built_with(dtype=dtype, lora_rank=RANK))
        self.kept, self._folder = KeptLoras(None), folder

    def lora(self, name: str, strength: float, rank: int = 2, expert: str = EXPERT) -> AppliedLora:
        rng, tensors = np.random.default_rng(len(name)), dict[str, np.ndarray]()
        component = self.components[EXPERT]
        for path, slot in slots_of(component, rank).items():
            tensors[f"{expert}/{path}"] = rng.standard_normal(slot.shape, np.float32).astype(self.slots.dtype)
        for path in SMALL:
            shape = component.parameters[path].layout.shape
            tensors[f"{expert}/{path}"] = rng.standard_normal(shape, np.float32)
        file = self._folder / name
        file.write_bytes(name.encode())
        content: Any = None
        return AppliedLora(AdapterFile(file, content, 1, tensors), {expert: strength})

    def filled(self, *loras: AppliedLora) -> FilledSlots:
        return FilledSlots(self.slots, self.kept, loras, self.components)


@pytest.fixture
def make(shared: Path, open_here: Callable[..., Opened], tmp_path: Path) -> Callable[..., Made]:
    opened = open_here(shared)

    def make(dtype: str = "float32", bits: bool = False) -> Made:
        return Made(opened.opened, tmp_path, dtype, bits)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bits"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_slots_hold_what_was_combined(make: Callable[..., Made], dtype: str, bits: bool) -> None:
    """All of an expert, what is in no stack, and a layer: in the dtype of the programs, or its bits."""
    made = make(dtype, bits)
    loras = made.lora("one", 0.5), made.lora("second", -1.0)
    slots = made.filled(*loras)
    chosen = [(one.file, one.strengths[EXPERT]) for one in loras]
    expected = combined(chosen, EXPERT, made.slots.shapes, made.slots.dtype).slots

    def values(tree: Any) -> dict[str, np.ndarray]:
        return {path: np.asarray(one).view(made.slots.dtype) for path, one in flat(tree).items()}

    whole, outside = values(slots.of(EXPERT)), values(slots.of_part(EXPERT))
    assert whole.keys() == expected.keys() == made.slots.shapes.keys()
    assert outside.keys() == {path for path in whole if not path.startswith("blocks/")}
    layer = {f"blocks/{path}": one for path, one in values(slots.of_part(EXPERT, "blocks", 2)).items()}
    assert outside.keys() | layer.keys() == whole.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(whole[path], array)
        np.testing.assert_array_equal(
            *((outside[path], array) if path in outside else (layer[path], array[2]))
        )


@pytest.mark.slow
def test_small_parameters_are_changed(make: Callable[..., Made]) -> None:
    """Of the whole expert, of a layer, and of what is in no stack; others stay the same arrays."""
    made = make()
    parameters = made.components[EXPERT].parameters
    rng, same = np.random.default_rng(0), "blocks/norm2/weight"
    stored = {
        path: jax.device_put(rng.standard_normal(parameters[path].layout.shape, np.float32))
        for path in (*SMALL, same)
    }
    lora = made.lora("one", -0.5)
    slots = made.filled(lora)
    changed = flat(dict(slots.changed(EXPERT, nest(stored))))
    for path in SMALL:
        expected = np.asarray(stored[path]) - np.float32(0.5) * lora.file.tensors[f"{EXPERT}/{path}"]
        np.testing.assert_array_equal(changed[path], expected)
    assert changed.keys() == stored.keys() and changed[same] is stored[same]
    again = flat(dict(slots.changed(EXPERT, nest(stored))))
    assert all(again[path] is changed[path] for path in SMALL)

    blocks = jax.tree.map(lambda array: array[1], nest(stored)["blocks"])
    layer = flat(dict(slots.changed_part(EXPERT, blocks, "blocks", 1)))
    np.testing.assert_array_equal(layer["norm2/bias"], changed[SMALL[0]][1])
    outside = {name: tree for name, tree in nest(stored).items() if name != "blocks"}
    np.testing.assert_array_equal(
        flat(dict(slots.changed_part(EXPERT, outside)))[SMALL[1]], changed[SMALL[1]]
    )


@pytest.mark.slow
def test_a_choice_that_comes_again_is_there(make: Callable[..., Made]) -> None:
    """By the digests, strengths and the expert; what changes nothing takes the zeros."""
    made = make()
    one, other = made.lora("one", 1.0), made.lora("other", 1.0)
    first = made.filled(one).of(EXPERT)
    assert made.filled(one).of(EXPERT) is first
    assert made.filled(other).of(EXPERT) is not first
    assert made.filled(one._replace(strengths={EXPERT: 0.5})).of(EXPERT) is not first
    assert made.filled(one).of(EXPERT) is first
    unchanged = made.filled(), made.filled(one._replace(strengths={EXPERT: 0.0})), made.filled(one)
    for slots, expert in zip(unchanged, (EXPERT, EXPERT, "transformer_2"), strict=True):
        assert slots.of(expert) is made.slots.zeros and slots.of_part(expert) is made.slots.zeros_of("")
        assert slots.of_part(expert, "blocks", 0) is made.slots.zeros_of("blocks")
        weights: dict[str, Any] = {"blocks": {}}
        assert slots.changed(expert, weights) is weights and slots.changed_part(expert, weights) is weights


@pytest.mark.slow
def test_the_host_keeps_no_copy_of_what_is_on_the_device(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not until the next collection of garbage either: it may be as large as the device's."""
    made, copies = make(), list[weakref.ref[Any]]()

    def noted(*args: Any) -> Any:
        changes = combined(*args)
        copies.extend(map(weakref.ref, changes.slots.values()))
        return changes

    monkeypatch.setattr("wanrun.weights.loras.combined", noted)
    slots = made.filled(made.lora("one", 0.5))
    gc.disable()
    try:
        slots.of(EXPERT)
        assert copies and not any(copy() is not None for copy in copies)
        slots.of_part(EXPERT, "blocks", 0)
        del slots
        assert not any(copy() is not None for copy in copies)
    finally:
        gc.enable()


@pytest.mark.slow
def test_slots_of_other_profiles_share_the_room(make: Callable[..., Made]) -> None:
    """A choice is of the slots that it fills."""
    one, other = make(), make("bfloat16")
    other.kept = one.kept = KeptLoras(one.slots.nbytes + other.slots.nbytes)
    first, second = (made.filled(made.lora("one", 1.0)).of(EXPERT) for made in (one, other))
    again = [made.filled(made.lora("one", 1.0)).of(EXPERT) for made in (one, other)]
    assert again[0] is first and again[1] is second
    other.filled(other.lora("one", 0.5)).of(EXPERT)
    assert one.filled(one.lora("one", 1.0)).of(EXPERT) is not first


@pytest.mark.slow
def test_ranks_that_the_slots_have_not(make: Callable[..., Made]) -> None:
    made = make()
    with pytest.raises(UsageError) as caught:
        made.filled(made.lora("one", 1.0, rank=3), made.lora("other", 1.0)).of(EXPERT)
    assert str(RANK) in str(caught.value.expected) and str(caught.value.found).endswith("5")


def test_the_choice_that_was_used_longest_ago_leaves() -> None:
    """When there is no room for another one; a single one may be larger than the room."""
    kept = KeptLoras(10)
    choices: list[Any] = [("transformer", ((name, 1.0),)) for name in "abcd"]

    def put(number: int, nbytes: int) -> None:
        kept.make_room(nbytes)
        kept.put(choices[number], nbytes, object())  # type: ignore[arg-type]

    def there() -> list[bool]:
        return [kept.get(choice) is not None for choice in choices]

    put(0, 4)
    put(1, 4)
    assert kept.get(choices[0]) is not None and kept.get(choices[2]) is None
    put(2, 4)
    assert there() == [True, False, True, False]
    put(3, 50)
    assert there() == [False, False, False, True]


# --- slots ---


Toys = Callable[[str], tuple[Path, Path]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "bits", "passed"),
    [("bfloat16", True, np.uint16), ("bfloat16", False, jnp.bfloat16), ("float32", True, np.float32)],
)
def test_zeros_of_what_programs_take(make: Callable[..., Made], dtype: str, bits: bool, passed: Any) -> None:
    """On a mesh they are where programs take them: ``tests/commands/test_mesh.py``."""
    made = make(dtype, bits)
    whole, outside = flat(made.slots.zeros), flat(made.slots.zeros_of(""))
    expected = {path: one.shape for path, one in slots_of(made.components[EXPERT], RANK).items()}
    assert {path: one.shape for path, one in whole.items()} == expected
    assert outside.keys() == {path for path in whole if not path.startswith("blocks/")}
    layer = {f"blocks/{path}": one for path, one in flat(made.slots.zeros_of("blocks")).items()}
    assert {path: one.shape for path, one in layer.items()} == {
        path: shape[1:] for path, shape in expected.items() if path.startswith("blocks/")
    }
    arrays = [*whole.values(), *outside.values(), *layer.values()]
    assert all(one.dtype == passed and not np.any(one) for one in arrays)
    assert all(isinstance(one, jax.Array) and one.committed for one in arrays)


@pytest.mark.slow
def test_experts_and_layers_share_them(shared: Path, open_here: Callable[..., Opened]) -> None:
    """So do the programs of profiles that are built alike."""
    weights = open_here(shared).weights

    def of(expert: str = "transformer", **options: Any) -> list[Any]:
        return jax.tree.leaves(weights.slots(built_with(**options)).of(expert))

    def same(one: list[Any], other: list[Any]) -> bool:
        return all(a is b for a, b in zip(one, other, strict=True))

    slots = of(lora_rank=RANK)
    assert same(slots, of("transformer_2", lora_rank=RANK)) and same(slots, of(lora_rank=RANK, max_steps=7))
    assert not same(slots, of(lora_rank=5)) and of() == []


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
