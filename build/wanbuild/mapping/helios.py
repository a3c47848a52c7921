"""Mapping of the Helios transformer's state dict: the base table, the past's patches, other names."""

from __future__ import annotations

from wanbuild.mapping.rules import Rule
from wanbuild.mapping.transformer import TRANSFORMER_RULES

HELIOS_RULES: tuple[Rule, ...] = (
    *(rule for rule in TRANSFORMER_RULES if rule.pattern != "scale_shift_table"),
    Rule(r"norm_out\.scale_shift_table", "scale_shift_table"),
    Rule(r"(?P<patch>patch_short|patch_mid|patch_long)\.weight", "{patch}/weight", "flatten_in"),
    Rule(r"(?P<patch>patch_short|patch_mid|patch_long)\.bias", "{patch}/bias"),
    Rule(r"blocks\.(?P<layer>\d+)\.attn1\.history_key_scale", "blocks/attn1/history_key_scale"),
)
