"""The parts of gpu.py that build, check and start artifacts with the commands, as a user does.

As a script it writes a checkpoint: ``python gpu_artifact.py checkpoint JSON``.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu_bench import HERE, Bench, NotGivenError, ProcessFailedError, manifest_fields
from gpu_rows import COMPILES, Rows, main

SIZE, FRAMES = "96x64", 9
PROMPT = "A red fox runs through fresh snow at dawn"
HEAD_SIZE = 64
"""Of the toy's transformer: the attention of a GPU takes multiples of 8."""
START = ("1.3b", "832x480", 81)
"""The start that is timed: model, size, frames."""
STREAMED = 4
"""Steps of which the first does not count."""
CPU: Mapping[str, str] = MappingProxyType({"JAX_PLATFORMS": "cpu"})


def checkpoint(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Writes a checkpoint: the toy with a head size that GPUs take, or a published model full of zeros."""
    from checkpoints import ensure_checkpoint
    from wanbuild.toy.checkpoint import write_toy

    folder, model = Path(arguments["folder"]), arguments["model"]
    if model == "toy":
        write_toy(folder, configs={"transformer": {"attention_head_dim": HEAD_SIZE}})
    else:
        folder = ensure_checkpoint(folder, model, sparse=True)
    rows.add("checkpoint", note=str(folder))


def make(bench: Bench, folder: Path, target: str | None = None) -> None:
    """Makes the toy's artifact with the CPU's programs and golden records, and those of another target.

    Raises:
        ProcessFailedError: if a command fails.
        TimeoutError: if there is no time left.
    """
    bench.measure("gpu_artifact.py", "checkpoint", folder=str(folder / "checkpoint"), model="toy")
    artifact = folder / "artifact"
    bench.wanbuild("convert", folder / "checkpoint", "--artifact", artifact, **CPU)
    profile = ("--size", SIZE, "--frames", FRAMES, "--loop", "step")
    bench.wanbuild("compile", "--artifact", artifact, "--target", "cpu", *profile, **CPU)
    bench.wanbuild("verify", "--artifact", artifact, "--record", **CPU)
    if target is not None:
        bench.wanbuild("compile", "--artifact", artifact, "--target", target, *profile)


def _toy(bench: Bench, name: str) -> Path:
    """Returns a copy of the toy's artifact with golden records: of the given one, or of one made here."""
    made = bench.folder / "made"
    if not (made / "ready").exists():
        shutil.rmtree(made, ignore_errors=True)
        if bench.artifact is None:
            make(bench, made)
        else:
            shutil.copytree(bench.artifact, made / "artifact")
            if not manifest_fields(made / "artifact")["golden"]:
                bench.wanbuild("verify", "--artifact", made / "artifact", "--record", **CPU)
        (made / "ready").touch()
    shutil.copytree(made / "artifact", bench.folder / name / "artifact")
    return bench.folder / name / "artifact"


def _own_toy(bench: Bench, name: str) -> Path:
    """Returns the same without targets from elsewhere, which might be chosen instead of this machine's."""
    artifact = _toy(bench, name)
    if _elsewhere(artifact):
        bench.measure("gpu_artifact.py", "only_cpu", artifact=str(artifact))
    return artifact


def _run(bench: Bench, artifact: Path, *words: object, steps: int = 2) -> dict[str, Any]:
    """Makes steps of a video with ``wanrun`` and returns its timings; raises as ``Bench.run``."""
    timings = artifact.parent / "timing.json"
    common = ("--artifact", artifact, "--prompt", PROMPT, "--steps", steps, "--timing-json", timings)
    output = ("--output", artifact.parent / "out.npy", "--overwrite")
    words = (sys.executable, "-m", "wanrun", *common, *output, *words)
    bench.run("wanrun", words)
    return json.loads(timings.read_text())


def _cache(timings: Mapping[str, Any]) -> str:
    return f"{timings['cache_hits']} hits, {timings['cache_misses']} misses in the cache"


def _replay(bench: Bench, artifact: Path) -> None:
    """Replays the golden records, with the target that fits best, and adds how they agree."""
    outcome = artifact.parent / "verify.json"
    seconds = bench.wanbuild("verify", "--artifact", artifact, "--json", outcome)
    agreements = json.loads(outcome.read_text())["profiles"]
    for profile, agreement in agreements.items():
        bench.rows.add(f"golden {profile}", seconds, "s", agreement)
    if not agreements:
        bench.rows.fail("golden", "no profile with a record can run here")


def only_cpu(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Leaves only the targets of CPUs in an artifact's manifest; the next build removes the others' files."""
    from wanbuild.programs.export import used_sets
    from wanrun.artifact.manifest import read_manifest

    artifact = Path(arguments["artifact"])
    manifest = read_manifest(artifact)
    kept = {name: one for name, one in manifest.targets.items() if one.environment["platform"] == "cpu"}
    sets = used_sets(manifest.program_sets, kept)
    manifest.changed(targets=kept, program_sets=sets).write(artifact)


def native(bench: Bench) -> None:
    """Compiles the toy for this machine, makes a video, and compares with the CPU's golden records."""
    artifact = _own_toy(bench, "native")
    before = manifest_fields(artifact)
    name, profile = next(iter(before["profiles"].items()))
    options = profile["options"]
    words = ["--size", f"{profile['width']}x{profile['height']}", "--frames", profile["num_frames"]]
    for option in ("dtype", "vae_dtype", "loop"):
        words += [f"--{option.replace('_', '-')}", options[option]]
    seconds = bench.wanbuild("compile", "--artifact", artifact, "--target", "local", *words)
    after = manifest_fields(artifact)["targets"]
    targets = [key for key in after if bench.smoke or key not in before["targets"]] or list(after)
    bench.rows.add(
        f"wanbuild compile {name}", seconds, "s", tolerance=COMPILES, note=f"target {', '.join(targets)}"
    )
    with bench.rows.attempt("wanrun"):
        timings = _run(bench, artifact, "--target", targets[-1])
        bench.rows.add("wanrun, 2 steps", timings["total_seconds"], "s", _cache(timings))
        if timings["cache_misses"] or not timings["cache_hits"]:
            bench.rows.fail("cache", f"expected hits alone, found {_cache(timings)}")
    with bench.rows.attempt("golden"):
        _replay(bench, artifact)


def _elsewhere(artifact: Path) -> list[str]:
    """Returns the targets of an artifact that are not a CPU's."""
    targets = manifest_fields(artifact)["targets"]
    return [name for name, target in targets.items() if target["environment"]["platform"] != "cpu"]


def cross(bench: Bench) -> None:
    """Loads executables that were built on a machine without this chip, and says what happens."""
    if bench.artifact is None and not bench.smoke:
        raise NotGivenError("no artifact from elsewhere: give --artifact, made with --make")
    artifact = _toy(bench, "cross")
    elsewhere = ["cpu"] if bench.smoke else _elsewhere(artifact)
    name = bench.target or next(iter(elsewhere), "of a GPU")
    if name not in elsewhere:
        raise LookupError(f"the artifact has no target {name}: it has {', '.join(elsewhere) or 'none'}")
    bench.measure("gpu_entries.py", "entries", artifact=str(artifact), target=name)
    for more in ((), ("--allow-compile",)):
        what = " ".join(("wanrun --target", name, *more))
        started = time.monotonic()
        try:
            timings = _run(bench, artifact, "--target", name, *more)
        except ProcessFailedError as error:
            bench.rows.fail(
                what, f"exit code {error.code} after {time.monotonic() - started:.0f} s: {error.last}"
            )
            continue
        bench.rows.add(what, timings["total_seconds"], "s", f"exit code 0, {_cache(timings)}")
        break
    if not bench.smoke:  # native has replayed them, with the same programs
        with bench.rows.attempt("golden"):
            _replay(bench, artifact)


def _converted(bench: Bench, model: str) -> Path:
    """Returns an artifact of a model full of zeros, without programs; converts it once."""
    folder = bench.folder / "converted"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        bench.measure("gpu_artifact.py", "checkpoint", folder=str(folder), model=model)
        (source,) = folder.glob("checkpoint-*")
        seconds = bench.wanbuild("convert", source, "--artifact", folder / "artifact")
        bench.rows.add("convert", seconds, "s", tolerance=COMPILES)
        (folder / "ready").touch()
    return folder / "artifact"


def start(bench: Bench) -> None:
    """Times a start: from the command until the first step could be dispatched, and the restore in it."""
    model, size, frames = ("toy", SIZE, FRAMES) if bench.smoke else START
    if bench.smoke:
        artifact = _own_toy(bench, "start")
    else:
        artifact = _converted(bench, model)
        words = ("--size", size, "--frames", frames, "--loop", "step", "--target", "local", "--no-proxies")
        seconds = bench.wanbuild("compile", "--artifact", artifact, *words)
        bench.rows.add(
            f"wanbuild compile {size}x{frames}", seconds, "s", "with autotuning", tolerance=COMPILES
        )
    for attempt in ("first", "second"):
        timing = _ready(bench, artifact, size, frames)
        gigabytes, seconds = timing["restore_bytes"] / 1e9, timing["restore_seconds"]
        bench.rows.add(
            f"{model} until ready, {attempt}", timing["process_to_ready_seconds"], "s", _cache(timing)
        )
        rate = f"{gigabytes:.2f} GB, {gigabytes / seconds:.2f} GB/s" if seconds else ""
        bench.rows.add(f"{model} restore, {attempt}", seconds, "s", rate)
        bench.rows.add(f"{model} executables, {attempt}", timing["executables_seconds"], "s")
        if bench.smoke:
            break


def stream(bench: Bench) -> None:
    """Makes steps of a model whose layers stream through the device, and of one whose layers stay there.

    The weights are zeros: what counts are the transfers, of which a step brings all layers.
    """
    model, size, frames = ("toy", SIZE, FRAMES) if bench.smoke else START
    artifact = _own_toy(bench, "stream") if bench.smoke else _converted(bench, model)
    profile = ("--size", size, "--frames", frames)
    for loop, memory in (("stream", "stream"), ("step", "auto")):
        words = ("--loop", loop, "--target", "local", "--no-proxies")
        seconds = bench.wanbuild("compile", "--artifact", artifact, *profile, *words)
        bench.rows.add(f"wanbuild compile --loop {loop}", seconds, "s", tolerance=COMPILES)
        with bench.rows.attempt(f"--loop {loop}"):
            timings = _run(bench, artifact, *profile, "--loop", loop, "--memory", memory, steps=STREAMED)
            steps = timings["step_seconds"]
            middle = statistics.median(steps[1:])
            bench.rows.add(f"{model} step, --loop {loop}", middle, "s", f"first {steps[0]:.3f} s")


def _ready(bench: Bench, artifact: Path, size: str, frames: int) -> dict[str, Any]:
    """Runs ``wanrun`` until it is ready and returns its timings; raises as ``Bench.run``."""
    result = artifact.parent / "ready.json"
    words = ["--artifact", artifact, "--size", size, "--frames", frames, "--prompt", PROMPT, "--steps", 2]
    words += ["--no-embedding-cache", "--output", artifact.parent / "ready.npy"]
    payload = {"arguments": [str(word) for word in words], "stop": "ready", "result": str(result)}
    payload["spawned"] = time.monotonic()
    bench.run("wanrun", [sys.executable, "-P", HERE / "probes.py", "command", json.dumps(payload)])
    return json.loads(result.read_text())["timing"]


if __name__ == "__main__":
    main(MappingProxyType({"checkpoint": checkpoint, "only_cpu": only_cpu}))
