"""Measures this project on a machine with one NVIDIA GPU: one table, and one line of JSON.

    python benchmarks/gpu.py                          # all parts that fit into --budget, by importance
    python benchmarks/gpu.py --part step-14b,start    # these alone
    python benchmarks/gpu.py --artifact DIR           # with an artifact that was built elsewhere for this GPU
    python benchmarks/gpu.py --kernel DIR             # and with an attention that was (see gpu_attention.py)
    python benchmarks/gpu.py --smoke                  # tiny shapes on the CPU: 1 if a part fails

It runs from a checkout and needs no network. Each part runs in processes of its own, so that one which fails,
crashes or exceeds its time becomes a row with the reason, and the others go on. Weights are random, in the
shapes of the published models, and made on the device; those of a start are zeros on the disk.

device     what JAX sees; always measured
ceiling    matrix products in bfloat16, and cuDNN's attention alone
cross      executables that were built elsewhere: past wanrun's checks, through wanrun, and golden records
native     a toy built here: hits, and agreement with the golden records of a CPU
attention  cuDNN's attention beside the one in Mosaic GPU that JAX has; one that was built elsewhere
step-*     the denoising step with guidance at 832x480x81 and 1280x720x81, and the memory
w8a8       the step of 14B at 832x480x81 with weights of 8 bits, multiplied in bfloat16 and in 8 bits
decode     the VAE's decode at these sizes, and in other precisions at the first
torch      a plain transformer block with scaled_dot_product_attention, eager and compiled
start      wanrun from its start until it is ready, with the 1.3B model, and the restore in it
stream     steps of the 1.3B model whose layers stream through the GPU, beside those whose layers stay

TFLOP/s count matrix products and attention: see ``step_flops`` in gpu_device.py. "of ceiling" compares them
with this run's fastest matrix product.

The artifact from elsewhere is a toy, made with the same versions of Python's packages (jax, jax-cuda13-pjrt;
zstandard or not), because executables depend on them. On a machine without the GPU:

    python benchmarks/gpu.py --make DIR --target h200

in an environment with that machine's jax, which constraints.txt does not pin:

    python3.12 -m venv made
    made/bin/pip install -e '.[build,cuda13]' jax==0.11.2 jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2

A package that is missing where nothing can be installed travels as a folder. Where there is an index:

    pip download --only-binary=:all: --no-deps --python-version 3.12 --implementation cp \\
        --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 -d wheels \\
        msgspec zstandard crc32c ftfy wcwidth imageio-ffmpeg gguf iced-x86
    pip install --no-index --no-deps --target packages wheels/*.whl

The second command also runs on the other machine, from the wheels. Then PYTHONPATH=packages is all that this
script needs. Its first lines say which dependencies of the project are missing. No part writes a video: where
imageio-ffmpeg's 68 MB are too many, an empty package of that name will do.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from gpu_artifact import cross, make, native, start, stream
from gpu_bench import Bench, NotGivenError, ProcessFailedError, machine
from gpu_rows import reason

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


def ceiling(bench: Bench) -> None:
    """Matrix products in bfloat16, and the attention alone."""
    bench.measure("gpu_device.py", "ceiling")


SHAPES = (
    *((2, 32768, 32768, heads) for heads in (12, 40)),
    *((2, 32768, 512, 40), (2, 75648, 75648, 40)),
)
"""Sequences, queries, keys and heads: of 832x480x81 for 1.3B and 14B, its text's, of 1280x720x81 for 14B."""
WIDE = (2, 32768, 32832, 12)
"""The first one with keys for tiles of 192, of which no number has 32 768."""
TILES = ((64, 128, 2), (64, 128, 3), (64, 64, 4), (128, 64, 2))


def attention(bench: Bench) -> None:
    """cuDNN's attention and Mosaic's; each form in a process of its own, because a fault ends all of CUDA."""
    compared = functools.partial(bench.measure, "gpu_attention.py", "attention")
    compared(shapes=SHAPES, tiles=TILES[:1], emitter=False)
    if bench.kernel is not None:
        bench.measure("gpu_attention.py", "elsewhere", folder=str(bench.kernel))
    compared(shapes=(WIDE,), tiles=((64, 192, 2),), emitter=False)
    compared(shapes=SHAPES[1:2], tiles=TILES[1:], emitter=False)
    compared(shapes=SHAPES[1:2], tiles=((64, 128, 2),), emitter=True)


def w8a8(bench: Bench) -> None:
    """Steps with weights of 8 bits."""
    sizes, name = (TOY_SIZES, "toy") if bench.smoke else (SIZES[:1], "14b")
    for form, eight_bits in (("float8", True), ("int8", True), ("float8", False)):
        words = {"quantise": form, "w8a8": eight_bits}
        bench.measure("gpu_device.py", "step", model=name, sizes=sizes, repeats=2, **words)


def _step(model: str, repeats: int) -> Callable[[Bench], None]:
    def step(bench: Bench) -> None:
        sizes, name = (TOY_SIZES, "toy") if bench.smoke else (SIZES, model)
        bench.measure("gpu_device.py", "step", model=name, sizes=sizes, repeats=repeats)

    return step


def decode(bench: Bench) -> None:
    """The VAE's decode."""
    sizes, name = (TOY_SIZES, "toy") if bench.smoke else (SIZES, "1.3b")
    bench.measure("gpu_device.py", "decode", model=name, sizes=sizes, repeats=3)


def torch_block(bench: Bench) -> None:
    """A plain torch block, eager and compiled."""
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


@dataclass(frozen=True)
class Part:
    """A part of the run.

    Args:
        run: measures it.
        needs: packages without which it is left out.
        least: seconds that must be left for it to begin.
        most: seconds after which it is ended.
    """

    run: Callable[[Bench], None]
    needs: Sequence[str]
    least: float
    most: float


PARTS: Mapping[str, Part] = {
    "device": Part(device, ("jax",), 10, 60),
    "ceiling": Part(ceiling, ("jax",), 20, 60),
    "cross": Part(cross, COMMANDS, 30, 100),
    "native": Part(native, COMMANDS, 40, 130),
    "attention": Part(attention, PROGRAMS, 30, 130),
    "step-1.3b": Part(_step("1.3b", 5), PROGRAMS, 40, 150),
    "decode": Part(decode, PROGRAMS, 40, 300),
    "step-14b": Part(_step("14b", 3), PROGRAMS, 60, 200),
    "w8a8": Part(w8a8, PROGRAMS, 40, 130),
    "torch": Part(torch_block, ("torch",), 25, 80),
    "start": Part(start, COMMANDS, 80, 170),
    "stream": Part(stream, COMMANDS, 50, 120),
}
"""By name, in the order of importance."""
SMOKE_PARTS = tuple(name for name in PARTS if name not in ("attention", "step-14b"))


def run_parts(bench: Bench, names: Sequence[str], budget: float, missing: Sequence[str]) -> dict[str, Any]:
    """Runs parts until the time is up, and returns what came of each."""
    deadline, outcomes = time.monotonic() + budget, dict[str, Any]()
    try:
        for name in names:
            part, left = PARTS[name], deadline - time.monotonic()
            lacking = [package for package in part.needs if package in missing]
            if "jax" in part.needs and outcomes.get("device", {}).get("state") in ("failed", "left out"):
                lacking.append("a GPU that JAX can use")
            if lacking:
                outcomes[name] = _left_out(f"missing: {', '.join(lacking)}")
            elif left < part.least and not bench.smoke:
                outcomes[name] = _left_out(
                    f"{left:.0f} s of the budget were left, it takes {part.least:.0f} or more"
                )
            else:
                outcomes[name] = {"state": "interrupted", "note": "", "seconds": None, "rows": []}
                until = deadline if bench.smoke else min(deadline, time.monotonic() + part.most)
                _measure(bench, name, until, outcomes[name])
            print(f"{name}: {outcomes[name]['state']} {outcomes[name]['note']}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: what was measured follows", file=sys.stderr)
    for name in names:
        outcomes.setdefault(name, _left_out("the run was interrupted"))
    return outcomes


def _left_out(why: str) -> dict[str, Any]:
    return {"state": "left out", "note": why, "seconds": None, "rows": []}


def _measure(bench: Bench, name: str, until: float, outcome: dict[str, Any]) -> None:
    """Runs one part and puts its rows and its state into the outcome, whatever happens."""
    started = time.monotonic()
    bench.begin(name, until)
    try:
        PARTS[name].run(bench)
    except NotGivenError as error:
        outcome |= _left_out(str(error))
        return
    except Exception as error:
        bench.rows.fail(name, reason(error))
    finally:
        outcome["rows"], outcome["seconds"] = bench.rows.read(), round(time.monotonic() - started, 1)
        for row in outcome["rows"]:
            print("  " + "  ".join(filter(None, _cells(row, None))), file=sys.stderr, flush=True)
    failed = sum(row["failed"] for row in outcome["rows"])
    outcome["state"] = "failed" if failed or not outcome["rows"] else "done"
    outcome["note"] = f"{failed} of {len(outcome['rows'])} rows failed" if failed else ""


def _cells(row: Mapping[str, Any], ceiling: float | None) -> tuple[str, ...]:
    """Returns a row's cells: what, value, TFLOP/s, of ceiling, note."""
    value = "" if row["value"] is None else f"{row['value']:.3f} {row['unit']}"
    tflops = row.get("tflops")
    share = f"{tflops / ceiling:.0%}" if tflops and ceiling else ""
    note = f"FAILED: {row['note']}" if row["failed"] else row["note"]
    return row["what"], value, f"{tflops:.3g}" if tflops else "", share, note


def table(outcomes: Mapping[str, Any]) -> str:
    """Returns the table of all parts; operations are compared with the fastest matrix product."""
    rows = [row for outcome in outcomes.values() for row in outcome["rows"]]
    ceiling = max((row["tflops"] for row in rows if row.get("ceiling")), default=None)
    cells = [("part", "what", "value", "TFLOP/s", "of ceiling", "note")]
    for name, outcome in outcomes.items():
        took = "" if outcome["seconds"] is None else f"{outcome['seconds']:.1f} s"
        cells.append((name, outcome["state"], took, "", "", outcome["note"]))
        cells += [("", *_cells(row, ceiling)) for row in outcome["rows"]]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    aligned = ("<", "<", ">", ">", ">")
    return "\n".join(
        "  ".join(
            [*(f"{cell:{a}{w}}" for cell, a, w in zip(row, aligned, widths, strict=False)), row[5]]
        ).rstrip()
        for row in cells
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", help=f"separated by commas, of: {', '.join(PARTS)}")
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything [default: 540]")
    parser.add_argument(
        "--artifact", type=Path, help="a toy artifact from elsewhere; it is copied, not changed"
    )
    parser.add_argument("--kernel", type=Path, help="an attention from elsewhere: see gpu_attention.py")
    parser.add_argument("--target", help="of --artifact: the target to load; of --make: the one to build")
    parser.add_argument("--json", type=Path, help="also write the line of JSON to this file")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--make", type=Path, metavar="DIR", help="make the toy artifact, and measure nothing")
    options = parser.parse_args()
    named = options.part.split(",") if options.part else list(SMOKE_PARTS if options.smoke else PARTS)
    if unknown := [name for name in named if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    options.part = list(dict.fromkeys(["device", *named]))
    if options.make is not None and (options.target is None or options.make.exists()):
        parser.error("--make needs --target, and a folder that does not exist yet")
    return options


def make_artifact(bench: Bench, options: argparse.Namespace) -> None:
    """Makes the toy artifact with the CPU's target, golden records and the target of another machine."""
    bench.begin("make", time.monotonic() + options.budget)
    try:
        make(bench, bench.folder, options.target)
    except (ProcessFailedError, TimeoutError) as error:
        raise SystemExit(f"no artifact was made: {error}") from None
    shutil.move(bench.folder / "artifact", options.make)
    print(f"made {options.make}")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, _interrupt)
    found = machine()
    print(f"Python {found['python']}, {found['cores']} cores, GPU: {found['gpu']}")
    print(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    print(f"missing packages: {', '.join(found['missing']) or 'none'}", flush=True)
    with tempfile.TemporaryDirectory(prefix="wanrun-gpu-") as temporary:
        bench = Bench(Path(temporary), options.smoke, options.artifact, options.target, options.kernel)
        if options.make is not None:
            make_artifact(bench, options)
            return
        outcomes = run_parts(bench, options.part, options.budget, found["missing"])
    print(table(outcomes))
    line = json.dumps({"machine": found, "smoke": options.smoke, "parts": outcomes})
    print(line, flush=True)
    if options.json is not None:
        options.json.write_text(line + "\n")
    if options.smoke and any(outcome["state"] == "failed" for outcome in outcomes.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
