"""The parts of gpu.py, in the order of their worth."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_artifact import cross, native, start, stream
from gpu_bench import Bench

SIZES = ((832, 480, 81), (1280, 720, 81))
TOY_SIZES = ((64, 64, 1),)
PROGRAMS = ("jax", "flax", "msgspec", "safetensors")
"""The packages that making programs needs."""
COMMANDS = (
    *(
        *PROGRAMS,
        "numpy",
        "ml_dtypes",
        "flatbuffers",
        "tokenizers",
        "ftfy",
        "click",
        "imageio-ffmpeg",
        "pillow",
    ),
    *("crc32c", "orbax-checkpoint", "huggingface_hub", "gguf", "iced-x86"),
)
"""The packages that wanbuild and wanrun need."""


@dataclass(frozen=True)
class Part:
    """A part of the run.

    Args:
        run: measures it.
        what: what it measures, in a few words.
        needs: packages without which it is left out.
        least: seconds that must be left for it to begin.
        limit: seconds after which it is ended.
        tolerance: how much more than a kept figure is no fault: 0.05 is a twentieth.
        memory: GB that JAX must have of the device's memory.
        after: parts that have to be done in the same run, because it takes their artifacts.
        smoke: whether a run on a CPU has it; another part runs the same code there.
    """

    run: Callable[[Bench], None]
    what: str
    needs: Sequence[str]
    least: float
    limit: float = 120
    tolerance: float = 0.05
    memory: float = 0
    after: Sequence[str] = ()
    smoke: bool = True


def device(bench: Bench) -> None:
    """The device that JAX sees, without which nothing of JAX is measured.

    Where wanbuild takes this machine for one without an accelerator, JAX_PLATFORMS tells it.
    """
    bench.measure("gpu_device.py", "device")
    found = {row["what"]: row for row in bench.rows.read() if not row["failed"]}
    sees_gpu = found.get("device", {}).get("platform") == "gpu"
    if sees_gpu and found.get("local target", {}).get("note") == "cpu" and "JAX_PLATFORMS" not in os.environ:
        bench.environment["JAX_PLATFORMS"] = "cuda,cpu"
        bench.rows.add("JAX_PLATFORMS", note="set to cuda,cpu: without it wanbuild's target local is the CPU")


def _ceiling(bench: Bench) -> None:
    bench.measure("gpu_device.py", "ceiling")


SHAPES = (
    *((2, 32768, 32768, heads) for heads in (12, 40)),
    *((2, 32768, 512, 40), (2, 75648, 75648, 40)),
)
"""Sequences, queries, keys and heads: of 832x480x81 for 1.3B and 14B, its text's, of 1280x720x81 for 14B."""
WIDE = (2, 32768, 32832, 12)
"""The first one with keys for tiles of 192, of which no number has 32 768."""
TILES = ((64, 128, 2), (64, 128, 3), (64, 64, 4), (128, 64, 2))


def _attention(bench: Bench) -> None:
    bench.measure("gpu_attention.py", "attention", shapes=SHAPES, tiles=TILES[:1], emitter=False)
    if bench.kernel is not None:
        bench.measure("gpu_attention.py", "elsewhere", folder=str(bench.kernel))


def _tiles(bench: Bench) -> None:
    """Each form in a process of its own, because a fault ends all of CUDA."""
    compared = functools.partial(bench.measure, "gpu_attention.py", "attention")
    compared(shapes=(WIDE,), tiles=((64, 192, 2),), emitter=False)
    compared(shapes=SHAPES[1:2], tiles=TILES[1:], emitter=False)
    compared(shapes=SHAPES[1:2], tiles=((64, 128, 2),), emitter=True)


def _step(model: str, sizes: Any, repeats: int, **words: Any) -> Callable[[Bench], None]:
    def step(bench: Bench) -> None:
        given, name = (TOY_SIZES, "toy") if bench.smoke else (sizes, model)
        bench.measure("gpu_device.py", "step", model=name, sizes=given, repeats=repeats, **words)

    return step


def _eight_bits(*forms: tuple[str, bool]) -> Callable[[Bench], None]:
    def step(bench: Bench) -> None:
        for form, products in forms:
            _step("14b", SIZES[:1], 2, quantise=form, w8a8=products)(bench)

    return step


def _decode(sizes: Any, choices: Sequence[int]) -> Callable[[Bench], None]:
    def decode(bench: Bench) -> None:
        given, name = (TOY_SIZES, "toy") if bench.smoke else (sizes, "1.3b")
        bench.measure("gpu_device.py", "decode", model=name, sizes=given, repeats=3, choices=choices)

    return decode


def _torch_block(bench: Bench) -> None:
    models = {"1.3b": (12, 8960, 30), "14b": (40, 13824, 40)}
    cases = [
        {"name": f"{model} {width}x{height}x{frames}", "heads": heads, "ffn": ffn, "layers": layers}
        | {"tokens": ((frames - 1) // 4 + 1) * (height // 16) * (width // 16)}
        for width, height, frames in SIZES
        for model, (heads, ffn, layers) in models.items()
    ]
    if bench.smoke:
        cases = [{"name": "toy", "heads": 1, "ffn": 64, "layers": 2, "tokens": 24}]
    bench.measure("gpu_torch.py", "block", cases=cases, repeats=5)


STEP = "a denoising step with guidance"
PARTS: Mapping[str, Part] = {
    "device": Part(device, "what JAX sees", ("jax",), 10),
    "native": Part(
        native,
        "a toy built there: hits, and agreement with the golden records of a CPU",
        COMMANDS,
        40,
        tolerance=0.5,
    ),
    "attention": Part(
        _attention, "cuDNN's attention and Mosaic's, and the errors of both", PROGRAMS, 30, smoke=False
    ),
    "cross": Part(cross, "executables that were built elsewhere", COMMANDS, 30, tolerance=0.5),
    "start": Part(
        start, "wanrun from its start until it is ready, 1.3B at 832x480x81", COMMANDS, 80, tolerance=0.25
    ),
    "step-1.3b": Part(_step("1.3b", SIZES, 5), f"{STEP}, 1.3B", PROGRAMS, 40),
    "step-14b": Part(
        _step("14b", SIZES[:1], 3), f"{STEP}, 14B at 832x480x81", PROGRAMS, 40, memory=40, smoke=False
    ),
    "step-14b-720p": Part(
        _step("14b", SIZES[1:], 3), f"{STEP}, 14B at 1280x720x81", PROGRAMS, 80, memory=46, smoke=False
    ),
    "ceiling": Part(_ceiling, "matrix products in bfloat16, and cuDNN's attention alone", ("jax",), 20),
    "w8a8": Part(
        _eight_bits(("float8", True)), f"{STEP}, 14B, products of 8-bit floats", PROGRAMS, 40, memory=26
    ),
    "w8": Part(
        _eight_bits(("float8", False)),
        f"{STEP}, 14B, 8-bit floats in bfloat16",
        PROGRAMS,
        40,
        memory=40,
        smoke=False,
    ),
    "w8a8-int8": Part(
        _eight_bits(("int8", True)),
        f"{STEP}, 14B, products of 8-bit integers",
        PROGRAMS,
        60,
        memory=26,
        smoke=False,
    ),
    "decode": Part(_decode(SIZES[:1], (0,)), "the VAE's decode of 832x480x81", PROGRAMS, 40),
    "decode-720p": Part(
        _decode(SIZES[1:], (0,)), "the VAE's decode of 1280x720x81", PROGRAMS, 50, memory=20, smoke=False
    ),
    "decode-forms": Part(
        _decode(SIZES[:1], (1, 2)), "the same in other precisions", PROGRAMS, 80, smoke=False
    ),
    "torch": Part(
        _torch_block, "a plain block of torch, eager and compiled, times the layers", ("torch",), 25
    ),
    "stream": Part(
        stream,
        "steps of 1.3B whose layers stream through the GPU, and whose layers stay",
        COMMANDS,
        50,
        tolerance=0.1,
    ),
    "attention-tiles": Part(
        _tiles, "other tiles of Mosaic's attention", PROGRAMS, 30, tolerance=0.1, smoke=False
    ),
}
"""By name. What they take of each other's artifacts comes before them."""
SMOKE_PARTS = tuple(name for name, part in PARTS.items() if part.smoke)
