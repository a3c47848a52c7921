"""The attention parts of gpu.py: our kernel in Mosaic GPU beside cuDNN's: ``gpu_attention.py NAME JSON``.

XLA builds cuDNN's graphs only with a GPU, so steps wait for it; a kernel in Mosaic is compiled anywhere.
Both are the forms that programs have. On a machine without a GPU, where its compilers are installed:

    python benchmarks/gpu_attention.py build '{"rows": "rows.jsonl", "folder": "DIR"}'

exports and compiles Mosaic's for an H200, as ``wanbuild`` does it; ``gpu.py --kernel DIR`` runs it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

if "CUDA_ROOT" not in os.environ and (assembler := shutil.which("ptxas")):
    os.environ["CUDA_ROOT"] = str(Path(assembler).resolve().parents[1])  # Mosaic looks in its folder bin

import jax
import jax.numpy as jnp
import numpy as np

from gpu_device import TERA, Timed, timed
from gpu_rows import Rows, main

HEAD_SIZE = 128
LOGITS = 2.0
"""The standard deviation of the scores: of 32 768 keys about 600 count."""
CHECKED = 256
"""Queries of each head whose results are compared with those in float64."""
ERRORS = 0.5
"""The tolerance of an error: it is that of a single element."""
BUILT = (2, 32760, 12)
"""Sequences, tokens and heads of the kernel that is built elsewhere: 1.3B at 832x480x81."""
Call = Callable[..., Any]
Tile = tuple[int, int, int]
"""Queries, keys, and blocks of keys on their way."""


def _cudnn() -> Call:
    """Returns cuDNN's attention; on a CPU, which a smoke run has, XLA's."""
    from wanbuild.models.attention import blocked_attention
    from wanbuild.models.cudnn import CudnnAttention

    return jax.jit(blocked_attention if jax.default_backend() == "cpu" else CudnnAttention())


def _mosaic(tile: Tile) -> Call:
    """Returns the chip's attention in Mosaic; on a CPU JAX interprets that of an H100."""
    from wanbuild.models.mosaic_tcgen05 import Tcgen05Attention
    from wanbuild.models.mosaic_wgmma import WgmmaAttention

    blackwell = getattr(jax.devices()[0], "compute_capability", "") == "10.0"
    form = Tcgen05Attention if blackwell else WgmmaAttention
    return jax.jit(form(*tile, interpret=jax.default_backend() == "cpu"))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed: int, shape: tuple[int, ...], deviation: float) -> jax.Array:
    key = jax.random.key(seed, impl="rbg")
    return (jax.random.normal(key, shape, jnp.float32) * deviation).astype(jnp.bfloat16)


def _arrays(sequences: int, queries: int, keys: int, heads: int) -> dict[str, jax.Array]:
    """Returns queries, keys and values."""
    sizes = {"q": queries, "k": keys, "v": keys}
    deviations = {"q": LOGITS, "k": 1.0, "v": 1.0}
    return {
        name: _normal(number, (sequences, size, heads, HEAD_SIZE), deviations[name])
        for number, (name, size) in enumerate(sizes.items())
    }


@jax.jit
def _in_float64(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k, v = (x.astype(jnp.float64) for x in (q[0, :CHECKED], k[0], v[0]))
    weights = jax.nn.softmax(jnp.einsum("qnd,knd->nqk", q, k) * HEAD_SIZE**-0.5, axis=-1)
    return jnp.einsum("nqk,knd->qnd", weights, v)


def _exact(q: jax.Array, k: jax.Array, v: jax.Array) -> np.ndarray:
    """Attention of the first queries of the first sequence, in float64: (queries, N, K)."""
    with jax.enable_x64(True):
        return np.asarray(_in_float64(q, k, v))


def _furthest(x: jax.Array, y: jax.Array) -> float:
    return float(jnp.max(jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32))))


def _add(
    rows: Rows, what: str, shape: tuple[int, int, int, int], found: Timed, note: str, exact: np.ndarray
) -> None:
    """Adds the time, and the largest error of the checked queries next to the size of the exact results."""
    sequences, queries, keys, heads = shape
    tflops = 4 * sequences * heads * queries * keys * HEAD_SIZE / found.median / TERA
    rows.add(what, found.median * 1e3, "ms", note, tflops=tflops, seconds=found.seconds)
    error = np.max(np.abs(np.asarray(found.result[0, :CHECKED], np.float64) - exact))
    size = f"rms of the result {np.sqrt(np.mean(exact**2)):.2g}"
    rows.add(f"{what}: furthest from float64", float(error), "absolute", size, tolerance=ERRORS)


def attention(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """cuDNN's attention, and Mosaic's with each tile, on the same arrays of each shape.

    Args:
        rows: gets the times.
        arguments: ``shapes``, of sequences, queries, keys and heads; ``tiles``; ``repeats``.
    """
    until, repeats = arguments["until"], arguments["repeats"]
    for shape in map(tuple, arguments["shapes"]):
        where = "{} x {} x {} keys, {} heads".format(*shape)
        given, cudnn = _arrays(*shape), None
        exact = _exact(**given)
        with rows.attempt(f"cudnn {where}"):
            found = timed(_cudnn(), functools.partial(dict, given), repeats, until)
            cudnn = found.result
            _add(rows, f"cudnn {where}", shape, found, "", exact)
        for tile in map(tuple, arguments["tiles"]):
            if time.monotonic() > until:
                continue
            what = f"mosaic {'x'.join(map(str, tile))} {where}"
            with rows.attempt(what):
                started = time.perf_counter()
                kernel = _mosaic(tile).lower(**given).compile()
                seconds = time.perf_counter() - started
                found = timed(kernel, functools.partial(dict, given), repeats, until)
                note = "" if cudnn is None else f"max |x - cuDNN| {_furthest(found.result, cudnn):.2g}; "
                _add(rows, what, shape, found, f"{note}compiled in {seconds:.1f} s", exact)


def build(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Exports the kernel and compiles it for an H200, which need not be here, into ``folder``."""
    from wanbuild.models.attention_forms import attention_form
    from wanbuild.programs.jax_flags import pinned
    from wanbuild.programs.xla import compile_into
    from wanbuild.targets.target import MOSAIC, resolve_target

    target, folder = resolve_target("h200").attending_by(MOSAIC), Path(arguments["folder"])
    folder.mkdir(parents=True)
    sequences, tokens, heads = BUILT
    array = jax.ShapeDtypeStruct((sequences, tokens, heads, HEAD_SIZE), jnp.bfloat16)
    started = time.perf_counter()
    cache = folder / "cache"
    cache.mkdir()
    with pinned("cpu"):
        exporting = jax.export.export(jax.jit(attention_form(target.kernels)), platforms=["cuda"])
        data = bytes(exporting(array, array, array).serialize())
        facts = compile_into(cache, target, "attention", data, ())
    (folder / "program").write_bytes(data)
    (entry,) = (path for path in cache.iterdir() if path.name.endswith("-cache"))
    shutil.move(entry, folder / "entry")
    shutil.rmtree(cache)
    facts_of = {"options": target.options_of("attention"), "tile": target.kernels.attention_blocks}
    (folder / "facts.json").write_text(json.dumps(facts_of))
    sizes = f"program {len(data)} bytes, entry {(folder / 'entry').stat().st_size} bytes; {facts}"
    rows.add("built elsewhere", time.perf_counter() - started, "s", sizes)


def elsewhere(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Loads what ``build`` made on another machine, as ``wanrun`` does it, and compares and times it."""
    import jax.experimental.mosaic.gpu  # names the library that a loaded kernel calls

    from wanrun.executables.jax_hook import load
    from wanrun.executables.lowering import lower

    folder = Path(arguments["folder"])
    built = json.loads((folder / "facts.json").read_text())
    sequences, tokens, heads = BUILT
    shape = (sequences, tokens, tokens, heads)
    lowered = lower((folder / "program").read_bytes(), "attention", (), jax.devices()[0], built["options"])
    started = time.perf_counter()
    compiled = load("attention", lowered, (folder / "entry").read_bytes())
    rows.add("load mosaic from elsewhere", (time.perf_counter() - started) * 1e3, "ms", "loaded")
    given = _arrays(*shape)
    found = timed(lambda q, k, v: compiled(q, k, v), functools.partial(dict, given), 5, arguments["until"])
    note = f"max |x - cuDNN| {_furthest(found.result, _cudnn()(**given)):.2g}"
    _add(rows, "mosaic from elsewhere", shape, found, note, _exact(**given))
    here = _mosaic(tuple(built["tile"]))(**given)
    rows.add("mosaic from elsewhere and from here", note=f"max |x - y| {_furthest(here, found.result):.2g}")


if __name__ == "__main__":
    main(MappingProxyType({"attention": attention, "build": build, "elsewhere": elsewhere}))
