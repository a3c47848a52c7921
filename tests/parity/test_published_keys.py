"""Every parameter of every published checkpoint has its place: the reference classes' own key lists."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from helpers.published_shapes import reference_shapes
from wanbuild.components import kind_of
from wanbuild.mapping.engine import assign
from wanbuild.published.base_configs import Config
from wanbuild.published.variant_configs import PUBLISHED_MODELS


def cases() -> list[Any]:
    """One per component of every repository; a component that repositories share is tested once."""
    found: list[Any] = []
    seen: list[tuple[str, dict[str, Any]]] = []
    for repository, components in PUBLISHED_MODELS.items():
        for component, config in components.items():
            facts = {name: value for name, value in config.items() if name != "_diffusers_version"}
            if component != "transformer_2" and (component, facts) in seen:
                continue
            seen.append((component, facts))
            found.append(pytest.param(component, config, id=f"{repository}-{component}"))
    return found


@pytest.mark.parametrize(("component", "config"), cases())
def test_every_published_key_is_used_once(component: str, config: Config) -> None:
    shapes = reference_shapes(component, config)
    kind = kind_of(component, config.get("_class_name"))
    parsed = kind.parse(config, f"{component}/config.json")
    assignments, problems = assign(kind.rules, shapes, kind.module(parsed, kind.policy(None)), component)
    assert problems == []
    assert Counter(fill.key for item in assignments for fill in item.fills) == Counter(shapes.keys())
    for item in assignments:
        assert len(item.fills) == (item.shape[0] if item.stacked else 1)
        for fill in item.fills:
            assert math.prod(shapes[fill.key]) == math.prod(item.shape[item.stacked :])
    filled = sum(math.prod(item.shape) for item in assignments)
    assert filled == sum(map(math.prod, shapes.values()))
