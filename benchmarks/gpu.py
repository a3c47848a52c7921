"""Measures this project on a machine with one NVIDIA GPU: one table, and one line of JSON.

    python benchmarks/gpu.py                          # what has no figure of this chip and these versions
    python benchmarks/gpu.py --part step-14b,start    # only these
    python benchmarks/gpu.py --again --seconds 3000   # all, in the order of their worth
    python benchmarks/gpu.py --check                  # what has figures: 1 if one is exceeded by too much
    python benchmarks/gpu.py --artifact DIR           # with an artifact that was built elsewhere for this GPU
    python benchmarks/gpu.py --kernel DIR             # and with an attention that was (see gpu_attention.py)
    python benchmarks/gpu.py --smoke                  # tiny shapes on the CPU: 1 if a part fails
    python benchmarks/gpu.py --table                  # writes the tables of README.md and docs/targets.md

It runs from a checkout and needs no network. The parts are in gpu_parts.py. Each runs in processes of its
own, so that one which fails, crashes or exceeds its time becomes a row with the reason, and the others go on.
What came of it is kept at once, in the folder ``gpu``, in a file for each chip: the next machine goes on
where this one stopped. Where the checkout does not come back, ``--kept DIR`` names a copy of that folder. Of
other versions of jax, the driver, CUDA or cuDNN (of torch, for its parts) all is measured anew. A smoke run
keeps what it finds where --kept is given, and goes on there too, so that all this can be tried without a GPU.

Weights are random, in the shapes of the published models, and made on the device; those of a start are zeros
on the disk.

TFLOP/s count matrix products and attention: see ``step_flops`` in gpu_device.py. "of ceiling" compares them
with this run's fastest matrix product.

The artifact from elsewhere is a toy with two experts, made with the same versions of Python's packages (jax,
jax-cuda13-pjrt; zstandard or not), because executables depend on them. On a machine without the GPU:

    python benchmarks/gpu.py --make DIR --target h200 --attention mosaic

The first lines of a run say which of the project's dependencies are missing. No part needs ffmpeg. How to get
the rest there, and what to call on a machine that is lent for a quarter of an hour: docs/notes/lent-gpu.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from gpu_artifact import make
from gpu_bench import Bench, ProcessFailedError, machine
from gpu_kept import FOLDER, Kept, beyond, pending, put, read_kept, with_before, write_kept
from gpu_parts import PARTS
from gpu_run import Outcomes, device_row, run_parts, table
from gpu_table import write_tables


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", help=f"separated by commas, of: {', '.join(PARTS)}")
    parser.add_argument("--again", action="store_true", help="also what has figures of these versions")
    parser.add_argument("--check", action="store_true", help="compare with the kept figures, and keep none")
    parser.add_argument("--seconds", type=float, default=540, help="for everything [default: 540]")
    parser.add_argument(
        "--artifact", type=Path, help="a toy artifact from elsewhere; it is copied, not changed"
    )
    parser.add_argument("--kernel", type=Path, help="an attention from elsewhere: see gpu_attention.py")
    parser.add_argument("--target", help="of --artifact: the target to load; of --make: the one to build")
    parser.add_argument("--kept", type=Path, help="the folder of the kept figures [default: benchmarks/gpu]")
    parser.add_argument("--json", type=Path, help="also write the line of JSON to this file")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--table", action="store_true", help="write the pages' tables, and measure nothing")
    parser.add_argument("--make", type=Path, metavar="DIR", help="make the toy artifact, and measure nothing")
    parser.add_argument("--attention", help="of the target of --make: one of wanbuild compile")
    options = parser.parse_args()
    options.part = list(dict.fromkeys(options.part.split(","))) if options.part else None
    if unknown := [name for name in options.part or () if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.make is not None and (options.target is None or options.make.exists()):
        parser.error("--make needs --target, and a folder that does not exist yet")
    return options


def make_artifact(bench: Bench, options: argparse.Namespace) -> None:
    """Makes the toy artifact with the CPU's target, golden records and the target of another machine."""
    bench.begin("make", time.monotonic() + options.seconds)
    try:
        attention = ("--attention", options.attention) if options.attention else ()
        make(bench, bench.folder, options.target, attention)
    except (ProcessFailedError, TimeoutError) as error:
        raise SystemExit(f"no artifact was made: {error}") from None
    shutil.move(bench.folder / "artifact", options.make)
    print(f"made {options.make}")


def measure(bench: Bench, options: argparse.Namespace, found: Mapping[str, Any]) -> tuple[Outcomes, Kept]:
    """Runs the parts that the options name, or that come next; returns what came of each, and the kept."""
    deadline, missing = time.monotonic() + options.seconds, found["missing"]
    outcomes = run_parts(PARTS, bench, ["device"], deadline, missing)
    device = device_row(outcomes)
    folder = options.kept or FOLDER
    kept = read_kept(folder, device.get("chip", "unknown"), device.get("note", ""))
    versions = {**found["versions"], **device.get("versions", {}), "driver": found["driver"]}
    here = {name: version for name, version in versions.items() if version}

    def keep(name: str, outcome: Mapping[str, Any]) -> None:
        put(kept, name, PARTS[name], outcome, here, date.today().isoformat())
        write_kept(folder, kept)

    names = _chosen(options, kept, here)
    keeps = options.kept is not None if options.smoke else device.get("platform") == "gpu"
    kept_by = keep if keeps and not options.check else None
    run_parts(PARTS, bench, names, deadline, missing, outcomes, kept_by)
    return outcomes, kept


def _chosen(options: argparse.Namespace, kept: Kept, here: Mapping[str, str]) -> Sequence[str]:
    """The parts to run after the device, with those whose artifacts they take."""
    parts = {name: part for name, part in PARTS.items() if part.smoke or not options.smoke}
    if options.part is not None:
        names = options.part
    elif options.check:
        names = [name for name in parts if "measured" in kept["parts"].get(name, {})]
    else:
        names = list(parts) if options.again else pending(parts, kept, here)
    return [name for name in with_before(PARTS, names) if name != "device"]


def compare(outcomes: Outcomes, kept: Kept) -> bool:
    """Prints what is beyond the kept figures; returns whether something was compared, and nothing is."""
    ran = [name for name, outcome in outcomes.items() if outcome["state"] != "left out"]
    compared = [name for name in ran if "measured" in kept["parts"].get(name, {})]
    lines = [line for name in compared for line in beyond(name, kept, outcomes[name])]
    print(f"compared with the kept figures of {kept['chip']}: {', '.join(compared) or 'nothing'}")
    print("\n".join(lines) or "within the tolerances")
    return bool(compared) and not lines


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    options = _options()
    if options.table:
        write_tables()
        return
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
        outcomes, kept = measure(bench, options, found)
    print(table(outcomes))
    line = json.dumps({"machine": found, "smoke": options.smoke, "parts": outcomes})
    print(line, flush=True)
    if options.json is not None:
        options.json.write_text(line + "\n")
    failed = options.smoke and any(outcome["state"] == "failed" for outcome in outcomes.values())
    if failed or (options.check and not compare(outcomes, kept)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
