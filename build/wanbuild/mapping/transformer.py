"""Mapping of the Wan transformer's state dict (diffusers' key names)."""

from __future__ import annotations

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
