"""JAX starts what a target needs; a program that embeds wanrun keeps its own options."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import wanrun
from helpers.damage import edit_environment, linked
from helpers.refusals import refuses
from wanrun.errors import ArtifactError
from wanrun.machine import jax_process
from wanrun.machine.jax_process import check_process, own_options, starting, uncollected


def test_the_platforms_are_set_while_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    before = jax.config.values["jax_platforms"]
    with starting("tpu", "cpu", "tpu"):
        assert jax.config.values["jax_platforms"] == "tpu,cpu"
        with starting("cpu"):
            assert jax.config.values["jax_platforms"] == "cpu"
        assert jax.config.values["jax_platforms"] == "tpu,cpu"
    assert jax.config.values["jax_platforms"] == before
    with pytest.raises(RuntimeError), starting("tpu"):
        raise RuntimeError
    assert jax.config.values["jax_platforms"] == before


@pytest.mark.slow
def test_nothing_is_collected_in_a_block_and_its_objects_are_old_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(RuntimeError), uncollected():
        assert not gc.isenabled()
        with uncollected():  # whoever has switched it off decides
            pass
        assert not gc.isenabled()
        made = [[]]
        raise RuntimeError
    assert gc.isenabled() and any(one is made for one in gc.get_objects(generation=2))
    gc.freeze()
    try:
        with uncollected():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_kernels_of_a_gpu_find_their_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What JAX's module of Mosaic GPU does when it is imported, which a run does not."""
    name, plugin = "MOSAIC_GPU_RUNTIME_LIB_PATH", tmp_path / "jax_cuda13_plugin"
    plugin.mkdir()
    (plugin / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, plugin.name, raising=False)
    monkeypatch.setenv(name, "mine")
    with starting("cuda"):
        assert os.environ[name] == "mine"
    monkeypatch.delenv(name)
    with starting("cpu"):
        assert name not in os.environ
    with starting("cuda"):
        assert os.environ[name] == str(plugin / "libmosaic_gpu_runtime.so")


@pytest.mark.parametrize(("named", "decides"), [("tpu", True), ("cpu", False), ("", False)])
def test_the_user_s_variable_decides(monkeypatch: pytest.MonkeyPatch, named: str, decides: bool) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", named)
    before = jax.config.values["jax_platforms"]
    with starting("cpu", "tpu"):
        assert jax.config.values["jax_platforms"] == (before if decides else "cpu,tpu")


def test_a_fork_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by those who have not loaded anything: JAX would wait for threads that a fork has not."""
    check_process()
    monkeypatch.setattr(jax_process._Started, "by", os.getpid() + 1)
    for use in (check_process, starting("cpu").__enter__):
        with refuses("closed", what="JAX ", expected=os.getpid() + 1, found=os.getpid(), remedy="spawn"):
            use()


def test_own_options_are_of_this_thread_and_block() -> None:
    with jax.no_tracing(True), jax.transfer_guard("disallow"):
        with own_options():
            assert float(jax.jit(lambda x: 7 * x)(3.0)) == 21
        with pytest.raises(RuntimeError, match="no_tracing"):
            jax.jit(lambda x: 8 * x)(3.0)


@pytest.mark.slow
def test_only_the_platform_of_the_target_is_started() -> None:
    """Also where another compiler is installed, which would print a traceback for a missing chip."""
    code = """
from wanrun.machine.environment import open_devices
print([device.platform for device in open_devices("cpu")])
from jax._src import xla_bridge
print(sorted(xla_bridge.backends()))
"""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["['cpu']", "['cpu']"]


@pytest.mark.thorough
def test_the_user_s_compilation_cache_is_left_alone(toy_artifact: Path, tmp_path: Path) -> None:
    """It works before and after, and nothing of a pipeline's is read from it or written to it."""
    code = """
import sys
from pathlib import Path
import jax, numpy as np
import wanrun
artifact, cache = sys.argv[1:]
jax.config.update("jax_compilation_cache_dir", cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
def entries():
    return len(list(Path(cache).glob("*-cache")))
jax.jit(lambda x: 3 * x)(np.float32(2)).block_until_ready()
before = entries()
with wanrun.load(artifact) as pipeline:
    pipeline.generate("a fox", num_steps=1)
    print(entries() - before, pipeline.timings.cache_misses)
jax.jit(lambda x: 4 * x)(np.float32(2)).block_until_ready()
print(entries() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, toy_artifact, tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["0 0", "1"]


def test_a_load_that_fails_leaves_nothing(toy_artifact: Path, tmp_path: Path) -> None:
    before = dict(jax.config.values)
    artifact = linked(toy_artifact, tmp_path / "artifact")
    edit_environment(artifact, device_kind="TPU v9", machine="riscv64")
    with pytest.raises(ArtifactError):
        wanrun.load(artifact)
    assert dict(jax.config.values) == before
