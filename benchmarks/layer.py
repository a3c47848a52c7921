"""What a chip's compiler says of one layer of a transformer: its cycles on a TPU, its bytes on a GPU.

Compiles a denoising step for a chip that need not be here, and reads the compiled loop over layers.

TPUs: million cycles that XLA estimates, by the operation that a kernel ends with. Pallas kernels have no
estimate: those that move values count as their bytes by the memory's rate, and attention does not count.
GPUs: GB that kernels read and write, in libraries' kernels and between them. Where videos, or parts of the
tokens, go through a layer one after the other, all of them count.

    python benchmarks/layer.py wan2.1-t2v-14b v6e-8 1280x720x81 --mesh data=2,context=4
    python benchmarks/layer.py wan2.1-t2v-14b h100 832x480x81
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wanbuild.build_options import BuildOptions
from wanbuild.plan.published_model import published_manifest, published_names
from wanbuild.programs.export import export_program
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.programs.xla import compiled_for
from wanbuild.targets.chips import CHIPS
from wanbuild.targets.parsing import chip_named, parse_mesh
from wanbuild.targets.target import resolve_target
from wanrun.artifact.target_names import split_w8a8

GHZ = {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "v7x": 2.2}
"""Clocks of TPUs, by which moved bytes are cycles."""

PASSES = ("rotate", "by_part", "joined")
"""Pallas kernels that move values."""

ITEM_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1, "f8e4m3fn": 1}


@dataclass(frozen=True)
class Instruction:
    """One line of a compiled program.

    Args:
        name: its name.
        shape: text of its result's shape.
        opcode: what it does.
        operands: names of its operands.
        text: the line.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str

    def found(self, pattern: str) -> str:
        """Returns the first group of a pattern in the line; empty if there is none."""
        match = re.search(pattern, self.text)
        return match[1] if match else ""


Computations = Mapping[str, list[Instruction]]


def computations(text: str) -> Computations:
    """Returns the instructions of a compiled program by computation."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if not line.startswith(" ") and line.endswith("{") and "(" in line:
            current = found.setdefault(re.sub("^ENTRY ", "", line).split(" ")[0], [])
        elif match := re.match(r"\s+(?:ROOT )?(%[\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)", line):
            name, shape, opcode, operands = match.groups()
            current.append(Instruction(name, shape, opcode, tuple(re.findall(r"%[\w.-]+", operands)), line))
    return found


def trips(one: Instruction, all_of_them: Computations) -> int:
    """Returns how often the body of a while runs: its condition compares with a constant."""
    if known := one.found(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    condition = all_of_them[one.found(r"condition=(%[\w.-]+)")]
    return max(int(line.found(r"constant\((\d+)\)") or 1) for line in condition)


def nbytes(shape: str, layers: int) -> int:
    """Returns the bytes of a shape; of a stack of layers, those of one."""
    total = 0
    for dtype, text in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        sizes = [int(size) for size in text.split(",") if size]
        if len(sizes) > 1 and sizes[0] == layers:
            sizes = sizes[1:]
        count = ITEM_BYTES.get(dtype, 0)
        for size in sizes:
            count *= size
        total += count
    return total


def moved(one: Instruction, shapes: Mapping[str, str], layers: int) -> int:
    """Returns the bytes that a kernel reads and writes; a slice's operand counts as what is taken of it."""
    parts = [nbytes(one.shape, layers), *(nbytes(shapes.get(name, ""), layers) for name in one.operands)]
    if "dynamic_slice" in one.name or "dynamic_update_slice" in one.name:
        return 2 * min((size for size in parts if size > 1000), default=0)
    return sum(parts)


def costs(body: str, all_of_them: Computations, layers: int, chip: str) -> Counter[str]:
    """Returns the cost of one run of a computation by kind: cycles for a TPU, bytes for a GPU."""
    total: Counter[str] = Counter()
    shapes = {one.name: one.shape for one in all_of_them[body]}
    for one in all_of_them[body]:
        operation = one.found(r'op_name="[^"]*?([\w.-]+)"') or one.opcode
        if one.opcode == "while":
            inner = costs(one.found(r"body=(%[\w.-]+)"), all_of_them, layers, chip)
            for kind, cost in inner.items():
                total[kind] += cost * trips(one, all_of_them)
        elif chip in GHZ:
            if cycles := one.found(r'"estimated_cycles":"(\d{1,15})"'):
                total["products" if operation == "dot_general" else operation] += int(cycles)
            elif one.name.strip("%").split(".")[0] in PASSES:
                rate = CHIPS[chip].bandwidth / GHZ[chip] / 1e9
                total["passes of Pallas"] += round(moved(one, shapes, layers) / rate)
        elif one.opcode in ("fusion", "copy", "transpose", "convert", "custom-call"):
            kind = "kernels of libraries" if one.opcode == "custom-call" else "passes between"
            total[kind] += moved(one, shapes, layers)
    return total


def layer_costs(text: str, layers: int, chip: str) -> Counter[str]:
    """Returns the cost of one layer by kind: of the loop over layers that costs most."""
    found = computations(text)
    loops = {
        one.found(r"body=(%[\w.-]+)")
        for lines in found.values()
        for one in lines
        if one.opcode == "while" and trips(one, found) == layers
    }
    return max((costs(body, found, layers, chip) for body in loops), key=lambda cost: cost.total())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("target")
    parser.add_argument("shape", help="width, height and frames")
    parser.add_argument("--mesh", default="")
    parser.add_argument("--lora-rank", type=int, default=0)
    options = parser.parse_args()
    manifest = published_manifest(published_names()[options.model])
    target = resolve_target(options.target, parse_mesh(options.mesh))
    width, height, frames = (int(size) for size in options.shape.split("x"))
    shape, build = (
        Shape(width, height, frames, 1, True),
        BuildOptions(loop="step", lora_rank=options.lora_rank),
    )
    builder = ProgramBuilder(manifest, shape, build, *target.programs_for)
    spec = builder.named("denoise_step")
    data = export_program(spec, target.platform)
    started = time.perf_counter()
    compiled = compiled_for(target, spec.name, data, spec.donate)
    seconds = time.perf_counter() - started
    memory: Any = compiled.memory_analysis()
    named = chip_named(options.target)
    chip, _ = split_w8a8(options.target if named is None else named.chip.name)
    config = builder.configs["transformer"]
    found = layer_costs(compiled.as_text(), config.num_layers, chip)
    unit, scale = ("million cycles", 1e6) if chip in GHZ else ("GB", 1e9)
    print(f"{options.model}, {options.shape}, {options.target} {options.mesh}: compiled in {seconds:.0f} s,")
    print(
        f"{memory.temp_size_in_bytes / 1e9:.2f} GB of temporaries; a layer {found.total() / scale:.1f} {unit}"
    )
    for kind, cost in found.most_common():
        if cost > found.total() / 200:
            print(f"  {kind:24} {cost / scale:8.1f}")


if __name__ == "__main__":
    main()
