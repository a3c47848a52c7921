"""Filled slots against diffusers with merged weights, in float32: every layer changes, of each expert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import wanrun
from helpers.artifacts import build_artifact, shared
from helpers.naive import load_params
from helpers.reference_models import relative_error
from wanbuild.check.reference_pipeline import Made, Reference
from wanbuild.components import kind_of
from wanrun.artifact.manifest import TRANSFORMERS, Manifest, read_manifest
from wanrun.artifact.parameters import Tree, flat, nest
from wanrun.artifact.slots import slots_of
from wanrun.replay.samples import sample_media
from wanrun.weights.slots import Slots

# diffusers hands arrays to NumPy in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

LATENTS = 1e-5
RUN: dict[str, Any] = {"prompt": "a cat in the snow", "negative_prompt": "blurry", "seed": 5}
TWO_EXPERTS = {"boundary": 0.9, "guidance_scale_2": 2.0}

Artifact = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def artifact(slots_toy: Artifact, toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Gives a checkpoint and its artifact with slots by variant."""

    def make(variant: str) -> tuple[Path, Path]:
        if variant != "wan2.1-t2v":
            return slots_toy(variant)
        return toy_checkpoint, shared(
            tmp_path_factory,
            "slots-artifact",
            lambda folder: build_artifact(toy_checkpoint, folder, loop="step", rank=8),
        )

    return make


class Filled(Slots):
    """Random slots of each expert, whose changes are a quarter of the weights."""

    def __init__(self, slots: Slots, manifest: Manifest, rank: int) -> None:
        self._whole_of = dict[str, Tree]()
        for seed, expert in enumerate(name for name in TRANSFORMERS if name in manifest.components):
            rng, found = np.random.default_rng(seed), dict[str, Any]()
            for path, slot in slots_of(manifest.components[expert], rank).items():
                spread = np.float32(0.5 * slot.shape[-1] ** -0.5)
                found[path] = spread * rng.standard_normal(slot.shape, np.float32)
            self._whole_of[expert] = nest(found)
        self._stacks = slots._stacks

    def of(self, expert: str) -> Tree:
        return jax.device_put(self._whole_of[expert])

    def outside(self, expert: str) -> Tree:
        return {name: tree for name, tree in self.of(expert).items() if name not in self._stacks}

    def layer(self, expert: str, stack: str, number: int) -> Tree:
        return jax.tree.map(lambda array: array[number], self.of(expert)[stack])

    def changes(self, expert: str) -> dict[str, np.ndarray]:
        """What each layer's weight changes by, (out, in) or (L, out, in), by the layer's path."""
        arrays = {path: array.astype(np.float64) for path, array in flat(self._whole_of[expert]).items()}
        paths = {path.rpartition("/")[0] for path in arrays}
        return {path: arrays[f"{path}/lora_b"] @ arrays[f"{path}/lora_a"] for path in paths}


def merge(model: torch.nn.Module, manifest: Manifest, expert: str, changes: dict[str, np.ndarray]) -> None:
    """Adds changes to the weights of diffusers' model, wherever an artifact's parameters are from."""
    config = manifest.configs[expert]
    kind = kind_of(expert, config["_class_name"])
    module = kind.module(kind.parse(config, expert), manifest.dtypes[expert])
    state = {key: value.numpy().astype(np.float64) for key, value in model.state_dict().items()}
    places = {key: np.arange(value.size).reshape(value.shape) for key, value in state.items()}
    keys = {key: np.full(value.shape, number) for number, (key, value) in enumerate(state.items())}
    place, number = (flat(load_params(one, kind.rules, module)) for one in (places, keys))
    for path, change in changes.items():
        for own, at, of in zip(
            *(
                x.reshape(-1, *x.shape[-2:])
                for x in (change, place[f"{path}/weight"], number[f"{path}/weight"])
            ),
            strict=True,
        ):
            values = state[list(state)[int(of.flat[0])]]
            values.reshape(-1)[at.astype(np.int64).ravel()] += own.ravel()
    model.load_state_dict({key: torch.from_numpy(value.astype(np.float32)) for key, value in state.items()})


@pytest.mark.essential
@pytest.mark.parametrize(
    ("variant", "memories"),
    [("wan2.1-t2v", ["auto"]), ("wan2.1-i2v", ["auto"]), ("wan2.2-vace", ["auto", "stream"])],
)
def test_latents(artifact: Artifact, variant: str, memories: list[Any], record_property: Any) -> None:
    """Image keys and control blocks too; whole steps and layers that stream."""
    checkpoint, folder = artifact(variant)
    manifest, reference = read_manifest(folder), Reference(checkpoint, variant)
    (profile,) = manifest.profiles.values()
    media = sample_media(manifest, profile)
    options: dict[str, Any] = TWO_EXPERTS if "boundary" in manifest.model.options else {}

    def theirs() -> Made:
        return reference.run(
            media,
            **RUN,
            **options,
            height=profile.height,
            width=profile.width,
            num_frames=profile.num_frames,
            num_inference_steps=4,
            guidance_scale=3.0,
        )

    plain = theirs().latents
    filled: Filled | None = None
    for memory in memories:
        with wanrun.load(folder, profile=profile.name, memory=memory, embeddings="none") as pipeline:
            programs = pipeline.session(pipeline.profile).programs
            if filled is None:
                filled = Filled(programs.slots, manifest, profile.options.lora_rank)
                for expert in TRANSFORMERS[: 2 if options else 1]:
                    merge(getattr(reference.pipe, expert), manifest, expert, filled.changes(expert))
                expected = theirs().latents
            programs.slots = filled
            made = pipeline.generate(**RUN, **options, num_steps=4, guidance_scale=3.0, media=media)
        error = relative_error(made.all_latents, expected)
        record_property(f"latents_relative_error_{memory}", error)
        print(f"{variant}, {made.timings.loop}: {error:.1e}; moved by {relative_error(expected, plain):.2f}")
        assert error < LATENTS < 1e-1 < relative_error(expected, plain)
