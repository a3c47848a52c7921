"""Every parameter of every published checkpoint has its place: the reference classes' own key lists."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import pytest

from published_shapes import reference_shapes
from wanbuild.components import KINDS
from wanbuild.mapping.engine import assign
from wanbuild.published_models import PUBLISHED_MODELS
from wanrun.errors import SourceError

_IMAGE = "image_dim is 1280 and only None is supported"
_VACE = "found 'WanVACETransformer3DModel'"
NOT_BUILT: dict[tuple[str, str], str] = {
    ("Wan2.1-I2V-14B-480P-Diffusers", "transformer"): _IMAGE,
    ("Wan2.1-I2V-14B-480P-Diffusers", "image_encoder"): "image_encoder",
    ("Wan2.1-FLF2V-14B-720P-diffusers", "transformer"): _IMAGE,
    ("Wan2.1-VACE-1.3B-diffusers", "transformer"): _VACE,
    ("Wan2.1-VACE-14B-diffusers", "transformer"): _VACE,
    ("Wan2.2-Animate-14B-Diffusers", "transformer"): "found 'WanAnimateTransformer3DModel'",
}
"""What has no model or no mapping table yet, and what its error has to say: built, its strict xfail fails."""


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
            reason = NOT_BUILT.get((repository, component))
            mark = pytest.mark.xfail(
                strict=True, reason=f"not built: {reason}", raises=(SourceError, KeyError)
            )
            name = f"{repository}-{component}"
            found.append(pytest.param(repository, component, id=name, marks=[mark] if reason else []))
    return found


@pytest.mark.parametrize(("repository", "component"), cases())
def test_every_published_key_is_used_once(repository: str, component: str) -> None:
    config = PUBLISHED_MODELS[repository][component]
    shapes = reference_shapes(component, config)
    try:
        kind = KINDS["transformer" if component == "transformer_2" else component]
        parsed = kind.parse(config, f"{component}/config.json")
    except (SourceError, KeyError) as error:
        expected = NOT_BUILT.get((repository, component))
        assert expected is None or re.search(re.escape(expected), str(error)), str(error)
        raise
    assignments, problems = assign(kind.rules, shapes, kind.module(parsed, kind.policy(None)), component)
    assert problems == []
    assert Counter(fill.key for item in assignments for fill in item.fills) == Counter(shapes.keys())
    for item in assignments:
        assert len(item.fills) == (item.shape[0] if item.stacked else 1)
        for fill in item.fills:
            assert math.prod(shapes[fill.key]) == math.prod(item.fill_shape)
    filled = sum(math.prod(item.shape) for item in assignments)
    assert filled == sum(map(math.prod, shapes.values()))


def test_every_unbuilt_component_is_published() -> None:
    assert all(component in PUBLISHED_MODELS[repository] for repository, component in NOT_BUILT)
