"""Programs of a target become entries of the cache, or are left to the chip that can compile them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import zstandard
from jax import export

from helpers.chips import needs_cuda
from helpers.manifests import plain_manifest
from wanbuild.models.attention_forms import attention_form
from wanbuild.programs.entry_compiler import EntryCompiler
from wanbuild.programs.export import CUSTOM_CALLS
from wanbuild.programs.jax_flags import pinned
from wanbuild.programs.limited import LimitedProcesses
from wanbuild.targets.target import resolve_target
from wanrun.artifact.artifact import Artifact
from wanrun.timing.spans import Spans

pytestmark = pytest.mark.slow


def exported(function: Callable[..., Any], tokens: int = 64, width: int = 64) -> bytes:
    """A program of one bfloat16 array of two heads, for GPUs."""
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS["cuda"]]
    make = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=allowed)
    return bytes(make(q=jax.ShapeDtypeStruct((1, tokens, 2, width), jnp.bfloat16)).serialize())


@needs_cuda
def test_what_calls_cudnn_is_left_to_the_gpu(tmp_path: Path) -> None:
    """Without the GPU its executable would load, and fail when it is called."""

    def attention(q: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    def convolution(q: jax.Array) -> jax.Array:
        filters = jnp.ones((3, 3, 64, 64), q.dtype)
        return jax.lax.conv_general_dilated(
            q, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def plain(q: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, q, q)

    with pinned("cpu"), LimitedProcesses() as processes:
        target = resolve_target("h200", {})
        compiler = EntryCompiler(
            Artifact(plain_manifest(), tmp_path), target, "executables", {}, processes, print, Spans()
        )
        left = [compiler.compile(one.__name__, exported(one), ()) for one in (attention, convolution)]
        whole = compiler.compile("plain", exported(plain), ())
    assert all(one.executable is None and one.statistics["compile_seconds"] > 0 for one in left)
    assert whole.executable is not None
    (file,) = (tmp_path / "executables").iterdir()
    assert file.name == whole.executable.file and file.stat().st_size == whole.executable.nbytes


@pytest.mark.thorough
@needs_cuda
@pytest.mark.parametrize(("name", "architecture"), [("h100", b"sm_90a"), ("b200", b"sm_100a")])
def test_attention_of_mosaic_is_in_the_entry(name: str, architecture: bytes, tmp_path: Path) -> None:
    """Its machine code is the only one there: the tokens fill whole blocks."""
    with pinned("cpu"), LimitedProcesses() as processes:
        target = resolve_target(name, {}).attending_by("mosaic")
        compiler = EntryCompiler(
            Artifact(plain_manifest(), tmp_path), target, "executables", {}, processes, print, Spans()
        )
        attend = attention_form(target.kernels)
        data = exported(lambda q: attend(q, q, q), tokens=256, width=128)
        compiled = compiler.compile("attention", data, ())
    assert compiled.executable is not None
    entry = (tmp_path / "executables" / compiled.executable.file).read_bytes()
    code = zstandard.ZstdDecompressor().decompress(entry, max_output_size=2**24)
    assert b"mosaic_gpu" in code and architecture in code
