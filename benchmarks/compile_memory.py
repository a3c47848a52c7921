"""Compiles the programs of published models from only their configs, and prints the memory of each.

No weights are read or created: every argument is abstract. The figures are XLA's own, for the CPU or for a
chip whose compiler is installed: arguments, outputs and temporaries of one call. A loop's floating-point
operations count once, whatever its length (layers, pieces of a video, blocks of queries), so they only
compare forms of one program.

    python benchmarks/compile_memory.py
    python benchmarks/compile_memory.py --model vace-14b --size 832x480 --reference-images 1
    python benchmarks/compile_memory.py --model 14b --program denoise_step --target v6e
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from checkpoints import MODELS
from wanbuild.build_options import BuildOptions
from wanbuild.plan.published_model import published_manifest
from wanbuild.programs.export import export_program
from wanbuild.programs.jax_flags import pinned
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.programs.spec import ProgramSpec
from wanbuild.programs.xla import compiled_for
from wanbuild.targets.target import TargetSpec, resolve_target
from wanbuild.variants.table import variants

SIZES = ((832, 480), (1280, 720))
"""The sizes for models that have no other published sizes."""

MEDIA_MODELS = ("i2v-14b", "flf2v-14b", "vace-14b", "animate-14b", "5b")

COLUMNS = ("arguments", "temporaries", "outputs", "compile", "operations", "StableHLO")


def program_specs(builder: ProgramBuilder) -> Iterator[ProgramSpec]:
    """Yields the programs of one generation, except the text encoder's, which all models share."""
    yield from (spec for spec in builder.programs() if spec.role not in ("text", "scan"))


def measure(spec: ProgramSpec, target: TargetSpec) -> dict[str, float]:
    """Returns bytes, seconds and operations of one program."""
    data = export_program(spec, target.platform)
    started = time.perf_counter()
    compiled = compiled_for(target, spec.name, data, spec.donate)
    seconds = time.perf_counter() - started
    memory: Any = compiled.memory_analysis()
    figures = (
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        seconds,
        (compiled.cost_analysis() or {}).get("flops", 0.0),
        len(data),
    )
    return dict(zip(COLUMNS, figures, strict=True))


def shapes_of(model: str, options: argparse.Namespace) -> Iterator[Shape]:
    """Yields the requested shapes, or else the model's published ones."""
    variant = variants()[MODELS[model][0]]
    sizes = [tuple(map(int, size.split("x"))) for size in options.size or ()]
    published = [size for size in SIZES if size in variant.sizes] or variant.sizes[:1]
    guidance = variant.guidance_scale > 1
    references = options.reference_images if "reference_image" in variant.inputs else 0
    for width, height in sizes or published:
        yield Shape(width, height, options.frames or variant.num_frames, 1, guidance, references)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="repeatable")
    parser.add_argument("--size", action="append", help="repeatable; the published ones where not given")
    parser.add_argument("--frames", type=int, help="the published number where not given")
    parser.add_argument("--reference-images", type=int, default=0, help="of VACE")
    parser.add_argument("--program", action="append", help="repeatable; all where not given")
    parser.add_argument("--target", default="cpu", help="a chip's name")
    options = parser.parse_args()
    with pinned("cpu"):
        _measure_all(options)


def _measure_all(options: argparse.Namespace) -> None:
    target = resolve_target(options.target)
    for model in options.model or MEDIA_MODELS:
        manifest = published_manifest(MODELS[model][1])
        for shape in shapes_of(model, options):
            builder = ProgramBuilder(manifest, shape, BuildOptions(), *target.programs_for)
            name = f"{shape.width}x{shape.height}x{shape.num_frames}"
            print(f"{f'{model} {name}':<28}" + "".join(f"{column:>12}" for column in COLUMNS), flush=True)
            record: dict[str, Any] = {}
            for spec in program_specs(builder):
                if options.program and spec.name not in options.program:
                    continue
                record[spec.name] = found = measure(spec, target)
                sizes = "".join(f"{found[column] / 1e9:>9.3f} GB" for column in COLUMNS[:3])
                rest = f"{found['compile']:>10.1f} s{found['operations'] / 1e12:>7.2f} TFLO"
                print(f"  {spec.name:<26}{sizes}{rest}{found['StableHLO'] / 1e6:>9.2f} MB", flush=True)
            print(json.dumps({"model": model, "shape": name, "programs": record}), flush=True)


if __name__ == "__main__":
    main()
