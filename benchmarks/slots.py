"""Times a denoising step with slots beside its weights, which are zeros, and without.

A transformer of 1.3B's widths with few layers and random weights. Ranks take turns in one process, so that
their ratios are meaningful on a shared machine. They are of CPU seconds: the median of the rounds' ratios,
and the ratio of the least ones, which others have disturbed least. The floor is what the slots' products add
to a step's multiplications and additions.

    python benchmarks/slots.py [--size 448x256x9] [--layers 4] [--ranks 32,64] [--quantise int8]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cpus import cpu_name
from wanbuild.build_options import BuildOptions
from wanbuild.conversion.chosen import parse_quantise
from wanbuild.plan.published_model import model_manifest, published_names, published_variant
from wanbuild.plan.work import work_of
from wanbuild.programs.export import export_program
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.programs.spec import ProgramSpec
from wanbuild.programs.xla import compiled_for
from wanbuild.published.variant_configs import PUBLISHED_MODELS
from wanbuild.targets.target import resolve_target
from wanrun.artifact.manifest import Manifest

MODEL, STEP = "wan2.1-t2v-1.3b", "denoise_step"
SCALARS = {"timestep": 500.0, "guidance_scale": 5.0}


def few_layers(layers: int, quantise: str | None) -> Manifest:
    """Returns the manifest of the published model with this number of layers."""
    repository = published_names()[MODEL]
    configs = dict(PUBLISHED_MODELS[repository])
    configs["transformer"] = {**configs["transformer"], "num_layers": layers}
    return model_manifest(published_variant(repository), configs, quantise=parse_quantise(quantise, ()))


def filled(name: str, tree: Any) -> Any:
    """Returns random values for abstract arrays; slots are zeros."""
    rng = np.random.default_rng(0)

    def one(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if name in SCALARS and not leaf.shape:
            return np.asarray(SCALARS[name], leaf.dtype)
        if name == "lora":
            return np.zeros(leaf.shape, leaf.dtype)
        if leaf.dtype == jnp.int8:
            return rng.integers(-127, 127, leaf.shape, np.int8)
        values = 0.02 * rng.standard_normal(leaf.shape, np.float32)
        if leaf.dtype == jnp.uint16:  # the bits of bfloat16
            return np.asarray(values, jnp.bfloat16).view(np.uint16)
        return np.asarray(values, leaf.dtype)

    return jax.tree.map(lambda leaf: jax.device_put(one(leaf)), tree)


def arguments_of(spec: ProgramSpec) -> dict[str, Any]:
    return {name: filled(name, tree) for name, tree in zip(spec.inputs, spec.arguments, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="448x256x9", help="width, height and frames")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", default="32,64")
    parser.add_argument("--quantise")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    ranks = [0, *map(int, options.ranks.split(","))]
    width, height, frames = map(int, options.size.split("x"))
    manifest, target = few_layers(options.layers, options.quantise), resolve_target("cpu")
    flops, memory, programs, given = list[float](), list[int](), list[Any](), list[dict[str, Any]]()
    for rank in ranks:
        build = BuildOptions(loop="step", lora_rank=rank)
        builder = ProgramBuilder(manifest, Shape(width, height, frames, 1, True), build, *target.programs_for)
        spec = builder.named(STEP)
        flops.append(work_of(spec).operations)
        programs.append(compiled_for(target, spec.name, export_program(spec, target.platform), ()))
        memory.append(programs[-1].memory_analysis().temp_size_in_bytes)
        given.append(arguments_of(spec))
    seconds, results = measured(programs, given, options.rounds)
    stored = options.quantise or "bfloat16"
    print(f"{cpu_name()}, {options.layers} layers of 1.3B, {options.size}, guidance, {stored} weights\n")
    print(
        "| rank | seconds | more FLOP | more CPU | of the least | of the floor | temporaries | bits of none |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for index, rank in enumerate(ranks):
        floor = flops[index] / flops[0] - 1
        took, cpu = np.array(seconds[index]).T
        _, none = np.array(seconds[0]).T
        more, least = np.median(cpu / none) - 1, min(cpu) / min(none) - 1
        times = f"{least / floor:.2f}" if rank else ""
        same = jax.tree.all(jax.tree.map(np.array_equal, results[index], results[0]))
        print(
            f"| {rank} | {min(took):.3f} | {floor:.1%} | {more:.1%} | {least:.1%} | {times} "
            f"| {memory[index] / 1e6:.0f} MB | {'yes' if same else 'no'} |"
        )


def measured(
    programs: Sequence[Any], given: Sequence[dict[str, Any]], rounds: int
) -> tuple[list[list[np.ndarray]], list[Any]]:
    """Returns the seconds and CPU seconds of each program by round, and its results."""
    seconds, results = [list[np.ndarray]() for _ in programs], list[Any](programs)
    for round_number in range(rounds + 1):
        order = range(len(programs))
        for index in order if round_number % 2 else reversed(order):
            begun = np.array([time.perf_counter(), time.process_time()])
            results[index] = jax.block_until_ready(programs[index](**given[index]))
            if round_number:  # the first one touches memory for the first time
                seconds[index].append(np.array([time.perf_counter(), time.process_time()]) - begun)
    return seconds, results


if __name__ == "__main__":
    main()
