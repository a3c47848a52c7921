"""The parts of gpu.py, in the order of their worth."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_artifact import FRAMES, SIZE, cross, native, tiny
from gpu_bench import Bench, device_bytes
from gpu_experts import build as build_a14b
from gpu_experts import experts
from gpu_live import live
from gpu_rows import COMPILES
from gpu_start import build, build_and_start, put, start, stream, stream_14b

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


SERVER = ("starlette", "uvicorn", "h11", "python-multipart", "prometheus-client")
"""The packages that wanrun serve needs besides them."""


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
    *((2, 32760, 32760, heads) for heads in (12, 40)),
    *((2, 32760, 512, 40), (2, 75600, 75600, 40)),
)
"""Sequences, queries, keys and heads: of 832x480x81 for 1.3B and 14B, its text's, of 1280x720x81 for 14B."""
TOY_SHAPES = ((1, 70, 90, 1),)
TILES = ((64, 128, 2), (64, 128, 3), (64, 64, 4), (128, 64, 2), (64, 192, 2))
"""Queries, keys and stages of Mosaic's attention, those of the targets first."""
TOY_TILES = ((64, 64, 2),)


def _attention(bench: Bench) -> None:
    shapes, tiles, repeats = (TOY_SHAPES, TOY_TILES, 1) if bench.smoke else (SHAPES, TILES[:1], 5)
    bench.measure("gpu_attention.py", "attention", shapes=shapes, tiles=tiles, repeats=repeats)
    if bench.kernel is not None:
        bench.measure("gpu_attention.py", "elsewhere", folder=str(bench.kernel))


def _tiles(bench: Bench) -> None:
    """Each form in a process of its own, because a fault ends all of CUDA."""
    for tile in TILES[1:]:
        bench.measure("gpu_attention.py", "attention", shapes=SHAPES[1:2], tiles=(tile,), repeats=5)


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


TOKENS: Mapping[str, int] = {
    f"{width}x{height}x{frames}": ((frames - 1) // 4 + 1) * (height // 16) * (width // 16)
    for width, height, frames in SIZES
}
BLOCKS: Mapping[str, Mapping[str, int]] = {
    "1.3b": {"heads": 12, "ffn": 8960, "layers": 30},
    "14b": {"heads": 40, "ffn": 13824, "layers": 40},
}
TOY_BLOCK = {"name": "toy", "heads": 1, "ffn": 64, "layers": 2, "tokens": 24}


def _torch_block(bench: Bench) -> None:
    cases = [
        {"name": f"{model} {size}", "tokens": tokens, **facts}
        for size, tokens in TOKENS.items()
        for model, facts in BLOCKS.items()
    ]
    bench.measure("gpu_torch.py", "block", cases=[TOY_BLOCK] if bench.smoke else cases, repeats=5)


def _torch_start(bench: Bench, model: str) -> None:
    case = TOY_BLOCK if bench.smoke else {"name": model, "tokens": TOKENS["832x480x81"], **BLOCKS[model]}
    file = bench.folder / f"torch-{model}.safetensors"
    bench.measure("gpu_torch.py", "save", case=case, file=str(file))
    for how in ("eager", "compiled"):
        started = {"how": how, "spawned": time.monotonic()}
        bench.measure("gpu_torch.py", "start", case=case, file=str(file), **started)
    file.unlink(missing_ok=True)


def _serve(bench: Bench) -> None:
    artifact, data = bench.folder / "native" / "artifact", bench.folder / "served"
    bench.measure("gpu_serve.py", "serve", artifact=str(artifact), data=str(data))


LARGE = "1280x720"
"""A size at which the toy's decode takes 4.2 GB; at its own it takes 0.06."""
LITTLE = 1e9
"""Bytes of the device's memory between the two."""


def _serve_memory(bench: Bench) -> None:
    artifact, data = bench.folder / "native" / "artifact", bench.folder / "served-little"
    size, environment = SIZE, {}
    if not bench.smoke:
        size = LARGE
        words = ("--artifact", artifact, "--target", "local", "--size", size, "--frames", FRAMES)
        seconds = bench.wanbuild("compile", *words, "--loop", "step")
        bench.rows.add(f"wanbuild compile {size}x{FRAMES}", seconds, "s", tolerance=COMPILES)
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{LITTLE / device_bytes():.4f}"
    words = {"artifact": str(artifact), "data": str(data), "size": size}
    bench.measure("gpu_serve.py", "memory", environment, **words)


STEP = "a denoising step with guidance"
PARTS: Mapping[str, Part] = {
    "device": Part(device, "what JAX sees", ("jax",), 10),
    "tiny-float32": Part(
        functools.partial(tiny, form="float32"),
        "a trained tiny model's whole video beside the CPU's, in float32",
        COMMANDS,
        60,
        tolerance=0.5,
    ),
    "tiny": Part(
        functools.partial(tiny, form="default"),
        "the same in the default dtypes",
        COMMANDS,
        60,
        tolerance=0.5,
        smoke=False,
    ),
    "native": Part(
        native,
        "a toy built there: hits, and agreement with the golden records of a CPU",
        COMMANDS,
        40,
        tolerance=0.5,
    ),
    "attention": Part(_attention, "cuDNN's attention and Mosaic's, and the errors of both", PROGRAMS, 30),
    "cross": Part(cross, "executables that were built elsewhere", COMMANDS, 30, tolerance=0.5),
    "start": Part(
        functools.partial(build_and_start, model="1.3b"),
        "wanrun from its start until it is ready, 1.3B at 832x480x81",
        COMMANDS,
        80,
        tolerance=0.25,
    ),
    "put": Part(
        put, "arrays to the device, staged by XLA and from pinned memory", PROGRAMS, 20, tolerance=0.5
    ),
    "build-14b": Part(
        functools.partial(build, model="14b"),
        "convert and compile of 14B at 832x480x81",
        COMMANDS,
        100,
        tolerance=1.0,
        memory=40,
        smoke=False,
    ),
    "start-14b": Part(
        functools.partial(start, model="14b"),
        "wanrun from its start until it is ready, 14B at 832x480x81",
        COMMANDS,
        50,
        tolerance=0.25,
        memory=40,
        after=("build-14b",),
        smoke=False,
    ),
    "torch-start": Part(
        functools.partial(_torch_start, model="1.3b"),
        "blocks of torch as many as 1.3B has, from the command to the first step",
        ("torch", "safetensors"),
        40,
        tolerance=0.25,
    ),
    "torch-start-14b": Part(
        functools.partial(_torch_start, model="14b"),
        "the same of 14B",
        ("torch", "safetensors"),
        80,
        tolerance=0.25,
        memory=40,
        smoke=False,
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
    "stream-14b": Part(
        stream_14b,
        "steps of 14B whose layers stream, in 24 GB",
        COMMANDS,
        60,
        tolerance=0.1,
        after=("build-14b",),
        smoke=False,
    ),
    "stream": Part(
        stream,
        "steps of 1.3B whose layers stream through the GPU, and whose layers stay",
        COMMANDS,
        50,
        tolerance=0.1,
    ),
    "decode": Part(_decode(SIZES[:1], (0,)), "the VAE's decode of 832x480x81", PROGRAMS, 40),
    "decode-720p": Part(
        _decode(SIZES[1:], (0,)), "the VAE's decode of 1280x720x81", PROGRAMS, 50, memory=20, smoke=False
    ),
    "decode-forms": Part(
        _decode(SIZES[:1], (1, 2)), "the same in other precisions", PROGRAMS, 80, smoke=False
    ),
    "build-a14b": Part(
        build_a14b,
        "convert and compile of A14B's widths, 8 layers of each expert, at 832x480x81",
        COMMANDS,
        100,
        tolerance=1.0,
        memory=24,
    ),
    "experts": Part(
        experts,
        "steps of those experts: both on the GPU, one in host memory, one read at the boundary",
        COMMANDS,
        50,
        tolerance=0.25,
        memory=24,
        after=("build-a14b",),
    ),
    "slots": Part(
        _step("14b", SIZES[:1], 2, lora_rank=64),
        f"{STEP}, 14B, with slots for LoRAs",
        PROGRAMS,
        40,
        memory=42,
        smoke=False,
    ),
    "torch": Part(
        _torch_block, "a plain block of torch, eager and compiled, times the layers", ("torch",), 25
    ),
    "live": Part(
        live,
        "live video of Self-Forcing's 1.3B at 832x480: the first frames, and later chunks",
        COMMANDS,
        100,
        tolerance=0.25,
        memory=24,
    ),
    "serve": Part(
        _serve,
        "wanrun serve with the toy: a job that is cancelled, and one whose worker is killed",
        (*COMMANDS, *SERVER),
        40,
        tolerance=1.0,
        after=("native",),
    ),
    "serve-memory": Part(
        _serve_memory,
        "a request to wanrun serve that does not fit into the memory, and the one after it",
        (*COMMANDS, *SERVER),
        60,
        tolerance=1.0,
        after=("native",),
    ),
    "attention-tiles": Part(
        _tiles, "other tiles of Mosaic's attention", PROGRAMS, 30, tolerance=0.1, smoke=False
    ),
}
"""By name. What they take of each other's artifacts comes before them."""
