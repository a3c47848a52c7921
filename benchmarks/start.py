"""Times a start, its floor and diffusers, page cache warm and cold, in one run.

The artifact has the published transformer and VAE shapes and random weights; the text encoder has the
published width and one layer. Every figure is a median over separate processes; the variants take turns, so
that noise of a shared machine affects all of them. Quote ratios of one run.

    python benchmarks/start.py                                    # everything, 1.3B: most of an hour
    python benchmarks/start.py --only floor,ready,help,imports    # without a denoising step: minutes
    python benchmarks/start.py --model toy                        # a smoke run, everything once

floor     interpreter + import jax + reading a start's bytes, in parallel, into fresh memory
ready     the wanrun command from process start until a first step could be dispatched, then ended
step      the wanrun command until the end of its second step, then ended; diffusers, eager, likewise
compiled  diffusers with torch.compile: once with an empty compile cache, then with that cache
decode    whole runs of the command and of diffusers, with two steps
help      wanrun --help; imports: the modules of a start that is ready, besides jax
traces    what JAX traced and compiled, by its report; overhead: Python between the steps, on the toy

Two variants of a start: "encoded" encodes both prompts, "stored" finds both embeddings in the user's cache
and does not read the text encoder. "cold" drops the artifact and the checkpoint, not installed packages.

A virtual machine may return free 2 MiB pages to its host within seconds. Their next touch then waits for the
host (0.5 GB/s was seen, and 10 GB/s for recently used memory), while the cost of 4 KiB pages is constant. So
the floor is measured with both page sizes, and the faster one counts; the system's CPU seconds show which.

diffusers computes in the dtype that is the fastest on the target's CPUs. For a CPU level below this one's
own, its libraries are limited to that level by their own variables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints import ensure_checkpoint
from cpus import cpu_name, fair_dtype, limits
from pagecache import cold, warm
from peers import diffusers
from processes import clean_environment, measure, run_timed
from start_report import EMPTY_COMPILE_CACHE, report

PARTS = ("floor", "ready", "step", "compiled", "decode", "help", "imports", "traces", "overhead")
PROMPT = "A red fox runs through fresh snow at dawn"
NEGATIVE_PROMPT = "blurred, overexposed, a still picture"  # the artifact's may have a stored embedding
PROBES = Path(__file__).with_name("probes.py")
SHAPES = {"1.3b": ("448x256", 9), "toy": ("96x64", 9)}
READ = {"encoded": ("text_encoder", "transformer"), "stored": ("transformer",)}
"""The components that are read before a start is ready."""
OVERHEAD_STEPS = 300
SHORT, LONG = 120.0, 1800.0
"""Timeouts of a start and of a generation, in seconds."""


def command(name: str) -> str:
    """Returns the path of a command installed in this interpreter's environment."""
    return str(Path(sys.executable).with_name(name))


def build(folder: Path, model: str, size: str, frames: int, target: str = "cpu") -> tuple[Path, Path]:
    """Returns the checkpoint and its artifact with this profile and target; creates what is missing."""
    checkpoint, artifact = folder / f"checkpoint-{model}", folder / f"artifact-{model}"
    if model != "toy":
        checkpoint = ensure_checkpoint(folder, model)
    elif not checkpoint.exists():
        run_timed([command("wanbuild"), "toy", checkpoint], LONG)
    if not artifact.exists():
        run_timed([command("wanbuild"), "convert", checkpoint, "--artifact", artifact], LONG)
    profile = ("--size", size, "--frames", frames)
    run_timed([command("wanbuild"), "compile", "--artifact", artifact, "--target", target, *profile], LONG)
    return checkpoint, artifact


class Starts:
    """Runs the parts and keeps every run.

    Attributes:
        runs: one object per run: part, who, variant, cache state and the figures.
        notes: what could not be measured, and the reasons.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, checkpoint: Path, artifact: Path) -> None:
        self.options, self.folder, self.checkpoint, self.artifact = options, folder, checkpoint, artifact
        self.runs: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.environment = clean_environment(OMP_NUM_THREADS=str(options.threads))
        self.files = {
            side: sorted(path for path in side.rglob("*") if path.is_file() and path.stat().st_size)
            for side in (artifact, checkpoint)
        }
        usage = [command("wanrun"), "--help"]
        run_timed(usage, SHORT, self.environment)  # writes bytecode
        self.variants = self._variants()

    def _variants(self) -> list[str]:
        """Returns the variants of a start that this wanrun has; fills the second one's cache."""
        if {"step", "ready", "floor"}.isdisjoint(self.options.only):
            return ["encoded"]
        self._wanrun("stored", 1)
        if any(path.is_file() for path in (self.folder / "stored").rglob("*")):
            return ["encoded", "stored"]
        self.notes.append("no embedding was kept in the user's cache: the variant 'stored' is left out")
        return ["encoded"]

    def set_cache(self, state: str, folder: Path) -> float:
        """Makes the files of one side warm, or those of both cold; returns their resident fraction."""
        if state == "warm":
            return warm(self.files[folder])
        return cold([path for files in self.files.values() for path in files])

    def _wanrun_arguments(self, *more: object) -> list[str]:
        size, frames = self.options.size, self.options.frames
        words = ["--artifact", self.artifact, "--size", size, "--frames", frames, "--prompt", PROMPT]
        words += ["--negative-prompt", NEGATIVE_PROMPT, "--steps", 4, "--target", self.options.target]
        return [str(word) for word in [*words, *more]]

    def _wanrun(self, variant: str, stop: int | str, **more: Any) -> dict[str, Any]:
        """Runs the command until a moment; an own cache folder means that the cache is empty."""
        with tempfile.TemporaryDirectory() as scratch:
            cache = str(self.folder / "stored") if variant == "stored" else scratch
            return measure(
                PROBES,
                "command",
                {
                    "stop": stop,
                    "arguments": self._wanrun_arguments("--output", Path(scratch) / "out.npy"),
                    **more,
                },
                timeout=SHORT if stop == "ready" else LONG,
                environment={**self.environment, "XDG_CACHE_HOME": cache},
            )

    def _keep(self, part: str, who: str, variant: str, state: str, figures: dict[str, Any]) -> None:
        run = {"part": part, "who": who, "variant": variant, "cache": state, **figures}
        self.runs.append(run)
        shown = {
            name: round(value, 3)
            for name, value in run.items()
            if isinstance(value, float) and name.endswith(("_seconds", "resident"))
        }
        for name, value in run.get("timing", {}).items():
            if name.startswith("process_to") and value is not None:
                shown[name] = round(value, 3)
        print(f"{part} {who} {variant} {state} {shown}", file=sys.stderr)

    def starts(self) -> None:
        """Measures the floor and the start until ready, in turns."""
        floors = [(variant, pages) for variant in self.variants for pages in ("numpy", "small")]
        for _, state in itertools.product(range(self.options.repeat), self.options.caches):
            for variant, pages in floors if "floor" in self.options.only else ():
                self._floor(variant, pages, state)
            for variant in self.variants if "ready" in self.options.only else ():
                resident = self.set_cache(state, self.artifact)
                self._keep(
                    *("ready", "wanrun", variant, state),
                    {"resident": resident, **self._wanrun(variant, "ready")},
                )

    def _floor(self, variant: str, pages: str, state: str) -> None:
        """Runs the floor; pages: 'numpy' as np.empty requests them (huge if granted) or 'small'."""
        chunks = [
            (str(path), path.stat().st_size)
            for name in READ[variant]
            for path in sorted((self.artifact / "weights" / name).glob("*/c/**/*"))
            if path.is_file()
        ]
        resident = self.set_cache(state, self.artifact)
        environment = {**self.environment, "NUMPY_MADVISE_HUGEPAGE": str(int(pages == "numpy"))}
        figures = measure(
            *(PROBES, "floor", {"threads": self.options.read_threads, "files": chunks}),
            timeout=SHORT,
            environment=environment,
        )
        self._keep("floor", pages, variant, state, {"resident": resident, **figures})

    def _diffusers(self, state: str, *, cache: Path | None = None, **options: Any) -> dict[str, Any]:
        """Runs diffusers once, compiled if a folder for its compile cache is given."""
        resident = self.set_cache(state, self.checkpoint)
        environment = self.environment | limits(self.options.target)
        if cache is not None:
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        width, height = map(int, self.options.size.split("x"))
        figures = diffusers(
            *(self.checkpoint, (width, height), self.options.frames, (PROMPT, NEGATIVE_PROMPT)),
            compiled=cache is not None,
            threads=self.options.threads,
            timeout=LONG,
            environment=environment,
            dtype=fair_dtype(self.options.target),
            **options,
        )
        return {"resident": resident, **figures}

    def steps(self) -> None:
        """Measures until the end of the second step: wanrun, diffusers eager and compiled, in turns."""
        only, reference = self.options.only, self.options.reference
        with tempfile.TemporaryDirectory() as compile_cache:
            inductor = Path(compile_cache)
            if "compiled" in only and reference:
                figures = self._diffusers("warm", cache=inductor, steps=3, stop_after=2)
                self._keep("step", "compiled", EMPTY_COMPILE_CACHE, "warm", figures)
            for _, state in itertools.product(range(self.options.step_repeat), self.options.step_caches):
                for variant in self.variants if "step" in only else ():
                    resident = self.set_cache(state, self.artifact)
                    figures = {"resident": resident, **self._wanrun(variant, 3)}
                    self._keep("step", "wanrun", variant, state, figures)
                    if reference and variant == "encoded":
                        figures = self._diffusers(state, steps=3, stop_after=2)
                        self._keep("step", "eager", "encoded", state, figures)
                if "compiled" in only and reference:
                    figures = self._diffusers(state, cache=inductor, steps=3, stop_after=2)
                    self._keep("step", "compiled", "encoded", state, figures)

    def decodes(self) -> None:
        """Measures whole runs with the VAE's decode: the command as a user runs it, and diffusers."""
        for _ in range(self.options.decode_repeat):
            resident = self.set_cache("warm", self.artifact)
            with tempfile.TemporaryDirectory() as scratch:
                timing = Path(scratch) / "timing.json"
                words = self._wanrun_arguments("--output", Path(scratch) / "out.npy")
                words += ["--timing-json", str(timing)]
                environment = {**self.environment, "XDG_CACHE_HOME": scratch}
                seconds = run_timed([command("wanrun"), *words, "--steps", 3], LONG, environment)
                figures = {"resident": resident, "wall_seconds": seconds}
                figures["timing"] = json.loads(timing.read_text())
            self._keep("decode", "wanrun", "encoded", "warm", figures)
            if self.options.reference:
                figures = self._diffusers("warm", steps=2, decode=True)
                self._keep("decode", "eager", "encoded", "warm", figures)

    def imports(self) -> None:
        """Measures wanrun --help and the imports of a start, each with its reference."""
        only = self.options.only
        modules: list[str] = []
        if "imports" in only:
            modules = self._wanrun("encoded", "ready", modules=True)["modules"]
            modules = [name for name in modules if not name.startswith("__")]
        for _ in range(self.options.repeat):
            if "help" in only:
                seconds = run_timed([command("wanrun"), "--help"], SHORT, self.environment)
                self._keep("help", "wanrun", "", "warm", {"wall_seconds": seconds})
            for who, names in (("jax", ["jax"]), ("wanrun", modules)) if "imports" in only else ():
                arguments = {"modules": names}
                figures = measure(
                    *(PROBES, "imports", arguments), timeout=SHORT, environment=self.environment
                )
                self._keep("imports", who, "", "warm", figures)

    def traces(self) -> None:
        """Counts what JAX traced, lowered and compiled until the end of the first step."""
        figures = self._wanrun("encoded", 1, listen=True)
        files = (self.artifact / "programs").glob("*/*.stablehlo")
        programs = sorted({path.stem.rpartition("-")[0] for path in files})
        self._keep("traces", "wanrun", "encoded", "warm", {**figures, "programs": programs})

    def overhead(self) -> None:
        """Measures a toy's steps, which are short enough to show Python's time between them."""
        size, frames = SHAPES["toy"]
        _, toy = build(self.folder, "toy", size, frames, self.options.target)
        for _ in range(self.options.repeat):
            with tempfile.TemporaryDirectory() as scratch:
                timing = Path(scratch) / "timing.json"
                words = ["--artifact", toy, "--prompt", PROMPT, "--steps", OVERHEAD_STEPS]
                words += ["--output", Path(scratch) / "out.npy", "--timing-json", timing]
                run_timed([command("wanrun"), *words], SHORT, self.environment)
                figures = json.loads(timing.read_text())
            between = figures["denoise_seconds"] - sum(figures["step_seconds"])
            kept = {
                "between_steps_seconds": between / OVERHEAD_STEPS,
                "toy_step_seconds": statistics.median(figures["step_seconds"]),
            }
            if figures.get("loop_overhead_seconds") is not None:
                kept["loop_overhead_seconds"] = figures["loop_overhead_seconds"]
            self._keep("overhead", "wanrun", "toy", "warm", kept)


def _words(allowed: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        words = text.split(",")
        if unknown := [word for word in words if word not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not of {', '.join(allowed)}")
        return words

    return parse


def parse_options() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(SHAPES), default="1.3b")
    parser.add_argument("--target", default="cpu", help="cpu, or a CPU level")
    parser.add_argument("--size", help="the model's own small profile where not given")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--repeat", type=int, help="of everything without a denoising step: 5")
    parser.add_argument("--step-repeat", type=int, help="of runs with denoising steps: 3")
    parser.add_argument("--decode-repeat", type=int, help="of whole runs: 2")
    parser.add_argument("--threads", type=int, default=2, help="cores that every measured process may use")
    parser.add_argument("--read-threads", type=int, help="of the floor; as wanrun where not given")
    states = _words(("warm", "cold"))
    parser.add_argument("--caches", type=states, default=["warm", "cold"], help="of floor and ready")
    parser.add_argument("--step-caches", type=states, default=["warm", "cold"], help="of step and compiled")
    parser.add_argument("--no-reference", dest="reference", action="store_false", help="without diffusers")
    parser.add_argument("--only", type=_words(PARTS), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument(
        "--folder", type=Path, help="kept, and used again if it holds checkpoint and artifact"
    )
    parser.add_argument("--artifact", type=Path, help="one that is there, with the profile; not changed")
    parser.add_argument("--checkpoint", type=Path, help="what --artifact was made of; not changed")
    options = parser.parse_args()
    if (options.artifact is None) != (options.checkpoint is None):
        parser.error("give --artifact and --checkpoint together")
    size, frames = SHAPES[options.model]
    options.size, options.frames = options.size or size, options.frames or frames
    for name, times in (("repeat", 5), ("step_repeat", 3), ("decode_repeat", 2)):
        if getattr(options, name) is None:
            setattr(options, name, 1 if options.model == "toy" else times)
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.sched_setaffinity(0, cores)
    options.read_threads = options.read_threads or max(4, len(cores))
    return options


def run(options: argparse.Namespace, folder: Path) -> None:
    """Creates what is missing in folder, measures the chosen parts, prints the table and a JSON line."""
    begun = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, artifact = options.checkpoint, options.artifact
    if artifact is None:
        checkpoint, artifact = build(folder, options.model, options.size, options.frames, options.target)
    os.sync()  # dirty pages cannot be dropped
    starts = Starts(options, folder, checkpoint.resolve(), artifact.resolve())
    parts = {
        starts.starts: {"floor", "ready"},
        starts.imports: {"help", "imports"},
        starts.traces: {"traces"},
        starts.overhead: {"overhead"},
        starts.steps: {"step", "compiled"},
        starts.decodes: {"decode"},
    }
    for measure_part, names in parts.items():
        if not names.isdisjoint(options.only):
            try:
                measure_part()
            except SystemExit as error:  # earlier measurements are still worth reporting
                starts.notes.append(f"FAILED, {'/'.join(sorted(names))}: {error}")
    settings = {"model": options.model, "size": options.size, "frames": options.frames}
    settings |= {"cpu": cpu_name(), "target": options.target, "reference_dtype": fair_dtype(options.target)}
    settings |= {"threads": options.threads, "read_threads": options.read_threads}
    settings["benchmark_seconds"] = time.monotonic() - begun
    print(f"{settings['cpu']}; target {settings['target']}; diffusers in {settings['reference_dtype']}")
    print(report(starts.runs, starts.notes, settings))
    if any(note.startswith("FAILED") for note in starts.notes):
        raise SystemExit(1)


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as temporary:
        run(options, options.folder or Path(temporary))


if __name__ == "__main__":
    main()
