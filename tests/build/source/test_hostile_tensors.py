"""Weight files in order that hold the wrong tensors, generated: refused like those of test_hostile.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.hostile import WEIGHTS, Case, Change, Checkpoint, Tensor, assert_refused, edit_tensors


def reverse(tensor: Tensor) -> Tensor:
    """The same tensor with its bytes the other way round."""
    dtype, shape, content = tensor
    return dtype, shape, content[::-1]


def some(tensors: dict[str, Tensor], checkpoint: Checkpoint, rank: int = 1) -> str:
    """A tensor of at least this rank, whose sizes differ."""
    fitting = [key for key, (_, shape, _) in tensors.items() if len(shape) >= rank]
    if rank > 1:
        fitting = [key for key in fitting if tensors[key][1][0] != tensors[key][1][1]]
    return str(checkpoint.pick(*fitting))


def stored_as(dtype: str, item_bytes: int) -> Change:
    """The same number of values in another dtype."""

    def edit(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> None:
        key = some(tensors, checkpoint)
        _, shape, values = tensors[key]
        tensors[key] = (dtype, shape, checkpoint.rng.bytes(len(values) // 4 * item_bytes))

    return edit_tensors("", edit)


def reshaped(reshape: Callable[[tuple[int, ...]], tuple[int, ...]], rank: int = 1) -> Change:
    def edit(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> None:
        key = some(tensors, checkpoint, rank)
        dtype, shape, values = tensors[key]
        tensors[key] = (dtype, reshape(shape), values)

    return edit_tensors("", edit)


def swap_names(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> None:
    first = some(tensors, checkpoint)
    others = [key for key in tensors if tensors[key][1] != tensors[first][1]]
    second = checkpoint.pick(*others)
    tensors[first], tensors[second] = tensors[second], tensors[first]


def empty_tensor(shape: tuple[int, ...]) -> Change:
    def edit(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> None:
        tensors[some(tensors, checkpoint)] = ("F32", shape, b"")

    return edit_tensors("", edit)


def rename(new: Callable[[str], str]) -> Change:
    def edit(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> None:
        key = some(tensors, checkpoint)
        tensors[new(key)] = tensors.pop(key)

    return edit_tensors("", edit)


def not_a_number(dtype: str) -> Change:
    """Values of one byte, of which one is not a number; without it they are weights as any."""

    def edit(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> None:
        key = some(tensors, checkpoint)
        _, shape, _ = tensors[key]
        tensors[key] = (dtype, shape, b"\x01" * (int(np.prod(shape)) - 1) + b"\x7f")

    return edit_tensors("", edit)


UNFIT = "weights do not fit their config"
TENSORS: dict[str, tuple[Change, str]] = {
    **{
        f"dtype {dtype}": (stored_as(dtype, item_bytes), "is not a plain weight")
        for dtype, item_bytes in (
            *(("BOOL", 1), ("U8", 1), ("F8_E8M0", 1)),
            *(("U16", 2), ("I16", 2), ("U32", 4), ("I32", 4), ("U64", 8), ("I64", 8), ("F64", 8)),
        )
    },
    "dtype I8": (stored_as("I8", 1), "for integers"),
    **{
        f"dtype {dtype}, not a number": (not_a_number(dtype), "has a value that is not finite")
        for dtype in ("F8_E4M3", "F8_E5M2")
    },
    "swapped sizes": (reshaped(lambda s: (s[1], s[0], *s[2:]), rank=2), UNFIT),
    "a flat shape": (reshaped(lambda s: (int(np.prod(s)),), rank=2), UNFIT),
    "one more axis": (reshaped(lambda s: (*s, 1, 1, 1)), UNFIT),
    "32 axes": (reshaped(lambda s: (*s, *[1] * (32 - len(s)))), UNFIT),
    "half as wide": (
        edit_tensors(
            "",
            lambda t, c: t.update(
                {(k := some(t, c, 2)): (t[k][0], (1, *t[k][1][1:]), t[k][2][: len(t[k][2]) // t[k][1][0]])}
            ),
        ),
        UNFIT,
    ),
    "a scalar": (
        edit_tensors("", lambda t, c: t.update({some(t, c): ("F32", (), c.rng.bytes(4))})),
        UNFIT,
    ),
    "no values": (empty_tensor((0,)), UNFIT),
    "no values and a huge axis": (empty_tensor((0, 2**62)), UNFIT),
    "no values and huge axes": (empty_tensor((2**62, 2**62, 0)), UNFIT),
    "a missing tensor": (edit_tensors("", lambda t, c: t.pop(some(t, c))), "missing key"),
    "no tensors": (edit_tensors("", lambda t, c: t.clear()), "no tensors"),
    "one tensor alone": (
        edit_tensors("", lambda t, c: [t.pop(key) for key in sorted(t)[1:]]),
        "missing key",
    ),
    "one tensor more": (
        edit_tensors("", lambda t, c: t.update(extra=("F32", (2,), c.rng.bytes(8)))),
        "unexpected key extra",
    ),
    "a thousand tensors more": (
        edit_tensors(
            "", lambda t, c: t.update({f"e{i}": ("F32", (1,), c.rng.bytes(4)) for i in range(1000)})
        ),
        "unexpected key e0 .* and 980 more",
    ),
    "a copy under another name": (
        edit_tensors("", lambda t, c: t.update({"copy." + (k := some(t, c)): t[k]})),
        "unexpected key copy",
    ),
    "names of two tensors swapped": (edit_tensors("", swap_names), UNFIT),
    "a renamed tensor": (rename(lambda key: key + "_"), "unexpected key .*missing key"),
    "a name in capitals": (rename(str.upper), "unexpected key .*missing key"),
    "a name with a path": (rename(lambda key: f"../../{key}"), "unexpected key .*missing key"),
    "a layer too many": (
        edit_tensors(
            WEIGHTS["transformer"],
            lambda t, c: t.update({"blocks.3.norm2.bias": t["blocks.2.norm2.bias"]}),
        ),
        "unexpected key blocks.3.norm2.bias",
    ),
    "a layer of 4000 digits": (
        edit_tensors(
            WEIGHTS["transformer"],
            lambda t, c: t.update({f"blocks.{'9' * 900}.norm2.bias": t["blocks.2.norm2.bias"]}),
        ),
        "unexpected key blocks.99",
    ),
    "the same layer twice": (
        edit_tensors(
            WEIGHTS["transformer"],
            lambda t, c: t.update({"blocks.02.norm2.bias": t["blocks.2.norm2.bias"]}),
        ),
        "both fill|unexpected key",
    ),
    "two values of the tied embedding": (
        edit_tensors(
            WEIGHTS["text_encoder"],
            lambda t, c: t.update({"encoder.embed_tokens.weight": reverse(t["shared.weight"])}),
        ),
        "shared.weight and encoder.embed_tokens.weight in .* are not equal",
    ),
}

# Signalling and quiet NaN with payloads, and both infinities.
NOT_FINITE = {
    "F32": (0x7F800000, 0xFF800000, 0x7F800001, 0x7FC12345, 0xFFFFFFFF),
    "F16": (0x7C00, 0xFC00, 0x7C01, 0x7E55, 0xFFFF),
    "BF16": (0x7F80, 0xFF80, 0x7F81, 0x7FC5, 0xFFFF),
}


def not_finite(component: str, last: bool) -> Change:
    """One value that is NaN or infinite, the first or the last of a tensor drawn at random."""

    def edit(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> None:
        key = some(tensors, checkpoint)
        dtype, shape, values = tensors[key]
        size = len(values) // int(np.prod(shape))
        bits = int(checkpoint.pick(*NOT_FINITE[dtype])).to_bytes(size, "little")
        tensors[key] = (dtype, shape, values[:-size] + bits if last else bits + values[size:])

    return edit_tensors(WEIGHTS[component], edit)


def all_cases() -> list[Case]:
    cases = [Case(name, change, says) for name, (change, says) in TENSORS.items()]
    cases += [
        Case(
            f"{dtype} {component} not finite in the {'last' if last else 'first'} value",
            not_finite(component, last),
            "has a value that is not finite",
            dtype,
        )
        for dtype in ("float32", "float16", "bfloat16")
        for component in WEIGHTS
        for last in (False, True)
    ]
    return cases


@pytest.mark.thorough
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_wrong_tensors_are_refused(
    case: Case, good_checkpoints: dict[str, Path], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, good_checkpoints, place, capsys)
