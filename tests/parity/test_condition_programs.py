"""What saves work changes nothing, in any variant: the cross-attention cache, and padding for a target."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from helpers.compiling import fast_jit
from helpers.reference_models import relative_error
from wanbuild.build_options import BuildOptions
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.programs.spec import ProgramSpec
from wanbuild.variants.table import variants
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.programs import Kernels
from wanrun.generation.load import load

SAME = 2e-6  # seen: 5e-7; sums of the same terms in another order

VARIANTS_WITH_MEDIA = ("wan2.1-flf2v", "wan2.2-i2v", "wan2.2-ti2v", "wan2.2-vace", "wan2.2-animate")
ALIKE = {"wan2.1-i2v": "wan2.1-flf2v", "wan2.1-vace": "wan2.2-vace"}
"""Variants that have nothing that another has not."""

OF_CHUNKS = ("anyflow-far-wan2.1", "helios-wan2.1", "helios-mid-wan2.1", "helios-distilled-wan2.1")
"""Variants whose media are no conditions of steps: see ``test_whole_path`` and ``test_helios_video``."""

PADDED = (("wan2.1-flf2v", 128), ("wan2.2-animate", 256))


class Toy:
    """The programs of a toy at a small size, as functions of random inputs and the artifact's weights."""

    def __init__(self, artifact: Path) -> None:
        self.step = functools.cache(self._step)
        self._manifest = read_manifest(artifact)
        with load(artifact, lazy=True, num_references=self._references) as pipeline:
            self._weights = jax.tree.map(np.asarray, pipeline.component_weights("transformer"))

    @property
    def _references(self) -> int:
        return next(iter(self._manifest.profiles.values())).num_references

    def builder(self, multiple: int = 1) -> ProgramBuilder:
        spatial = 2 * self._manifest.model.vae_spatial
        shape = Shape(5 * spatial, 3 * spatial, 9, 1, True, self._references)
        kernels = Kernels("cpu", "winograd", weight_bits=False, image_multiple=multiple)
        return ProgramBuilder(self._manifest, shape, BuildOptions(dtype="float32"), kernels)

    def arguments(self, spec: ProgramSpec) -> dict[str, Any]:
        """Random inputs, the same wherever two programs have one of a name."""
        return {
            name: self._weights if name == "transformer" else jax.tree.map(self._random, argument)
            for name, argument in zip(spec.inputs, spec.arguments, strict=True)
        }

    @staticmethod
    def _random(argument: jax.ShapeDtypeStruct) -> np.ndarray:
        rng = np.random.default_rng(argument.shape)
        if argument.dtype == np.uint8:
            return rng.integers(0, 256, argument.shape, np.uint8)
        return np.asarray(rng.standard_normal(argument.shape), argument.dtype)

    def _step(self, multiple: int = 1, cached: bool = True) -> np.ndarray:
        """Latents after a step, with what ``prepare`` gives computed before it, or within it."""
        builder = self.builder(multiple)
        prepare, step = builder.named("prepare"), builder.named("denoise_step")
        before, during = self.arguments(prepare), self.arguments(step)

        def take(prepared: Any) -> Any:
            return step.function(*{**during, **prepared}.values())["latents"]

        def prepared() -> Any:
            return prepare.function(*before.values())

        latents = fast_jit(take)(fast_jit(prepared)()) if cached else fast_jit(lambda: take(prepared()))()
        return np.asarray(latents)


@pytest.fixture(scope="module")
def programs_of(toy_of: Callable[[str], tuple[Path, Path]]) -> Callable[[str], Toy]:
    return functools.cache(lambda variant: Toy(toy_of(variant)[1]))


@pytest.mark.thorough
@pytest.mark.parametrize("variant", VARIANTS_WITH_MEDIA)
def test_the_cache_is_what_a_step_would_compute(programs_of: Callable[[str], Toy], variant: str) -> None:
    toy = programs_of(variant)
    assert relative_error(toy.step(), toy.step(cached=False)) < SAME


@pytest.mark.thorough
@pytest.mark.parametrize(("variant", "multiple"), PADDED)
def test_padded_image_tokens(programs_of: Callable[[str], Toy], variant: str, multiple: int) -> None:
    toy = programs_of(variant)
    padded = toy.builder(multiple).named("prepare")
    cache = jax.eval_shape(padded.function, *padded.arguments)["kv"]["blocks"]
    assert cache["image_k"].shape[2] == cache["image_mask"].shape[1] == multiple  # it is padded
    assert relative_error(toy.step(multiple), toy.step()) < SAME


def test_every_variant_is_here() -> None:
    with_media = {name for name, variant in variants().items() if variant.inputs}
    assert with_media == {*VARIANTS_WITH_MEDIA, *ALIKE, *OF_CHUNKS} and set(ALIKE.values()) < set(
        VARIANTS_WITH_MEDIA
    )
    with_tokens = {name for name in with_media if variants()[name].encoded_images}
    assert with_tokens - ALIKE.keys() == {variant for variant, _ in PADDED}
