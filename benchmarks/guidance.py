"""Times a denoising step with guidance and without, by one program, and by a program that has no guidance.

Likewise a step with NAG and without. A transformer of 1.3B's widths with few layers and random weights;
programs take turns in one process. The floor of a step with guidance is twice the program without, and of
any other step the same once.

    python benchmarks/guidance.py [--size 448x256x9] [--layers 4] [--rounds 9]
"""

from __future__ import annotations

import argparse

import jax
import numpy as np

from cpus import cpu_name
from slots import STEP, arguments_of, few_layers, measured
from wanbuild.build_options import BuildOptions
from wanbuild.programs.export import export_program
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.programs.xla import compiled_for
from wanbuild.targets.target import resolve_target
from wanrun.artifact.guiders import NAG, nag_settings

PROGRAMS = (
    (False, False, {"none": {}}),
    (True, False, {f"guidance {scale}": {"guidance_scale": np.float32(scale)} for scale in (5, 1)}),
    (False, True, {f"nag {scale}": {NAG: nag_settings({"nag_scale": scale})} for scale in (11, 1)}),
)
"""Programs with guidance or not, with NAG or not, and their steps by name with what these take besides."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="448x256x9", help="width, height and frames")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    width, height, frames = map(int, options.size.split("x"))
    manifest, target = few_layers(options.layers, None), resolve_target("cpu")
    names, programs, given, memory = [], [], [], []
    for guided, nag, steps in PROGRAMS:
        shape, built = Shape(width, height, frames, 1, guided), BuildOptions(loop="step", nag=nag)
        spec = ProgramBuilder(manifest, shape, built, *target.programs_for).named(STEP)
        program, arguments = (
            compiled_for(target, spec.name, export_program(spec, target.platform), ()),
            arguments_of(spec),
        )
        for name, own in steps.items():
            names.append(name)
            programs.append(program)
            given.append({**arguments, **own})
            memory.append(program.memory_analysis().temp_size_in_bytes)
    for one in given[2:]:
        one["kv"] = given[1]["kv"]
    given[0]["kv"] = jax.tree.map(lambda array: array[:, :1], given[1]["kv"])
    seconds, results = measured(programs, given, options.rounds)
    print(f"{cpu_name()}, {options.layers} layers of 1.3B, {options.size}, bfloat16\n")
    print("| step | seconds | of the floor | temporaries | bits of none |")
    print("|---|---|---|---|---|")
    none = np.array(seconds[0])[:, 0]
    for index, name in enumerate(names):
        took = np.array(seconds[index])[:, 0]
        passes = 2 if name == "guidance 5" else 1
        same = jax.tree.all(jax.tree.map(np.array_equal, results[index], results[0]))
        print(
            f"| {name} | {np.median(took):.3f} | {np.median(took / none) / passes:.3f} "
            f"| {memory[index] / 1e6:.0f} MB | {'yes' if same else 'no'} |"
        )


if __name__ == "__main__":
    main()
