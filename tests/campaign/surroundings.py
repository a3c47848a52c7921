"""Faults of surroundings: odd environments, closed streams, full disks, small limits."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from campaign.damage import copied
from campaign.fault import Call, Case
from campaign.moments import OTHER_PROFILE
from campaign.sources import Sample, Sources

ODD: tuple[Mapping[str, str | None], ...] = (
    {"JAX_ENABLE_X64": "maybe"},
    {"JAX_ENABLE_X64": "1"},
    {"JAX_PLATFORMS": "tpu"},
    {"JAX_PLATFORMS": ""},
    {"JAX_COMPILATION_CACHE_DIR": "/proc/nothing"},
    {"JAX_LOG_COMPILES": "junk"},
    {"JAX_DEFAULT_MATMUL_PRECISION": "junk"},
    {"JAX_DEFAULT_MATMUL_PRECISION": "bfloat16"},
    {"JAX_NUMPY_RANK_PROMOTION": "raise"},
    {"JAX_DEBUG_NANS": "1"},
    {"JAX_DISABLE_JIT": "1"},
    {"JAX_ENABLE_COMPILATION_CACHE": "0"},
    {"JAX_RAISE_PERSISTENT_CACHE_ERRORS": "1"},
    {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"},
    {"XLA_FLAGS": "--no_such_flag=1"},
    {"XLA_FLAGS": "junk"},
    {"HOME": None, "XDG_CACHE_HOME": None},
    {"HOME": "/nonexistent", "XDG_CACHE_HOME": None},
    {"XDG_CACHE_HOME": "/proc/nothing"},
    {"XDG_CACHE_HOME": "/dev/null"},
    {"XDG_CACHE_HOME": "relative"},
    {"TMPDIR": "/nonexistent"},
    {"PATH": "/nonexistent"},
    {"PATH": None},
    {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "utf-16"},
    {"PYTHONWARNINGS": "error"},
    {"PYTHONDEVMODE": "1"},
    {"PYTHONHASHSEED": "0"},
    {"PYTHONUNBUFFERED": "1"},
    {"COLUMNS": "1"},
    {"COLUMNS": "junk", "LINES": "0"},
    {"TERM": "junk"},
    {"TZ": "junk"},
    {"OMP_NUM_THREADS": "0"},
    {"PYTHONOPTIMIZE": "2"},
    {"TF_CPP_MIN_LOG_LEVEL": "junk"},
    {"IMAGEIO_FFMPEG_EXE": "/bin/false"},
    {"IMAGEIO_FFMPEG_EXE": "/nonexistent"},
)

SHELL = (
    *("2>&-", "1>&-", "0<&-", "1>&- 2>&-", "0<&- 1>&- 2>&-", ">/dev/full", "2>/dev/full", "</dev/zero"),
    *("| head -c 1", "2>&1 | head -c 1", "2</dev/null"),
)


def odd_environment(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """A video is made as always, or one line says why not."""
    sample = rng.choice(sources.samples)
    output = folder / rng.choice(("video.npy", "video.npy", "video.mp4"))
    call = sample.run(sample.artifact, output, codes=(0, 2, 3, 4, 141))
    if rng.random() < 0.3:
        call = sample.convert(folder / "artifact", codes=(0, 2, 4, 141))
    if rng.random() < 0.7:
        environment = {
            name: value for odd in rng.sample(ODD, rng.choice((1, 1, 2))) for name, value in odd.items()
        }
        call, what = replace(call, environment=environment), json.dumps(environment)
    else:
        shell = rng.choice(SHELL)
        call, what = replace(call, shell=shell, codes=call.codes | {0}), shell
    kind = "odd environment"
    return Case(kind, f"{call}: {what}", [call], {sample.video}, process=True, clean=[folder])


def full_disk(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """Writes to a file system with a random number of bytes left."""
    assert sources.small is not None
    for path in sources.small.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    sample = rng.choice(sources.samples)
    where, call, artifact = _write_into(sources.small, sample, rng, folder)
    free = os.statvfs(sources.small)
    room = free.f_bavail * free.f_frsize
    left = min(room, rng.choice((0, 4096, 16384, rng.randrange(2**20), rng.randrange(max(1, room)))))
    with (sources.small / "filling").open("wb") as file:
        file.truncate(0)
        os.posix_fallocate(file.fileno(), 0, max(1, room - left))
    kind, what = "full disk", f"{where}, {left} bytes left"
    clean = [folder, sources.small]
    return Case(kind, what, [call], {sample.video}, artifact=artifact, clean=clean, process="TMPDIR" in where)


def _write_into(
    small: Path, sample: Sample, rng: random.Random, folder: Path
) -> tuple[str, Call, Path | None]:
    """A command that writes to a small disk: what is there, the call, and the artifact that it changes."""
    codes = (0, 2, 4)
    where = rng.choice(
        ("output", "output", "mp4", "latents", "timing", "cache", "TMPDIR", "convert", "embed", "toy")
    )
    video = small / "video.npy"
    if where == "output":
        return where, sample.run(sample.artifact, video, codes=codes), None
    if where == "mp4":
        return where, sample.run(sample.artifact, small / "video.mp4", codes=codes), None
    if where in ("latents", "timing"):
        option = {"latents": "--save-latents", "timing": "--timing-json"}[where]
        path = small / {"latents": "latents.npy", "timing": "timing.json"}[where]
        return where, sample.run(sample.artifact, folder / "video.npy", option, str(path), codes=codes), None
    if where in ("cache", "TMPDIR"):
        name = {"cache": "XDG_CACHE_HOME", "TMPDIR": "TMPDIR"}[where]
        call = sample.run(sample.artifact, folder / "video.npy", codes=codes)
        return where, replace(call, environment={name: str(small)}), None
    if where == "convert":
        return where, sample.convert(small / "artifact", codes=codes), small / "artifact"
    if where == "toy":
        return where, Call("wanbuild", ["toy", str(small / "toy")], frozenset(codes)), None
    artifact = copied(sample.artifact, small / "artifact")
    arguments = ["embed", "--artifact", str(artifact), "--prompt", "a fox"]
    return where, Call("wanbuild", arguments, frozenset(codes)), artifact


def small_limits(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """Commands under ulimit: the size of a file, open files, memory."""
    sample = rng.choice(sources.samples)
    artifact = copied(sample.artifact, folder / "artifact")
    call = rng.choice(
        (
            sample.run(artifact, folder / "video.npy"),
            sample.run(artifact, folder / "video.mp4"),
            sample.convert(folder / "new"),
            Call("wanbuild", ["embed", "--artifact", str(artifact), "--prompt", "a fox"]),
            Call("wanbuild", ["toy", str(folder / "toy")]),
            Call("wanbuild", ["compile", "--artifact", str(artifact), *OTHER_PROFILE]),
        )
    )
    name, most = rng.choice(
        (
            ("RLIMIT_FSIZE", rng.choice((0, 1024, 2**16, 2**20))),
            ("RLIMIT_NOFILE", rng.choice((16, 24, 32, 48, 64, 128))),
            ("RLIMIT_AS", rng.choice((1, 2, 3, 4)) * 2**29),
            ("RLIMIT_CORE", 0),
        )
    )
    call = replace(call, limits={name: most}, codes=frozenset({0, 1, 2, 3, 4}))
    kind, what = "small limit", f"{name} {most} for {call}"
    return Case(kind, what, [call], {sample.video}, process=True, artifact=artifact, clean=[folder])


def odd_client(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """What a server is sent, and finds in its folder and on its disk: see ``campaign.at_doors``."""
    sample = rng.choice(sources.samples)
    doors = ["users_files", "body", *(["picture"] if sample.media else [])]
    door = rng.choice([*doors, *(["full_disk"] if sources.small is not None else [])])
    if door == "full_disk" and sources.small is not None:
        folder = sources.small / "served"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    arguments = [door, str(rng.randrange(2**32)), str(folder), str(sample.artifact)]
    return Case("odd client", " ".join(arguments[:2]), [Call("campaign.at_doors", arguments)], process=True)
