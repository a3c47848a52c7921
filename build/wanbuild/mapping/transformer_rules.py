"""Mappings of the transformers' state dicts (diffusers' key names).

Helios, VACE and Animate repeat Wan's table and add to it: the patches of the past, the control blocks, and
the motion encoder with the face adapter.
"""

from __future__ import annotations

import dataclasses

from wanbuild.mapping.rules import Rule

_LAYER = r"blocks\.(?P<layer>\d+)\."
_IMAGE = r"condition_embedder\.image_embedder\."
_PARAM = r"(?P<param>weight|bias)"

TRANSFORMER_RULES: tuple[Rule, ...] = (
    Rule(r"(?P<which>|far_)patch_embedding\.weight", "{which}patch_embedding/weight", "flatten_in"),
    Rule(r"(?P<which>|far_)patch_embedding\.bias", "{which}patch_embedding/bias"),
    Rule(
        r"condition_embedder\.(?P<part>time_embedder|delta_embedder|text_embedder)\.(?P<linear>linear_[12])\."
        + _PARAM,
        "condition_embedder/{part}/{linear}/{param}",
    ),
    Rule(r"condition_embedder\.time_proj\." + _PARAM, "condition_embedder/time_proj/{param}"),
    Rule(_IMAGE + r"(?P<norm>norm[12])\." + _PARAM, "condition_embedder/image_embedder/{norm}/{param}"),
    Rule(_IMAGE + r"ff\.net\.0\.proj\." + _PARAM, "condition_embedder/image_embedder/up/{param}"),
    Rule(_IMAGE + r"ff\.net\.2\." + _PARAM, "condition_embedder/image_embedder/down/{param}"),
    Rule(_IMAGE + r"pos_embed", "condition_embedder/image_embedder/pos_embed"),
    Rule(
        _LAYER + r"(?P<attn>attn[12])\.(?P<proj>to_q|to_k|to_v)\." + _PARAM,
        "blocks/{attn}/{proj}/{param}",
    ),
    Rule(_LAYER + r"(?P<attn>attn[12])\.to_out\.0\." + _PARAM, "blocks/{attn}/to_out/{param}"),
    Rule(_LAYER + r"(?P<attn>attn[12])\.(?P<norm>norm_[qk])\.weight", "blocks/{attn}/{norm}/weight"),
    Rule(_LAYER + r"attn2\.(?P<proj>add_[kv]_proj)\." + _PARAM, "blocks/attn2/{proj}/{param}"),
    Rule(_LAYER + r"attn2\.norm_added_k\.weight", "blocks/attn2/norm_added_k/weight"),
    # Files converted by an early version have this key; no version of the model uses it.
    Rule(_LAYER + r"attn2\.norm_added_q\.weight", None),
    Rule(_LAYER + r"norm2\." + _PARAM, "blocks/norm2/{param}"),
    Rule(_LAYER + r"ffn\.net\.0\.proj\." + _PARAM, "blocks/ffn/up/{param}"),
    Rule(_LAYER + r"ffn\.net\.2\." + _PARAM, "blocks/ffn/down/{param}"),
    Rule(_LAYER + r"scale_shift_table", "blocks/scale_shift_table"),
    Rule(r"scale_shift_table", "scale_shift_table"),
    Rule(r"proj_out\." + _PARAM, "proj_out/{param}"),
)

HELIOS_RULES: tuple[Rule, ...] = (
    *(rule for rule in TRANSFORMER_RULES if rule.pattern != "scale_shift_table"),
    Rule(r"norm_out\.scale_shift_table", "scale_shift_table"),
    Rule(r"(?P<patch>patch_short|patch_mid|patch_long)\.weight", "{patch}/weight", "flatten_in"),
    Rule(r"(?P<patch>patch_short|patch_mid|patch_long)\.bias", "{patch}/bias"),
    Rule(r"blocks\.(?P<layer>\d+)\.attn1\.history_key_scale", "blocks/attn1/history_key_scale"),
)

_BASE, _CONTROL = r"blocks\.(?P<layer>", r"vace_blocks\.(?P<layer>"


def _of_control(rule: Rule) -> Rule:
    return dataclasses.replace(
        rule,
        pattern=rule.pattern.replace(_BASE, _CONTROL, 1),
        target=rule.target and rule.target.replace("blocks/", "vace_blocks/", 1),
    )


VACE_RULES: tuple[Rule, ...] = (
    *TRANSFORMER_RULES,
    *(_of_control(rule) for rule in TRANSFORMER_RULES if rule.pattern.startswith(_BASE)),
    Rule(r"vace_patch_embedding\.weight", "vace_patch_embedding/weight", "flatten_in"),
    Rule(r"vace_patch_embedding\.bias", "vace_patch_embedding/bias"),
    # Only the first control block has this projection, so it is not in the stack.
    Rule(r"vace_blocks\.0\.proj_in\.(?P<param>weight|bias)", "vace_proj_in/{param}"),
    Rule(r"vace_blocks\.(?P<layer>\d+)\.proj_out\.(?P<param>weight|bias)", "vace_blocks/proj_out/{param}"),
)

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
