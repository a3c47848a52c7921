"""Checkpoints whose weight files are whole and hold the wrong tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hostile.changes import WEIGHTS, Change, Checkpoint, Row, Tensors, one_more, tensors


def _some(found: Tensors, checkpoint: Checkpoint, rank: int = 1) -> str:
    """A tensor of at least this rank, whose first sizes differ; a vector may have axes of one."""
    fitting = [key for key, (_, shape, _) in found.items() if len(shape) >= rank]
    if rank > 1:
        fitting = [key for key in fitting if 1 != found[key][1][1] != found[key][1][0]]
    return str(checkpoint.pick(*fitting))


def _stored_as(dtype: str, item_bytes: int) -> Change:
    """The same number of values in another dtype."""

    def edit(found: Tensors, checkpoint: Checkpoint) -> None:
        key = _some(found, checkpoint)
        _, shape, values = found[key]
        found[key] = (dtype, shape, checkpoint.draw.bytes(len(values) // 4 * item_bytes))

    return tensors("", edit)


def _reshaped(reshape: Callable[[tuple[int, ...]], tuple[int, ...]], rank: int = 1) -> Change:
    def edit(found: Tensors, checkpoint: Checkpoint) -> None:
        key = _some(found, checkpoint, rank)
        dtype, shape, values = found[key]
        found[key] = (dtype, reshape(shape), values)

    return tensors("", edit)


def _becomes_tensor(shape: tuple[int, ...], nbytes: int = 0) -> Change:
    def edit(found: Tensors, checkpoint: Checkpoint) -> None:
        found[_some(found, checkpoint)] = ("F32", shape, checkpoint.draw.bytes(nbytes))

    return tensors("", edit)


def _half_as_wide(found: Tensors, checkpoint: Checkpoint) -> None:
    key = _some(found, checkpoint, 2)
    dtype, shape, values = found[key]
    found[key] = (dtype, (1, *shape[1:]), values[: len(values) // shape[0]])


def _swap_names(found: Tensors, checkpoint: Checkpoint) -> None:
    first = _some(found, checkpoint)
    second = checkpoint.pick(*(key for key in found if found[key][1] != found[first][1]))
    found[first], found[second] = found[second], found[first]


def _copied(name: Callable[[str], str], keep: bool = False) -> Change:
    """A tensor under another name, besides its own or instead."""

    def edit(found: Tensors, checkpoint: Checkpoint) -> None:
        key = _some(found, checkpoint)
        found[name(key)] = found[key] if keep else found.pop(key)

    return tensors("", edit)


def _eight_bit_nan(dtype: str) -> Change:
    """Values of one byte, of which one is not a number; without it they are weights as any."""

    def edit(found: Tensors, checkpoint: Checkpoint) -> None:
        key = _some(found, checkpoint)
        _, shape, _ = found[key]
        found[key] = (dtype, shape, b"\x01" * (int(np.prod(shape)) - 1) + b"\x7f")

    return tensors("", edit)


def _layer(number: str) -> Change:
    name = f"blocks.{number}.norm2.bias"
    return tensors(
        WEIGHTS["transformer"], lambda found, _: found.update({name: found["blocks.2.norm2.bias"]})
    )


def _two_embeddings(found: Tensors, checkpoint: Checkpoint) -> None:
    dtype, shape, values = found["shared.weight"]
    found["encoder.embed_tokens.weight"] = dtype, shape, values[::-1]


def _large(found: Tensors, checkpoint: Checkpoint) -> None:
    """A value of float32 that is infinite in bfloat16."""
    dtype, shape, values = found["patch_embedding.weight"]
    found["patch_embedding.weight"] = dtype, shape, values[:-4] + b"\xff\xff\x7f\x7f"


_PLAIN = "BF16 or F16 or F32"
_OTHER_DTYPES = (
    *(("BOOL", 1), ("U8", 1), ("F8_E8M0", 1), ("U16", 2), ("I16", 2), ("U32", 4), ("I32", 4), ("U64", 8)),
    *(("I64", 8), ("F64", 8)),
)
# Signalling and quiet NaN with payloads, and both infinities.
_NOT_FINITE = {
    "float32": ("F32", (0x7F800000, 0xFF800000, 0x7F800001, 0x7FC12345, 0xFFFFFFFF)),
    "float16": ("F16", (0x7C00, 0xFC00, 0x7C01, 0x7E55, 0xFFFF)),
    "bfloat16": ("BF16", (0x7F80, 0xFF80, 0x7F81, 0x7FC5, 0xFFFF)),
}


def _bits_in(component: str, last: bool, *bits: int) -> Change:
    """One value of these bits, the first or the last of a tensor drawn at random."""

    def edit(found: Tensors, checkpoint: Checkpoint) -> None:
        key = _some(found, checkpoint)
        dtype, shape, values = found[key]
        size = len(values) // int(np.prod(shape))
        value = int(checkpoint.pick(*bits)).to_bytes(size, "little")
        found[key] = (dtype, shape, values[:-size] + value if last else value + values[size:])

    return tensors(WEIGHTS[component], edit)


def _several(checkpoint: Checkpoint) -> None:
    """A problem in each component, and three in the transformer."""

    def transformer(found: Tensors, _: Checkpoint) -> None:
        del found["blocks.1.attn1.to_k.weight"]
        found["blocks.9.attn1.to_k.weight"] = found["blocks.0.attn1.to_k.weight"]
        dtype, (rows, columns), values = found["blocks.0.ffn.net.2.weight"]
        found["blocks.0.ffn.net.2.weight"] = dtype, (rows, columns - 1), values[: -4 * rows]

    tensors(WEIGHTS["transformer"], transformer)(checkpoint)
    tensors(WEIGHTS["vae"], lambda found, _: found.pop("decoder.conv_out.bias"))(checkpoint)
    tensors(WEIGHTS["text_encoder"], one_more)(checkpoint)


def _tensors() -> Iterator[Row]:
    for dtype, item_bytes in _OTHER_DTYPES:
        yield Row(f"dtype {dtype}", _stored_as(dtype, item_bytes), "wrong_kind", (_PLAIN, dtype))
    yield Row("dtype I8", _stored_as("I8", 1), "unknown_name", ("integers",))
    for dtype in ("F8_E4M3", "F8_E5M2"):
        yield Row(f"{dtype} that is not finite", _eight_bit_nan(dtype), "not_finite")
    sizes: dict[str, Change] = {
        "swapped sizes": _reshaped(lambda s: (s[1], s[0], *s[2:]), rank=2),
        "a flat shape": _reshaped(lambda s: (int(np.prod(s)),), rank=2),
        "one more axis": _reshaped(lambda s: (*s, 1, 1, 1)),
        "32 axes": _reshaped(lambda s: (*s, *[1] * (32 - len(s)))),
        "half as wide": tensors("", _half_as_wide),
        "a scalar": _becomes_tensor((), 4),
        "no values": _becomes_tensor((0,)),
        "no values and a huge axis": _becomes_tensor((0, 2**62)),
        "no values and huge axes": _becomes_tensor((2**62, 2**62, 0)),
        "a missing tensor": tensors("", lambda found, c: found.pop(_some(found, c))),
        "one tensor alone": tensors("", lambda found, _: [found.pop(key) for key in sorted(found)[1:]]),
        "names of two tensors swapped": tensors("", _swap_names),
        "a renamed tensor": _copied(lambda key: key + "_"),
        "a name in capitals": _copied(str.upper),
        "a name with a path": _copied(lambda key: f"../../{key}"),
    }
    for name, change in sizes.items():
        yield Row(name, change, "mismatch")
    many = tensors(
        "", lambda found, c: [found.update({f"e{i}": ("F32", (1,), bytes(4))}) for i in range(1000)]
    )
    for name, change, code, *values in (
        ("no tensors", tensors("", lambda found, _: found.clear()), "unreadable"),
        ("one tensor more", tensors("", one_more), "mismatch", "extra"),
        ("a thousand tensors more", many, "mismatch", "e0", 980),
        ("a copy under another name", _copied(lambda key: f"copy.{key}", keep=True), "mismatch", "copy."),
        ("a layer too many", _layer("3"), "mismatch", "blocks.3.norm2.bias"),
        ("a layer of 900 digits", _layer("9" * 900), "mismatch", "blocks.99"),
        ("the same layer twice", _layer("02"), "mismatch", "blocks.02.norm2.bias"),
        (
            "two values of the tied embedding",
            tensors(WEIGHTS["text_encoder"], _two_embeddings),
            *("mismatch", "shared.weight", "encoder.embed_tokens.weight"),
        ),
        (
            "a problem in each component",
            _several,
            *("mismatch", "blocks/attn1/to_k/weight", "blocks.9.attn1.to_k.weight", "[40, 55]", "[40, 56]"),
            *("blocks/ffn/down/weight", "decoder/conv_out/bias", "extra"),
        ),
        (
            "finite, but not in bfloat16",
            tensors(WEIGHTS["transformer"], _large),
            "not_finite",
            "transformer",
        ),
    ):
        yield Row(name, change, code, tuple(values))
    for base, (dtype, bits) in _NOT_FINITE.items():
        for component in WEIGHTS:
            for last in (False, True):
                name = f"{dtype} {component} not finite, {'last' if last else 'first'} value"
                yield Row(name, _bits_in(component, last, *bits), "not_finite", (component,), base)


ROWS: tuple[Row, ...] = tuple(_tensors())
