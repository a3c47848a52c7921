"""Converting a checkpoint of two experts: each from its own weights, with its own LoRAs, all read once."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.manifests import with_model
from helpers.naive_conversion import arrays_of
from helpers.original_checkpoint import original_keys
from helpers.refusals import refuses
from wanbuild.build import convert
from wanbuild.cli import wanbuild
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.mapping.original import diffusers_names
from wanbuild.source.checkpoint import SourceComponent, open_source
from wanbuild.source.experts import check_experts, expert_named, experts_named
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.toy.toy_weights import Stored
from wancli.console import run
from wanrun.artifact.manifest import read_manifest
from wanrun.denoising.boundary import boundary_between

EXPERTS = ("transformer", "transformer_2")
KEY, PATH, LAYER = "blocks.1.attn1.to_v.weight", "blocks/attn1/to_v/weight", 1


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("wan2.2_i2v_A14b_high_noise_lora_rank64_lightx2v_4step_1022.safetensors", "transformer"),
        ("wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors", "transformer_2"),
        ("Wan2.2-I2V-A14B-LowNoise-Q8_0.gguf", "transformer_2"),
        ("Wan2_2-I2V-A14B-HIGH_fp8_e4m3fn_scaled_KJ.safetensors", "transformer"),
        ("Wan2.2-Lightning_T2V-A14B-4steps-lora_LOW_fp16.safetensors", "transformer_2"),
        ("Wan_2_2_I2V_A14B_HIGH_lightx2v_MoE_distill_lora_rank_64_bf16.safetensors", "transformer"),
        ("wan22_A14b_low.safetensors", "transformer_2"),
        ("High/Index-Anisora-V3.2-Q4_K_M.gguf", "transformer"),
        ("low_noise_model/diffusion_pytorch_model-00001-of-00006.safetensors", "transformer_2"),
        ("t2vlow_noise.safetensors", "transformer_2"),
        ("high_noise_model_low.safetensors", "transformer"),
        ("low-noise/model.safetensors", "transformer_2"),
        ("x_high.safetensors", "transformer"),
        ("highres.safetensors", None),
        ("wan_high_quality_slow.safetensors", None),
        ("wan2.1_t2v_14B_flow_shift5_low-vram.safetensors", None),
        ("high_noise_or_low_noise.safetensors", None),
        ("SmoothMix_t2v_HIGHv1.0.safetensors", "transformer"),
        ("high_heels_wan22.safetensors", None),
        ("Wan2.1-T2V-merged_low_rank.safetensors", None),
        ("high-definition/low_bit.safetensors", None),
    ],
)
def test_what_files_of_experts_are_named_after(name: str, expert: str | None) -> None:
    assert expert_named(Path("models", name)) == expert


@pytest.mark.parametrize(
    ("names", "experts"),
    [
        (("wan22_H.safetensors", "wan22_L.safetensors"), EXPERTS),
        (("L-i2v-14B.safetensors", "H-i2v-14B.safetensors"), EXPERTS[::-1]),
        (("wan22h.gguf", "wan22l.gguf"), EXPERTS),
        (("wan22_H.safetensors", "wan22_L_v2.safetensors"), (None, None)),
        (("wan22_H.safetensors", "wan22_H.safetensors"), (None, None)),
        (("rank_h.safetensors", "rank_l_h.safetensors"), (None, None)),
        (("helm.safetensors", "lelm.safetensors"), (None, None)),
        (("a_high.safetensors", "a_low.safetensors"), EXPERTS),
    ],
)
def test_a_letter_names_experts_that_differ_in_it_alone(
    names: tuple[str, str], experts: tuple[str | None, str | None]
) -> None:
    assert experts_named([Path("x", name) for name in names]) == [*experts]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy of two experts, in three shards a component. Not to be changed."""
    folder = tmp_path_factory.mktemp("experts") / "checkpoint"
    write_toy(folder, "wan2.2-t2v", stored=Stored(shards=3))
    return folder


def stored(checkpoint: Path, component: str, key: str) -> np.ndarray:
    with open_source(checkpoint) as source:
        return source.component(component).array(key).copy()


def test_the_manifest_of_two_experts(checkpoint: Path, tmp_path: Path) -> None:
    manifest = convert(ConvertRequest(checkpoint, tmp_path / "artifact"))
    assert manifest.model.variant == "wan2.2-t2v" and manifest.model.task.name == "t2v"
    assert manifest.model.options["boundary"] == 0.875
    defaults = manifest.model.default_options()
    assert (defaults["num_steps"], defaults["guidance_scale"], defaults["guidance_scale_2"]) == (40, 4.0, 3.0)
    first, second = (manifest.components[name] for name in EXPERTS)
    layouts = [{path: p.layout for path, p in expert.parameters.items()} for expert in (first, second)]
    assert layouts[0] == layouts[1] and manifest.dtypes["transformer"] == manifest.dtypes["transformer_2"]
    assert not {p.sha256 for p in first.parameters.values()} & {p.sha256 for p in second.parameters.values()}
    assert {f"{name}/config.json" for name in EXPERTS} <= manifest.source["files"].keys()


@pytest.mark.slow
def test_the_manifest_of_ti2v(tmp_path: Path) -> None:
    write_toy(tmp_path / "toy", "wan2.2-ti2v")
    model = convert(ConvertRequest(tmp_path / "toy", tmp_path / "artifact")).model
    assert (model.task.name, model.latent_channels, model.vae_spatial) == ("ti2v", 48, 16)
    assert model.expand_timesteps is True and not model.options
    assert (model.defaults.fps, model.defaults.num_steps) == (24, 50)


@pytest.mark.slow
def test_every_byte_is_read_once(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: Counter[tuple[str, str, int, int]] = Counter()
    read = SourceComponent.read

    def counted(self: SourceComponent, key: str, begin: int, out: np.ndarray) -> None:
        ranges[self.name, key, begin, begin + out.nbytes] += 1
        read(self, key, begin, out)

    def whole(self: SourceComponent, key: str) -> np.ndarray:
        raise AssertionError(f"{self.name} {key} is read whole")

    monkeypatch.setattr(SourceComponent, "read", counted)
    monkeypatch.setattr(SourceComponent, "array", whole)
    convert(ConvertRequest(checkpoint, tmp_path / "artifact", threads=3))
    assert set(ranges.values()) == {1}
    with open_source(checkpoint) as source:
        found: Counter[tuple[str, str]] = Counter()
        for name, key, begin, end in ranges:
            found[name, key] += end - begin
        assert found == {
            (name, key): component.entry(key).nbytes
            for name, component in source.components.items()
            for key in component.tensors
        }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_option_sets_the_dtype_of_both(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    artifact = tmp_path / "artifact"
    arguments = ["convert", checkpoint, "--artifact", artifact, "--weights-dtype", dtype]
    assert run(wanbuild, list(map(str, arguments))) == 0
    for name in EXPERTS:
        value, expected = arrays_of(artifact, name)[PATH][LAYER], stored(checkpoint, name, KEY)
        assert value.dtype.name == dtype
        assert np.array_equal(value, expected.astype(value.dtype))


def test_experts_of_two_dtypes_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    request = ConvertRequest(
        checkpoint, tmp_path / "artifact", {"transformer": "float32", "transformer_2": "bfloat16"}
    )
    with refuses("mismatch", expected="float32", found="transformer_2 in bfloat16"):
        convert(request)
    assert list(tmp_path.iterdir()) == []


def lora_file(path: Path, seed: int) -> np.ndarray:
    """Writes a LoRA of one matrix, rank 3; returns its delta in float64."""
    rng = np.random.default_rng(seed)
    down, up = (rng.standard_normal(shape, np.float32) / 8 for shape in ((3, 40), (40, 3)))
    name = f"transformer.{KEY.removesuffix('.weight')}"
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, path)
    return up.astype(np.float64) @ down


@pytest.mark.slow
def test_loras_of_both_experts_and_of_each(checkpoint: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.safetensors" for name in ("both", "high", "low")]
    both, high, low = (lora_file(path, seed) for seed, path in enumerate(files))
    artifact = tmp_path / "artifact"
    options = ["--lora", f"{files[0]}:0.5", "--lora-high", files[1], "--lora-low", f"{files[2]}:-2"]
    arguments = ["convert", checkpoint, "--artifact", artifact, "--weights-dtype", "float32", *options]
    assert run(wanbuild, list(map(str, arguments))) == 0
    records = read_manifest(artifact).loras
    assert [(r.file, r.scale, r.component) for r in records] == [
        ("both.safetensors", 0.5, None),
        ("high.safetensors", 1.0, "transformer"),
        ("low.safetensors", -2.0, "transformer_2"),
    ]
    for name, delta in (("transformer", 0.5 * both + high), ("transformer_2", 0.5 * both - 2 * low)):
        found = arrays_of(artifact, name)[PATH]
        expected = stored(checkpoint, name, KEY) + delta
        # One rounding of the delta and one of the sum.
        assert np.abs(found[LAYER] - expected).max() < 3e-7 * np.abs(expected).max()
        for layer in (0, 2):  # which no LoRA changes
            key = KEY.replace(f".{LAYER}.", f".{layer}.")
            assert np.array_equal(found[layer], stored(checkpoint, name, key))


@pytest.mark.slow
def test_both_experts_in_the_original_naming(tmp_path: Path) -> None:
    """One file of any name in each folder gives the parameters that diffusers' names give."""
    plain, original = tmp_path / "plain", tmp_path / "original"
    write_toy(plain, "wan2.2-t2v")
    shutil.copytree(plain, original)
    for name in EXPERTS:
        (file,) = (original / name).glob("*.safetensors")
        state = load_file(file)
        names = diffusers_names(original_keys(json.loads((original / name / "config.json").read_text())))
        save_file(
            {key: state[new] for key, new in names.items()}, original / name / f"wan-{name}.safetensors"
        )
        file.unlink()
    manifests = [
        convert(ConvertRequest(folder, tmp_path / f"{folder.name}-a")) for folder in (plain, original)
    ]
    first, second = (dict(manifest.components) for manifest in manifests)
    assert first == second


@pytest.mark.slow
def test_programs_of_another_variant_are_not_kept(artifact_copy: Path, toy_checkpoint: Path) -> None:
    """They depend on it even where configs, dtypes and shapes are the same."""
    dtypes: dict[str, Any] = {"transformer": "float32", "text_encoder": "float32"}
    request = ConvertRequest(toy_checkpoint, artifact_copy, dtypes, force=True)
    assert convert(request).profiles
    manifest = read_manifest(artifact_copy)
    with_model(manifest, variant="wan2.2-t2v").write(artifact_copy)
    assert not convert(request).profiles


def test_one_transformer_has_no_boundary(toy_artifact: Path) -> None:
    assert boundary_between(read_manifest(toy_artifact), 2) is None


def test_one_file_for_both_experts(tmp_path: Path) -> None:
    """A SOURCE may have it; a folder that both share names neither."""
    folder = tmp_path / "high_noise"
    folder.mkdir()
    first, second = folder / "a.safetensors", folder / "b.safetensors"
    first.write_bytes(b"a")
    second.hardlink_to(first)
    for other in (first, second, folder / "." / "a.safetensors"):
        files = {"transformer": first, "transformer_2": other}
        with refuses("conflict", found=f"{first} and {other}"):
            check_experts(files, "wan2.2-t2v")
        check_experts(files, "wan2.2-t2v", given=False)
    second.unlink()
    second.write_bytes(b"b")
    check_experts({"transformer": first, "transformer_2": second}, "wan2.2-t2v")


def renamed(checkpoint: Path, folder: Path, names: Mapping[str, str]) -> Path:
    """A checkpoint of links, with the one file of each of these transformers under another name."""
    for path in checkpoint.iterdir():
        if path.name not in names:
            (folder / path.name).symlink_to(path)
    for name, file in names.items():
        (folder / name).mkdir()
        (folder / name / "config.json").symlink_to(checkpoint / name / "config.json")
        (weights,) = (checkpoint / name).glob("*.safetensors")
        (folder / name / file).symlink_to(weights)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", ["options", "SOURCE", "SOURCE and an option"])
def test_experts_whose_names_say_the_other(way: str, tmp_path: Path) -> None:
    write_toy(tmp_path / "toy", "wan2.2-t2v")
    (tmp_path / "source").mkdir()
    names = {"transformer": "T2V-A14B-LowNoise.safetensors", "transformer_2": "a14b_HIGH_fp16.safetensors"}
    checkpoint = renamed(tmp_path / "toy", tmp_path / "source", names)
    every = {name: checkpoint / name for name in (*EXPERTS, "vae", "text_encoder", "tokenizer")}
    source, files = {
        "options": (None, every),
        "SOURCE": (checkpoint, {}),
        "SOURCE and an option": (tmp_path / "toy", {"transformer": every["transformer"]}),
    }[way]
    with refuses("invalid_value", found=f"{names['transformer']} as transformer"):
        convert(ConvertRequest(source, tmp_path / "artifact", files=files))
    assert not (tmp_path / "artifact").exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["an option", "SOURCE"])
def test_one_expert_alone_is_said(
    way: str, toy_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source").mkdir()
    checkpoint = renamed(toy_checkpoint, tmp_path / "source", {"transformer": "wan_low_noise.safetensors"})
    files = {"transformer": checkpoint / "transformer" / "wan_low_noise.safetensors"}
    if way == "an option":
        request = ConvertRequest(toy_checkpoint, tmp_path / "artifact", files=files)
    else:
        request = ConvertRequest(checkpoint, tmp_path / "artifact")
    convert(request)
    line = capsys.readouterr().err
    assert "wan2.1-t2v" in line and "wan_low_noise.safetensors" in line
