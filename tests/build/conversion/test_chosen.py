"""Which layers are stored in 8 bits, and what an artifact then holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.naive import load_params
from helpers.naive_conversion import arrays_of, load_state
from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.check.weights import check_places, check_with_orbax
from wanbuild.components import kind_of
from wanbuild.conversion import writer as writer_module
from wanbuild.conversion.chosen import Quantise, chosen_layers, lost_lines, parse_quantise
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.conversion.quantise import Quantiser
from wanbuild.models.eight_bit import linear_layers
from wanbuild.models.params import LAYERS
from wanbuild.plan.published_model import published_manifest
from wanbuild.published.variant_configs import PUBLISHED_MODELS
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun import EIGHT_BITS
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import TRANSFORMERS, Manifest
from wanrun.artifact.parameters import flat
from wanrun.errors import SourceError, UsageError


def modules_of(repository: str) -> dict[str, Any]:
    modules = {}
    for name, config in PUBLISHED_MODELS[repository].items():
        kind = kind_of(name, config.get("_class_name"))
        modules[name] = kind.module(kind.parse(config, name), kind.policy(None))
    return modules


@pytest.mark.slow
@pytest.mark.parametrize("repository", PUBLISHED_MODELS)
def test_the_table(repository: str) -> None:
    """All matrices of a transformer's blocks, and of the text encoder two of seven; nothing else."""
    modules = modules_of(repository)
    chosen = chosen_layers(Quantise("int8"), modules)
    assert set(chosen) == set(modules)
    for name, layers in chosen.items():
        linear = linear_layers(modules[name])
        stacked = {path for path, one in linear.items() if one.weight.get_metadata()["axes"][0] == LAYERS}
        if name in TRANSFORMERS:
            assert set(layers) == stacked
        else:
            assert set(layers) == ({"blocks/wi_0", "blocks/wi_1"} if name == "text_encoder" else set())
        assert set(layers.values()) <= {"int8"}


@pytest.mark.thorough
@pytest.mark.parametrize("repository", PUBLISHED_MODELS)
@pytest.mark.parametrize("form", EIGHT_BITS)
def test_a_transformer_has_half_of_its_bytes(repository: str, form: str) -> None:
    """And a float16 for each block of weights, where a form has those."""
    one, scales = EIGHT_BITS[form], 1 / EIGHT_BITS[form].block if EIGHT_BITS[form].block else 0
    sizes = [published_manifest(repository, quantise=quantise) for quantise in (Quantise(one.name), None)]
    for name in TRANSFORMERS:
        if name in sizes[0].components:
            small, large = (manifest.components[name].nbytes for manifest in sizes)
            assert 0.5 + scales < small / large <= 0.53 + scales


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ([], {"attn1/to_k", "attn2/to_out", "ffn/up", "wi_0"}),
        (["blocks/attn?/*"], {"ffn/up", "wi_0"}),
        (["text_encoder/*"], {"attn1/to_k", "attn2/to_out", "ffn/up"}),
        (["transformer/*", "*/wi_1"], {"wi_0"}),
        (["*/to_k", "blocks/ffn/*"], {"attn2/to_out", "wi_0"}),
    ],
)
def test_layers_that_are_kept(keep: list[str], left: set[str]) -> None:
    chosen = chosen_layers(Quantise("float8", keep), modules_of("Wan2.2-T2V-A14B-Diffusers"))
    assert chosen["transformer"] == chosen["transformer_2"]
    paths = {path.removeprefix("blocks/") for layers in chosen.values() for path in layers}
    assert paths & {"attn1/to_k", "attn2/to_out", "ffn/up", "wi_0"} == left


@pytest.mark.parametrize(
    ("quantise", "parts"),
    [
        (Quantise("int8", ["blocks/attn3/*"]), {"what": "--keep blocks/attn3/*", "expected": "to_k"}),
        (Quantise("int8", ["patch_embedding"]), {"what": "--keep patch_embedding"}),
        (Quantise("int8", ["*"]), {"what": "--quantise int8", "expected": "without --keep"}),
        (Quantise("source"), {"what": "--quantise source", "expected": "the source"}),
        (Quantise("source", ["*"]), {"what": "--keep *", "found": "no layer"}),
    ],
)
def test_choices_that_cannot_be(quantise: Quantise, parts: dict[str, str]) -> None:
    with refuses("no_effect", **parts):
        chosen_layers(quantise, modules_of("Wan2.1-T2V-1.3B-Diffusers"))


def test_keep_is_for_quantise() -> None:
    assert parse_quantise(None, []) is None
    with refuses("no_effect", what="--keep", remedy="--quantise int8"):
        parse_quantise(None, ["*"])


def expected_of(checkpoint: Path, manifest: Manifest, name: str) -> Mapping[str, np.ndarray]:
    """The arrays in float32, loaded and stacked naively."""
    config = manifest.configs[name]
    kind = kind_of(name, config.get("_class_name"))
    module = kind.module(kind.parse(config, name), kind.policy("float32"))
    return flat(load_params(load_state(checkpoint / name), kind.rules, module))


@pytest.mark.thorough
@pytest.mark.parametrize("form", EIGHT_BITS)
def test_an_artifact_holds_rounded_rows(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both experts, with control blocks; in blocks of few rows, and the same bytes with other threads."""
    widths = {"attention_head_dim": 32, "ffn_dim": 96}  # whole blocks
    write_toy(tmp_path / "toy", "wan2.2-vace", seed=4, configs={"transformer": widths})
    lines, quantise = list[str](), Quantise(EIGHT_BITS[form].name)
    request = ConvertRequest(tmp_path / "toy", tmp_path / "a", quantise=quantise, threads=3)
    manifest = convert(request, lambda *told: lines.extend(told))
    monkeypatch.setattr(writer_module, "BLOCK_ITEMS", 300)
    again = convert(
        ConvertRequest(tmp_path / "toy", tmp_path / "b", quantise=quantise, threads=1),
    )
    assert again.content_digest == manifest.content_digest
    worst = 0.0
    for name in ("transformer", "transformer_2", "text_encoder"):
        layers = manifest.dtypes[name].eight_bit
        assert set(layers.values()) == {form}
        found, expected = arrays_of(tmp_path / "a", name), expected_of(tmp_path / "toy", manifest, name)
        assert found.keys() == expected.keys() | {f"{path}/scale" for path in layers}
        for path, value in expected.items():
            layer = path.removesuffix("/weight")
            if path == f"{layer}/weight" and layer in layers:
                for number, matrix in enumerate(value):
                    rows = Quantiser(matrix.size)(matrix, form)
                    np.testing.assert_array_equal(found[path][number].view(np.uint8), rows.stored)
                    np.testing.assert_array_equal(found[f"{layer}/scale"][number], rows.scales)
                    worst = max(worst, float(np.sqrt(rows.lost[0] / rows.lost[1])))
            else:
                np.testing.assert_array_equal(found[path], value.astype(found[path].dtype))
    listed = [float(match[1]) for line in lines if (match := re.match(r" +([0-9.]+) % in ", line))]
    assert len(listed) == 10 and listed == sorted(listed, reverse=True)
    assert listed[0] == pytest.approx(100 * worst, abs=0.006)
    check_places(Artifact(manifest, tmp_path / "a"))
    check_with_orbax(Artifact(manifest, tmp_path / "a"), print)


def test_experts_that_differ_share_the_layers_that_both_have() -> None:
    modules = modules_of("Wan2.2-T2V-A14B-Diffusers")
    first, second = {"blocks/ffn/up": "int8", "blocks/ffn/down": "int8"}, {"blocks/ffn/up": "int8"}
    chosen = chosen_layers(Quantise("source"), modules, {"transformer": first, "transformer_2": second})
    assert chosen["transformer"] == chosen["transformer_2"] == second
    other = {"blocks/ffn/up": "float8_e4m3fn"}
    with pytest.raises(UsageError, match="finds nothing"):
        chosen_layers(Quantise("source"), modules, {"transformer": first, "transformer_2": other})


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    from helpers.checkpoint_files import load_file, save_file

    write_toy(tmp_path / "toy", "wan2.1-t2v")
    (file,) = (tmp_path / "toy" / "transformer").glob("*.safetensors")
    state = load_file(file)
    key = "blocks.1.ffn.net.2.weight"
    state[key] = state[key].copy()
    state[key][3, 5] = np.inf
    save_file(state, file)
    with refuses("not_finite", SourceError, what=f"transformer: {key}"):
        convert(ConvertRequest(tmp_path / "toy", tmp_path / "a", quantise=Quantise("int8")))
    assert not (tmp_path / "a").exists()


def test_what_is_told_of_weights_that_were_exact() -> None:
    lost = {"transformer": {("blocks/ffn/up/weight", 0): 0.0, ("blocks/ffn/up/weight", 1): 0.01}, "vae": {}}
    whole, worst = lost_lines(lost)
    assert whole.startswith("transformer: ") and re.findall(r"[\d.]+", whole) == ["2", "8", "1.00", "1"]
    assert "transformer/blocks/ffn/up" in worst and re.findall(r"[\d.]+", worst) == ["1.00", "1"]
