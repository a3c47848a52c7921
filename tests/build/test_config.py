"""Reading a config: every field is read, fixed, ignored or refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from helpers.refusals import refuses
from wanbuild.config import Divisor, Index, Number, Size, parse_config, read_json
from wanbuild.models.animate_config import AnimateConfig
from wanbuild.models.clip_config import ImageEncoderConfig
from wanbuild.models.transformer_config import TransformerConfig
from wanbuild.models.umt5 import TextEncoderConfig
from wanbuild.models.vace import VACEConfig
from wanbuild.models.vae_config import VAEConfig
from wanbuild.source.image_processor import ImageProcessorConfig
from wanbuild.source.original_config import OriginalConfig
from wanrun.errors import SourceError


@dataclass(frozen=True)
class _Config:
    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("Model", "ModelWithAnotherName")
    FIXED: ClassVar[Mapping[str, Any]] = {
        "act": "gelu",
        "rate": 1.0,
        "shift": None,
        "skip": [],
        "flag": False,
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset({"dropout"})

    layers: Size
    eps: Divisor
    patch: tuple[Size, Size, Size] = (1, 2, 2)
    scales: tuple[Number, ...] = ()
    image_dim: Size | None = None
    norm: str = "rms"
    causal: bool = False
    extra: tuple[Index, ...] = field(default_factory=tuple)


_GOOD: dict[str, Any] = {"_class_name": "Model", "layers": 7, "eps": 1e-5}


def _parse(**changes: Any) -> _Config:
    return parse_config(_Config, {**_GOOD, **changes}, "x/config.json")


def test_fields_are_read_and_defaults_apply() -> None:
    assert _parse() == _Config(7, 1e-5)
    config = _parse(patch=[2, 3, 4], scales=[1, 0.5], image_dim=1280, norm="ln", causal=True, extra=[1])
    assert config == _Config(7, 1e-5, (2, 3, 4), (1.0, 0.5), 1280, "ln", True, (1,))
    assert all(type(scale) is float for scale in config.scales)
    fine = {"image_dim": None, "act": "gelu", "rate": 1, "shift": None, "skip": [], "flag": False}
    metadata = {"_diffusers_version": "0.33", "_name_or_path": "a/b", "transformers_version": "5"}
    assert _parse(**fine, **metadata, dropout=0.3) == _Config(7, 1e-5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layers": "7"}, "layers is '7': Expected `int`"),
        ({"layers": 7.0}, "layers is 7.0"),
        ({"layers": True}, "layers is True"),
        ({"layers": None}, "layers is None"),
        ({"layers": 0}, "layers is 0: Expected `int` >= 1"),
        ({"layers": 2**20 + 1}, "layers is 1048577: Expected"),
        ({"layers": 10**400}, r"layers is 1000+\.\.\.: Expected"),
        ({"eps": "1e-5"}, "eps is '1e-5': Expected `float`"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"eps": float("inf")}, "eps is inf"),
        ({"eps": False}, "eps is False"),
        ({"eps": 1e-200}, "eps is 1e-200: Expected `float` >= 1e-12"),
        ({"eps": 10**400}, r"eps is 1000+\.\.\.: Number out of range"),
        ({"scales": [0.5, -1e300]}, r"scales is .*: Expected `float` >= -1000000.0 - at `\$\[1\]`"),
        ({"scales": [1.0, "x"]}, "scales is"),
        ({"patch": [1, 2]}, r"patch is \[1, 2\]"),
        ({"patch": [1, 2, 2, 2]}, "patch is"),
        ({"patch": 2}, "patch is 2"),
        ({"image_dim": "1280"}, "image_dim is '1280'"),
        ({"causal": 0}, "causal is 0"),
        ({"act": "relu"}, "act is 'relu' and only 'gelu' is supported"),
        ({"rate": 2}, "rate is 2 and only 1.0"),
        ({"rate": True}, "rate is True"),
        ({"shift": 0}, "shift is 0 and only None"),
        ({"flag": 0}, "flag is 0 and only False"),
        ({"skip": [0]}, r"skip is \[0\]"),
        ({"window": 4}, "unknown field window = 4"),
        ({"FIXED": 1}, "unknown field FIXED"),
        ({"unknown": "x" * 10_000}, r"unknown field unknown = 'xx{70,80}\.\.\.;"),
        ({"_class_name": ["x"] * 1000}, r"another class; .*\.\.\.;"),
    ],
)
def test_what_is_not_understood_is_an_error(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(SourceError, match=problem) as caught:
        _parse(**changes)
    assert "x/config.json" in str(caught.value) and len(str(caught.value)) < 500


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(SourceError) as caught:
        parse_config(_Config, {"layers": "x", "act": "relu", "other": 1}, "c")
    for problem in ("layers is 'x'", "eps is missing", "act is 'relu'", "unknown field other"):
        assert problem in str(caught.value)


def test_the_class_may_be_left_out_or_another_name() -> None:
    assert parse_config(_Config, {"layers": 1, "eps": 1.0}, "c") == _Config(1, 1.0)
    assert _parse(_class_name="ModelWithAnotherName") == _Config(7, 1e-5)
    for names in ({"_class_name": "Other"}, {"architectures": ["Other"]}):
        with refuses("wrong_kind", SourceError, expected="Model or ModelWithAnotherName", found="'Other'"):
            parse_config(_Config, {"layers": 1, "eps": 1.0, **names}, "c")


@dataclass(frozen=True)
class _Other:
    """With the names of transformers, and a number that JSON cannot have."""

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("Model",)
    FIXED: ClassVar[Mapping[str, Any]] = {"clip": float("-inf")}
    IGNORED: ClassVar[frozenset[str]] = frozenset({"architectures"})


def test_architectures_of_transformers() -> None:
    for architectures in (None, [], ["Model"]):
        parse_config(_Other, {"architectures": architectures}, "c")


def test_a_fixed_infinity_is_that_of_the_file() -> None:
    """diffusers writes its DPM++ scheduler's lambda_min_clipped as -Infinity."""
    for value in ("-Infinity", float("-inf")):
        parse_config(_Other, {"clip": value}, "c")
    for value in ("Infinity", "-inf", -5.1, None):
        with refuses("unreadable", SourceError, what="-inf is supported"):
            parse_config(_Other, {"clip": value}, "c")


def test_what_is_no_json_number_is_text(tmp_path: Path) -> None:
    """So no field can have it as its number, and the manifest is JSON whatever an ignored field has."""
    path = tmp_path / "config.json"
    path.write_text('{"eps": 1e999, "dropout": NaN, "rate": -Infinity, "b": {"c": "é"}}', encoding="utf-8")
    data = read_json(path)
    assert data == {"eps": "1e999", "dropout": "NaN", "rate": "-Infinity", "b": {"c": "é"}}
    with refuses("unreadable", SourceError, what="eps is '1e999'") as caught:
        parse_config(_Config, data, "c")
    assert "rate is '-Infinity'" in caught.value.what


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "cannot be read as JSON"),
        (b"", "cannot be read as JSON"),
        (b'{"a": "\xff"}', "cannot be read as JSON"),
        (b'{"b": {"a": 1, "a": 1}}', "duplicate name 'a'"),
        (b'{"a": ' + b"1" * 5000 + b"}", "cannot be read as JSON"),
        (b'{"a":' * 100_000, "cannot be read as JSON"),
        (b"[1, 2]", "is not a JSON object; found list"),
        *(
            (json.dumps({"a": {name: 1}}).encode(), "name that")
            for name in ("\x1b[2J", "a\nb", "\ud800", "a" * 1001)
        ),
        (None, "is missing"),
    ],
)
def test_bad_json_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SourceError, match=message) as caught:
        read_json(path)
    assert str(path) in str(caught.value) and str(caught.value).isprintable()
    with pytest.raises(SourceError, match="cannot be read"):
        read_json(tmp_path)


# --- no config makes a division by zero, or a root of what is below it --------------------------------------

CONFIGS = (
    TransformerConfig,
    VACEConfig,
    AnimateConfig,
    VAEConfig,
    TextEncoderConfig,
    ImageEncoderConfig,
    ImageProcessorConfig,
    OriginalConfig,
)

REQUIRED = {
    "dim": 24,
    "num_heads": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 32,
    "in_dim": 16,
    "out_dim": 16,
    "num_layers": 40,
    "text_dim": 32,
    "vocab_size": 100,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 32,
    "added_kv_proj_dim": 24,
    "image_dim": 1280,
    "hidden_act": "gelu",
}


def _good(cls: Any) -> dict[str, Any]:
    """Values of all fields that fit together."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for name, field_ in fields.items():
        alone = name in ("image_dim", "added_kv_proj_dim") and cls is not AnimateConfig
        if name in REQUIRED and not alone:
            values[name] = REQUIRED[name]
        elif field_.default is not dataclasses.MISSING:
            values[name] = field_.default
    return values


def _numbers(cls: Any) -> list[str]:
    """The fields of numbers: every one that is no switch, text or object."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    return [name for name in kinds if re.search("int|float|Divisor|Index|Number|Size", kinds[name])]


@pytest.mark.slow
@pytest.mark.parametrize("cls", CONFIGS)
def test_zero_and_what_is_below_are_refused(cls: Any) -> None:
    good = _good(cls)
    parse_config(cls, good, "c")
    for name, bad in itertools.product(_numbers(cls), (0, -1, -1e-9)):
        changed = {**good, name: (*good[name][:-1], bad) if isinstance(good[name], tuple) else bad}
        if name in ("latents_mean", "image_mean"):  # subtracted
            parse_config(cls, changed, "c")
            continue
        with pytest.raises(SourceError, match=rf"{name}\b"):
            parse_config(cls, changed, "c")


@pytest.mark.parametrize(
    ("cls", "changes", "problem"),
    [
        (TextEncoderConfig, {"relative_attention_num_buckets": 3}, "num_buckets is 3, fewer than 4"),
        (TextEncoderConfig, {"relative_attention_max_distance": 8}, "max_distance is 8, within the 8 dist"),
        (TransformerConfig, {"freq_dim": 255}, "freq_dim is 255, an odd number"),
        (TransformerConfig, {"attention_head_dim": 13}, "attention_head_dim is 13, an odd number"),
        (TransformerConfig, {"patch_size": (1, 0, 2)}, "patch_size is .*: Expected `int` >= 1"),
        (TransformerConfig, {"patch_size": (1, 2)}, "patch_size is .*: Expected `array`"),
        (OriginalConfig, {"patch_size": (1, 2, 0)}, "patch_size is .*: Expected `int` >= 1"),
        (VAEConfig, {"latents_std": (0.0,) * 16}, "latents_std is .*: Expected `float` >= 1e-12"),
        (VAEConfig, {"dim_mult": (1, 2, 0, 4)}, "dim_mult is .*a level without channels"),
    ],
)
def test_numbers_that_would_be_divided_by(cls: Any, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(SourceError, match=problem):
        parse_config(cls, {**_good(cls), **changes}, "c")
