"""The kinds of faults, each of which prepares one in an empty folder."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaign.damage import copied, damage, files_below
from campaign.fault import Case, Maker
from campaign.manifest_edits import edit_manifest
from wanrun.files import file_sha256

STEPS = ("--steps", "2", "--guidance-scale", "5", "--flow-shift", "3", "--solver", "unipc", "--seed", "7")
"""Every number is given, so that no default of a manifest decides."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

REFUSED = frozenset({2, 3, 4})


@dataclass(frozen=True)
class Sources:
    """What is copied and damaged.

    Attributes:
        checkpoint: a toy.
        artifact: made of it.
        small: a folder on a file system of a megabyte, where one could be mounted.
    """

    checkpoint: Path
    artifact: Path
    small: Path | None


def generation(artifact: Path, output: Path, *options: str) -> list[str]:
    """Arguments of ``wanrun`` for the campaign's one video."""
    prompts = ("--prompt", "a fox in the snow", "--negative-prompt", "blurred")
    return ["--artifact", str(artifact), *prompts, *STEPS, "--output", str(output), *options]


def _content(folder: Path) -> dict[str, str]:
    """Digests by name; reading what may be read."""
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in files_below(folder)}


def damaged_run(sources: Sources, rng: random.Random, folder: Path) -> Case:
    artifact, output = copied(sources.artifact, folder / "artifact"), folder / "video.npy"
    what = damage(rng, artifact)
    options = rng.choice(((), (), ("--verify", "sha256"), ("--memory", "low"), ("--loop", "scan")))
    arguments = generation(artifact, output, *options)
    return Case("damaged run", what, "wanrun", arguments, output, codes=frozenset({0, 3}), clean=[folder])


def damaged_verify(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """Nothing that changed a file's content may be called verified."""
    artifact = copied(sources.artifact, folder / "artifact")
    before = _content(artifact)
    what = damage(rng, artifact)
    # A device or a FIFO is not read: its kind differs already.
    changed = _sizes(artifact) != _sizes(sources.artifact) or _content(artifact) != before
    codes = {3} if changed else {0}
    arguments = ["verify", "--artifact", str(artifact)]
    return Case("damaged verify", what, "wanbuild", arguments, codes=frozenset(codes), clean=[folder])


def _sizes(folder: Path) -> dict[str, tuple[int, int]]:
    status = {path.relative_to(folder).as_posix(): path.lstat() for path in sorted(folder.rglob("*"))}
    return {name: (stat.S_IFMT(found.st_mode), found.st_size) for name, found in status.items()}


def damaged_source(sources: Sources, rng: random.Random, folder: Path) -> Case:
    checkpoint, artifact = copied(sources.checkpoint, folder / "checkpoint"), folder / "artifact"
    what = damage(rng, checkpoint) if rng.random() < 0.5 else _edit_config(rng, checkpoint)
    arguments = ["convert", str(checkpoint), "--artifact", str(artifact)]
    codes = frozenset({0, 4})
    return Case("damaged source", what, "wanbuild", arguments, artifact=artifact, codes=codes, clean=[folder])


def _edit_config(rng: random.Random, checkpoint: Path) -> str:
    """Gives a field of a JSON file another value."""
    path = rng.choice([path for path in files_below(checkpoint) if path.suffix == ".json"])
    data = json.loads(path.read_bytes())
    key = rng.choice(sorted(data))
    values = (None, True, 0, 1, -1, 2**40, 1e-300, 1e300, "", "a", [], [0], {}, -0.0, 3, 0.5)
    data[key] = rng.choice(values)
    path.write_text(json.dumps(data))
    return f"{path.relative_to(checkpoint)} {key} = {data[key]!r}"


def edited_manifest(sources: Sources, rng: random.Random, folder: Path) -> Case:
    artifact, output = copied(sources.artifact, folder / "artifact"), folder / "video.npy"
    what, signed = edit_manifest(rng, artifact)
    command, arguments, written = rng.choice(
        (
            *[("wanrun", generation(artifact, output), None if signed else output)] * 3,
            ("wanrun", ["--artifact", str(artifact), "--list"], None),
            ("wanbuild", ["inspect", "--artifact", str(artifact)], None),
            ("wanbuild", ["verify", "--artifact", str(artifact)], None),
        )
    )
    codes = frozenset({0, 1, 2, 3} if signed else {0, 3})
    return Case("edited manifest", what, command, arguments, written, codes=codes, clean=[folder])


def signalled(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """Ends a command at a random moment."""
    artifact = copied(sources.artifact, folder / "artifact")
    number = rng.choice(SIGNALS)
    output = folder / rng.choice(("video.npy", "video.mp4"))
    size = ["--size", "64x32", "--frames", "5", "--target", "cpu"]
    command, arguments, longest = rng.choice(
        (
            *[("wanrun", generation(artifact, output), 3.0)] * 4,
            ("wanbuild", ["convert", str(sources.checkpoint), "--artifact", str(artifact), "--force"], 1.0),
            *[("wanbuild", ["compile", "--artifact", str(artifact), *size], 12.0)] * 2,
            ("wanbuild", ["verify", "--artifact", str(artifact)], 3.0),
            ("wanbuild", ["inspect", "--artifact", str(artifact)], 0.5),
        )
    )
    return Case(
        "signal",
        f"{number.name} to {command} {arguments[0]}",
        command,
        arguments,
        output if output.suffix == ".npy" and command == "wanrun" else None,
        artifact=artifact,
        process=True,
        signal=number,
        after_seconds=rng.uniform(0.05, longest) if rng.random() < 0.6 else rng.uniform(0.05, 0.7),
        codes=frozenset({0}),
        clean=[folder],
    )


_ODD: tuple[Mapping[str, str | None], ...] = (
    {"JAX_ENABLE_X64": "maybe"},
    {"JAX_ENABLE_X64": "1"},
    {"JAX_PLATFORMS": "tpu"},
    {"JAX_PLATFORMS": ""},
    {"JAX_COMPILATION_CACHE_DIR": "/proc/nothing"},
    {"JAX_LOG_COMPILES": "junk"},
    {"JAX_DEFAULT_MATMUL_PRECISION": "junk"},
    {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"},
    {"XLA_FLAGS": "--no_such_flag=1"},
    {"HOME": None, "XDG_CACHE_HOME": None},
    {"HOME": "/nonexistent", "XDG_CACHE_HOME": None},
    {"XDG_CACHE_HOME": "/proc/nothing"},
    {"TMPDIR": "/nonexistent"},
    {"PATH": "/nonexistent"},
    {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"},
    {"PYTHONIOENCODING": "ascii"},
    {"COLUMNS": "1"},
    {"COLUMNS": "junk", "LINES": "0"},
    {"TERM": "junk"},
    {"OMP_NUM_THREADS": "0"},
    {"PYTHONOPTIMIZE": "2"},
    {"TF_CPP_MIN_LOG_LEVEL": "junk"},
)

_SHELL = ("2>&-", "1>&-", "0<&-", "1>&- 2>&-", ">/dev/full", "2>/dev/full", "</dev/zero", "| head -c 1")


def odd_environment(sources: Sources, rng: random.Random, folder: Path) -> Case:
    output = folder / "video.npy"
    environment = dict(rng.choice(_ODD)) if rng.random() < 0.6 else {}
    shell = "" if environment else rng.choice(_SHELL)
    what = shell or json.dumps(environment)
    arguments = generation(sources.artifact, output)
    codes = frozenset({0, 2, 3, 4, 141})
    return Case(
        *("odd environment", what, "wanrun", arguments, output),
        environment=environment,
        process=True,
        shell=shell,
        codes=codes,
        clean=[folder],
    )


def full_disk(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """Writes to a file system with a random number of bytes left."""
    assert sources.small is not None
    for path in sources.small.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    free = os.statvfs(sources.small)
    left = rng.choice((0, 4096, 16384, rng.randrange(2**20)))
    with (sources.small / "filling").open("wb") as file:
        file.write(bytes(max(0, free.f_bavail * free.f_frsize - left)))
    output = sources.small / "video.npy"
    where: dict[str, str | None] = rng.choice(({}, {"XDG_CACHE_HOME": str(sources.small)}))
    if where:
        output = folder / "video.npy"
    codes = frozenset({0, 2, 4})
    arguments = generation(sources.artifact, output)
    return Case(
        *("full disk", f"{left} bytes left {where}", "wanrun", arguments, output),
        environment=where,
        codes=codes,
        clean=[folder, sources.small],
    )


def kinds(sources: Sources) -> dict[Maker, int]:
    """The makers of faults, with their weights."""
    makers: dict[Callable[..., Any], int] = {
        damaged_run: 45,
        damaged_verify: 10,
        damaged_source: 20,
        edited_manifest: 40,
        signalled: 6,
        odd_environment: 3,
    }
    if sources.small is not None:
        makers[full_disk] = 4
    return {functools.partial(maker, sources): weight for maker, weight in makers.items()}
