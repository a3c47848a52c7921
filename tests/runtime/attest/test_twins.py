"""Programs that run twice: what is taken away is copied, and what differs most is remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec import structs

from helpers.manifests import built_with
from wanrun.artifact.programs import Program
from wanrun.artifact.roles import RoleName
from wanrun.attest.twins import CannotCompileError, Twins
from wanrun.executables.executables import Native

AVALS = {"inputs": {"state": "float32[4]"}, "outputs": {"state": "float32[4]"}}
PROGRAM = Program("p", "sha256:0", ("state",), (0,), AVALS, "decode")


class Run:
    """A twin of a function; notes what is told and kept."""

    def __init__(self, shipped: Callable[..., Any], native: Callable[..., Any]) -> None:
        self.told, self.kept = list[str](), list[str]()
        self.twins = Twins(built_with(dtype="float32"), False, lambda what, keep: self.told.append(what))
        self.call = self.twins.beside(
            "decode", PROGRAM, shipped, lambda: Native(native, lambda: self.kept.append("decode") or "")
        )


def test_arrays_that_a_call_takes_away_are_copied_for_the_other() -> None:
    double = jax.jit(lambda state: 2 * state, donate_argnums=0)
    run = Run(lambda state: double(state), lambda state: double(state))
    for given in (jnp.arange(4.0), np.arange(4, dtype=np.float32)):
        assert np.array_equal(run.call(state=given), 2 * np.arange(4))
    assert run.twins.found["decode"].error == 0 and run.twins.native() == ()
    assert len(run.told) == 2
    run.twins.keep()
    assert run.kept == []


def test_the_worst_call_counts_and_what_is_right_goes_on() -> None:
    run = Run(lambda state: np.where(state > 2, 0, state), lambda state: state)
    for scale in (1, 2, 1):
        assert np.array_equal(run.call(state=scale * np.ones(4)), scale * np.ones(4))
        assert not run.twins.native()
    assert np.array_equal(run.call(state=3 * np.ones(4)), 3 * np.ones(4))
    run.call(state=np.ones(4))
    assert run.twins.native() == ("decode",) and run.twins.found["decode"].error == 1
    run.twins.keep()
    assert run.kept == ["decode"]


def test_what_does_not_run_is_not_used() -> None:
    """But for want of memory, which is no matter of the executable."""

    def fail(said: str) -> Run:
        def shipped(state: Any) -> Any:
            raise RuntimeError(said)

        return Run(shipped, lambda state: state)

    run = fail("CUDNN_STATUS_BAD_PARAM")
    for _ in range(2):
        assert np.array_equal(run.call(state=np.ones(4)), np.ones(4))
    assert run.twins.native() == ("decode",) and run.twins.found == {}
    run.twins.keep()
    assert run.kept == ["decode"]
    with pytest.raises(RuntimeError):
        fail("RESOURCE_EXHAUSTED: 1 GiB").call(state=np.ones(4))


@pytest.mark.parametrize(("role", "found"), [("step", 16e-3), ("prepare", 16e-3), ("text", 1e-3)])
def test_what_shifts_a_channel_counts_for_more(role: RoleName, found: float) -> None:
    """But of text encoders and the VAE, which may be rounded to one side."""
    twins, program = (
        Twins(built_with(dtype="bfloat16"), False, lambda what, keep: None),
        structs.replace(PROGRAM, role=role),
    )
    native = Native(lambda state: np.ones(512), str)
    for name, shift in {"shifted": 1e-3, "rounded": np.tile([1e-3, -1e-3], 256)}.items():
        twins.beside(name, program, lambda state, by=shift: np.ones(512) + by, lambda: native)(state=None)
    assert {name: apart.error for name, apart in twins.found.items()} == {
        "shifted": pytest.approx(found),
        "rounded": pytest.approx(1e-3),
    }


def test_what_cannot_be_compiled_is_said() -> None:
    def refuse() -> Native:
        raise RuntimeError("no such\ninstruction")

    run = Run(lambda state: state, lambda state: state)
    call = run.twins.beside("other", PROGRAM, lambda state: state, refuse)
    with pytest.raises(CannotCompileError) as caught:
        call(state=np.ones(4))
    assert "'no such instruction'" in str(caught.value)
