"""Names and shapes of a checkpoint's tensors, from nothing but the components' config.json.

They are those that conversion reads: each parameter of the component's module, under the key that its mapping
table maps to it, in the shape that the table's transform makes the parameter's. A test compares them with the
state dicts of the reference classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from wanbuild.components import kind_of
from wanbuild.mapping.rules import Rule
from wanbuild.models.params import LAYERS, abstract_params, flatten, parameter_axes

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

_GROUP = re.compile(r"\(\?P<(\w+)>([^)]*)\)")
"""A named group of a rule's pattern. None has parentheses in it."""

_UNNAMED = re.compile(r"\(\?:([^)|]*)[^)]*\)\??")
"""An unnamed group, of which published files have the first form."""

_LAST: Mapping[str, Shape] = MappingProxyType(
    {
        r".*/attentions/0/norm/gamma": (1, 1),
        r".*/gamma": (1, 1, 1),
        r".*/attentions/0/.*/weight": (1, 1),
        r"(.*/conv_shortcut|(post_)?quant_conv)/weight": (1, 1, 1),
        r"face_encoder/conv.*/weight": (3,),
        r"levels/\d/grow/weight": (1, 1),
        r"patch_short/weight": (1, 2, 2),
        r"patch_mid/weight": (2, 4, 4),
        r"patch_long/weight": (4, 8, 8),
    }
)
"""The last axes in files of parameters that have them flattened or not at all, by path."""


def component_shapes(name: str, config: Mapping[str, Any]) -> Shapes:
    """Returns the shapes of a component's tensors, sorted by name; raises SourceError for a wrong config."""
    kind = kind_of(name, config.get("_class_name"))
    parsed = kind.parse(config, f"{name}/config.json")
    module = kind.module(parsed, kind.policy(None))
    axes = parameter_axes(module)
    shapes: Shapes = {}
    for path, parameter in flatten(abstract_params(module)):
        shape, layers = tuple(parameter.shape), range(0)
        if axes[path][0] == LAYERS:
            shape, layers = shape[1:], range(shape[0])
        rule, groups = _rule_of(kind.rules, path)
        stored = _stored_shape(path, shape, rule.transform, parsed)
        for layer in layers or (None,):
            shapes[_key(rule, {**groups, "layer": str(layer)})] = stored
    if config.get("is_residual"):  # its levels have one of these, and no list of them
        shapes = {key.replace(".upsamplers.0.", ".upsampler."): shape for key, shape in shapes.items()}
    return dict(sorted(shapes.items()))


def _rule_of(rules: Sequence[Rule], path: str) -> tuple[Rule, Mapping[str, str]]:
    """Returns the rule that fills a parameter, and the values of the groups in its target."""
    (found,) = ((rule, match.groupdict()) for rule in rules if (match := _target_match(rule, path)))
    return found


def _target_match(rule: Rule, path: str) -> re.Match[str] | None:
    """Returns the match of a path with a rule's target."""
    if rule.target is None:
        return None
    groups = {name: f"(?P<{name}>{pattern})" for name, pattern in _GROUP.findall(rule.pattern)}
    return re.fullmatch(rule.target.format(**groups), path)


def _key(rule: Rule, groups: Mapping[str, str]) -> str:
    """Returns the key of published files that a rule's pattern matches with these groups."""
    pattern = _UNNAMED.sub(r"\1", _GROUP.sub(lambda group: groups[group[1]], rule.pattern))
    return pattern.split("|")[0].replace("\\.", ".")


def _stored_shape(path: str, shape: Shape, transform: str, config: Any) -> Shape:
    """Returns the shape in files of a parameter, or of one layer of a stack."""
    if transform in ("conv2d", "conv3d"):
        return (shape[-1], shape[-2], *shape[:-2])
    last = next((axes for pattern, axes in _LAST.items() if re.fullmatch(pattern, path)), ())
    if path.endswith("patch_embedding/weight"):
        patch = config.compressed_patch_size if path.startswith("far_") else config.patch_size
        last = (patch, patch) if isinstance(patch, int) else tuple(patch)
    if transform == "flatten_in":
        return (shape[0], shape[1] // math.prod(last), *last)
    return (*shape, *last)
