"""JAX's flags are ours while somebody needs them, and then what they were."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import wanrun
from helpers.damage import edit_environment, linked, own
from helpers.opened import LIMIT_SECONDS, eventually
from wanbuild.programs.build_options import BuildOptions
from wanbuild.programs.compile import CompileRequest, compile_artifact
from wanrun.errors import ArtifactError
from wanrun.executables import store as executables
from wanrun.machine import jax_process
from wanrun.machine.jax_process import JAX_FLAGS, JaxFlags, using_cache

OTHERS: Mapping[str, Any] = {
    "jax_persistent_cache_min_compile_time_secs": 7.0,
    "jax_persistent_cache_min_entry_size_bytes": 123,
    "jax_persistent_cache_enable_xla_caches": "all",
    "jax_default_matmul_precision": "highest",
    "jax_default_prng_impl": "rbg",
    "jax_transfer_guard": "log",
    "jax_optimization_level": "O1",
    "jax_memory_fitting_effort": 0.25,
    "jax_compilation_cache_max_size": 99,
}
"""What a user may have set."""


def flags() -> dict[str, Any]:
    return dict(jax.config.values)


def ours() -> bool:
    """Whether every flag is as executables were built with."""
    return all(value == JAX_FLAGS[name] for name, value in flags().items() if name in JAX_FLAGS)


@pytest.fixture(autouse=True)
def users(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """JAX's flags as a user has set them; all are set back at the end."""
    assert jax_process._PROCESS.holders == 0 and not jax_process._PROCESS.before
    before = flags()
    for name, value in OTHERS.items():
        if name in before:  # a newer JAX may have dropped it
            jax.config.update(name, value)
    yield flags()
    for name, value in flags().items():
        if value != before[name]:
            jax.config.update(name, before[name])
    assert jax_process._PROCESS.holders == 0 and not jax_process._PROCESS.before


def test_every_flag_is_put_back(users: dict[str, Any]) -> None:
    assert not ours()
    with JaxFlags("cpu") as held:
        assert ours()
        assert flags() != users
    assert flags() == users
    held.release()
    assert flags() == users


def test_the_last_one_puts_them_back(users: dict[str, Any]) -> None:
    first, second = JaxFlags("cpu"), JaxFlags("cpu")
    first.release()
    first.release()  # counts once
    assert ours()
    third = JaxFlags("cpu")
    second.release()
    assert ours()
    third.release()
    assert flags() == users


def test_what_a_user_changes_meanwhile_stays(users: dict[str, Any]) -> None:
    """It is set again for the next who needs the flags, and then given back."""
    changed = {"jax_memory_fitting_effort": 0.5, "jax_debug_nans": True}  # ours was another; was ours

    def change() -> None:
        for name, value in changed.items():
            jax.config.update(name, value)

    with JaxFlags("cpu"):
        change()
        assert not ours()
    assert flags() == {**users, **changed}
    with JaxFlags("cpu"):
        assert ours()
        change()
        with JaxFlags("cpu"):
            assert ours()
    assert flags() == {**users, **changed}


def test_a_flag_that_changes_others(users: dict[str, Any]) -> None:
    """That of transfers is three, which a user may have set one by one."""
    jax.config.update("jax_transfer_guard_host_to_device", "disallow_explicit")
    before = flags()
    assert before["jax_transfer_guard"] == before["jax_transfer_guard_device_to_host"] == "log"
    with JaxFlags("cpu"):
        assert flags()["jax_transfer_guard_host_to_device"] == "allow"
    assert flags() == before


def test_an_error_puts_them_back(users: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError), JaxFlags("cpu"):
        raise RuntimeError
    assert flags() == users
    monkeypatch.setattr(jax_process, "JAX_FLAGS", {**JAX_FLAGS, "jax_optimization_level": "O9"})
    with pytest.raises(ValueError, match="O9"):
        JaxFlags("cpu")
    assert flags() == users


def test_threads(users: dict[str, Any]) -> None:
    wrong, barrier = list[str](), threading.Barrier(4)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        barrier.wait(LIMIT_SECONDS)
        for _ in range(100):
            with JaxFlags("cpu"):
                time.sleep(rng.random() * 1e-3)
                if not ours():
                    wrong.append("others")
            time.sleep(rng.random() * 1e-3)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, seed) for seed in range(4)]:
            future.result()
    assert wrong == []
    assert flags() == users


def test_flags_wait_for_an_executable_that_is_on_its_way(users: dict[str, Any], tmp_path: Path) -> None:
    """Or it would be loaded with half of them, and the cache's folder be taken for the user's."""
    reached, go_on = threading.Event(), threading.Event()

    def load() -> bool:
        with using_cache(tmp_path, write=False):
            reached.set()
            go_on.wait(LIMIT_SECONDS)
            return flags()["jax_default_matmul_precision"] is None

    held = JaxFlags("cpu")
    with ThreadPoolExecutor(3) as pool:
        loading = pool.submit(load)
        assert reached.wait(LIMIT_SECONDS)
        releasing = pool.submit(held.release)
        assert eventually(lambda: jax_process._PROCESS.holders == 0)
        time.sleep(0.05)
        assert not releasing.done()
        go_on.set()
        assert loading.result(LIMIT_SECONDS)
        releasing.result(LIMIT_SECONDS)
    assert flags() == users


# --- through the pipeline ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pipeline_puts_them_back(toy_artifact: Path, users: dict[str, Any], tmp_path: Path) -> None:
    """And the user's own compilation cache works before, after, and is not written to in between."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_max_size", -1)
    before = flags()

    def entries() -> int:
        return len(list(tmp_path.glob("*-cache")))

    jax.jit(lambda x: 3 * x)(np.float32(2)).block_until_ready()
    assert entries() == 1
    with wanrun.load(toy_artifact) as pipeline:
        assert ours()
        with wanrun.load(toy_artifact, lazy=True):
            pipeline.generate("a fox", num_steps=1)
        assert ours()
    assert entries() == 1
    assert flags() == before
    jax.jit(lambda x: 4 * x)(np.float32(2)).block_until_ready()
    assert entries() == 2


@pytest.mark.parametrize("damaged", ["target", "program"])
def test_a_load_that_fails_puts_them_back(
    toy_artifact: Path, tmp_path: Path, users: dict[str, Any], damaged: str
) -> None:
    artifact = linked(toy_artifact, tmp_path / "artifact")
    if damaged == "target":
        edit_environment(artifact, device_kind="TPU v9", machine="riscv64")
    else:
        own(artifact, "programs")
        next((artifact / "programs").rglob("denoise_step*")).write_bytes(b"")
    with pytest.raises(ArtifactError):
        wanrun.load(artifact)
    assert flags() == users


@pytest.mark.slow
def test_compiling_puts_them_back(toy_artifact: Path, tmp_path: Path, users: dict[str, Any]) -> None:
    artifact = linked(toy_artifact, tmp_path / "artifact")
    request = CompileRequest(
        artifact, ["cpu"], [(96, 64)], [9], (True,), options=BuildOptions(dtype="float32")
    )
    seen: list[bool] = []
    compile_artifact(request, lambda line: seen.append(ours() and "up to date" in line))
    assert len(seen) == 8 and all(seen)
    assert flags() == users


def test_closed_while_an_executable_is_on_its_way(
    toy_artifact: Path, users: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """close waits for it, and nothing is loaded after it with the user's flags."""
    reached, go_on = threading.Event(), threading.Event()
    loaded: list[tuple[str, bool]] = []
    lower = executables.lower

    def slow(data: bytes, name: str, *arguments: Any) -> Any:
        if name == "denoise_step":
            reached.set()
            go_on.wait(LIMIT_SECONDS)
        loaded.append((name, ours_but_for_writing()))
        return lower(data, name, *arguments)

    def ours_but_for_writing() -> bool:
        name = "jax_persistent_cache_min_compile_time_secs"  # by which nothing is written
        return all(flags()[flag] == value for flag, value in JAX_FLAGS.items() if flag != name)

    monkeypatch.setattr(executables, "lower", slow)
    pipeline = wanrun.load(toy_artifact, lazy=True)
    programs = pipeline.session(pipeline.profile).programs
    step, decode = programs.request(programs=["denoise_step", "decode_video"])
    assert reached.wait(LIMIT_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(pipeline.close)
        assert eventually(decode.cancelled, LIMIT_SECONDS)
        assert not closing.done()
        go_on.set()
        closing.result(LIMIT_SECONDS)
    assert step.result(LIMIT_SECONDS) is not None
    assert loaded == [("denoise_step", True)]
    assert flags() == users
