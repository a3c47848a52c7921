"""Programs are lowered without SciPy, and one that JAX does not take is one error."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax import export

from helpers.opened import LIMIT_SECONDS
from helpers.refusals import refuses
from wanrun.executables import lowering
from wanrun.executables.lowering import UnreadableProgramError, lower


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
