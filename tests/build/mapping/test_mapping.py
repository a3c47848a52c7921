"""The mapping engine: what it assigns, and that every problem is found; the tables on the published keys."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from flax import nnx

from wanbuild.components import KINDS
from wanbuild.mapping.engine import LISTED, Assignment, assign, describe_problems
from wanbuild.mapping.rules import TRANSFORMS, Rule
from wanbuild.models.params import param, stacked
from wanbuild.published.base_configs import PUBLISHED_TEXT_ENCODER, PUBLISHED_TRANSFORMERS, PUBLISHED_VAE
from wanbuild.source.shapes import Shapes, component_shapes

F32, BF16 = np.dtype("float32"), np.dtype("bfloat16")


class Block(nnx.Module):
    def __init__(self) -> None:
        self.weight = param((6, 4), BF16, ("mlp", "embed"))
        self.scale = param((4,), F32, ("embed",))


class Model(nnx.Module):
    """Three stacked blocks, a 2-D convolution and an input layer."""

    def __init__(self) -> None:
        self.blocks = stacked(Block(), 3)
        self.conv = param((3, 5, 2, 7), BF16, (None,) * 4)
        self.table = param((8, 4), F32, ("vocab", "embed"))


RULES = (
    Rule(r"layers\.(?P<layer>\d+)\.(?P<name>weight|scale)", "blocks/{name}"),
    Rule(r"conv\.weight", "conv", "conv2d"),
    Rule(r"table", "table"),
)
SHAPES: dict[str, tuple[int, ...]] = {
    **{f"layers.{i}.weight": (6, 4) for i in range(3)},
    **{f"layers.{i}.scale": (4,) for i in range(3)},
    "conv.weight": (7, 2, 3, 5),
    "table": (8, 4),
}


def problems_of(shapes: Mapping[str, tuple[int, ...]], rules: tuple[Rule, ...] = RULES) -> list[str]:
    return assign(rules, shapes, Model(), "model")[1]


def test_every_row_has_its_source() -> None:
    keys = list(SHAPES)
    random.Random(0).shuffle(keys)  # the order of the file must not matter
    assignments, problems = assign(RULES, {key: SHAPES[key] for key in keys}, Model(), "model")
    assert problems == []
    assert [(a.path, a.shape, a.dtype, a.stacked) for a in assignments] == [
        ("blocks/scale", (3, 4), F32, True),
        ("blocks/weight", (3, 6, 4), BF16, True),
        ("conv", (3, 5, 2, 7), BF16, False),
        ("table", (8, 4), F32, False),
    ]
    assert [[fill.key for fill in a.fills] for a in assignments] == [
        ["layers.0.scale", "layers.1.scale", "layers.2.scale"],
        ["layers.0.weight", "layers.1.weight", "layers.2.weight"],
        ["conv.weight"],
        ["table"],
    ]
    assert assignments[2].fills[0].transform == "conv2d"


def test_layers_are_ordered_by_number() -> None:
    class Deep(nnx.Module):
        def __init__(self) -> None:
            self.blocks = stacked(Block(), 12)

    shapes = {
        f"layers.{i}.{name}": shape
        for i in range(12)
        for name, shape in (("weight", (6, 4)), ("scale", (4,)))
    }
    assignments, problems = assign(RULES, shapes, Deep(), "model")
    assert problems == []
    assert [fill.key for fill in assignments[0].fills] == [f"layers.{i}.scale" for i in range(12)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"table": None}, ["model: missing key for table"]),
        ({"layers.1.scale": None}, ["model: missing key for blocks/scale, layers 1"]),
        (
            {f"layers.{i}.weight": None for i in range(3)},
            ["model: missing key for blocks/weight, layers 0-2"],
        ),
        ({"lora_A.weight": (4,)}, ["model: unexpected key lora_A.weight is not a part of this model"]),
        ({"xtable": (8, 4)}, ["model: unexpected key xtable is not a part of this model"]),
        ({"table.x": (8, 4)}, ["model: unexpected key table.x is not a part of this model"]),
        (
            {"layers.3.scale": (4,)},
            ["model: unexpected key layers.3.scale, the config says 3 layers"],
        ),
        (
            {"layers.01.scale": (4,)},
            ["model: layers.1.scale and layers.01.scale both fill blocks/scale"],
        ),
        (
            {"layers.\u0663.scale": (4,)},  # a digit of another script
            ["model: unexpected key layers.\u0663.scale is not a part of this model"],
        ),
        (
            {"table": (4, 8)},
            ["model: table has shape [4, 8], table needs [8, 4]"],
        ),
        (
            {"layers.2.weight": (1, 6, 4)},
            ["model: layers.2.weight has shape [1, 6, 4], blocks/weight needs [6, 4]"],
        ),
        (
            {"conv.weight": (7, 2, 5, 3)},
            ["model: conv.weight has shape [7, 2, 5, 3], conv needs [3, 5, 2, 7]"],
        ),
        (
            {"conv.weight": (7, 2)},
            ["model: conv.weight has shape [7, 2], conv needs [3, 5, 2, 7]"],
        ),
    ],
)
def test_a_problem_is_named(change: dict[str, Any], expected: list[str]) -> None:
    assert problems_of({k: v for k, v in {**SHAPES, **change}.items() if v is not None}) == expected


def test_all_problems_are_listed_together() -> None:
    shapes = {key: shape for key, shape in SHAPES.items() if key not in ("table", "layers.0.weight")}
    shapes |= {"layers.2.weight": (4, 6), "layers.7.weight": (6, 4), "extra": (1,), "layers.00.scale": (4,)}
    assert len(problems_of(shapes)) == 6
    text = " ".join(problems_of(shapes))
    for part in (
        "missing key for table",
        "missing key for blocks/weight, layers 0",
        "layers.2.weight has shape",
        "layers.7.weight, the config says 3 layers",
        "extra is not a part",
        "both fill blocks/scale",
    ):
        assert part in text


def test_ambiguous_rules_are_a_problem() -> None:
    unexpected, missing = problems_of(SHAPES, (*RULES, Rule(r"ta.*", "conv")))
    assert "table matches 2" in unexpected
    assert "missing" in missing and missing.endswith(" table")


def test_a_rule_without_a_target_accepts_a_key_and_leaves_it_out() -> None:
    rules = (*RULES, Rule(r"(?:layers\.(?P<layer>\d+)\.)?ids", None))
    extra = {"ids": (1, 9), "layers.7.ids": ()}  # of any shape, and of a layer that there is not
    assignments, problems = assign(rules, {**SHAPES, **extra}, Model(), "model")
    assert problems == []
    assert assignments == assign(RULES, SHAPES, Model(), "model")[0]
    (unexpected,) = problems_of({**SHAPES, "ids2": (1, 9)}, rules)
    assert "key ids2 " in unexpected and "matches" not in unexpected
    (unexpected,) = problems_of({**SHAPES, "ids": (1, 9)}, (*rules, Rule("ids", "table")))
    assert "ids matches 2" in unexpected


@pytest.mark.parametrize(
    "rule",
    [
        Rule(r"other", "no/such/path"),
        Rule(r"other", "blocks/weight"),  # a stacked parameter without a layer
        Rule(r"oth(?P<layer>er|\d)", "table"),
    ],
    ids=["no parameter", "no layer", "a layer too much"],
)
def test_a_rule_that_leads_nowhere(rule: Rule) -> None:
    key = "oth1" if "layer" in rule.pattern else "other"
    (problem,) = problems_of({**SHAPES, key: (6, 4)}, (*RULES, rule))
    assert f"key {key}," in problem and problem.endswith(f" {rule.target}")


def test_a_long_list_is_cut_and_counted() -> None:
    problems = [f"p{i}" for i in range(LISTED + 7)]
    text = describe_problems(problems)
    assert text.endswith(f"p{LISTED - 1} and 7 more")
    assert describe_problems(problems[:LISTED]).endswith(f"p{LISTED - 1}")


def test_transforms_are_views_with_the_axes_moved() -> None:
    rng = np.random.default_rng(0)
    for name, shape, index, moved in (
        ("conv2d", (5, 4, 3, 2), (4, 1, 2, 0), (2, 0, 1, 4)),
        ("conv3d", (6, 5, 4, 3, 2), (5, 1, 2, 0, 1), (2, 0, 1, 1, 5)),
        ("flatten_in", (3, 4, 1, 2, 2), (2, 3, 0, 1, 0), (2, 14)),
        ("vector", (7, 1, 1, 1), (6, 0, 0, 0), (6,)),
        ("copy", (3, 4), (1, 2), (1, 2)),
    ):
        x = rng.standard_normal(shape)
        y = TRANSFORMS[name](x)
        assert np.shares_memory(x, y), name
        assert y.size == x.size
        assert y[moved] == x[index], name


# --- the tables and the published checkpoints -------------------------------------------------------------

PUBLISHED: dict[str, tuple[str, Mapping[str, Any]]] = {
    **{name: ("transformer", config) for name, config in PUBLISHED_TRANSFORMERS.items()},
    "vae": ("vae", PUBLISHED_VAE),
    "umt5-xxl": ("text_encoder", PUBLISHED_TEXT_ENCODER),
}
"""That these tables cover the reference classes' own keys is in test_published_keys."""


def assign_published(name: str, shapes: Shapes | None = None) -> tuple[tuple[Assignment, ...], list[str]]:
    component, config = PUBLISHED[name]
    kind = KINDS[component]
    module = kind.module(kind.parse(config, f"{component}/config.json"), kind.policy(None))
    return assign(kind.rules, shapes or component_shapes(component, config), module, component)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_missing_or_misshapen_key_is_found(name: str) -> None:
    """A mistake in any one key of a published list is one problem that names it; a sample of the keys."""
    shapes = component_shapes(*PUBLISHED[name])
    kinds = {"".join(c for c in key if not c.isdigit()): key for key in shapes}  # one of each kind
    dropped, bent = dict(shapes), dict(shapes)
    for key in kinds.values():
        del dropped[key]
        bent[key] = (*shapes[key], 2)
    paths = {a.path for a in assign_published(name)[0] if {f.key for f in a.fills} & set(kinds.values())}
    problems = assign_published(name, dropped)[1]
    assert len(problems) == len(paths)
    assert all(any(f"missing key for {path}" in problem for problem in problems) for path in paths)
    problems = assign_published(name, bent)[1]
    assert len(problems) == len(kinds)
    assert all(any(f" {key} has shape" in problem for problem in problems) for key in kinds.values())


def test_dtypes_follow_the_policy() -> None:
    for name, norms in (
        ("wan2.1-t2v-1.3b", ("norm", "condition_embedder", "scale_shift_table")),
        ("umt5-xxl", ("norm", "relative_attention_bias")),
    ):
        for a in assign_published(name)[0]:
            assert a.dtype == (F32 if any(part in a.path for part in norms) else BF16), a.path
    assert {a.dtype for a in assign_published("vae")[0]} == {F32}
