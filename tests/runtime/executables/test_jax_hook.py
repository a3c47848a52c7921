"""Executables are handed to JAX and taken from it, programs are lowered; the process notices nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src import compiler

from helpers.opened import LIMIT_SECONDS
from helpers.refusals import refuses
from wanrun.errors import ArtifactError
from wanrun.executables import lowering
from wanrun.executables.jax_hook import compile_here, load, replaced
from wanrun.executables.lowering import UnreadableProgramError, lower

THREE = np.array([1, 2, 3], np.float32)


def lowered(factor: float = 3) -> jax.stages.Lowered:
    """A program that multiplies, lowered anew."""
    return jax.jit(lambda x: factor * x).lower(jax.ShapeDtypeStruct(THREE.shape, THREE.dtype))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which XLA was asked to compile, once for each time."""
    asked: list[int] = []
    own = compiler.backend_compile_and_load

    def counted(*arguments: Any) -> Any:
        asked.append(threading.get_ident())
        return own(*arguments)

    monkeypatch.setattr(compiler, "backend_compile_and_load", counted)
    return asked


def test_what_was_compiled_is_loaded_again(compiles: list[int]) -> None:
    compiled, entry = compile_here(lowered())
    assert np.array_equal(compiled(THREE), 3 * THREE) and len(compiles) == 1
    again = load("triple", lowered(), entry)
    assert np.array_equal(again(THREE), 3 * THREE) and len(compiles) == 1


def test_the_bytes_decide_and_not_the_program() -> None:
    """So a digest over them covers what runs. The manifest's digests say which bytes are whose."""
    _, entry = compile_here(lowered(5))
    assert np.array_equal(load("triple", lowered(3), entry)(THREE), 5 * THREE)


@pytest.mark.parametrize("data", [b"", b"no entry", bytes(200), b"\x28\xb5\x2f\xfd" + bytes(50)])
def test_what_is_no_entry(data: bytes, compiles: list[int]) -> None:
    with refuses("wrong_machine", ArtifactError, what="triple", remedy="--allow-compile"):
        load("triple", lowered(), data)
    assert compiles == []


def test_an_entry_that_ends_early(compiles: list[int]) -> None:
    _, entry = compile_here(lowered())
    with pytest.raises(ArtifactError, match="triple"):
        load("triple", lowered(), entry[: len(entry) // 2])
    assert len(compiles) == 1


def test_the_entry_of_a_program_with_other_inputs() -> None:
    other = jax.jit(lambda x, y: x + y).lower(*[jax.ShapeDtypeStruct(THREE.shape, THREE.dtype)] * 2)
    _, entry = compile_here(other)
    with pytest.raises(ArtifactError, match="triple"):
        load("triple", lowered(), entry)


def test_too_little_memory_is_no_fault_of_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    _, entry = compile_here(lowered())

    def full(*arguments: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr("jax._src.compilation_cache.extract_executable_and_time", full)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        load("triple", lowered(), entry)


def test_a_jax_that_asks_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, and not taken for a hit."""
    _, entry = compile_here(lowered())
    own = compiler.compile_or_get_cached
    from jax._src.interpreters import pxla

    class Elsewhere:
        """A module whose function nobody replaces."""

        compile_or_get_cached = staticmethod(own)

        def __getattr__(self, name: str) -> Any:
            return getattr(compiler, name)

    monkeypatch.setattr(pxla, "compiler", Elsewhere())
    with pytest.raises(ArtifactError) as refused:
        load("triple", lowered(), entry)
    assert refused.value.found == "0 calls"


@pytest.mark.slow
def test_other_threads_compile_as_ever(compiles: list[int]) -> None:
    _, entry = compile_here(lowered())
    compiles.clear()
    with ThreadPoolExecutor(1) as pool:
        for factor in range(20):
            other = pool.submit(lambda factor=factor: float(jax.jit(lambda x: factor * x + 1)(2.0)))
            assert np.array_equal(load("triple", lowered(), entry)(THREE), 3 * THREE)
            assert other.result(LIMIT_SECONDS) == 2 * factor + 1
    assert threading.get_ident() not in compiles


def test_a_replaced_function_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    own = compiler.compile_or_get_cached
    with pytest.raises(RuntimeError), replaced(compiler, "compile_or_get_cached", lambda *_: None):
        raise RuntimeError
    assert compiler.compile_or_get_cached is own


# --- in somebody's process ----------------------------------------------------------------------------------

OTHERS: Mapping[str, Any] = {
    "jax_enable_x64": True,
    "jax_debug_nans": True,
    "jax_disable_jit": True,
    "jax_transfer_guard": "disallow_explicit",
    "jax_default_matmul_precision": "highest",
    "jax_default_prng_impl": "rbg",
    "jax_optimization_level": "O1",
    "jax_memory_fitting_effort": 0.25,
    "jax_enable_compilation_cache": False,
    "jax_persistent_cache_min_compile_time_secs": 7.0,
    "jax_persistent_cache_enable_xla_caches": "all",
    "jax_compilation_cache_max_size": 99,
    "jax_no_tracing": True,
}
"""What a program that embeds wanrun may have set."""


OF_COMPILED = ("jax_debug_nans", "jax_disable_jit", "jax_enable_x64", "jax_no_tracing", "jax_transfer_guard")
"""Those that may stop what is compiled already, or change what it is given: one may hide another."""


@pytest.fixture(params=[*OF_COMPILED, "the rest", "all"])
def users(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """JAX's options as a user has set them; all are set back at the end."""
    before = dict(jax.config.values)
    sets = {"all": set(OTHERS), "the rest": OTHERS.keys() - set(OF_COMPILED)}
    chosen = {name: OTHERS[name] for name in sets.get(request.param, {request.param})}
    for name, value in chosen.items():
        if name in before:  # a newer JAX may have dropped it
            jax.config.update(name, value)
    yield dict(jax.config.values)
    for name, value in before.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)


@pytest.mark.thorough
def test_a_user_s_options_change_nothing_and_are_not_changed(
    toy_artifact: Any, golden: dict[str, Any], users: dict[str, Any]
) -> None:
    """A pipeline gives the bits that it gives without them, and none is set while it is open."""
    import wanrun
    from wanrun.replay.golden import replayed

    with wanrun.load(toy_artifact, embeddings="none") as pipeline:
        assert jax.config.values == users
        found = replayed(pipeline, pipeline.environment).golden.as_json()
        assert jax.config.values == users
        assert (pipeline.timings.cache_misses, found) == (0, golden)
    assert jax.config.values == users


# Lowering.


def test_another_thread_may_import_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.export import _export

    asked: list[int] = []
    monkeypatch.setattr(
        _export, "_ensure_backends_initialized", lambda platforms: asked.append(threading.get_ident())
    )
    replaced = _export._ensure_backends_initialized
    with lowering._without_lapack(), ThreadPoolExecutor(1) as pool:
        _export._ensure_backends_initialized(("cpu",))
        assert asked == []
        pool.submit(_export._ensure_backends_initialized, ("cpu",)).result(LIMIT_SECONDS)
    assert len(asked) == 1
    assert _export._ensure_backends_initialized is replaced


def test_the_results_of_a_program_without_arguments_say_on_which_device_it_runs() -> None:
    """Else it is lowered for the process's first one, of whatever kind that is."""
    device = jax.devices("cpu")[0]
    without, taking = (
        export.export(jax.jit(function))(*arguments)
        for function, arguments in ((lambda: jnp.zeros(2), ()), (jnp.negative, (jnp.zeros(2),)))
    )
    own = jax.sharding.SingleDeviceSharding(device)
    assert lowering._shardings(without, device) == ([], {"out_shardings": own})
    assert lowering._shardings(taking, device) == ([own], {})


def test_a_program_that_jax_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no program at all, and what JAX 0.11.1 and newer say of an old one."""
    device = jax.devices("cpu")[0]
    for data in (b"", b"no program", bytes(200)):
        with refuses("other_release", UnreadableProgramError, what="prepare", expected=jax.__version__):
            lower(data, "prepare", (), device)

    def expired(data: bytearray) -> None:
        raise ValueError("Exported is older. See https://docs.jax.dev/#guarantees.")

    monkeypatch.setattr(export, "deserialize", expired)
    with pytest.raises(UnreadableProgramError) as caught:
        lower(b"", "prepare", (), device)
    assert caught.value.found == "Exported is older"
    assert caught.value.exit_code == 3 and isinstance(caught.value.__cause__, ValueError)
