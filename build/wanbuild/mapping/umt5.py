"""Mapping of the UMT5 encoder's state dict (transformers' key names)."""

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
