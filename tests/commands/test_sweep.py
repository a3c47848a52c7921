"""Steps, shift, guidance, boundary, solver and seed are inputs: no value of them needs a new executable.

Swept for every kind of model and in both forms of the denoising loop, which have to agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import wanrun
from helpers.manifests import programs_of
from wanrun import relative_error
from wanrun.denoising.steps import transformers
from wanrun.files import sha256_of, user_cache
from wanrun.timing.timings import Timings

PROMPT = "a fox in the snow"
# Seen: bitwise equal, on the CPU, for every kind of model. But a compiler may order the sums of the two
# programs differently, which is worth 1e-6.
SAME = 1e-5

COMPILE = "/jax/core/compile/backend_compile_duration"  # an executable that is handed to JAX has it too
HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"

BASE: Mapping[str, Any] = {"num_steps": 4, "flow_shift": 5.0, "guidance_scale": 4.0, "seed": 3}
CHANGES: tuple[Mapping[str, Any], ...] = (
    {},
    {"num_steps": 1},
    {"num_steps": 7},
    {"flow_shift": 1.5},
    {"guidance_scale": 1.5},
    {"solver": "dpm++"},
    {"solver": "euler"},
    {"solver": "lcm"},
    {"seed": 4},
    {"negative_prompt": "blurry"},
)
FEW: tuple[Mapping[str, Any], ...] = ({}, {"num_steps": 7, "solver": "lcm", "seed": 4})
"""For models whose programs take these values as all others do."""

ALL_ROWS: Mapping[str, Any] = {"num_steps": 100}
"""Of the scan form's table, which is the same for every model."""

# Without a change the four steps are 999 and 937 of the high-noise expert, 833 and 625 of the other.
CHANGES_OF_TWO: tuple[Mapping[str, Any], ...] = (
    {"guidance_scale_2": 2.0},
    {"guidance_scale": 2.0, "guidance_scale_2": 4.0},
    {"boundary": 0.95},
    {"boundary": 0.0},
    {"boundary": 1.0},
    {"boundary": 0.7, "solver": "euler", "num_steps": 6},
)


def contents(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Every file below a folder: its size, the time of its last change, and its digest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): (
            path.stat().st_size,
            path.stat().st_mtime_ns,
            sha256_of(path.read_bytes()),
        )
        for path in files
    }


def cached() -> set[str]:
    """Kinds of what the user's cache holds."""
    folder = user_cache()
    return {path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()}


@contextmanager
def compiling() -> Iterator[list[str]]:
    """Collects what JAX reports of tracing, lowering, compiling and its compilation cache."""
    seen: list[str] = []

    def event(name: str, **_: Any) -> None:
        if name.startswith(("/jax/core/compile/", "/jax/compilation_cache/")):
            seen.append(name)

    def duration(name: str, seconds: float, **_: Any) -> None:
        event(name)

    jax.monitoring.register_event_listener(event)
    jax.monitoring.register_event_duration_secs_listener(duration)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_listener(event)
        jax.monitoring.unregister_event_duration_listener(duration)


@pytest.mark.thorough
@pytest.mark.parametrize("fixture", ["toy_artifact", "two_experts_artifact", "ti2v_artifact"])
def test_no_option_needs_an_executable(
    fixture: str, request: pytest.FixtureRequest, record_property: Any
) -> None:
    artifact: Path = request.getfixturevalue(fixture)
    before = contents(artifact)
    jax.clear_caches()  # or what an earlier test compiled would not be seen
    timings = Timings()
    with compiling() as seen, wanrun.load(artifact, timings=timings) as pipeline:
        two = len(transformers(pipeline.manifest)) == 2
        assert two == (fixture == "two_experts_artifact")
        of_each: Mapping[str, tuple[Mapping[str, Any], ...]] = {
            "toy_artifact": (*CHANGES, ALL_ROWS),
            "two_experts_artifact": (*FEW, *CHANGES_OF_TWO),
            "ti2v_artifact": FEW,
        }
        sweep = [{**BASE, **change} for change in of_each[fixture]]
        pipeline.warmup(timings)
        for loop in ("step", "scan"):
            pipeline.generate(PROMPT, loop=loop, num_steps=2, timings=timings)
        programs = programs_of(pipeline.manifest, pipeline.profile.name)
        assert {"denoise_step", "denoise_loop"} <= programs.keys()
        assert seen.count(COMPILE) == timings.cache_hits == len(programs)
        assert seen.count(HIT) == seen.count(MISS) == timings.cache_misses == 0  # JAX's cache is not asked

        seen.clear()
        steps, scans = (
            [pipeline.generate(PROMPT, loop=loop, timings=timings, **options).latents for options in sweep]
            for loop in ("step", "scan")
        )
        assert seen == []
        assert (timings.cache_hits, timings.cache_misses) == (len(programs), 0)
        assert np.asarray(jax.jit(lambda x: 3 * x)(np.float32(2))) == 6
        assert seen.count(COMPILE) == 1, "a compilation is seen"
    assert contents(artifact) == before
    assert cached() == {"embeddings", "rates"}

    for index, latents in enumerate(steps):
        for other in range(index):
            assert relative_error(latents, steps[other]) > 1e-3, f"{sweep[index]} is {sweep[other]}"
    errors = [relative_error(scan, step) for scan, step in zip(scans, steps, strict=True)]
    equal = sum(np.array_equal(scan, step) for scan, step in zip(scans, steps, strict=True))
    record_property("scan_against_step", max(errors))
    print(f"scan and step: {equal} of {len(sweep)} bitwise equal, at most {max(errors):.1e}", flush=True)
    assert max(errors) < SAME
