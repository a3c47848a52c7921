"""Faults of moments: signals, kills and races, with processes of their own."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path

from campaign.damage import copied
from campaign.fault import Call, Case
from campaign.sources import Sample, Sources

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

OTHER_PROFILE = ("--size", "64x32", "--frames", "5", "--target", "cpu", "--loop", "step", "--no-guidance")
"""A profile that the samples lack."""


def _prompts(sample: Sample, artifact: Path, folder: Path) -> Call:
    """A file of three prompts, of which each gives the one video."""
    file = folder / "prompts.jsonl"
    lines = [{"prompt": "a fox in the snow", "output": str(folder / f"line{n}.npy")} for n in range(3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = sample.generation(artifact, folder / "line{index}.npy")
    del arguments[arguments.index("--prompt") : arguments.index("--prompt") + 2]
    return Call("wanrun", [*arguments, "--prompts", str(file)], output=folder / "line0.npy")


def _build(sample: Sample, artifact: Path, folder: Path) -> Call:
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f'source = "{sample.checkpoint}"\nartifact = "{artifact}"\n'
        '[compile]\ntargets = ["cpu"]\nsizes = ["64x32"]\nframes = [5]\nloop = "step"\n'
    )
    return Call("wanbuild", ["build", str(recipe), "--force"])


def _wanbuild(*arguments: str) -> Callable[[Sample, Path, Path], Call]:
    return lambda sample, artifact, folder: Call(
        "wanbuild", [*arguments[:1], "--artifact", str(artifact), *arguments[1:]]
    )


COMMANDS: tuple[tuple[Callable[[Sample, Path, Path], Call], float, int], ...] = (
    (lambda sample, artifact, folder: sample.run(artifact, folder / "video.npy"), 3.0, 6),
    (lambda sample, artifact, folder: sample.run(artifact, folder / "video.mp4"), 3.0, 3),
    (lambda sample, artifact, folder: sample.run(artifact, folder / "video.npy", "--overwrite"), 3.0, 3),
    (_prompts, 4.0, 4),
    (lambda sample, artifact, folder: sample.convert(artifact, "--force"), 1.5, 4),
    (lambda sample, artifact, folder: sample.convert(artifact, "--force", other=True), 1.5, 3),
    (lambda sample, artifact, folder: sample.convert(folder / "new"), 1.5, 3),
    (_wanbuild("compile", *OTHER_PROFILE), 10.0, 2),
    (_build, 10.0, 1),
    (_wanbuild("compile", "--again"), 8.0, 1),
    (_wanbuild("embed", "--prompt", "a fox"), 3.0, 2),
    (_wanbuild("verify"), 3.0, 2),
    (_wanbuild("verify", "--record"), 4.0, 2),
    (_wanbuild("inspect"), 0.5, 1),
    (lambda sample, artifact, folder: Call("wanrun", ["--artifact", str(artifact), "--list"]), 0.5, 1),
    (lambda sample, artifact, folder: Call("wanbuild", ["toy", str(folder / "toy")]), 2.0, 1),
)
"""Commands, how many seconds each takes at most where the machine is quiet, and weights."""


def _interrupted(sources: Sources, rng: random.Random, folder: Path, number: signal.Signals) -> Case:
    """A command and the moment at which a signal ends it."""
    sample = rng.choice(sources.samples)
    artifact = copied(sample.artifact, folder / "artifact")
    ((make, longest, _),) = rng.choices(COMMANDS, [weight for *_, weight in COMMANDS])
    call = make(sample, artifact, folder)
    early = rng.random() < 0.4
    after = rng.uniform(0.05, 0.7) if early else rng.uniform(0.05, longest)
    what = f"{number.name} to {call} after {after:.3f} s"
    folders = {"artifact": artifact, "clean": [folder], "expected": {sample.video}}
    return Case("signal", what, [call], process=True, signal=number, after_seconds=after, **folders)


def signalled(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """Ends a command at a random moment."""
    return _interrupted(sources, rng, folder, rng.choice(SIGNALS))


def killed(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """Kills a command at a random moment; the same command then does its work, and clears up."""
    case = _interrupted(sources, rng, folder, signal.SIGKILL)
    (call,) = case.calls
    again = call
    if call.command == "wanrun" and "--overwrite" not in call.arguments:
        again = dataclasses.replace(call, codes=frozenset({0, 2}))  # the video may have been complete
    if "--force" not in call.arguments and call.arguments[0] == "convert":
        again = dataclasses.replace(call, codes=frozenset({0, 2}))  # as may the artifact
    return dataclasses.replace(case, kind="kill", again=again)


def raced(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """Two or three commands at once on one artifact; afterwards it gives one of the two videos."""
    sample = rng.choice(sources.samples)
    artifact = copied(sample.artifact, folder / "artifact")
    makers = rng.choices(
        (
            lambda n: sample.run(artifact, folder / "video.npy", "--overwrite", codes=(0, 2, 3)),
            lambda n: sample.run(artifact, folder / "video.npy", codes=(0, 2, 3)),
            lambda n: sample.run(artifact, folder / f"video{n}.npy", codes=(0, 3)),
            lambda n: sample.convert(artifact, "--force"),
            lambda n: sample.convert(artifact, "--force", other=True),
            lambda n: _with_codes(
                _wanbuild("embed", "--prompt", f"a fox {n}")(sample, artifact, folder), 0, 3
            ),
            lambda n: _with_codes(_wanbuild("verify")(sample, artifact, folder), 0, 3),
            lambda n: _with_codes(_wanbuild("inspect")(sample, artifact, folder), 0, 3),
        ),
        (3, 3, 4, 3, 3, 2, 2, 1),
        k=rng.choice((2, 2, 3)),
    )
    calls = [make(number) for number, make in enumerate(makers)]
    return Case(
        *("race", ", ".join(map(str, calls)), calls, {sample.video, sample.other_video}),
        process=True,
        again=sample.run(artifact, folder / "after.npy"),
        artifact=artifact,
        clean=[folder],
    )


def _with_codes(call: Call, *codes: int) -> Call:
    return dataclasses.replace(call, codes=frozenset(codes))
