"""Mapping of the Wan Animate transformer's state dict (diffusers' key names)."""

from __future__ import annotations

from wanbuild.mapping.rules import Rule
from wanbuild.mapping.transformer import TRANSFORMER_RULES

_PARAM = r"(?P<param>weight|bias)"
_MOTION = r"motion_encoder\."
_CONV = r"(?P<conv>conv1|conv2|conv_skip)"
_ADAPTER = r"face_adapter\.(?P<layer>\d+)\."

MOTION_RULES: tuple[Rule, ...] = (
    Rule(_MOTION + r"(?P<conv>conv_in|conv_out)\.weight", "motion_encoder/{conv}/weight", "conv2d"),
    # The bias is (C,) in diffusers and (1, C, 1, 1) in the original.
    Rule(_MOTION + r"conv_in\.act_fn\.bias", "motion_encoder/conv_in/bias", "vector"),
    Rule(
        _MOTION + r"res_blocks\.(?P<i>\d+)\." + _CONV + r"\.weight",
        "motion_encoder/res_blocks/{i}/{conv}/weight",
        "conv2d",
    ),
    Rule(
        _MOTION + r"res_blocks\.(?P<i>\d+)\." + _CONV + r"\.act_fn\.bias",
        "motion_encoder/res_blocks/{i}/{conv}/bias",
        "vector",
    ),
    Rule(_MOTION + r"motion_network\.(?P<i>\d+)\." + _PARAM, "motion_encoder/motion_network/{i}/{param}"),
    Rule(_MOTION + r"motion_synthesis_weight", "motion_encoder/motion_synthesis_weight"),
)

FACE_RULES: tuple[Rule, ...] = (
    Rule(
        r"face_encoder\.(?P<conv>conv1_local|conv2|conv3)\.weight",
        "face_encoder/{conv}/weight",
        "flatten_in",
    ),
    Rule(r"face_encoder\.(?P<conv>conv1_local|conv2|conv3)\.bias", "face_encoder/{conv}/bias"),
    Rule(r"face_encoder\.out_proj\." + _PARAM, "face_encoder/out_proj/{param}"),
    Rule(r"face_encoder\.padding_tokens", "face_encoder/padding_tokens"),
    Rule(_ADAPTER + r"(?P<proj>to_q|to_k|to_v|to_out)\." + _PARAM, "face_adapter/{proj}/{param}"),
    Rule(_ADAPTER + r"(?P<norm>norm_[qk])\.weight", "face_adapter/{norm}/weight"),
)

ANIMATE_RULES: tuple[Rule, ...] = (
    *TRANSFORMER_RULES,
    Rule(r"pose_patch_embedding\.weight", "pose_patch_embedding/weight", "flatten_in"),
    Rule(r"pose_patch_embedding\.bias", "pose_patch_embedding/bias"),
    *MOTION_RULES,
    *FACE_RULES,
)
