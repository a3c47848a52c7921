"""Mapping of a tiny decoder's state dict (TAEHV), whose layers have the numbers of one sequence."""

from __future__ import annotations

from collections.abc import Iterator

from wanbuild.mapping.rules import Rule

LEVELS, BLOCKS = 3, 3
FIRST_BLOCK, LEVEL_STEP = 3, 6
"""The first block's number, and how far apart the same layers of two levels are."""

CONV_IN, CONV_OUT = "decoder.1", "decoder.22"


def block_name(level: int, block: int) -> str:
    """Returns the name of a block's convolutions."""
    return f"decoder.{FIRST_BLOCK + LEVEL_STEP * level + block}.conv"


def grow_name(level: int) -> str:
    """Returns the name of the layer that makes a level's frames."""
    return f"decoder.{FIRST_BLOCK + LEVEL_STEP * level + BLOCKS + 1}.conv"


def upsample_name(level: int) -> str:
    """Returns the name of the convolution behind a level's upsampling."""
    return f"decoder.{FIRST_BLOCK + LEVEL_STEP * level + BLOCKS + 2}"


def _conv(name: str, target: str) -> Iterator[Rule]:
    name = name.replace(".", r"\.")
    yield Rule(rf"{name}\.weight", f"{target}/weight", "conv2d")
    yield Rule(rf"{name}\.bias", f"{target}/bias")


def _rules() -> Iterator[Rule]:
    yield Rule(r"encoder\..*", None)
    yield from _conv(CONV_IN, "conv_in")
    for level in range(LEVELS):
        for block in range(BLOCKS):
            for number in range(3):  # between them are activations
                target = f"levels/{level}/blocks/{block}/conv/{number}"
                yield from _conv(f"{block_name(level, block)}.{2 * number}", target)
        grow, upsample = (name(level).replace(".", r"\.") for name in (grow_name, upsample_name))
        yield Rule(rf"{grow}\.weight", f"levels/{level}/grow/weight", "flatten_in")
        yield Rule(rf"{upsample}\.weight", f"levels/{level}/upsample", "conv2d")
    yield from _conv(CONV_OUT, "conv_out")


TINY_VAE_RULES: tuple[Rule, ...] = tuple(_rules())
