"""The executables are found wherever the artifact lies and whatever the user's environment says.

A run that hits compiles nothing: its ``cache_misses`` is 0 and its ``cache_hits`` the number of programs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import wanrun
from helpers import UNPRIVILEGED
from helpers.terminal import complaints

pytestmark = pytest.mark.thorough

USED = 5  # of the programs: one length of encode_text
SEED = 7


@dataclass(frozen=True)
class Run:
    """What one process made: the files' bytes and its timings."""

    video: bytes
    latents: bytes
    timings: dict[str, Any]

    @property
    def cache(self) -> tuple[int, int]:
        return self.timings["cache_hits"], self.timings["cache_misses"]


def generate(artifact: Path, folder: Path, **environment: str) -> Run:
    """Runs wanrun as a user to whom file permissions apply."""
    folder.mkdir()
    video, latents, timings = folder / "o.mp4", folder / "z.npy", folder / "t.json"
    command = [sys.executable, UNPRIVILEGED, Path(sys.executable).with_name("wanrun")]
    command += ["--artifact", artifact, "--prompt", "a fox in the snow", "--steps", 3, "--seed", SEED]
    command += ["--output", video, "--save-latents", latents, "--timing-json", timings]
    command += ["--no-embedding-cache"]
    done = subprocess.run(
        [str(item) for item in command],
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and complaints(done.stderr) == [], done.stderr
    # Of caches there is none but that of the machine's rates.
    written = [path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file()]
    assert {path[0] for path in written} == {"cache", "o.mp4", "t.json", "z.npy"}
    assert all("rates" in path for path in written if path[0] == "cache")
    return Run(video.read_bytes(), latents.read_bytes(), json.loads(timings.read_text()))


def names(folder: Path) -> dict[str, int]:
    """Every file and folder below a folder, with the time of its last change."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def first(toy_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of the artifact where it was built."""
    return generate(toy_artifact, tmp_path_factory.mktemp("first") / "run")


def test_the_artifact_hits_and_stays_as_it_is(first: Run, toy_artifact: Path) -> None:
    assert first.cache == (USED, 0)
    listed = json.loads((toy_artifact / "manifest.json").read_text())["targets"]["cpu"]
    (entries,) = listed["executables"].values()
    folder = toy_artifact / listed["folder"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(e["file"] for e in entries.values())


def test_a_moved_read_only_artifact(first: Run, toy_artifact: Path, tmp_path: Path) -> None:
    """Another place, a name with a space, and a medium that cannot be written: the same bytes."""
    artifact = tmp_path / "a place" / "ärtifact"
    shutil.copytree(toy_artifact, artifact)
    folders = [artifact, *(path for path in artifact.rglob("*") if path.is_dir())]
    for path in artifact.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    artifact.chmod(0o555)
    try:
        before = names(artifact)
        moved = generate(artifact, tmp_path / "run")
        assert names(artifact) == before
    finally:
        for path in folders:
            path.chmod(0o755)
    assert moved.cache == (USED, 0)
    assert moved.latents == first.latents
    assert moved.video == first.video


# Variables that change the key, the lowering or the cache when a user or a base image sets them.
HOSTILE = {
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_COMPILATION_CACHE_DIR": "/nowhere/else",
    "JAX_COMPILATION_CACHE_MAX_SIZE": "1000",
    "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1000",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "1000000000",
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "all",
    "JAX_RAISE_PERSISTENT_CACHE_ERRORS": "1",
    "JAX_ENABLE_X64": "1",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS": "0",
    "JAX_DEBUG_NANS": "1",
    "JAX_DISABLE_JIT": "1",
    "JAX_NO_TRACING": "1",
    "JAX_TRANSFER_GUARD": "disallow",
    "JAX_USE_SHARDY_PARTITIONER": "0",
    "JAX_OPTIMIZATION_LEVEL": "O1",
    "JAX_MEMORY_FITTING_LEVEL": "O1",
    "JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "0.5",
    "JAX_MEMORY_FITTING_EFFORT": "0.5",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILER_ENABLE_REMAT_PASS": "0",
    "JAX_XLA_PROFILE_VERSION": "3",
    "JAX_ENABLE_PGLE": "1",
    "JAX_COMPILATION_CACHE_EXPECT_PGLE": "1",
}


def test_variables_of_jax_change_nothing(first: Run, toy_artifact: Path, tmp_path: Path) -> None:
    hostile = generate(toy_artifact, tmp_path / "run", **HOSTILE)
    assert hostile.cache == (USED, 0)
    assert hostile.latents == first.latents
    assert hostile.video == first.video


ALONE = """
import json, sys
from pathlib import Path
import jax
from jax import export

artifact, folder = map(Path, sys.argv[1:])
manifest = json.loads((artifact / "manifest.json").read_text())
target = manifest["targets"]["cpu"]
((_, programs),) = manifest["program_sets"][target["program_set"]]["programs"].items()
jax.config.update("jax_compilation_cache_dir", str(folder))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
seen = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.rpartition("/")[2]))
where = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
for name, program in programs.items():
    exported = export.deserialize(bytearray((artifact / program["file"]).read_bytes()))
    given = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=where) for one in exported.in_avals]
    _, inputs = jax.tree.unflatten(exported.in_tree, given)

    def call(**inputs):
        return exported.call(**inputs)

    call.__name__ = call.__qualname__ = name
    donate = tuple(program["inputs"][index] for index in program["donate"])
    options = {**target.get("options", {}), **target.get("program_options", {}).get(name, {})} or None
    jax.jit(call, donate_argnames=donate, compiler_options=options).lower(**inputs).compile()
print(len(programs), seen.count("cache_hits"), seen.count("cache_misses"))
"""


def test_jax_alone_loads_the_entries(toy_artifact: Path, tmp_path: Path) -> None:
    """They are ordinary entries of JAX's compilation cache: that folder, JAX and nothing of ours."""
    target = json.loads((toy_artifact / "manifest.json").read_text())["targets"]["cpu"]
    folder = shutil.copytree(toy_artifact / target["folder"], tmp_path / "cache")
    command = [sys.executable, "-c", ALONE, str(toy_artifact), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    programs, hits, misses = map(int, done.stdout.split())
    assert (hits, misses) == (programs, 0) and programs == 9


def test_one_pipeline_serves_many_runs(first: Run, toy_artifact: Path, tmp_path: Path) -> None:
    """The same bits as the command's, given noise is only read, and nothing lands in the artifact.

    ``test_sweep`` has what no option does: need a new executable.
    """
    before = names(toy_artifact)
    with wanrun.load(toy_artifact) as pipeline:
        latents = pipeline.generate("a fox in the snow", seed=SEED, num_steps=3).latents
        (tmp_path / "first.npy").write_bytes(first.latents)
        assert np.array_equal(latents, np.load(tmp_path / "first.npy"))

        # Given noise is only read, though the program's latents are donated.
        noise = np.random.default_rng(3).standard_normal(pipeline.latents_shape, np.float32)
        aligned = np.empty(noise.nbytes + 64, np.uint8)
        start = -aligned.ctypes.data % 64
        given = aligned[start : start + noise.nbytes].view(np.float32).reshape(noise.shape)
        given[...] = noise
        for loop in ("step", "scan"):
            once, twice = (
                pipeline.generate("a fox", latents=given, num_steps=2, loop=loop) for _ in range(2)
            )
            assert np.array_equal(given, noise)
            assert np.array_equal(once.latents, twice.latents)
            assert np.array_equal(once.frames, twice.frames)

        # What else the process compiles stays out of the artifact.
        assert np.asarray(jax.jit(lambda x: 3 * x)(np.float32(2))) == 6
    assert names(toy_artifact) == before
