"""Toy checkpoints: what they hold, and how they are written."""

from __future__ import annotations

import filecmp
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from helpers.refusals import refuses
from wanbuild.published.base_configs import PUBLISHED_TEXT_ENCODER, PUBLISHED_TRANSFORMERS, PUBLISHED_VAE
from wanbuild.source.checkpoint import open_source
from wanbuild.source.match import variant_of
from wanbuild.source.shapes import component_shapes
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.toy.toy_configs import TOY_VARIANTS
from wanbuild.toy.toy_tokenizer import vocabulary
from wanbuild.toy.toy_weights import Stored, random_tensor
from wanbuild.variants.table import variants
from wanrun.artifact.model import Chunking
from wanrun.codes import ErrorCode
from wanrun.media.windows import check_chunks


@pytest.fixture(scope="module")
def toys(toy_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A toy of every variant, seed 0, float32. Not to be changed."""
    folder = tmp_path_factory.mktemp("toys")
    others = {variant: folder / variant for variant in TOY_VARIANTS if variant != "wan2.1-t2v"}
    for variant, path in others.items():
        write_toy(path, variant, seed=0)
    return {"wan2.1-t2v": toy_checkpoint, **others}


def test_published_sizes() -> None:
    def count(component: str, config: Mapping[str, Any]) -> int:
        return sum(math.prod(shape) for shape in component_shapes(component, config).values())

    counts = {name: count("transformer", config) for name, config in PUBLISHED_TRANSFORMERS.items()}
    # The names say 1.3 and 14 billion; UMT5-XXL's encoder has 5.7, the VAE 127 million.
    assert counts["wan2.1-t2v-1.3b"] == 1_418_996_800
    assert counts["wan2.1-t2v-14b"] == counts["wan2.2-t2v-a14b"] == 14_288_491_584
    assert counts["wan2.2-ti2v-5b"] == 4_999_787_712
    assert 5.6e9 < count("text_encoder", PUBLISHED_TEXT_ENCODER) < 5.8e9
    assert 1.26e8 < count("vae", PUBLISHED_VAE) < 1.28e8


def test_a_sample_video_ends_where_a_chunk_ends() -> None:
    check_chunks(variants()["anyflow-far-wan2.1"].sample_frames, 81, Chunking(first=1, each=3), 4, "it")


def _same_bytes(a: Path, b: Path) -> bool:
    names = [
        sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()) for root in (a, b)
    ]
    return names[0] == names[1] and filecmp.cmpfiles(a, b, names[0], shallow=False)[0] == names[0]


def test_the_same_seed_gives_the_same_bytes(toy_checkpoint: Path, tmp_path: Path) -> None:
    write_toy(tmp_path / "again", "wan2.1-t2v", seed=0)
    write_toy(tmp_path / "other", "wan2.1-t2v", seed=1)
    assert _same_bytes(toy_checkpoint, tmp_path / "again")
    for file in toy_checkpoint.rglob("*.safetensors"):
        first, other = load_file(file), load_file(tmp_path / "other" / file.relative_to(toy_checkpoint))
        assert not any(np.array_equal(first[key], other[key]) for key in first)


@pytest.mark.slow
def test_there_is_a_toy_of_every_variant(toys: dict[str, Path]) -> None:
    assert toys.keys() == variants().keys()
    for variant, folder in toys.items():
        with open_source(folder) as source:
            assert variant_of(source) is variants()[variant]
            assert source.components.keys() == TOY_VARIANTS[variant].configs.keys()
            assert json.loads((folder / "model_index.json").read_text()) == dict(TOY_VARIANTS[variant].index)


@pytest.mark.slow
@pytest.mark.parametrize("variant", TOY_VARIANTS)
def test_every_parameter_is_random(toys: dict[str, Path], variant: str) -> None:
    """No zeros or ones anywhere, no two parameters alike, and norm scales within 1 ± 0.2.

    No two of both experts either: an expert that is taken for the other shows.
    """
    with open_source(toys[variant]) as source:
        seen: set[bytes] = set()
        for component in source.components.values():
            for key in component.tensors:
                value = component.array(key)
                assert len(np.unique(value)) == value.size or value.size > 400, key
                assert np.isfinite(value).all()
                assert value.std() > 0.005, key
                seen.add(value.tobytes())
                if "norm" in key and not key.endswith(("bias", "proj.weight", "to_qkv.weight", "table")):
                    assert value.min() >= 0.8, key
                    assert value.max() <= 1.2, key
                elif not key.endswith("bias"):
                    assert abs(value.mean()) < 0.5, key
        assert len(seen) == sum(len(component.tensors) for component in source.components.values())


def test_a_parameter_depends_on_its_name_shape_and_seed_alone(tmp_path: Path) -> None:
    write_toy(tmp_path / "deep", configs={"transformer": {"num_layers": 4}}, stored=Stored(shards=2))
    with open_source(tmp_path / "deep") as source:
        component = source.component("transformer")
        assert "blocks.3.attn1.to_q.weight" in component.tensors
        for key in component.tensors:
            shape = component.entry(key).shape
            assert np.array_equal(component.array(key), random_tensor("transformer", key, shape, seed=0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_dtypes_are_the_same_values_rounded(toy_checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    write_toy(tmp_path / "half", stored=Stored(dtype=dtype))
    with open_source(toy_checkpoint) as full, open_source(tmp_path / "half") as half:
        assert half.component("text_encoder").config["torch_dtype"] == dtype
        for name, component in full.components.items():
            for key in component.tensors:
                value = half.component(name).array(key)
                assert value.dtype.name == dtype
                assert np.array_equal(value, component.array(key).astype(value.dtype))


def test_changed_fields_are_written(tmp_path: Path) -> None:
    write_toy(
        tmp_path / "x",
        configs={
            "transformer": {"text_dim": 24, "in_channels": 4, "out_channels": 4},
            "vae": {"z_dim": 4, "latents_mean": [0.1, 0.2, -0.3, 0.4], "latents_std": [1.5, 2.0, 2.5, 3.0]},
            "text_encoder": {"d_model": 24, "num_layers": 3},
        },
        scheduler="euler",
        flow_shift=4.5,
    )
    with open_source(tmp_path / "x") as source:
        assert variant_of(source).name == "wan2.1-t2v"
        assert source.component("vae").config["latents_std"] == [1.5, 2.0, 2.5, 3.0]
        assert source.component("text_encoder").entry("shared.weight").shape[1] == 24
        assert source.component("transformer").entry("patch_embedding.weight").shape == (40, 4, 1, 2, 2)
        assert source.scheduler_config["shift"] == 4.5


def test_experts_are_changed_together_or_one_alone(tmp_path: Path) -> None:
    write_toy(
        tmp_path / "x",
        "wan2.2-t2v",
        configs={"transformer": {"ffn_dim": 44}, "transformer_2": {"num_layers": 4}},
    )
    with open_source(tmp_path / "x") as source:
        first, second = (source.component(name) for name in ("transformer", "transformer_2"))
        assert first.config == {**second.config, "num_layers": 3}
        assert first.config["ffn_dim"] == 44
        assert {key for key in second.tensors if ".3." in key} == set(second.tensors) - set(first.tensors)


def fits(what: str, expected: int, found: int) -> tuple[ErrorCode, dict[str, object]]:
    """The refusal of a field that does not fit the other configs."""
    return "mismatch", {"what": f"{what} ", "expected": expected, "found": found}


@pytest.mark.parametrize(
    ("variant", "arguments", "refusal"),
    [
        ("wan2.3-i2v", {}, ("unknown_name", {"what": "variant", "expected": "wan2.1-t2v or "})),
        ("wan2.1-t2v", {"scheduler": "ddim"}, ("unknown_name", {"expected": "unipc or dpm++ or euler"})),
        ("wan2.1-t2v", {"dtype": "float64"}, ("unknown_name", {"what": "dtype", "found": "float64"})),
        ("wan2.1-t2v", {"seed": -1}, ("out_of_range", {"what": "seed"})),
        ("wan2.1-t2v", {"shards": 0}, ("out_of_range", {"what": "shards"})),
        ("wan2.1-t2v", {"transformer": {"num_layer": 4}}, ("unknown_parameter", {"what": " num_layer"})),
        ("wan2.2-t2v", {"transformer_2": {"layers": 4}}, ("unknown_parameter", {"what": "transformer_2 "})),
        ("wan2.1-i2v", {"image_encoder": {"size": 8}}, ("unknown_parameter", {"what": "image_encoder "})),
        ("wan2.1-t2v", {"transformer_2": {"num_layers": 4}}, ("unknown_name", {"what": " transformer_2"})),
        ("wan2.1-t2v", {"image_encoder": {"hidden_size": 8}}, ("unknown_name", {"what": " image_encoder"})),
        ("wan2.1-t2v", {"text_encoder": {"vocab_size": 100}}, ("out_of_range", {"found": 100})),
        ("wan2.1-t2v", {"transformer": {"text_dim": 33}}, fits("text_dim", 32, 33)),
        ("wan2.1-t2v", {"vae": {"z_dim": 4}}, fits("in_channels", 4, 16)),
        ("wan2.2-t2v", {"transformer_2": {"in_channels": 4}}, fits("transformer_2 in_channels", 16, 4)),
        ("wan2.1-i2v", {"image_encoder": {"hidden_size": 8}}, fits("image_dim", 8, 28)),
        ("wan2.1-flf2v", {"image_encoder": {"image_size": 56}}, fits("pos_embed_seq_len", 34, 20)),
        ("wan2.1-i2v", {"transformer": {"attention_head_dim": 24}}, fits("added_kv_proj_dim", 48, 40)),
        ("wan2.1-i2v", {"transformer": {"in_channels": 16}}, fits("in_channels", 36, 16)),
        ("wan2.1-vace", {"transformer": {"vace_in_channels": 32}}, fits("vace_in_channels", 96, 32)),
        ("wan2.2-animate", {"transformer": {"latent_channels": 4}}, fits("latent_channels", 16, 4)),
    ],
)
def test_wrong_arguments_leave_nothing(
    tmp_path: Path, variant: str, arguments: dict[str, Any], refusal: tuple[ErrorCode, dict[str, object]]
) -> None:
    configs = {name: value for name, value in arguments.items() if isinstance(value, dict)}
    stored = Stored(**{name: arguments[name] for name in {"dtype", "shards"} & arguments.keys()})
    others = {name: arguments[name] for name in {"scheduler", "seed"} & arguments.keys()}
    code, parts = refusal
    with refuses(code, **parts):
        write_toy(tmp_path / "x", variant, configs=configs, stored=stored, **others)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_only_a_toy_or_an_empty_folder_is_replaced(toy_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    write_toy(folder)
    write_toy(folder)
    (folder / "vae" / "notes.txt").write_text("precious")
    with refuses("exists", what=folder, found="vae/notes.txt"):
        write_toy(folder)
    (folder / "vae" / "notes.txt").unlink()
    write_toy(folder)
    assert _same_bytes(folder, toy_checkpoint)

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    with refuses("exists", what=mine):
        write_toy(mine)
    assert (mine / "thesis.txt").read_text() == "precious"

    with refuses("wrong_kind", what=folder / "model_index.json"):
        write_toy(folder / "model_index.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "x"]


def test_a_failure_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "x"
    write_toy(folder, seed=5)
    write_toy(tmp_path / "copy", seed=5)

    def fail(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("wanbuild.toy.toy_checkpoint.write_tokenizer", fail)
    with pytest.raises(KeyboardInterrupt):
        write_toy(folder, seed=6)
    assert _same_bytes(folder, tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "x"]


def test_english_is_more_than_letters(toy_checkpoint: Path) -> None:
    pieces = [piece for piece, _ in vocabulary()]
    assert len(set(pieces)) == len(pieces)
    alone = Tokenizer.from_file(str(toy_checkpoint / "tokenizer" / "tokenizer.json"))
    prompt = "A small cat walking through the city at night, cinematic."
    encoding = alone.encode(prompt)
    assert "▁walking" in encoding.tokens
    assert "<unk>" not in encoding.tokens
    assert len(encoding.ids) < len(prompt) / 2
    assert alone.decode(encoding.ids) == prompt
