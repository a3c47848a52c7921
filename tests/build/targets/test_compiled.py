"""Programs compiled for chips that are not here: the kernels are in them, and no path of this machine."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest
from jax.experimental.serialize_executable import serialize

from helpers.chips import needs_cuda, needs_libtpu
from wanbuild.build_options import BuildOptions
from wanbuild.conversion.chosen import Quantise, parse_quantise
from wanbuild.plan.published_model import published_manifest, published_names
from wanbuild.programs.export import export_program
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.targets.chips import CHIPS
from wanbuild.targets.target import MOSAIC, resolve_target
from wanrun.executables.lowering import lower

pytestmark = pytest.mark.slow

PALLAS = ("%flash_attention", "%rotate", "%by_part", "%joined")
"""What XLA calls the kernels of the attention, and of the passes around it."""

SHAPE = Shape(width=144, height=80, num_frames=5, num_videos=1, guidance=True)

EXPORT = """
import hashlib
from wanbuild.plan.published_model import published_manifest, published_names
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.export import export_program
from wanbuild.build_options import BuildOptions
from wanbuild.programs.shape import Shape
from wanbuild.targets.chips import CHIPS

manifest = published_manifest(published_names()["wan2.1-t2v-1.3b"])
builder = ProgramBuilder(manifest, Shape(144, 80, 5, 1, True), BuildOptions(), CHIPS["v5e"].kernels)
print(hashlib.sha256(export_program(builder.named('denoise_step'), "tpu")).hexdigest())
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "mesh", "kernels"),
    [
        pytest.param("v5e", {"data": 2, "context": 2}, PALLAS, marks=needs_libtpu),
        pytest.param("h200", {}, ["mosaic_gpu", "sm_90a", '"epilogue":"BIAS_GELU"'], marks=needs_cuda),
        pytest.param("h200-w8a8", {}, ["mosaic_gpu", "sm_90a", "__cublas$lt$matmul$f8"], marks=needs_cuda),
        pytest.param("RTX 5090", {"ring": 2}, ["__cudnn$fmhaSoftmax"], marks=needs_cuda),
    ],
)
def test_a_step_for_a_chip(name: str, mesh: dict[str, int], kernels: Sequence[str]) -> None:
    """An H200 has a number of tokens that is a multiple of 8, as at published sizes: XLA pads others."""
    shape = dataclasses.replace(SHAPE, width=128) if name == "h200" else SHAPE
    target = resolve_target(name, mesh)
    if MOSAIC in target.attentions:
        target = target.attending_by(MOSAIC)
    quantise = parse_quantise("float8", ()) if target.kernels.w8a8 else None
    manifest = published_manifest(published_names()["wan2.1-t2v-1.3b"], quantise=quantise)
    spec = ProgramBuilder(manifest, shape, BuildOptions(), *target.programs_for).named("denoise_step")
    weights = [leaf.dtype for leaf in jax.tree.leaves(spec.arguments[0])]
    assert "bfloat16" in weights and "uint16" not in weights
    data = export_program(spec, target.platform)
    compiled = lower(data, spec.name, spec.donate, target.where, options=target.options).compile()
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes > (1.6e9 if target.kernels.w8a8 else 2.8e9)
    # A copy of the stacked weights would be as large as they are.
    assert memory.temp_size_in_bytes < 0.5e9
    text = compiled.as_text() + serialize(compiled)[0].decode("latin-1")
    assert [kernel for kernel in kernels if kernel not in text] == []
    assert not target.mosaic or "cudnn" not in text


def test_scales_of_blocks_are_exported_for_a_chip() -> None:
    """As they are stored: no stack of weights is widened."""
    chip = CHIPS["v5e"]
    manifest = published_manifest(published_names()["wan2.1-t2v-1.3b"], quantise=Quantise("q8_0"))
    spec = ProgramBuilder(manifest, SHAPE, BuildOptions(), chip.kernels).named("denoise_step")
    stored = [(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(spec.arguments[0])]
    assert {("int8", (30, 1536, 8960)), ("float16", (30, 1536, 280))} <= set(stored)
    text = jax.export.deserialize(bytearray(export_program(spec, chip.platform))).mlir_module()
    assert "xi8" in text and not re.search(r"convert .*tensor<30x\d+x\d+xi8>", text)


@pytest.mark.thorough
def test_a_program_does_not_know_where_its_kernels_lie(tmp_path: Path) -> None:
    """Pallas writes the paths of its sources into a kernel: the key of the cache would depend on them."""
    for package in ("wanbuild", "wanrun"):
        source = Path(sys.modules[package].__file__ or "").parent
        shutil.copytree(source, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    digests = []
    for folder in (Path(sys.modules["wanbuild"].__file__ or "").parents[1], tmp_path):
        paths = [folder, Path(sys.modules["wanrun"].__file__ or "").parents[1]]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", EXPORT], env=environment, capture_output=True, text=True, check=True
        )
        digests.append(done.stdout)
    assert digests[0] == digests[1] and len(digests[0]) == 65
