"""Mapping of the VACE transformer's state dict: the base table, repeated for the control blocks."""

from __future__ import annotations

import dataclasses

from wanbuild.mapping.rules import Rule
from wanbuild.mapping.transformer import TRANSFORMER_RULES

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
