"""LoRAs that are opened: several, of two experts, what is refused, and conversions that merge them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers.lora_files import (
    PRECISION,
    SHAPES,
    Tensors,
    assert_deltas,
    dense,
    lora,
    normal,
    opened,
    refused,
    two_modules,
    write,
)
from helpers.refusals import json_error, refuses
from wanbuild.build import convert
from wanbuild.cli import wanbuild
from wanbuild.conversion import writer as writer_module
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.lora.merge import LoraRequest, misplaced, open_loras, parse_lora_file
from wanbuild.source.shapes import component_shapes
from wanbuild.toy.toy_configs import TOY_TRANSFORMER
from wancli.console import run
from wanrun.errors import SourceError


def test_loras_add_up_in_order(tmp_path: Path) -> None:
    (first, a), (second, b) = lora("original", 1), lora("kohya", 2)
    del second["lora_unet_head_head.lora_down.weight"]
    del second["lora_unet_head_head.lora_up.weight"], second["lora_unet_head_head.alpha"]
    requests = [
        LoraRequest(write(tmp_path, first, "1.safetensors"), 0.5),
        LoraRequest(write(tmp_path, second, "2.safetensors"), -2),
    ]
    with open_loras(requests, {"transformer": SHAPES}) as loras:
        for key, delta in loras.deltas("transformer").items():
            expected = 0.5 * a[key] - 2 * (b[key] if key != "proj_out.weight" else 0)
            assert np.abs(dense(delta, SHAPES[key]) - expected).max() < PRECISION * np.abs(expected).max()
        assert [(record.file, record.scale) for record in loras.records] == [
            ("1.safetensors", 0.5),
            ("2.safetensors", -2),
        ]


def test_a_lora_of_one_expert_and_one_of_both(tmp_path: Path) -> None:
    shapes = {"transformer": SHAPES, "transformer_2": SHAPES}
    both, low = (
        write(tmp_path, lora(seed=1)[0], "both.safetensors"),
        write(tmp_path, two_modules()[0], "low.safetensors"),
    )
    requests = [LoraRequest(both), LoraRequest(low, 0.5, "transformer_2")]
    with open_loras(requests, shapes) as loras:
        assert loras.deltas("transformer").keys() == lora()[1].keys()
        assert loras.deltas("transformer_2").keys() == lora()[1].keys() | two_modules()[1].keys()
        assert [record.component for record in loras.records] == [None, "transformer_2"]
        assert all(len(record.sha256) == 64 for record in loras.records)
        assert str(tmp_path) not in str(loras.records)
    with refuses("no_effect", what="low.safetensors", expected="transformer", remedy="--lora"):
        open_loras(requests, {"transformer": SHAPES})


# --- what is refused --------------------------------------------------------------------------------------

GOOD = "diffusion_model.blocks.0.self_attn.q"
DOWN, UP = np.full((4, 40), 0.5, np.float32), np.full((40, 4), 0.25, np.float32)
NAN = np.where(np.arange(160).reshape(40, 4) == 77, np.float32("nan"), UP)


def one_module(down: Any = DOWN, up: Any = UP, name: str = GOOD, **more: Any) -> Tensors:
    """Both matrices of a module, and what else it has."""
    matrices = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
    return {**matrices, **{f"{name}.{key}": value for key, value in more.items()}}


REFUSED: Mapping[str, tuple[dict[str, Any], tuple[object, ...]]] = {
    "dora": ({f"{GOOD}.dora_scale": UP[:, :1]}, ("DoRA",)),
    "dora of peft": ({f"{GOOD}.lora_magnitude_vector.weight": UP[:, 0]}, ("DoRA",)),
    "loha": ({f"{GOOD}.hada_w1_a": UP}, ("LoHa",)),
    "lokr": ({f"{GOOD}.lokr_w1": UP}, ("LoKr",)),
    "tucker": ({f"{GOOD}.lora_mid.weight": UP}, ("middle matrix",)),
    "text encoder": ({"lora_te1_encoder_block_0.lora_down.weight": DOWN}, ("text encoder",)),
    "text encoder of diffusers": ({"text_encoder.encoder.block.0.q.lora_A.weight": DOWN}, ("text encoder",)),
    "another model": (
        {"diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight": DOWN},
        ("nothing", "1 tensor ", "double_blocks.*.img_attn.qkv"),
    ),
    "past the last block": (
        {"diffusion_model.blocks.3.self_attn.q.lora_down.weight": DOWN},
        ("nothing", "blocks.*.self_attn.q"),
    ),
    "a checkpoint": ({f"{GOOD}.weight": NAN}, ("transformer", "--transformer")),
    "a VAE": ({"decoder.middle.0.residual.0.gamma": DOWN}, ("VAE", "--vae")),
    "a bias where there is none": (
        {"diffusion_model.blocks.0.self_attn.norm_q.diff_b": UP[:, 0]},
        ("nothing", "norm_q"),
    ),
    "matrices of a table": ({"diffusion_model.blocks.0.modulation.lora_up.weight": UP}, ("nothing",)),
    "no module": ({"diffusion_model.lora_up.weight": UP, "alpha": np.float32(1)}, ("nothing", "2 tensors")),
    "alpha of another name": ({**one_module(), "x.alpha": np.float32(4)}, ("x.alpha",)),
    "no up": ({f"{GOOD}.lora_down.weight": DOWN}, (f"{GOOD}.lora_down.weight", "up matrix")),
    "no down": ({f"{GOOD}.lora_up.weight": UP}, (f"{GOOD}.lora_up.weight", "down matrix")),
    "no matrices of an alpha": ({f"{GOOD}.alpha": np.float32(4)}, (f"{GOOD}.alpha",)),
    "no matrices of a bias": ({f"{GOOD}.lora_up.bias": UP[:, 0]}, (f"{GOOD}.lora_up.bias",)),
    "ranks differ": (one_module(up=UP[:, :3]), ([4, 40], [40, 3], "to_q.weight", [40, 40])),
    "another size": (one_module(DOWN[:, :30], UP[:30]), ("30 wide", "40 wide", "1 of the 1 ")),
    "rank 0": (one_module(DOWN[:0], UP[:, :0]), ([0, 40], [40, 0])),
    "no axes": (one_module(np.float32(1), np.float32(1)), ([],)),
    "matrices of a norm": (
        one_module(DOWN[:, :1], name="diffusion_model.blocks.0.norm3"),
        ("blocks.0.norm2.weight",),
    ),
    "a delta of another shape": ({f"{GOOD}.diff": DOWN}, ("to_q.weight", [40, 40], [4, 40])),
    "alpha zero": (one_module(alpha=np.float32(0)), (f"{GOOD}.alpha is 0",)),
    "alpha not finite": (one_module(alpha=np.float32("inf")), (f"{GOOD}.alpha is inf",)),
    "alpha of two numbers": (one_module(alpha=UP[0, :2]), (f"{GOOD}.alpha", [2])),
    "nan": (one_module(up=NAN), (f"{GOOD}.lora_up.weight",)),
    "infinity": ({f"{GOOD}.diff_b": np.full(40, np.inf, np.float16)}, (f"{GOOD}.diff_b",)),
    "quantized": (
        one_module(DOWN.astype(ml_dtypes.float8_e4m3fn)),
        (f"{GOOD}.lora_down.weight", "F8_E4M3"),
    ),
    "integers": ({f"{GOOD}.diff_b": np.ones(40, np.int8)}, (f"{GOOD}.diff_b", "I8")),
    "twice": (
        {**one_module(), "transformer.blocks.0.attn1.to_q.lora_A.weight": DOWN},
        ("both", "down matrix", "blocks.0.attn1.to_q.weight"),
    ),
    "empty": ({}, ("no tensors",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, named = REFUSED[case]
    refused(write(tmp_path, tensors), *named)


def test_extreme_scales(tmp_path: Path) -> None:
    tensors, expected = lora("diffusers")
    tiny = {key: (value * np.float32(1e-38 if "lora_A" in key else 1)) for key, value in tensors.items()}
    with opened(write(tmp_path, tiny), 1e38) as loras:
        for key, delta in loras.deltas("transformer").items():
            error = np.abs(dense(delta, SHAPES[key]) - expected[key]).max()
            assert error < 1e-6 * np.abs(expected[key]).max()  # subnormal numbers have fewer bits
    with opened(write(tmp_path, tensors), 0.0) as loras:
        for key, delta in loras.deltas("transformer").items():
            assert not dense(delta, SHAPES[key]).any()


def of_i2v_2_1(rng: np.random.Generator) -> Tensors:
    """The tensors of lightx2v's own LoRAs for Wan 2.2 that only Wan 2.1's image-to-video has layers for."""
    tensors: Tensors = {"diffusion_model.img_emb.proj.0.diff_b": normal(rng, 40)}
    for i in range(3):
        name = f"diffusion_model.blocks.{i}.cross_attn"
        tensors[f"{name}.norm_k_img.diff"] = normal(rng, 40)
        for one in ("k_img", "v_img"):
            tensors |= one_module(name=f"{name}.{one}")
            tensors[f"{name}.{one}.diff_b"] = normal(rng, 40)
    return tensors


def test_layers_that_the_model_lacks_are_left_out_and_counted(tmp_path: Path) -> None:
    others = of_i2v_2_1(np.random.default_rng(3))
    tensors, expected = lora()
    path = write(tmp_path, {**tensors, **others})
    assert_deltas(path, expected)
    both = {"transformer": SHAPES, "transformer_2": SHAPES}
    with open_loras([LoraRequest(path, 0.5)], both) as loras:
        ((record,), (line,)) = loras.records, loras.lines
    assert record.left_out == len(others) == 22
    for part in (str(record), record.sha256, "changes 20 weights", f"22 of its {len(tensors) + 22} tensors"):
        assert part in line
    layers = ("blocks.*.cross_attn.k_img", "blocks.*.cross_attn.norm_k_img", "img_emb.proj.*")
    assert all(layer in line for layer in layers)
    with refuses("unsupported", SourceError, what="22 tensors") as caught:
        open_loras([LoraRequest(path)], both, strict=True)
    assert "--strict" in str(caught.value)
    open_loras([LoraRequest(write(tmp_path, tensors))], both, strict=True).close()


def test_a_lora_of_another_width_is_one_short_line(tmp_path: Path) -> None:
    large = component_shapes("transformer", {**TOY_TRANSFORMER, "num_attention_heads": 4, "num_layers": 4})
    rng = np.random.default_rng(0)
    tensors = {}
    for i in range(4):
        for one in "qkvo":
            rows, columns = large[f"blocks.{i}.attn1.to_q.weight"]
            name = f"diffusion_model.blocks.{i}.self_attn.{one}"
            tensors |= one_module(normal(rng, 4, columns), normal(rng, rows, 4), name)
    path = write(tmp_path, tensors)
    with pytest.raises(SourceError) as caught:
        open_loras([LoraRequest(path)], {"transformer": SHAPES, "transformer_2": SHAPES})
    message = str(caught.value)
    assert all(part in message for part in ("is 80 wide", "is 40 wide", "12 of the 12"))
    assert len(message) < 400 and "\n" not in message


def test_all_problems_of_all_files_are_one_error(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, REFUSED["no up"][0], "1.safetensors"),
        write(tmp_path, REFUSED["nan"][0], "2.safetensors"),
        tmp_path / "3.pt",
        tmp_path / "4.safetensors",
        write(tmp_path, {**REFUSED["twice"][0], **REFUSED["another model"][0]}, "5.safetensors"),
    ]
    paths[2].write_bytes(b"PK")
    paths[3].write_bytes(paths[0].read_bytes()[:-1])
    with pytest.raises(SourceError) as caught:
        open_loras([LoraRequest(path) for path in paths], {"transformer": SHAPES})
    message = str(caught.value)
    names = ("1.safetensors: ", "2.safetensors is", "3.pt is", "4.safetensors is", "5.safetensors: ")
    assert all(name in message for name in names)
    assert "1 tensor is" not in message  # of a file with another problem


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    with refuses("missing_file", what=tmp_path / "none.safetensors"):
        opened(tmp_path / "none.safetensors")
    with refuses("out_of_range", what="nan", expected="finite"):
        opened(write(tmp_path, lora()[0]), scale=float("nan"))
    with refuses("unsupported", SourceError, what=" 1.6"):
        opened(write(tmp_path, lora()[0]), scale=1e300)


def test_parse_lora(tmp_path: Path) -> None:
    assert parse_lora_file("a/b.safetensors") == (Path("a/b.safetensors"), 1.0)
    assert parse_lora_file("a/b.safetensors:0.8") == (Path("a/b.safetensors"), 0.8)
    assert parse_lora_file("b:-1e-1") == (Path("b"), -0.1)
    assert parse_lora_file("c:d.safetensors:2") == (Path("c:d.safetensors"), 2.0)
    (tmp_path / "e:2").touch()
    assert parse_lora_file(f"{tmp_path}/e:2") == (tmp_path / "e:2", 1.0)
    assert parse_lora_file(f"{tmp_path}/e:2:3") == (tmp_path / "e:2", 3.0)
    for text in ("a:", ":1", "a:b", "a:nan", "a:inf", "a:1:x", "a:high=1,low=0.5"):
        with refuses("unreadable", what=repr(text), expected="FILE:SCALE"):
            parse_lora_file(text)


@pytest.mark.parametrize(
    ("name", "component", "said"),
    [
        ("wan2.2_i2v_A14b_high_noise_lora_rank64.safetensors", "transformer_2", ("low-noise", "says high")),
        ("Seko-V1/low_noise_model.safetensors", "transformer", ("high-noise", "says low")),
        ("HighNoise/pytorch_lora_weights.safetensors", "transformer_2", ("low-noise", "says high")),
        ("wan22-low.safetensors", "transformer", ("high-noise", "says low")),
        ("high_noise_model.safetensors", "transformer", ()),
        ("high_noise_model.safetensors", None, ("says high", "--lora-high")),
        ("slow_motion.safetensors", "transformer", ()),
        ("low_rank_of_high_noise.safetensors", "transformer", ()),
    ],
)
def test_a_file_of_the_other_expert(name: str, component: str | None, said: tuple[str, ...]) -> None:
    requests = [LoraRequest(Path(name), 1.0, component), LoraRequest(Path("x.safetensors"))]
    found = list(misplaced(requests, ("transformer", "transformer_2")))
    assert len(found) == bool(said)
    assert all(part in found[0] for part in said)


def test_loras_of_one_expert() -> None:
    low = LoraRequest(Path("low_noise_model.safetensors"))
    (line,) = misplaced([low], ("transformer",))
    assert "low-noise expert" in line and str(low.path) in line
    given = LoraRequest(low.path, 1.0, "transformer_2")
    (line,) = misplaced([given], ("transformer", "transformer_2"))
    assert "low-noise" in line and str(low.path) not in line


# --- converting -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_digest_does_not_depend_on_threads_or_blocks(
    toy_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, lora()[0])

    def digest(name: str, **options: Any) -> str:
        return convert(ConvertRequest(str(toy_checkpoint), tmp_path / name, **options)).content_digest

    first = digest("1", loras=[LoraRequest(path, 0.5)], threads=1)
    assert digest("2", loras=[LoraRequest(path, 0.5)], threads=3) == first
    monkeypatch.setattr(writer_module, "BLOCK_ITEMS", 100)
    assert digest("3", loras=[LoraRequest(path, 0.5)]) == first
    assert digest("4", loras=[LoraRequest(path, 0.6)]) != first
    assert digest("5") != first


@pytest.mark.slow
def test_the_command_line(toy_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, artifact = write(tmp_path, lora()[0]), tmp_path / "artifact"
    arguments = ["convert", str(toy_checkpoint), "--artifact", str(artifact), "--json-errors"]
    bad = write(tmp_path, REFUSED["another model"][0], "bad.safetensors")
    for given, code, ended in (
        ((f"{path}:x",), "unreadable", 2),
        ((str(path), "--lora-low", str(path)), "unsupported", 2),
        ((str(path), "--lora", str(bad)), "unsupported", 4),
    ):
        assert run(wanbuild, [*arguments, "--lora", *given]) == ended
        assert json_error(capsys.readouterr().err)["code"] == code
        assert not artifact.exists() and not list(tmp_path.glob(".*"))
    assert run(wanbuild, [*arguments, "--lora", f"{path}:0.5", "--lora", str(path)]) == 0
    records = json.loads((artifact / "manifest.json").read_text())["loras"]
    assert [(record["file"], record["scale"]) for record in records] == [(path.name, 0.5), (path.name, 1.0)]
    assert str(tmp_path) not in json.dumps(records)
    said = f"LoRA {path.name} at strength 0.5: changes 10 weights; sha256 {records[0]['sha256']}"
    assert said in capsys.readouterr().out.splitlines()
    assert run(wanbuild, ["inspect", str(artifact)]) == 0
    said = f"LoRA            {path.name} at strength 0.5, sha256 {records[0]['sha256']}"
    assert said in capsys.readouterr().out.splitlines()
    assert run(wanbuild, [*arguments, "--force", "--strict", "--lora", str(path)]) == 0
