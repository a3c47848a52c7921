"""Published parameters: each has its place, also by its original name; configs are made of shapes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from diffusers.loaders.single_file_utils import (
    convert_wan_transformer_to_diffusers,
    convert_wan_vae_to_diffusers,
)

from helpers.original_checkpoint import CONVS, animate_keys, fused_keys, original_config, original_keys
from helpers.original_parts import original_vae_key
from helpers.published_shapes import reference_shapes
from helpers.refusals import refuses
from wanbuild.components import kind_of
from wanbuild.mapping.engine import assign
from wanbuild.mapping.original import (
    MODULES,
    PARAMETERS,
    diffusers_names,
    fused_names,
)
from wanbuild.mapping.original_parts import vae_names
from wanbuild.published.base_configs import Config
from wanbuild.published.variant_configs import PUBLISHED_MODELS
from wanbuild.source.derived import class_of, derived_config
from wanbuild.source.original_config import derive_config
from wanrun.errors import SourceError


def components_of_models() -> list[Any]:
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


@pytest.mark.parametrize(("component", "config"), components_of_models())
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


ANIMATE = "Wan2.2-Animate-14B-Diffusers"
TOLD = [name for name in PUBLISHED_MODELS if not name.startswith("Self-Forcing")]
"""Self-Forcing's transformer has the tensors of T2V's, which do not tell."""

DIFFUSERS_OWN = ("AnyFlow", "Helios")

REPOSITORIES = [name for name in TOLD if name != ANIMATE and not name.startswith(DIFFUSERS_OWN)]


def transformer_config(repository: str) -> dict[str, Any]:
    return dict(PUBLISHED_MODELS[repository]["transformer"])


@pytest.mark.parametrize("repository", REPOSITORIES)
def test_every_published_key_gets_its_diffusers_name(repository: str) -> None:
    config = transformer_config(repository)
    keys = original_keys(config)
    names = diffusers_names(keys)
    assert list(names) == keys
    assert sorted(names.values()) == sorted(reference_shapes("transformer", config))
    for key in keys:  # the reference renames the dict it is given; it does not know FLF2V's embedding
        if key != "img_emb.emb_pos":
            for prefix in ("", "model.diffusion_model."):
                reference = convert_wan_transformer_to_diffusers({prefix + key: torch.empty(0)})
                assert list(reference) == [names[key]]


def test_every_key_of_a_vae_gets_its_diffusers_name() -> None:
    config = dict(PUBLISHED_MODELS["Wan2.1-T2V-1.3B-Diffusers"]["vae"])
    keys = {
        original_vae_key(key, config["num_res_blocks"] + 1): key for key in reference_shapes("vae", config)
    }
    assert vae_names(keys, "x") == keys
    assert list(convert_wan_vae_to_diffusers({key: torch.empty(0) for key in keys})) == list(keys.values())


def test_diffusers_names_stay() -> None:
    for repository in PUBLISHED_MODELS:
        shapes = reference_shapes("transformer", transformer_config(repository))
        assert diffusers_names(shapes) == {key: key for key in shapes}
    unknown = ["blocks.0.attn1.to_q.weight", "blocks.0.attn1.to_z.weight", "patch_embedding.weight"]
    assert diffusers_names(unknown) == {key: key for key in unknown}  # the mapping table names the odd one


def test_the_animate_adapters() -> None:
    """The reference renames all but the tensors of keys and values; shapes of biases are its own business."""
    config = transformer_config(ANIMATE)
    shapes = reference_shapes("transformer", config)
    keys = [*original_keys(config), *animate_keys(config)]
    constants = [f"{CONVS}.{i}.{name}.0.kernel" for i in range(1, 8) for name in ("conv2", "skip")]
    fused = fused_keys(config)
    names = diffusers_names([*keys, *constants, *fused])
    assert set(names) == set(keys)
    assert fused_names([*keys, *constants, *fused]) == fused
    assert sorted((*names.values(), *(key for pair in fused.values() for key in pair))) == sorted(shapes)
    state = {key: torch.empty(1, 4, 1, 1) if f"{CONVS}." in key else torch.empty(0) for key in keys}
    assert sorted(convert_wan_transformer_to_diffusers(state)) == sorted(names.values())


def test_the_table_is_one_to_one() -> None:
    for rows in (MODULES, PARAMETERS):
        assert len({original for original, _ in rows}) == len({new for _, new in rows}) == len(rows)
    # An original name that is a diffusers name too would be ambiguous, unless it stays what it is.
    originals, others = {a for a, b in MODULES if a != b}, {b for _, b in MODULES}
    assert not originals & others


# --- the config that shapes make ---------------------------------------------------------------------------


def published(repository: str) -> dict[str, Any]:
    """Every field but the version; 2.1 leaves out a field that has its default."""
    config = {"pos_embed_seq_len": None, **transformer_config(repository)}
    del config["_diffusers_version"]
    return config


def derived(repository: str, original: Mapping[str, Any] | None = None) -> dict[str, Any]:
    config = transformer_config(repository)
    found = derive_config(
        config["_class_name"], reference_shapes("transformer", config), "x.safetensors", original, "c.json"
    )
    return {"pos_embed_seq_len": None, **found}


@pytest.mark.parametrize("repository", REPOSITORIES)
def test_a_published_config_is_derived_field_by_field(repository: str) -> None:
    assert derived(repository) == published(repository)
    assert derived(repository, original_config(transformer_config(repository))) == published(repository)


@pytest.mark.parametrize("repository", TOLD)
def test_every_component_of_a_published_model_is_known_by_its_shapes(repository: str) -> None:
    """Configs derived from single files mean what the published ones do; classes too."""
    for name, config in PUBLISHED_MODELS[repository].items():
        kind = "transformer" if name.startswith("transformer") else name
        shapes = reference_shapes(kind, dict(config))
        found = derived_config(name, shapes, "x.safetensors")
        class_name = class_of(name, shapes, "x.safetensors")
        assert class_name == config.get("_class_name") or config["architectures"][0]
        kind_of_it = kind_of(name, class_name)
        assert kind_of_it.parse(found, "x") == kind_of_it.parse(dict(config), "x")


def test_the_original_config_counts_where_shapes_say_nothing() -> None:
    repository = "Wan2.1-VACE-14B-diffusers"
    stated = original_config(transformer_config(repository))
    changes = {"eps": 1e-5, "num_heads": 20, "vace_layers": [0, 1, 2, 3, 4, 5, 6, 39]}
    expected = {"eps": 1e-5, "num_attention_heads": 20, "attention_head_dim": 256}
    found = derived(repository, {**stated, **changes})
    assert found == {**published(repository), **expected, "vace_layers": changes["vace_layers"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ffn_dim": 13824}, "ffn_dim is 13824, the weights say 8960"),
        ({"num_layers": 40}, "num_layers is 40, the weights say 30"),
        ({"in_dim": 36, "out_dim": 48}, "in_channels is 36, .*out_channels is 48"),
        ({"dim": 3072, "num_heads": 24}, "num_attention_heads is 24, the weights say 12"),
        ({"text_len": 226}, "text_len is 226 and only 512"),
        ({"num_heads": 7}, "not 7 whole heads"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"rope": "yarn"}, "unknown field rope"),
        ({"dim": None}, "dim is None"),
    ],
)
def test_an_original_config_that_does_not_fit(change: dict[str, Any], message: str) -> None:
    repository = "Wan2.1-T2V-1.3B-Diffusers"
    with pytest.raises(SourceError, match=message):
        derived(repository, {**original_config(transformer_config(repository)), **change})


@pytest.mark.parametrize(
    ("class_name", "change", "what"),
    [
        ("WanTransformer3DModel", {"patch_embedding.weight": None}, "no patch_embedding.weight"),
        ("WanTransformer3DModel", {"patch_embedding.weight": (1536, 16)}, "whole patches"),
        ("WanTransformer3DModel", {"patch_embedding.weight": (1500, 16, 1, 2, 2)}, "heads of 128"),
        ("WanTransformer3DModel", {"patch_embedding.weight": (1536, 16, 0, 2, 2)}, "64 output channels"),
        ("WanTransformer3DModel", {"proj_out.weight": (64,)}, "x.safetensors"),
        ("WanVACETransformer3DModel", {}, "0 VACE blocks"),
        ("WanAnimateTransformer3DModel", {}, "WanAnimateTransformer3DModel"),
    ],
)
def test_shapes_that_make_no_config(class_name: str, change: dict[str, Any], what: str) -> None:
    shapes = reference_shapes("transformer", transformer_config("Wan2.1-T2V-1.3B-Diffusers")) | change
    with refuses("mismatch", SourceError, what=what, remedy="-Diffusers"):
        derive_config(class_name, {k: v for k, v in shapes.items() if v is not None}, "x.safetensors")


def test_mixtures_are_refused() -> None:
    with refuses("wrong_kind", SourceError, what=": model.head.head.bias"):
        diffusers_names(["model.head.head.bias", "head.head.bias"])
    with refuses("wrong_kind", SourceError, what=": blocks.0.norm2.bias"):
        diffusers_names(["blocks.0.norm3.bias", "blocks.0.norm2.bias"])
