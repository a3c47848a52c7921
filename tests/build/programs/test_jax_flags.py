"""A build pins JAX's flags and gives them back, whatever the user has set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from helpers.damage import linked
from wanbuild.build import compile_artifact
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.programs.jax_flags import FLAGS, cache_in, jax_options, pinned

OTHERS: Mapping[str, Any] = {
    "jax_persistent_cache_min_compile_time_secs": 7.0,
    "jax_persistent_cache_enable_xla_caches": "all",
    "jax_default_matmul_precision": "highest",
    "jax_default_prng_impl": "rbg",
    "jax_transfer_guard": "log",
    "jax_optimization_level": "O1",
    "jax_memory_fitting_effort": 0.25,
}
"""What a user may have set."""


def flags() -> dict[str, Any]:
    return dict(jax.config.values)


def ours() -> bool:
    """Whether every flag is as executables are built with."""
    return all(value == FLAGS[name] for name, value in flags().items() if name in FLAGS)


@pytest.fixture(autouse=True)
def users() -> Iterator[dict[str, Any]]:
    """JAX's flags as a user has set them; all are set back at the end."""
    with jax_options(**OTHERS):
        yield flags()


def test_every_flag_is_put_back(users: dict[str, Any]) -> None:
    assert not ours()
    with pinned("cpu"):
        assert ours() and flags() != users
        with pinned("cpu"):
            assert ours()
        assert ours()
    assert flags() == users
    with pytest.raises(RuntimeError), pinned("cpu"):
        raise RuntimeError
    assert flags() == users


def test_a_flag_that_changes_others(users: dict[str, Any]) -> None:
    """That of transfers is three, which a user may have set one by one."""
    with jax_options(jax_transfer_guard_host_to_device="disallow_explicit"):
        before = flags()
        assert before["jax_transfer_guard"] == before["jax_transfer_guard_device_to_host"] == "log"
        with pinned("cpu"):
            assert flags()["jax_transfer_guard_host_to_device"] == "allow"
        assert flags() == before
    assert flags() == users


def test_a_flag_that_cannot_be_set(users: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="O9"), jax_options(jax_debug_nans=True, jax_optimization_level="O9"):
        pass
    assert flags() == users


def test_what_is_compiled_is_kept_in_the_folder(tmp_path: Path) -> None:
    with pinned("cpu"), cache_in(tmp_path):
        jax.jit(lambda x: 3 * x)(np.float32(2)).block_until_ready()
    (entry,) = tmp_path.glob("*-cache")
    with pinned("cpu"):
        jax.jit(lambda x: 4 * x)(np.float32(2)).block_until_ready()
    assert list(tmp_path.glob("*-cache")) == [entry]


@pytest.mark.thorough
def test_compiling_puts_them_back(toy_artifact: Path, tmp_path: Path, users: dict[str, Any]) -> None:
    artifact = linked(toy_artifact, tmp_path / "artifact")
    request = CompileRequest(
        artifact, ["cpu"], [(96, 64)], [9], (True,), options=BuildOptions(dtype="float32")
    )
    seen: list[bool] = []
    compile_artifact(request, lambda line: seen.append(ours() and "up to date" in line))
    assert len(seen) == 9 and all(seen)
    assert flags() == users
