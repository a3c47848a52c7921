"""The parts of gpu.py that build and check artifacts with the commands, as a user does.

As a script it writes a checkpoint: ``python gpu_artifact.py checkpoint JSON``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu_bench import ROOT, Bench, NotGivenError, ProcessFailedError, manifest_fields
from gpu_rows import COMPILES, Rows, main

SIZE, FRAMES = "96x64", 9
PROMPT = "A red fox runs through fresh snow at dawn"
HEAD_SIZE = 128
"""Of the toy's transformer, as published: cuDNN's attention takes multiples of 8, Mosaic's only this."""
TRAINED = ROOT / "artifacts" / "tiny" / "wan2.1-t2v"
DRAWN, DRAWN_FRAMES, DRAWN_STEPS = "a red ball rolls to the right over green ground", 17, 30
"""A caption as the trained model knows them, and the length that it has learned."""
FORMS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = MappingProxyType(
    {
        "float32": (
            ("--weights-dtype", "float32", "--text-weights-dtype", "float32"),
            ("--dtype", "float32", "--vae-precision", "highest"),
        ),
        "default": ((), ()),
    }
)
"""By name, how the trained model is converted and compiled."""
LEAST_DECIBELS = 40
"""Of the default dtypes, frames are 48 to 53 dB from float32."""
CPU: Mapping[str, str] = MappingProxyType({"JAX_PLATFORMS": "cpu"})


def checkpoint(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Writes a checkpoint: the toy with the published head size, or a published model.

    Args:
        rows: gets the folder.
        arguments: ``folder``; ``model``, ``toy`` or one of ``checkpoints.MODELS``, of which also ``dtype``,
            ``layers`` (of each transformer; all without), and ``random``, whether values are random and not
            zeros that take no disk space.
    """
    from checkpoints import ensure_checkpoint
    from wanbuild.toy.toy_checkpoint import write_toy

    folder, model = Path(arguments["folder"]), arguments["model"]
    if model == "toy":
        write_toy(folder, "wan2.2-t2v", configs={"transformer": {"attention_head_dim": HEAD_SIZE}})
    else:
        layers = arguments.get("layers")
        folder = ensure_checkpoint(
            folder, model, sparse=True, transformer_layers=layers, dtype=arguments["dtype"]
        )
    if arguments.get("random"):
        for path in folder.rglob("*.safetensors"):
            _fill(path)
    rows.add("checkpoint", note=str(folder))


def _fill(path: Path) -> None:
    """Puts random bfloat16 into a file full of zeros, uniform in ±0.03: a block of them again and again."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(zlib.crc32(path.parent.name.encode()))
    block = memoryview(rng.uniform(-0.03, 0.03, 2**24).astype(ml_dtypes.bfloat16).tobytes())
    with path.open("r+b") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        left = file.seek(0, os.SEEK_END) - begin
        file.seek(begin)
        while left:
            left -= file.write(block[:left])


def make(bench: Bench, folder: Path, target: str | None = None, attention: Sequence[str] = ()) -> None:
    """Makes the toy's artifact with the CPU's programs and golden records, and those of another target.

    Args:
        bench: runs the processes.
        folder: gets the checkpoint and the artifact.
        target: what is also compiled for; None for nothing.
        attention: words that choose its attention.

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
        bench.wanbuild("compile", "--artifact", artifact, "--target", target, *profile, *attention)


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


def own_toy(bench: Bench, name: str) -> Path:
    """Returns the same without targets from elsewhere, which might be chosen instead of this machine's."""
    artifact = _toy(bench, name)
    if _elsewhere(artifact):
        bench.measure("gpu_artifact.py", "only_cpu", artifact=str(artifact))
    return artifact


def run_wanrun(
    bench: Bench,
    artifact: Path,
    *words: object,
    steps: int = 2,
    prompt: str = PROMPT,
    output: str = "out.npy",
    **environment: str,
) -> dict[str, Any]:
    """Makes steps of a video with ``wanrun`` and returns its timings; raises as ``Bench.run``."""
    timings = artifact.parent / "timing.json"
    common = ("--artifact", artifact, "--prompt", prompt, "--steps", steps, "--timing-json", timings)
    outputs = ("--output", artifact.parent / output, "--overwrite")
    # Not -m wanrun, which asks for an installed command: a checkout runs without.
    words = (sys.executable, "-m", "wancli", *common, *outputs, *words)
    bench.run("wanrun", words, **environment)
    return json.loads(timings.read_text())


def cache_words(timings: Mapping[str, Any]) -> str:
    """Returns the hits and misses of a run."""
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
    artifact = own_toy(bench, "native")
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
        timings = run_wanrun(bench, artifact, "--target", targets[-1])
        bench.rows.add("wanrun, 2 steps", timings["total_seconds"], "s", cache_words(timings))
        if timings["cache_misses"] or not timings["cache_hits"]:
            bench.rows.fail("cache", f"expected hits alone, found {cache_words(timings)}")
    with bench.rows.attempt("golden"):
        _replay(bench, artifact)


def _trained(bench: Bench, form: str) -> Path:
    """Returns a trained tiny model's artifact with programs for the CPU and for this machine."""
    stored, computed = FORMS[form]
    artifact = bench.folder / f"tiny-{form}" / "artifact"
    artifact.parent.mkdir()
    bench.wanbuild("convert", TRAINED, "--artifact", artifact, *stored, **CPU)
    profile = ("--size", SIZE, "--frames", DRAWN_FRAMES, "--loop", "step", *computed)
    bench.wanbuild("compile", "--artifact", artifact, "--target", "cpu", *profile, **CPU)
    seconds = bench.wanbuild("compile", "--artifact", artifact, "--target", "local", *profile)
    bench.rows.add("wanbuild compile", seconds, "s", tolerance=COMPILES)
    return artifact


def tiny(bench: Bench, form: str) -> None:
    """Makes a trained tiny model's video on the CPU and on this machine's device, and compares them.

    A smoke run makes the toy's, twice on the CPU.

    Args:
        bench: runs the processes.
        form: one of ``FORMS``.
    """
    artifact = own_toy(bench, f"tiny-{form}") if bench.smoke else _trained(bench, form)
    here = next(iter(_elsewhere(artifact)), "cpu")
    steps = 2 if bench.smoke else DRAWN_STEPS
    for name, target, environment in (("expected", "cpu", CPU), ("found", here, {})):
        words = ("--target", target, "--save-latents", artifact.parent / f"{name}-latents.npy")
        timings = run_wanrun(
            bench, artifact, *words, steps=steps, prompt=DRAWN, output=f"{name}.npy", **environment
        )
        if name == "found":
            bench.rows.add("wanrun", timings["total_seconds"], "s", f"{steps} steps, {cache_words(timings)}")
    bench.measure("gpu_artifact.py", "compare", folder=str(artifact.parent))


def compare(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Compares the latents and the frames that ``tiny`` has made.

    Raises:
        ArithmeticError: if the frames are further apart than any choice of dtypes puts them.
    """
    import numpy as np

    def pair(ending: str) -> list[Any]:
        arrays = (np.load(Path(arguments["folder"], name + ending)) for name in ("found", "expected"))
        return [array.astype(np.float64) for array in arrays]

    found, expected = pair("-latents.npy")
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    rows.add("final latents", float(error), "relative to the CPU's")
    found, expected = pair(".npy")
    apart, squares = np.max(np.abs(found - expected)), np.mean((found - expected) ** 2)
    decibels = 10 * np.log10(255**2 / squares) if squares else np.inf
    rows.add("frames", float(apart), "levels at most", f"{decibels:.1f} dB")
    if decibels < LEAST_DECIBELS:
        raise ArithmeticError(f"the frames are {decibels:.1f} dB from the CPU's, fewer than {LEAST_DECIBELS}")


def _elsewhere(artifact: Path) -> list[str]:
    """Returns the targets of an artifact that are not a CPU's."""
    targets = manifest_fields(artifact)["targets"]
    return [name for name, target in targets.items() if target["environment"]["platform"] != "cpu"]


def play(rows: Rows, arguments: Mapping[str, Any]) -> None:
    """Makes the target of the CPU one that looks as if it had been built without it, and leaves no other."""
    import msgspec

    from wanrun.artifact.manifest import read_manifest

    artifact = Path(arguments["artifact"])
    manifest = read_manifest(artifact)
    target = manifest.targets["cpu"]
    facts = {**target.environment, "topology": PLAYED, "device_kinds": [target.environment["device_kind"]]}
    manifest.changed(targets={PLAYED: msgspec.structs.replace(target, environment=facts)}).write(artifact)


PLAYED = "played"
"""The target of a smoke run that looks as if it had been built elsewhere."""


def cross(bench: Bench) -> None:
    """Loads executables that were built on a machine without this chip, and runs them as a user does.

    ``wanrun`` decides whether it trusts them. In a smoke run the chip is the CPU.
    """
    if bench.artifact is None and not bench.smoke:
        raise NotGivenError("no artifact from elsewhere: give --artifact, made with --make")
    artifact = _toy(bench, "cross")
    if bench.smoke:
        bench.measure("gpu_artifact.py", "play", artifact=str(artifact))
    elsewhere = [PLAYED] if bench.smoke else _elsewhere(artifact)
    name = bench.target or next(iter(elsewhere), "of a GPU")
    if name not in elsewhere:
        raise LookupError(f"the artifact has no target {name}: it has {', '.join(elsewhere) or 'none'}")
    bench.measure("gpu_entries.py", "entries", artifact=str(artifact), target=name)
    for more in ((), ("--allow-compile",)):
        what = " ".join(("wanrun --target", name, *more))
        started = time.monotonic()
        try:
            timings = run_wanrun(bench, artifact, "--target", name, *more)
        except ProcessFailedError as error:
            bench.rows.fail(
                what, f"exit code {error.code} after {time.monotonic() - started:.0f} s: {error.last}"
            )
            continue
        bench.rows.add(what, timings["total_seconds"], "s", f"exit code 0, {cache_words(timings)}")
        break
    if not bench.smoke:  # native has replayed them, with the same programs
        with bench.rows.attempt("golden"):
            _replay(bench, artifact)


if __name__ == "__main__":
    main(MappingProxyType({"checkpoint": checkpoint, "only_cpu": only_cpu, "play": play, "compare": compare}))
