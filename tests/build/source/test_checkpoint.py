"""Opening a checkpoint folder: what a good one holds, and that each kind of bad one is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.refusals import check_refusal, refuses
from hostile.refusal import edit_json
from wanbuild.published.schedulers import SCHEDULER_CONFIGS
from wanbuild.source import component
from wanbuild.source.checkpoint import open_source
from wanbuild.source.match import variant_of
from wanbuild.source.scheduler import SchedulerDefaults, read_scheduler
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.toy.toy_weights import Stored
from wanbuild.variants.table import variant_named, variants
from wanbuild.variants.variant import Variant
from wanrun.codes import ErrorCode
from wanrun.errors import ArtifactError, SourceError

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
INDEX = TRANSFORMER + ".index.json"


@pytest.fixture
def folder(toy_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the toy that a test may break."""
    return shutil.copytree(toy_checkpoint, tmp_path / "checkpoint")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A toy of three shards per component."""
    write_toy(tmp_path / "sharded", stored=Stored(shards=3))
    return tmp_path / "sharded"


def test_a_single_file_checkpoint(toy_checkpoint: Path) -> None:
    with open_source(toy_checkpoint) as source:
        assert source.pipeline_class == "WanPipeline"
        assert (source.repository, source.revision) == (None, None)
        assert (source.boundary_ratio, source.expand_timesteps) == (None, False)
        assert source.component_names == ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
        assert list(source.components) == ["text_encoder", "transformer", "vae"]
        for name, component in source.components.items():
            expected: dict[str, np.ndarray] = {}
            for file in component.files:
                expected |= load_file(file)
            assert list(component.tensors) == sorted(expected)
            assert component.nbytes == sum(value.nbytes for value in expected.values())
            assert component.config == json.loads((toy_checkpoint / name / "config.json").read_text())
            for key, value in expected.items():
                assert component.entry(key).shape == value.shape
                assert np.array_equal(component.array(key), value)
                part = np.empty(value.nbytes // 2, np.uint8)
                component.read(key, value.nbytes - part.nbytes, part)
                assert part.tobytes() == value.tobytes()[-part.nbytes :]
        assert set(source.files()) == {
            path.relative_to(toy_checkpoint).as_posix()
            for path in toy_checkpoint.rglob("*")
            if path.is_file() and path.name not in ("wanbuild_toy.json", "special_tokens_map.json")
        }
        assert list(source.files()) == sorted(source.files())
        array = source.component("vae").array("decoder.conv_in.weight")
    assert np.isfinite(array).all()
    with pytest.raises(ValueError, match="closed"):
        source.component("vae").array("decoder.conv_in.weight")
    with pytest.raises(KeyError):
        source.component("tokenizer")


def test_a_sharded_checkpoint_holds_the_same(toy_checkpoint: Path, sharded: Path) -> None:
    with open_source(toy_checkpoint) as one, open_source(sharded) as many:
        for name, component in one.components.items():
            assert len(many.component(name).files) > 1
            assert list(many.component(name).tensors) == list(component.tensors)
            for key in component.tensors:
                assert np.array_equal(many.component(name).array(key), component.array(key))
        assert INDEX in many.files()
        assert len(many.component("transformer").files) == 3
        shards = sum(len(component.files) for component in many.components.values())
        assert len(many.files()) == len(one.files()) + shards  # a file each became shards and an index


@pytest.mark.parametrize("variant", variants().values(), ids=variants())
def test_the_defaults_of_a_variant_can_be_built(variant: Variant) -> None:
    assert variant.num_frames % variant.vae_temporal == 1
    step = [variant.vae_spatial * patch for patch in variant.patch[1:]]
    assert all(height % step[0] == 0 and width % step[1] == 0 for width, height in variant.sizes)
    assert ("guidance_scale_2" in variant.options) == (len(variant.transformers) == 2)
    assert all(
        width % variant.size_multiple == 0 == height % variant.size_multiple
        for width, height in variant.sizes
    )
    images = {"image_encoder"} if variant.encoded_images else set()
    assert set(variant.weight_components) == {*variant.transformers, "text_encoder", "vae"} | images


def test_the_published_defaults() -> None:
    """Steps, guidance, shift, fps, frames and the first size, of the model cards."""
    assert {
        name: (
            *(f.steps, f.guidance_scale, f.options.get("guidance_scale_2"), f.flow_shift),
            *(f.fps, f.num_frames, f.sizes[0]),
        )
        for name, f in variants().items()
    } == {
        "wan2.1-t2v": (50, 5.0, None, 5.0, 16, 81, (832, 480)),
        "wan2.1-i2v": (40, 5.0, None, 5.0, 16, 81, (832, 480)),
        "wan2.1-flf2v": (50, 5.0, None, 16.0, 16, 81, (1280, 720)),
        "wan2.1-vace": (50, 5.0, None, 16.0, 16, 81, (1280, 720)),
        "wan2.2-t2v": (40, 4.0, 3.0, 12.0, 16, 81, (1280, 720)),
        "wan2.2-i2v": (40, 3.5, 3.5, 5.0, 16, 81, (1280, 720)),
        "wan2.2-vace": (50, 5.0, 5.0, 12.0, 16, 81, (832, 480)),
        "wan2.2-ti2v": (50, 5.0, None, 5.0, 24, 121, (1280, 704)),
        "wan2.2-animate": (20, 1.0, None, 5.0, 30, 77, (1280, 720)),
        "anyflow-wan2.1": (4, 1.0, None, 5.0, 16, 81, (832, 480)),
        "helios-wan2.1": (50, 5.0, None, 1.0, 24, 129, (640, 384)),
        "helios-mid-wan2.1": (20, 5.0, None, 1.0, 24, 129, (640, 384)),
        "helios-distilled-wan2.1": (2, 1.0, None, 1.0, 24, 129, (640, 384)),
        "anyflow-far-wan2.1": (4, 1.0, None, 5.0, 16, 81, (832, 480)),
        "self-forcing-wan2.1": (4, 1.0, None, 5.0, 16, 81, (832, 480)),
    }
    assert variants()["wan2.2-t2v"].transformers == ("transformer", "transformer_2")


def test_a_variant_that_is_not_known() -> None:
    assert variant_named("wan2.2-ti2v", Path("artifact")) is variants()["wan2.2-ti2v"]
    for variant in ("wan9-t2v", None, ["wan2.1-t2v"]):
        with refuses("other_release", ArtifactError, what="artifact ", expected="wan2.1-t2v or "):
            variant_named(variant, Path("artifact"))


@pytest.mark.slow
@pytest.mark.parametrize("variant", variants())
def test_the_variant_is_found(tmp_path: Path, variant: str) -> None:
    write_toy(tmp_path / "toy", variant)
    with open_source(tmp_path / "toy") as source:
        assert variant_of(source) is variants()[variant]


def test_tokenizer_ids_come_from_the_files(folder: Path) -> None:
    with open_source(folder) as source:
        vocabulary = source.component("text_encoder").config["vocab_size"]
        tokenizer = source.tokenizer
    assert (tokenizer.pad_id, tokenizer.eos_id) == (0, 1)
    assert 256 < tokenizer.vocab_size <= vocabulary
    assert tokenizer.file == folder / "tokenizer" / "tokenizer.json"

    def swap(data: dict[str, Any]) -> None:
        data["pad_token"] = {"content": "<s>", "lstrip": False}
        data["eos_token"] = "▁cat"

    edit_json(folder / "tokenizer" / "tokenizer_config.json", swap)
    pieces = [piece for piece, _ in json.loads(tokenizer.file.read_text())["model"]["vocab"]]
    with open_source(folder) as source:
        assert source.tokenizer.pad_id == 3
        assert source.tokenizer.eos_id == pieces.index("▁cat")


def test_absent_parts_as_newer_diffusers_writes_them(folder: Path) -> None:
    change = {name: [None, None] for name in ("transformer_2", "image_encoder", "image_processor")}
    change = {**change, "boundary_ratio": None, "expand_timesteps": False, "_name_or_path": "a/b"}
    change["tokenizer"] = ["transformers", "T5Tokenizer"]
    edit_json(folder / "model_index.json", lambda data: data.update(change))
    with open_source(folder) as source:
        assert variant_of(source).name == "wan2.1-t2v"


def test_missing_folders_and_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    for absent in (Path(name), tmp_path / "nowhere"):
        with refuses("missing_file", SourceError, what=absent, remedy="hub id"):
            open_source(absent)
    (tmp_path / "file").write_text("x")
    with refuses("wrong_kind", SourceError, what=tmp_path / "file"):
        open_source(tmp_path / "file")
    with refuses("missing_file", SourceError, what="model_index.json", remedy="-Diffusers"):
        open_source(tmp_path)


def test_the_plain_file_is_preferred_to_a_variant(folder: Path) -> None:
    plain = folder / TRANSFORMER
    variant = plain.with_name("diffusion_pytorch_model.fp16.safetensors")
    shutil.copy(plain, variant)
    with open_source(folder) as source:
        assert source.component("transformer").files == (plain,)
    plain.unlink()
    with open_source(folder) as source:
        assert source.component("transformer").files == (variant,)
    shutil.copy(variant, plain.with_name("diffusion_pytorch_model.bf16.safetensors"))
    with refuses("wrong_kind", SourceError, what=folder / "transformer", found="bf16") as caught:
        open_source(folder)
    assert "fp16" in str(caught.value.found)


def test_a_sharded_variant(sharded: Path) -> None:
    def rename(name: str) -> str:
        return name.replace("diffusion_pytorch_model-", "diffusion_pytorch_model.fp16-")

    for path in list((sharded / "transformer").glob("*-of-*")):
        path.rename(path.with_name(rename(path.name)))
    data = json.loads((sharded / INDEX).read_text())
    data["weight_map"] = {key: rename(name) for key, name in data["weight_map"].items()}
    (sharded / INDEX).unlink()
    (sharded / TRANSFORMER).with_name("diffusion_pytorch_model.safetensors.index.fp16.json").write_text(
        json.dumps(data)
    )
    with open_source(sharded) as source:
        files = source.component("transformer").files
        assert [path.name for path in files] == sorted(set(data["weight_map"].values()))


def test_files_may_be_links_into_a_cache(sharded: Path, tmp_path: Path) -> None:
    """The hub's cache keeps blobs by digest, and snapshots of links to them."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0fad780"
    blobs.mkdir()
    for number, path in enumerate(sorted(p for p in sharded.rglob("*") if p.is_file())):
        shutil.copy(path, blobs / str(number))
        link = snapshot / path.relative_to(sharded)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    with open_source(snapshot) as source, open_source(sharded) as plain:
        assert list(source.files()) == list(plain.files())
        key = "blocks.2.attn2.to_k.weight"
        assert np.array_equal(
            source.component("transformer").array(key), plain.component("transformer").array(key)
        )


def test_a_tied_embedding_under_both_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own saving writes it twice: one is read, if they are equal in every block."""
    monkeypatch.setattr(component, "_TIED_BYTES", 1000)
    (weights,) = (folder / "text_encoder").glob("*.safetensors")
    with open_source(folder) as source:
        expected = source.component("text_encoder").shapes
    tensors = load_file(weights)
    (given,) = (key for key in tensors if key in ("shared.weight", "encoder.embed_tokens.weight"))
    both = dict.fromkeys(("shared.weight", "encoder.embed_tokens.weight"), tensors.pop(given))
    save_file({**tensors, **both}, weights)
    with open_source(folder) as source:
        assert source.component("text_encoder").shapes == expected
    other = both["shared.weight"].copy()
    other[-1, -1] += 1
    save_file({**tensors, **both, "shared.weight": other}, weights)
    with refuses("mismatch", SourceError, what="shared.weight and encoder.embed_tokens.weight"):
        open_source(folder)


@pytest.mark.parametrize("solver", ["unipc", "dpm++", "euler"])
def test_published_schedulers(solver: str) -> None:
    config = SCHEDULER_CONFIGS[solver]
    assert read_scheduler(config) == SchedulerDefaults(solver, 3.0)  # type: ignore[arg-type]
    field = "shift" if solver == "euler" else "flow_shift"
    assert read_scheduler({**config, field: 7.5}).flow_shift == 7.5
    assert read_scheduler({**config, field: 12}).flow_shift == 12.0


@pytest.mark.parametrize(
    ("solver", "field", "value", "code"),
    [
        *(
            ("unipc", field, value, "unreadable")
            for field, value in (
                *(("solver_order", 3), ("solver_type", "bh1"), ("disable_corrector", [0])),
                *(("shift_terminal", 0.02), ("predict_x0", False), ("use_karras_sigmas", True)),
                *(("num_train_timesteps", 500), ("new_option", 1)),
                *(("prediction_type", ...), ("use_flow_sigmas", ...)),  # their defaults are not flow
            )
        ),
        ("unipc", "prediction_type", "epsilon", "wrong_kind"),
        ("unipc", "use_flow_sigmas", False, "wrong_kind"),
        ("unipc", "flow_shift", 0.0, "out_of_range"),
        ("unipc", "flow_shift", -3.0, "out_of_range"),
        ("dpm++", "algorithm_type", "sde-dpmsolver++", "unreadable"),
        ("dpm++", "euler_at_final", True, "unreadable"),
        ("dpm++", "lambda_min_clipped", -5.1, "unreadable"),
        ("dpm++", "final_sigmas_type", "sigma_min", "unreadable"),
        ("euler", "invert_sigmas", True, "unreadable"),
        ("euler", "stochastic_sampling", True, "unreadable"),
        ("euler", "use_dynamic_shifting", True, "unreadable"),
        ("flow-map", "num_train_timesteps", 500, "unreadable"),
        ("self-forcing", "extra_one_step", False, "unreadable"),
        ("euler", "_class_name", "DDIMScheduler", "unsupported"),
    ],
)
def test_a_scheduler_with_other_numerics_is_refused(
    solver: str, field: str, value: object, code: ErrorCode
) -> None:
    config = {**SCHEDULER_CONFIGS[solver], field: value}
    if value is ...:
        del config[field]
    with pytest.raises(SourceError) as caught:
        read_scheduler(config, "scheduler/scheduler_config.json")
    check_refusal(caught.value, code, what="scheduler/scheduler_config.json")
    assert field in str(caught.value) or code == "unsupported"
