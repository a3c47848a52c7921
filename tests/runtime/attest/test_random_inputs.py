"""Drawn inputs: what those of an attention are is tested with the kernels, by the faults that they show."""

from __future__ import annotations

import numpy as np

from wanrun.artifact.slots import Slot
from wanrun.attest.random_inputs import attention_inputs, drawn_lora

HEADS, TEXT = "bfloat16[2,70,3,128]", "float32[1,130,3,128]"
AVALS = {
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
    for avals in AVALS.values():
        for one, same in zip(attention_inputs(avals), attention_inputs(avals), strict=True):
            texts = {name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for name, x in one.items()}
            assert texts == avals
            assert all(np.array_equal(one[name], same[name]) for name in avals)


def test_logits() -> None:
    for avals in AVALS.values():
        found = list(attention_inputs(avals))
        counts = [int(one["mask"].sum()) if "mask" in one else 70 for one in found]
        assert counts == ([70] * 3 if avals is AVALS["among"] else [97, 129, 113])
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
