"""Which layers are stored in 8 bits, what an artifact then holds, and how values are rounded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from helpers.checkpoint_files import load_file, save_file
from helpers.naive import load_params
from helpers.naive_conversion import arrays_of, load_state
from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.check.weights import check_places, check_with_orbax
from wanbuild.components import kind_of
from wanbuild.conversion import writer as writer_module
from wanbuild.conversion.chosen import Quantise, chosen_layers, lost_lines, parse_quantise
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.conversion.quantise import ROUNDING, Quantiser, by_cast
from wanbuild.models.eight_bit import linear_layers
from wanbuild.models.params import LAYERS
from wanbuild.plan.published_model import published_manifest
from wanbuild.published.variant_configs import PUBLISHED_MODELS
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun import EIGHT_BITS
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import TRANSFORMERS, Manifest
from wanrun.artifact.parameters import flat
from wanrun.errors import SourceError


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
    with refuses("no_effect", what="--quantise source"):
        chosen_layers(Quantise("source"), modules, {"transformer": first, "transformer_2": other})


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    write_toy(tmp_path / "toy", "wan2.1-t2v")
    (file,) = (tmp_path / "toy" / "transformer").glob("*.safetensors")
    state = load_file(file)
    key = "blocks.1.ffn.net.2.weight"
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


# --- rounding, beside its definition in NumPy and ml_dtypes' cast ---

ROWS = [one.dtype for one in EIGHT_BITS.values() if not one.block]
"""The dtypes of forms with a scale for each row."""


def wild_rows() -> np.ndarray:
    """Rows of many sizes with outliers, ties, zeros, subnormal numbers, and nothing but zeros."""
    rng = np.random.default_rng(0)
    values = rng.standard_t(2, (40, 997)).astype(np.float32) * np.exp(rng.normal(0, 8, (40, 1)))
    values[3] = 0
    values[4] = np.float32(1e-42)
    values[5] = np.arange(997) % 255 - 127  # each value of int8
    values[6] = (np.arange(997) % 509 - 254) / 2  # halves: ties
    values[7, ::2] = 0
    return values.astype(np.float32)


def by_definition(values: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    largest = np.abs(values).max(axis=1, keepdims=True)
    scales = (largest / np.float32(EIGHT_BITS[dtype].largest)).astype(np.float32)
    scales[scales < np.finfo(np.float32).tiny] = 1
    scaled = values / scales
    return (np.rint(scaled) if EIGHT_BITS[dtype].whole else scaled).astype(dtype), scales


@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ROWS)
def test_rows_are_rounded_as_defined(dtype: str, source: str) -> None:
    values = wild_rows().astype(source)
    stored, scales = by_definition(values.astype(np.float32), dtype)
    found = Quantiser(values.size)(values, dtype)
    np.testing.assert_array_equal(found.stored, stored.view(np.uint8))
    np.testing.assert_array_equal(found.scales, scales[:, 0])
    errors = values.astype(np.float64) - stored.astype(np.float64) * scales
    expected = np.square(errors).sum(), np.square(values.astype(np.float64)).sum()
    np.testing.assert_allclose(found.lost, expected, rtol=1e-4)


def test_blocks_of_a_row_are_rounded_like_rows() -> None:
    """Each with its own scale in float16, which may be a subnormal number, and never too small."""
    values = wild_rows()[:, :992].clip(-1e5, 1e5)
    found = Quantiser(values.size)(values, "q8_0")
    assert (found.scales.dtype, found.scales.shape) == (np.float16, (40, 31))
    blocks, scales = values.reshape(40, 31, 32), found.scales.astype(np.float32)[..., None]
    exact = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    below = np.nextafter(found.scales, np.float16(0)).astype(np.float32)[..., None]
    assert ((below < exact) & (exact <= scales))[exact > 0].all() and (scales[exact == 0] == 1).all()
    stored = found.stored.view(np.int8)
    np.testing.assert_array_equal(stored.reshape(blocks.shape), np.rint(blocks / scales))
    own = (stored.reshape(blocks.shape) * scales).reshape(values.shape)
    expected = np.square(values.astype(np.float64) - own).sum(), np.square(values.astype(np.float64)).sum()
    np.testing.assert_allclose(found.lost, expected, rtol=1e-4)
    np.testing.assert_array_equal(Quantiser(992)(values[7:8], "q8_0").stored[0], stored[7].view(np.uint8))


def test_values_of_gguf_are_kept_by_blocks() -> None:
    """gguf rounds a scale to the nearest float16; what it gives rounds to itself."""
    values = (0.02 * np.random.default_rng(1).standard_normal((8, 96))).astype(np.float32)
    own = dequantize(quantize(values, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert Quantiser(own.size)(own, "q8_0").lost[0] == 0
    own[3, 40] = np.nan
    with np.errstate(invalid="ignore"):
        scales = Quantiser(own.size)(own, "q8_0").scales
    assert np.argwhere(~np.isfinite(scales)).tolist() == [[3, 1]]


def test_a_faster_rounding_gives_the_bits_of_the_cast() -> None:
    """A format without one has the cast."""
    scaled, found = wild_rows()[:3].clip(-448, 448), []
    for rounding in (ROUNDING["float8_e4m3fn"], partial(by_cast, "float8_e4m3fn")):
        rounded, stored = np.empty_like(scaled), np.empty(scaled.shape, np.uint8)
        rounding(scaled, rounded, stored)
        found.append((rounded.tobytes(), stored.tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ROWS)
def test_blocks_of_rows_have_the_same_bits(dtype: str) -> None:
    values, quantiser = wild_rows(), Quantiser(8 * 997)
    whole = Quantiser(values.size)(values, dtype).stored.copy()
    parts = [quantiser(values[first : first + 7], dtype).stored.copy() for first in range(0, 40, 7)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("dtype", ROWS)
def test_rounded_values_round_to_themselves(dtype: str) -> None:
    """Values of 8 bits with a scale for each row, whose largest is used, are stored as they are."""
    quantiser = Quantiser(40 * 997)
    first = quantiser(wild_rows(), dtype)
    stored = first.stored.copy()
    again = quantiser(stored.view(dtype).astype(np.float32) * first.scales[:, None], dtype)
    np.testing.assert_array_equal(again.stored.view(dtype), stored.view(dtype))
    assert again.lost[0] <= 1e-12 * again.lost[1]


@pytest.mark.parametrize("dtype", ROWS)
def test_values_that_are_not_finite_show_in_the_scale(dtype: str) -> None:
    values = wild_rows()
    values[[9, 11, 13], 500] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        scales = Quantiser(values.size)(values, dtype).scales
    assert list(np.flatnonzero(~np.isfinite(scales))) == [9, 11, 13]
