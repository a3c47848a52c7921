"""Mapping of the Wan VAE's state dict (diffusers' AutoencoderKLWan, plain or residual)."""

from __future__ import annotations

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
