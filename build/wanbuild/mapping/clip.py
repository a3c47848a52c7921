"""Mapping of the CLIP image encoder's state dict (transformers' key names).

Published files have ``vision_model.`` before every key; transformers 5 saves keys without it.
"""

from __future__ import annotations

from wanbuild.mapping.rules import Rule

_PREFIX = r"(?:vision_model\.)?"
_EMBEDDINGS = _PREFIX + r"embeddings\."
_LAYER = _PREFIX + r"encoder\.layers\.(?P<layer>\d+)\."
_PARAM = r"(?P<param>weight|bias)"

CLIP_RULES: tuple[Rule, ...] = (
    Rule(_EMBEDDINGS + r"class_embedding", "class_embedding", "squeeze"),
    Rule(_EMBEDDINGS + r"patch_embedding\.weight", "patch_embedding/weight", "flatten_in"),
    Rule(_EMBEDDINGS + r"position_embedding\.weight", "position_embedding", "squeeze"),
    Rule(_EMBEDDINGS + r"position_ids", None),  # 0, 1, 2, ...: saved by transformers before 4.31
    Rule(r"visual_projection\.weight", None),  # for the pooled output, which is not used
    Rule(_PREFIX + r"pre_layrnorm\." + _PARAM, "pre_norm/{param}"),  # the checkpoint's spelling
    Rule(_PREFIX + r"post_layernorm\." + _PARAM, "post_norm/{param}"),
    Rule(_LAYER + r"layer_norm1\." + _PARAM, "blocks/attn_norm/{param}"),
    Rule(_LAYER + r"self_attn\.(?P<proj>[qkv]|out)_proj\." + _PARAM, "blocks/{proj}/{param}"),
    Rule(_LAYER + r"layer_norm2\." + _PARAM, "blocks/mlp_norm/{param}"),
    Rule(_LAYER + r"mlp\.(?P<linear>fc[12])\." + _PARAM, "blocks/{linear}/{param}"),
)
