"""Programs that run twice, with drawn inputs: what is taken away is copied, and what differs most is told."""

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
from wanrun.artifact.slots import Slot
from wanrun.attest.random_inputs import attention_inputs, drawn_lora
from wanrun.attest.twins import CannotCompileError, Twins
from wanrun.executables.executables import Native

# --- twins ---


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


# --- drawn ---


HEADS, TEXT = "bfloat16[2,70,3,128]", "float32[1,130,3,128]"
ATTENTIONS = {
    "among": {
        **dict.fromkeys("qkv", HEADS),
        "inverse": "float32[2,70,1]",
        "weight": "float32[384]",
        "cos": "float32[70,64]",
        "sin": "float32[70,64]",
    },
    "to": {"q": "float32[2,70,3,128]", "k": TEXT, "v": TEXT, "mask": "bool[130]"},
}


def logits(q: np.ndarray, k: np.ndarray, count: int) -> np.ndarray:
    """Those of the keys that count, (queries, keys), of the first video's first head."""
    q, k = (x[0, :, 0].astype(np.float32) for x in (q, k))
    return np.asarray(q @ k[:count].T / np.sqrt(128))


def test_inputs_are_as_the_program_takes_them_and_always_the_same() -> None:
    for avals in ATTENTIONS.values():
        for one, same in zip(attention_inputs(avals), attention_inputs(avals), strict=True):
            texts = {name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for name, x in one.items()}
            assert texts == avals
            assert all(np.array_equal(one[name], same[name]) for name in avals)


def test_logits() -> None:
    for avals in ATTENTIONS.values():
        found = list(attention_inputs(avals))
        counts = [int(one["mask"].sum()) if "mask" in one else 70 for one in found]
        assert counts == ([70] * 3 if avals is ATTENTIONS["among"] else [97, 129, 113])
        random, low, borders = (logits(one["q"], one["k"], n) for one, n in zip(found, counts, strict=True))
        assert 2.5 < random.std() < 3.5
        assert -24 < low.min() < low.max() < -16 and low.std() > 0.3
        assert np.allclose(borders.max(axis=1), 16, atol=0.2)
        best = {0, 63, 64, counts[2] - 1}
        assert set(borders.argmax(axis=1)) == best
        for one, count in zip(found, counts, strict=True):
            assert not one["k"][:, count:].any() and one["v"][:, count:].any() == (count < one["v"].shape[1])


def test_no_two_tokens_are_alike() -> None:
    given = next(attention_inputs(dict.fromkeys("qkv", "bfloat16[1,9000,1,8]")))
    for name in "qkv":
        rows = given[name].reshape(9000, 8).view(np.uint16)
        assert len(np.unique(rows, axis=0)) == 9000


def test_a_lora_fills_all_slots_of_each_transformer() -> None:
    slots = {path: Slot(shape, (None, None)) for path, shape in (("a/lora_a", (4, 16)), ("a/lora_b", (8, 4)))}
    lora = drawn_lora(slots, "bfloat16", ["transformer", "transformer_2"])
    for expert in lora.strengths:
        assert {path: one.shape for path, one in lora.file.of(expert).items()} == {
            path: slot.shape for path, slot in slots.items()
        }
        assert all(one.dtype == "bfloat16" and one.all() for one in lora.file.of(expert).values())
