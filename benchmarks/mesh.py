"""What a mesh costs: bytes that each device sends in a denoising step, memory, and masked attention.

The steps of published models are compiled for virtual CPU devices from their configs alone. The bytes come
from the compiled HLO; the formula beside them says what they should be. The CPU backend has no bfloat16
collectives but those of bits, so activations travel as float32 here, and the formula counts them so.

    python benchmarks/mesh.py --model 14b --size 1280x720 --mesh data=2,context=4 --mesh ring=8
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from checkpoints import MODELS
from collectives import KINDS, sent_bytes
from compile_memory import published_manifest
from wanbuild.models.params import abstract_params, flatten, parameter_axes
from wanbuild.models.partition import PARAMETERS
from wanbuild.programs.builder import ProgramBuilder
from wanbuild.programs.export import export_program
from wanbuild.programs.options import BuildOptions, Shape
from wanbuild.targets.target import resolve_target
from wanrun.artifact.jax_process import JaxFlags
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.mesh import cut, jax_mesh, jax_sizes, mesh_text, parse_mesh
from wanrun.loading.jax_cache import lower

MESHES = (
    "data=2,context=4",
    "ring=8",
    "ring=2,context=4",
    "data=2,ring=2,context=2",
    "data=2,fsdp=4",
    "data=2,tensor=4",
)
DEVICES = 8
ACTIVATION_BYTES = 4
"""Of a value that travels between CPU devices."""

PREPARED = ("blocks/attn2/to_k", "blocks/attn2/to_v")
"""Parameters that a step does not use: ``prepare`` does, once."""


def formula(builder: ProgramBuilder, sizes: Mapping[str, int], shape: Shape) -> dict[str, float]:
    """Returns the bytes that one device should send in a step of a model of text alone, by kind."""
    config: Any = builder._configs["transformer"]
    ring, fsdp, context, tensor, data = (
        sizes.get(axis, 1) for axis in ("ring", "fsdp", "context", "tensor", "data")
    )
    exchanged, parts = fsdp * context, ring * fsdp * context
    batch = shape.num_videos * (1 + shape.guidance)
    count = math.prod(config.grid(builder.latent_shape))
    tokens = -(-count // parts)  # of one device
    here, layers = batch / data, config.num_layers
    values = (
        here * tokens * config.dim / tensor * ACTIVATION_BYTES
    )  # queries, or keys, or values of one device
    prompts = (1 + shape.guidance) / min(data, 1 + shape.guidance)
    # Keys and values of text are kept in parts of heads, as bits of bfloat16.
    cache = 2 * prompts * 512 * config.dim / tensor * 2
    stored = 1
    for size in (context, fsdp, ring):
        if config.num_attention_heads % (tensor * stored * size) == 0:
            stored *= size
    out = config.patch_volume * config.out_channels * 4
    return {
        "all-to-all": 4 * layers * values * (exchanged - 1) / exchanged,
        "collective-permute": 2 * layers * values * (ring - 1),
        "all-reduce": 2 * (tensor - 1) / tensor * layers * here * tokens * (3 * config.dim + 3) * 4,
        "all-gather": layers * cache * (stored - 1) / stored
        + layers * layer_bytes(builder, sizes) * (fsdp - 1) / fsdp
        + (parts - 1) / parts * here * tokens * parts * out
        + (data - 1) / data * batch * tokens * parts * out,
    }


def layer_bytes(builder: ProgramBuilder, sizes: Mapping[str, int]) -> float:
    """Returns the bytes of one layer's parameters that are gathered along ``fsdp``, cut along ``tensor``."""
    module, named = builder._modules["transformer"], jax_sizes(sizes)
    axes, total = parameter_axes(module), 0.0
    for name, leaf in flatten(abstract_params(module)):
        cuts = cut(axes[name], leaf.shape, PARAMETERS, named)
        if (
            name.startswith("blocks/")
            and not name.startswith(PREPARED)
            and any("fsdp" in one for one in cuts)
        ):
            parts = math.prod(named[axis] for one in cuts for axis in one if axis != "fsdp")
            total += math.prod(leaf.shape[1:]) * jnp.dtype(leaf.dtype).itemsize / parts
    return total


def measure(manifest: Manifest, shape: Shape, text: str) -> dict[str, Any]:
    """Compiles a step over a mesh and returns its figures."""
    sizes = parse_mesh(text)
    target = resolve_target("cpu", {"data": DEVICES})
    builder = ProgramBuilder(manifest, shape, BuildOptions(), target.kernels, sizes, target.devices)
    spec = builder.denoise_step()
    where = jax_mesh(sizes, target.devices) or target.devices[0]
    lowered = lower(export_program(spec, "cpu"), spec.name, spec.donate, where)
    started = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - started
    memory: Any = compiled.memory_analysis()
    count = math.prod(builder._configs["transformer"].grid(builder.latent_shape))
    parts = math.prod(sizes.get(axis, 1) for axis in ("ring", "fsdp", "context"))
    padded = -(-count // parts) * parts
    return {
        "mesh": mesh_text(sizes),
        "compile": seconds,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "masked": 1 - (count / padded) ** 2,
        "sent": dict(sent_bytes(compiled.as_text())),
        "formula": formula(builder, sizes, shape),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", default="1.3b", choices=[name for name in MODELS if MODELS[name][0].endswith("t2v")]
    )
    parser.add_argument("--size", default="832x480")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--mesh", action="append", help="repeatable; six of eight devices where not given")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    shape = Shape(width, height, options.frames, 1, guidance=True)
    manifest = published_manifest(options.model)
    with JaxFlags("cpu"):
        print(f"{options.model} {options.size}x{options.frames}, guidance on, per device and step, in GB")
        print(f"{'mesh':<26}{'arguments':>10}{'temporaries':>12}{'masked':>9}  sent (formula)")
        for text in options.mesh or MESHES:
            found = measure(manifest, shape, text)
            sent = ", ".join(
                f"{kind} {found['sent'].get(kind, 0) / 1e9:.3f} ({found['formula'].get(kind, 0) / 1e9:.3f})"
                for kind in KINDS
                if found["sent"].get(kind, 0) or found["formula"].get(kind, 0)
            )
            memory = f"{found['arguments'] / 1e9:>10.2f}{found['temporaries'] / 1e9:>12.2f}"
            print(f"{found['mesh']:<26}{memory}{found['masked']:>9.2%}  {sent}", flush=True)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
