"""A kernel of the attention agrees with XLA's operations where it is right, and only there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.generations import toy_manifest
from wanbuild.build_options import BuildOptions
from wanbuild.models.attention import Attention, BlockedAttention, Mask, blocked_attention
from wanbuild.models.flash import FlashAttention
from wanbuild.models.mosaic_wgmma import WgmmaAttention
from wanbuild.programs import attention_programs
from wanbuild.programs.export import describe
from wanbuild.programs.kinds import ProgramBuilder, kinds_of
from wanbuild.programs.shape import Shape
from wanbuild.programs.spec import ProgramSpec
from wanbuild.targets.chips import CHIPS
from wanrun.attest.random_inputs import attention_inputs
from wanrun.executables.tolerance import ALIKE, relative_error

VARIANT, SHAPE = "wan2.1-i2v", Shape(112, 80, 9, 1, True)
"""105 tokens of the video, 512 of text, and of images a number that is padded."""


@pytest.fixture(scope="module")
def builder() -> ProgramBuilder:
    return ProgramBuilder(toy_manifest(VARIANT), SHAPE, BuildOptions(), CHIPS["v6e"].kernels)


Expected = Callable[[str], list[tuple[Mapping[str, np.ndarray], np.ndarray]]]
"""By the name of what makes a program: its drawn inputs, and what its plain form makes of them."""


@pytest.fixture(scope="module")
def expected(builder: ProgramBuilder) -> Expected:
    @functools.cache
    def of(name: str) -> list[tuple[Mapping[str, np.ndarray], np.ndarray]]:
        spec = made(builder, name, blocked_attention)
        drawn = list(attention_inputs(describe(spec, ())["inputs"]))
        return [
            (inputs, found) for inputs, found in zip(drawn, results(spec, spec.plain, drawn), strict=True)
        ]

    return of


def made(builder: ProgramBuilder, name: str, kernel: Attention) -> ProgramSpec:
    """A program with this form of the attention."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_programs, "attention_form", lambda kernels: kernel)
        spec: ProgramSpec = getattr(attention_programs, name)(builder)
        return spec


def results(spec: ProgramSpec, function: Any, drawn: Iterable[Mapping[str, np.ndarray]]) -> list[np.ndarray]:
    form = jax.jit(function)
    with spec.tracing():
        return [np.asarray(form(*(inputs[name] for name in spec.inputs))["out"]) for inputs in drawn]


def errors(builder: ProgramBuilder, expected: Expected, name: str, kernel: Attention) -> list[float]:
    """The relative error of a form of the attention for each of the drawn inputs."""
    spec, drawn = made(builder, name, kernel), expected(name)
    found = results(spec, spec.function, [inputs for inputs, _ in drawn])
    assert all(one.dtype == plain.dtype for one, (_, plain) in zip(found, drawn, strict=True))
    return [relative_error(one, plain) for one, (_, plain) in zip(found, drawn, strict=True)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["among", "to_image"])
def test_a_right_kernel_agrees(builder: ProgramBuilder, expected: Expected, name: str) -> None:
    """Those of images have a mask, for their tokens are padded."""
    found = errors(builder, expected, name, FlashAttention(128, 16, 32, interpret=True))
    assert max(found) < 0.7 * ALIKE  # seen: 4.6e-3
    assert ("mask" in expected(name)[0][0]) == (name == "to_image")


@dataclasses.dataclass(frozen=True)
class Wrong(BlockedAttention):
    """An attention by XLA's operations with a fault that a kernel may have."""

    fault: str

    def query_factor(self, head_dim: int) -> float:
        return 1.05 if self.fault == "scale" else 1.0

    def rotate(self, x: Any, cos: jax.Array, sin: jax.Array, *others: Any) -> jax.Array:
        return super().rotate(
            x, cos, jnp.where(cos > 0, sin, -sin) if self.fault == "rotation" else sin, *others
        )

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = None) -> jax.Array:
        keys = k.shape[1]
        if self.fault == "tail":  # of the padding to whole blocks one key counts
            k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v))
        if self.fault == "mask":
            assert isinstance(mask, jax.Array)
            mask = jnp.arange(keys) <= jnp.sum(mask)
        if self.fault in ("block", "last"):
            lost = slice(keys - 1, keys) if self.fault == "last" else slice(64, 96)
            k, v = (jnp.delete(x, np.arange(keys)[lost], axis=1) for x in (k, v))
        return super().__call__(q, k, v, mask)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("tail", "among"),
        ("scale", "among"),
        ("block", "among"),
        ("rotation", "among"),
        ("last", "to_text"),
        ("mask", "to_image"),
    ],
)
def test_a_fault_is_noticed(builder: ProgramBuilder, expected: Expected, fault: str, name: str) -> None:
    """Seen: 4.9e-2 of a scale 5 % off, 0.2 and more of the others."""
    found = errors(builder, expected, name, Wrong(fault))
    assert max(found) > 4 * ALIKE, found


def test_programs_are_those_of_kernels(builder: ProgramBuilder) -> None:
    """A kernel that leaves a dtype or a width of heads to XLA needs no proof, nor does a library's."""

    def named(kernels: Any) -> list[str]:
        other = ProgramBuilder.__new__(ProgramBuilder)
        other.__dict__.update({**builder.__dict__, "kernels": kernels})
        return [kind.name for kind in kinds_of(other) if kind.role == "attention"]

    assert named(CHIPS["v5e"].kernels) == ["attention", "attention_text", "attention_image"]
    assert named(CHIPS["rtx4090"].kernels) == []
    mosaic = WgmmaAttention(64, 128, 2)
    found = [
        mosaic.is_kernel(*given) for given in ((jnp.bfloat16, 128), (jnp.bfloat16, 64), (jnp.float32, 128))
    ]
    assert found == [True, False, False] and not blocked_attention.is_kernel(jnp.bfloat16, 128)
