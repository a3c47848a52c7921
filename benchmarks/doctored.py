"""Measures what each check of executables notices, with programs that are wrong on purpose.

Every wrong program is compiled for this CPU twice: at a small size, where its video and velocity are compared
with those of the right one, as a recorded result is; and at a large size, whose steps are compared with the
right ones of the small size (``wanrun.replay.tiled``). Figures are relative errors. A check that cannot see a
fault gives the figure of the right program.

    python benchmarks/doctored.py CHECKPOINT [--small 48x32] [--large 192x128] [--frames 9]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from cpus import cpu_name
from wanbuild.conversion.convert import ConvertRequest, convert
from wanbuild.models import params, products
from wanbuild.models.attention import BlockedAttention
from wanbuild.models.blocks import WanAttention
from wanbuild.models.transformer import WanTransformer
from wanbuild.options import BuildOptions, CompileRequest
from wanbuild.programs.compile import compile_artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.executables.tolerance import relative_error
from wanrun.generation.load import load
from wanrun.replay.golden import recorded_generation
from wanrun.replay.tiled import repeated
from wanrun.replay.velocity import Start, velocity

Size = tuple[int, int]
PIECES = 16
"""Into how many parts sums are cut that are added in bfloat16."""


def keys_dropped(part: float) -> AbstractContextManager[Any]:
    """Self-attention without one block of the keys, in the middle."""
    own = BlockedAttention.__call__

    def attend(self: BlockedAttention, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        if mask is None and k.shape[1] == q.shape[1]:
            first, count = k.shape[1] // 3, max(1, round(part * k.shape[1]))
            kept = np.r_[0:first, first + count : k.shape[1]]
            k, v = k[:, kept], v[:, kept]
        return own(self, q, k, v, mask)

    return mock.patch.object(BlockedAttention, "__call__", attend)


def values_permuted() -> AbstractContextManager[Any]:
    """The rows of all layers' values lie in another order."""
    own = WanAttention.value
    return mock.patch.object(WanAttention, "value", lambda self, x: jnp.roll(own(self, x), 1, -1))


def queries_permuted() -> AbstractContextManager[Any]:
    """The rows of all layers' queries lie in another order."""
    own = WanAttention.unrotated

    def unrotated(self: WanAttention, x: Any) -> Any:
        q, k, v = own(self, x)
        return type(q)(jnp.roll(q.values, 1, -1), q.inverse, q.weight), k, v

    return mock.patch.object(WanAttention, "unrotated", unrotated)


def layers_swapped() -> AbstractContextManager[Any]:
    """The first two layers run in the other order."""
    own, own_scan = WanTransformer.run_blocks, params.scan

    def scan(body: Any, carry: Any, xs: Any) -> Any:
        return own_scan(body, carry, jax.tree.map(lambda x: x[np.r_[1, 0, 2 : len(x)]], xs))

    def run_blocks(self: WanTransformer, *arguments: Any) -> Any:
        with mock.patch.object(params, "scan", scan):
            return own(self, *arguments)

    return mock.patch.object(WanTransformer, "run_blocks", run_blocks)


def sums_rounded() -> AbstractContextManager[Any]:
    """Layers add up their products in bfloat16."""
    own = products._dot

    def dot(x: Any, weight: Any, result: Any) -> Any:
        if x.shape[-1] % PIECES or x.dtype != jnp.bfloat16:
            return own(x, weight, result)
        pieces = zip(jnp.split(x, PIECES, -1), jnp.split(weight, PIECES, -1), strict=True)
        total = jnp.zeros((), jnp.bfloat16)
        for piece in pieces:
            total = (total + own(*piece, jnp.float32)).astype(jnp.bfloat16)
        return total.astype(result)

    return mock.patch.object(products, "_dot", dot)


CASES: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "right": nullcontext,
    "right, products rounded": nullcontext,
    "1 % of the keys dropped": lambda: keys_dropped(0.01),
    "5 % of the keys dropped": lambda: keys_dropped(0.05),
    "12 % of the keys dropped": lambda: keys_dropped(0.12),
    "rows of the queries permuted": queries_permuted,
    "rows of the values permuted": values_permuted,
    "two layers swapped": layers_swapped,
    "sums in bfloat16": sums_rounded,
}


def build(folder: Path, size: Size, frames: int, rounded: bool = False) -> None:
    """Adds a profile of a size for this CPU to an artifact."""
    from wanbuild.programs import compile as compiling

    own = compiling.resolve_target

    def resolve(name: str, mesh: Any) -> Any:
        target = own(name, mesh)
        kernels = replace(target.kernels, products="rounded") if rounded else target.kernels
        return dataclasses.replace(target, kernels=kernels)

    request = CompileRequest(folder, ["local"], [size], [frames], (True,), options=BuildOptions(loop="step"))
    with mock.patch.object(compiling, "resolve_target", resolve), contextlib.redirect_stderr(io.StringIO()):
        compile_artifact(request, lambda line: None)


def made(artifact: Path, size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Returns the latents and the velocity that a recorded result would be of."""
    with load(artifact, size=size, guidance=True, lazy=True, embeddings="none") as pipeline:
        generation = recorded_generation(pipeline)
        inputs = generation.read_media()
        latents = pipeline.run(generation, inputs=inputs).latents
        start = Start.of(pipeline, generation, inputs)
        return latents, velocity(pipeline.session(pipeline.profile), start, "step")


def steps_apart(artifact: Path, small: Size, large: Size) -> float:
    """Returns how far the steps of the large size are from those of the small one."""
    profiles = read_manifest(artifact).profiles.values()
    (other,) = (profile for profile in profiles if (profile.width, profile.height) == large)
    with load(artifact, size=small, guidance=True, lazy=True, embeddings="none") as pipeline:
        generation = recorded_generation(pipeline)
        start = Start.of(pipeline, generation, generation.read_media())
        found = velocity(pipeline.session(pipeline.profile), start, "step")
        start, expected = repeated(pipeline, start, found, other)
        return relative_error(velocity(pipeline.session(other), start, "step"), expected)


def measure(source: Path, small: Size, large: Size, frames: int, folder: Path) -> None:
    """Prints a row for each case."""
    plain, right = folder / "plain", folder / "right"
    with contextlib.redirect_stdout(io.StringIO()):
        convert(ConvertRequest(source, plain, {}))
    shutil.copytree(plain, right)
    build(right, small, frames)
    latents, moved = made(right, small)
    print("| program | latents | velocity | steps and proxy |\n|---|---|---|---|", flush=True)
    if len(moved) == 2:
        print(f"| experts swapped | | {relative_error(moved, moved[::-1]):.1e} | |")
    for name, patch in CASES.items():
        own, other = folder / "own", folder / "other"
        shutil.copytree(plain, own)
        shutil.copytree(right, other)
        with patch():
            build(own, small, frames, "rounded" in name)
            build(other, large, frames)
        found = made(own, small)
        figures = [relative_error(found[0], latents), relative_error(found[1], moved)]
        figures.append(steps_apart(other, small, large))
        print(f"| {name} | " + " | ".join(f"{figure:.1e}" for figure in figures) + " |", flush=True)
        shutil.rmtree(own)
        shutil.rmtree(other)


def main() -> None:
    """Measures what the command line says."""

    def size(text: str) -> Size:
        width, height = map(int, text.split("x"))
        return width, height

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--small", type=size, default=(48, 32))
    parser.add_argument("--large", type=size, default=(192, 128))
    parser.add_argument("--frames", type=int, default=9)
    given = parser.parse_args()
    print(f"{given.checkpoint.name} on {cpu_name()}")
    with tempfile.TemporaryDirectory() as folder:
        measure(given.checkpoint, given.small, given.large, given.frames, Path(folder))


if __name__ == "__main__":
    main()
