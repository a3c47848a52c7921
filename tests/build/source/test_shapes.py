"""The published tensors of a component follow from its config; a test with diffusers compares them."""

from __future__ import annotations

from wanbuild.source.shapes import component_shapes
from wanbuild.toy.toy_configs import TOY_TRANSFORMER


def test_what_a_config_leaves_out_is_the_default() -> None:
    """As configs of published files do, which an artifact keeps as they are."""
    less = {name: value for name, value in TOY_TRANSFORMER.items() if name != "patch_size"}
    assert len(less) < len(TOY_TRANSFORMER)
    assert component_shapes("transformer", less) == component_shapes("transformer", TOY_TRANSFORMER)
