"""What a mesh costs: bytes that each device sends in a pass of a step, memory, and masked attention.

The steps of published models are compiled for virtual CPU devices from only their configs. The bytes come
from the compiled HLO; the formula beside them says what they should be. The CPU backend has no bfloat16
collectives but those of bits, so activations travel as float32 here, and the formula counts them so.

    python benchmarks/mesh.py --model 14b --size 1280x720 --mesh data=2,context=4 --mesh ring=8
"""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any

from checkpoints import MODELS
from collectives import KINDS, sent_bytes
from wanbuild.build_options import BuildOptions
from wanbuild.plan.exchange import PlannedStep
from wanbuild.plan.published_model import published_manifest
from wanbuild.programs.export import export_program
from wanbuild.programs.jax_flags import pinned
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.targets.parsing import parse_mesh
from wanbuild.targets.target import resolve_target
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.mesh import jax_mesh, mesh_text
from wanrun.executables.lowering import lower

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


def measure(manifest: Manifest, shape: Shape, text: str) -> dict[str, Any]:
    """Compiles a step over a mesh and returns its figures."""
    sizes = parse_mesh(text)
    target = resolve_target("cpu", {"data": DEVICES})
    builder = ProgramBuilder(manifest, shape, BuildOptions(), target.kernels, sizes, target.devices)
    spec = builder.first("step")
    where = jax_mesh(sizes, target.devices) or target.devices[0]
    lowered = lower(export_program(spec, "cpu"), spec.name, spec.donate, where)
    started = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - started
    memory: Any = compiled.memory_analysis()
    step = PlannedStep(
        builder.configs["transformer"],
        manifest.components["transformer"],
        shape,
        builder.latent_shape,
        manifest.tokenizer.max_length,
        ACTIVATION_BYTES,
    )
    parts = math.prod(sizes.get(axis, 1) for axis in ("ring", "fsdp", "context"))
    padded = -(-step.tokens // parts) * parts
    return {
        "mesh": mesh_text(sizes),
        "compile": seconds,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "masked": 1 - (step.tokens / padded) ** 2,
        "sent": dict(sent_bytes(compiled.as_text(), turns=1)),
        "formula": step.sent(sizes),
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
    manifest = published_manifest(MODELS[options.model][1])
    with pinned("cpu"):
        print(f"{options.model} {options.size}x{options.frames}, guidance on, per device and pass, in GB")
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
