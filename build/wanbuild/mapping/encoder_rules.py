"""Mappings of the state dicts of UMT5, the text encoder, and of CLIP, the image encoder (transformers' keys).

Published files of CLIP have ``vision_model.`` before every key; transformers 5 saves keys without it.
"""

from __future__ import annotations

from wanbuild.mapping.rules import Rule

_ATTENTION = r"encoder\.block\.(?P<layer>\d+)\.layer\.0\."
_FEED_FORWARD = r"encoder\.block\.(?P<layer>\d+)\.layer\.1\."

UMT5_RULES: tuple[Rule, ...] = (
    # One tensor with two tied names; of a file that holds both, equal ones, one is read.
    Rule(r"shared\.weight|encoder\.embed_tokens\.weight", "shared"),
    Rule(_ATTENTION + r"SelfAttention\.(?P<proj>[qkvo])\.weight", "blocks/{proj}/weight"),
    Rule(_ATTENTION + r"SelfAttention\.relative_attention_bias\.weight", "blocks/relative_attention_bias"),
    Rule(_ATTENTION + r"layer_norm\.weight", "blocks/attn_norm/weight"),
    Rule(_FEED_FORWARD + r"DenseReluDense\.(?P<proj>wi_0|wi_1|wo)\.weight", "blocks/{proj}/weight"),
    Rule(_FEED_FORWARD + r"layer_norm\.weight", "blocks/ff_norm/weight"),
    Rule(r"encoder\.final_layer_norm\.weight", "final_norm/weight"),
)

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
