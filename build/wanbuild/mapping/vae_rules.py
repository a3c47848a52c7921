"""Mappings of the state dicts of the Wan VAE and of a tiny decoder.

The VAE is diffusers' AutoencoderKLWan, plain or residual. The layers of a tiny decoder (TAEHV) have the
numbers of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

from wanbuild.mapping.rules import Rule

_N = r"\d+"


def _residual(prefix: str, target: str) -> tuple[Rule, ...]:
    """Returns the rules of one residual block."""
    return (
        Rule(rf"{prefix}\.(?P<norm>norm[12])\.gamma", f"{target}/{{norm}}/gamma", "vector"),
        Rule(rf"{prefix}\.(?P<conv>conv[12])\.weight", f"{target}/{{conv}}/weight", "conv3d"),
        Rule(rf"{prefix}\.(?P<conv>conv[12]|conv_shortcut)\.bias", f"{target}/{{conv}}/bias"),
        Rule(rf"{prefix}\.conv_shortcut\.weight", f"{target}/conv_shortcut/weight", "flatten_in"),
    )


def _resample(prefix: str, target: str) -> tuple[Rule, ...]:
    """Returns the rules of one resampling module."""
    return (
        Rule(rf"{prefix}\.resample\.1\.weight", f"{target}/resample/weight", "conv2d"),
        Rule(rf"{prefix}\.resample\.1\.bias", f"{target}/resample/bias"),
        Rule(rf"{prefix}\.time_conv\.weight", f"{target}/time_conv/weight", "conv3d"),
        Rule(rf"{prefix}\.time_conv\.bias", f"{target}/time_conv/bias"),
    )


_PART = r"(?P<part>encoder|decoder)"
_ATTENTION = rf"{_PART}\.mid_block\.attentions\.0"

VAE_RULES: tuple[Rule, ...] = (
    Rule(r"(?P<conv>quant_conv|post_quant_conv)\.weight", "{conv}/weight", "flatten_in"),
    Rule(r"(?P<conv>quant_conv|post_quant_conv)\.bias", "{conv}/bias"),
    Rule(rf"{_PART}\.(?P<conv>conv_in|conv_out)\.weight", "{part}/{conv}/weight", "conv3d"),
    Rule(rf"{_PART}\.(?P<conv>conv_in|conv_out)\.bias", "{part}/{conv}/bias"),
    Rule(rf"{_PART}\.norm_out\.gamma", "{part}/norm_out/gamma", "vector"),
    Rule(rf"{_ATTENTION}\.norm\.gamma", "{part}/mid_block/attentions/0/norm/gamma", "vector"),
    Rule(
        rf"{_ATTENTION}\.(?P<linear>to_qkv|proj)\.weight",
        "{part}/mid_block/attentions/0/{linear}/weight",
        "flatten_in",
    ),
    Rule(rf"{_ATTENTION}\.(?P<linear>to_qkv|proj)\.bias", "{part}/mid_block/attentions/0/{linear}/bias"),
    *_residual(rf"{_PART}\.mid_block\.resnets\.(?P<i>{_N})", "{part}/mid_block/resnets/{i}"),
    *_residual(rf"encoder\.down_blocks\.(?P<i>{_N})", "encoder/down_blocks/{i}"),
    *_resample(rf"encoder\.down_blocks\.(?P<i>{_N})", "encoder/down_blocks/{i}"),
    *_residual(
        rf"encoder\.down_blocks\.(?P<i>{_N})\.resnets\.(?P<j>{_N})", "encoder/down_blocks/{i}/resnets/{j}"
    ),
    *_resample(rf"encoder\.down_blocks\.(?P<i>{_N})\.downsampler", "encoder/down_blocks/{i}/downsampler"),
    *_residual(
        rf"decoder\.up_blocks\.(?P<i>{_N})\.resnets\.(?P<j>{_N})", "decoder/up_blocks/{i}/resnets/{j}"
    ),
    *_resample(
        rf"decoder\.up_blocks\.(?P<i>{_N})\.(?:upsamplers\.0|upsampler)", "decoder/up_blocks/{i}/upsampler"
    ),
)

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
