"""Decodes a video of a published VAE's shape at once and piece by piece: seconds, the first frame, memory.

Each form runs in a process of its own, with random weights. ``once`` is one program for the whole
video, as profiles had before there were pieces.

    python benchmarks/decoding.py --size 416x240 --frames 17
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMS = ("once", "pieces")
MODEL = "Wan2.1-T2V-1.3B-Diffusers"


def main() -> None:
    """Runs both forms, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="416x240", help="WIDTHxHEIGHT.")
    parser.add_argument("--frames", type=int, default=17)
    parser.add_argument("--chunk", type=int, default=1, help="Latent frames of a piece.")
    parser.add_argument("--dtype", default="float32", help="Of activations.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.form:
        print(json.dumps(_measured(given)))
        return
    rows = []
    for form in FORMS:
        done = subprocess.run(
            [sys.executable, __file__, "--form", form, *sys.argv[1:]], check=True, stdout=subprocess.PIPE
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print("| | " + " | ".join(FORMS) + " |\n|---|---|---|")
    for name in rows[0]:
        print(f"| {name} | " + " | ".join(str(row[name]) for row in rows) + " |")


def _measured(given: argparse.Namespace) -> dict[str, Any]:
    """Compiles the programs of one form, decodes, and returns what was seen."""
    import jax
    import numpy as np

    from wanbuild.build_options import BuildOptions
    from wanbuild.plan.published_model import published_manifest
    from wanbuild.programs import decode_programs
    from wanbuild.programs.export import export_program
    from wanbuild.programs.kinds import ProgramBuilder
    from wanbuild.programs.shape import Shape
    from wanbuild.programs.xla import compiled_for
    from wanbuild.targets.target import resolve_target
    from wanrun.files import sha256_of

    width, height = map(int, given.size.split("x"))
    target = resolve_target("local")
    manifest, shape = published_manifest(MODEL), Shape(width, height, given.frames, 1, True)
    options = BuildOptions(vae_dtype=given.dtype, vae_decode_chunk=given.chunk)
    parts = ProgramBuilder(manifest, shape, options, *target.programs_for)
    if given.form == "once":
        decode_programs.flows = lambda parts: False
    specs = [spec for spec in parts.programs() if spec.role in ("decode_first", "decode")]
    found: dict[str, Any] = {}
    started, compiled = time.perf_counter(), []
    for spec in specs:
        compiled.append(compiled_for(target, spec.name, export_program(spec, target.platform), spec.donate))
    found["compile, s"] = round(time.perf_counter() - started, 1)
    memory: list[Any] = [one.memory_analysis() for one in compiled]
    found["temporaries, GB"] = " + ".join(f"{one.temp_size_in_bytes / 1e9:.2f}" for one in memory)
    found["state, GB"] = f"{memory[-1].alias_size_in_bytes / 1e9:.2f}"
    random = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> Any:
        values = random.standard_normal(leaf.shape, np.float32)
        values = values / np.prod(leaf.shape[:-1]) ** 0.5 if len(leaf.shape) > 1 else 0.5 + 0.3 * values
        if leaf.dtype == np.uint16:
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        return jax.device_put(values.astype(leaf.dtype))

    weights = jax.tree.map(draw, specs[0].arguments[0])
    frames = (given.frames - 1) // 4 + 1
    latents = random.standard_normal((16, frames, height // 8, width // 8), np.float32)

    def made() -> Iterator[np.ndarray]:
        if given.form == "once":
            yield np.asarray(compiled[0](vae=weights, latents=latents)["frames"])
            return
        first, following = compiled
        out = first(vae=weights, latents=latents[:, :1])
        waiting = out["frames"]
        for start in range(1, frames, given.chunk):
            out = following(vae=weights, latents=latents[:, start : start + given.chunk], past=out["past"])
            yield np.asarray(waiting)
            waiting = out["frames"]
        yield np.asarray(waiting)

    seconds, busy, begun, kept = [], [], [], b""
    for _ in range(given.repeats):
        started, used, parts_ = time.perf_counter(), time.process_time(), []
        for piece in made():
            if not parts_:
                begun.append(time.perf_counter() - started)
            parts_.append(piece.tobytes())
        seconds.append(time.perf_counter() - started)
        busy.append(time.process_time() - used)
        kept = b"".join(parts_)
    found["decode, s"] = " ".join(f"{one:.2f}" for one in seconds)
    found["decode, seconds of all cores"] = " ".join(f"{one:.1f}" for one in busy)
    found["until the first frames, s"] = " ".join(f"{one:.2f}" for one in begun)
    peak = next(line for line in Path("/proc/self/status").read_text("utf-8").splitlines() if "VmHWM" in line)
    found["peak memory, GB"] = f"{int(peak.split()[1]) * 1024 / 1e9:.2f}"
    found["frames"] = sha256_of(kept)[:12]
    return found


if __name__ == "__main__":
    main()
