"""``wanbuild lora``: what is made of files, where it lies, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from helpers.damage import flip
from helpers.hub_server import read_folder
from helpers.loras import PUBLISHED, listed_adapter, lora, transformer_shapes, write
from helpers.refusals import json_error
from hostile.refusal import check_named
from wanbuild.build import convert
from wanbuild.cli import wanbuild
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.convert_options import DEFAULTS, default_rows
from wancli.console import run
from wanhub.marker import MARKER
from wanrun.artifact.adapter import SamplingDefaults
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import TRANSFORMERS, read_manifest
from wanrun.errors import ArtifactError
from wanrun.weights.adapters import open_adapter

TOLERANCE = 1e-6
"""Of the largest value of a parameter; both round to float32."""

Made = tuple[Path, Path]

# --- what is made -----------------------------------------------------------------------------------------

Ran = Callable[..., str]
Refused = Callable[..., None]


@pytest.fixture
def artifact(converted: Callable[[str], Made], tmp_path: Path) -> Path:
    """An artifact of wan2.1-t2v that a test may change."""
    folder = tmp_path / "artifact"
    shutil.copytree(converted("wan2.1-t2v")[1], folder)
    return folder


@pytest.fixture
def ran(artifact: Path, capsys: pytest.CaptureFixture[str]) -> Ran:
    """Runs ``wanbuild lora``; returns what it prints."""

    def call(*arguments: object, place: Path = artifact) -> str:
        capsys.readouterr()
        assert run(wanbuild, ["lora", *map(str, arguments), "--artifact", str(place)]) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def refused(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs ``wanbuild lora``, which has to be refused and to change no file, and checks its error."""

    def call(
        code: str, *arguments: object, named: Sequence[object] = (), ends: int = 2, place: Path = artifact
    ) -> None:
        before, words = read_folder(tmp_path), ["lora", *arguments, "--artifact", place, "--json-errors"]
        capsys.readouterr()
        assert run(wanbuild, [*map(str, words)]) == ends
        (line,) = capsys.readouterr().err.splitlines()
        assert read_folder(tmp_path) == before and len(line) < 1000
        check_named(json_error(line), code, named)

    return call


def of(artifact: Path, folder: Path, name: str = "FastWan", seed: int = 0, rank: int = 4) -> Path:
    """A LoRA of the artifact's model."""
    tensors = lora(PUBLISHED[name], read_manifest(artifact), seed, rank)
    return write(folder / f"{name}-{seed}", PUBLISHED[name], tensors)


def products(path: Path) -> dict[str, np.ndarray]:
    """B A of every layer that a file changes."""
    tensors = open_adapter(path).tensors
    return {
        name.removesuffix("/lora_a"): tensors[f"{name[:-1]}b"].astype(np.float64) @ array.astype(np.float64)
        for name, array in tensors.items()
        if name.endswith("/lora_a")
    }


@pytest.mark.slow
def test_several_files_become_one_adapter(artifact: Path, ran: Ran, tmp_path: Path) -> None:
    """Of other ranks and layers, each with its scale: their matrices lie one behind the other."""
    first, second = of(artifact, tmp_path, rank=3), of(artifact, tmp_path, "musubi", seed=1, rank=5)
    ran(first, "-o", tmp_path / "1.safetensors")
    ran(second, "-o", tmp_path / "2.safetensors")
    ran(f"{first}:0.5", f"{second}:-2", "-o", tmp_path / "3.safetensors")
    one, two, both = (products(tmp_path / f"{number}.safetensors") for number in (1, 2, 3))
    assert two.keys() < one.keys() == both.keys()  # the second has no layers outside the blocks
    for path, found in both.items():
        expected = 0.5 * one[path] - 2 * two.get(path, 0.0)
        assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()
    adapter = open_adapter(tmp_path / "3.safetensors")
    assert [(one.file, one.scale) for one in adapter.content.loras] == [
        (first.name, 0.5),
        (second.name, -2.0),
    ]
    assert (adapter.content.rank, adapter.content.experts) == (8, ("transformer",))
    shapes = {name: one.shape for name, one in adapter.tensors.items()}
    assert shapes["transformer/blocks/attn1/to_q/lora_a"] == (3, 8, 40)
    assert shapes["transformer/proj_out/lora_b"] == (64, 3)


def test_layers_of_other_ranks_are_padded(artifact: Path, ran: Ran, tmp_path: Path) -> None:
    tensors = lora(PUBLISHED["kohya"], read_manifest(artifact))
    name = "lora_unet_blocks_1_self_attn_q"
    del tensors["lora_unet_blocks_0_self_attn_q.lora_down.weight"]
    del tensors["lora_unet_blocks_0_self_attn_q.lora_up.weight"]
    del tensors["lora_unet_blocks_0_self_attn_q.alpha"]
    tensors[f"{name}.lora_down.weight"] = tensors[f"{name}.lora_down.weight"][:2].copy()
    tensors[f"{name}.lora_up.weight"] = tensors[f"{name}.lora_up.weight"][:, :2].copy()
    ran(write(tmp_path, PUBLISHED["kohya"], tensors), "-o", tmp_path / "a.safetensors")
    made = open_adapter(tmp_path / "a.safetensors").tensors
    a, b = (made[f"transformer/blocks/attn1/to_q/lora_{one}"] for one in "ab")
    assert a.shape == (3, 4, 40) and b.shape == (3, 40, 4)
    assert not a[0].any() and not b[0].any()  # the layer that the file does not have
    assert not a[1, 2:].any() and not b[1, :, 2:].any() and a[1, :2].all()


@pytest.mark.slow
def test_matrices_have_the_dtype_of_computing(
    converted: Callable[[str], Made], ran: Ran, artifact: Path, tmp_path: Path
) -> None:
    """Those of float32 weights are kept, and rounded once for others; small changes stay float32."""
    source, _ = converted("wan2.1-t2v")
    convert(ConvertRequest(source, tmp_path / "half"))
    path = of(artifact, tmp_path, "diffusers")
    ran(path, "-o", tmp_path / "whole.safetensors")
    ran(path, "-o", tmp_path / "half.safetensors", place=tmp_path / "half")
    whole, half = (open_adapter(tmp_path / f"{name}.safetensors").tensors for name in ("whole", "half"))
    assert whole.keys() == half.keys()
    for name, array in whole.items():
        assert array.dtype == np.float32
        matrix = name.endswith(("/lora_a", "/lora_b"))
        assert np.array_equal(array.astype(ml_dtypes.bfloat16) if matrix else array, half[name])
        assert half[name].dtype == (ml_dtypes.bfloat16 if matrix else np.float32)


@pytest.mark.slow
def test_layers_that_the_model_lacks(
    converted: Callable[[str], Made], ran: Ran, refused: Refused, artifact: Path, tmp_path: Path
) -> None:
    """As of LoRAs for images of Wan 2.1 on Wan 2.2, which has no such layers."""
    images = read_manifest(converted("wan2.1-i2v")[1])
    tensors = lora(PUBLISHED["lightx2v"], images)
    del tensors["diffusion_model.patch_embedding.lora_down.weight"]
    del tensors["diffusion_model.patch_embedding.lora_up.weight"]
    del tensors["diffusion_model.patch_embedding.alpha"]
    path = write(tmp_path, PUBLISHED["lightx2v"], tensors)
    line = ran(path, "--name", "few").splitlines()[0]
    content = read_manifest(artifact).adapters["few"].content
    count = content.loras[0].left_out
    assert count > 20 and f"; {count} of its {len(tensors)} tensors" in line
    assert {"blocks.*.cross_attn.k_img", "blocks.*.cross_attn.norm_k_img"} < set(content.left_out)
    refused("unsupported", path, "--name", "none", "--strict", ends=4, named=["--strict"])


@pytest.mark.slow
def test_a_way_to_sample(
    converted: Callable[[str], Made],
    ran: Ran,
    refused: Refused,
    artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As ``wanbuild convert`` would give it to this model; two experts have two scales."""
    path = of(artifact, tmp_path)
    ran(path, "--name", "four", "--sampling", "lightning-4")
    options = read_manifest(artifact).adapters["four"].content.options
    assert options.given == {
        "num_steps": 4,
        "guidance_scale": 1.0,
        "flow_shift": 5.0,
        "solver": "euler",
        "timesteps": (1000.0, 937.5, 2500 / 3, 625.0),
    }
    experts = tmp_path / "experts"
    shutil.copytree(converted("wan2.2-t2v")[1], experts)
    ran(path, "--name", "four", "--sampling", "lightning-4", place=experts)
    assert read_manifest(experts).adapters["four"].content.options.guidance_scale_2 == 1.0
    own = tmp_path / "own.toml"
    own.write_text("steps = 6\nfps = 8\n")
    ran(path, "--name", "six", "--sampling", own)
    assert read_manifest(artifact).adapters["six"].content.options.given == {"num_steps": 6, "fps": 8}
    own.write_text("boundary = 0.9\n")
    refused("no_effect", path, "--name", "x", "--sampling", own, named=["default boundary"])
    ran(path, "--name", "images", "--sampling", "rcm-4-i2v")
    refused("unknown_name", path, "--name", "x", "--sampling", "lightning", named=["'lightning'"])


def test_all_defaults_of_a_generation_can_be_brought() -> None:
    names = {default_rows()[key].name for key in DEFAULTS}
    assert set(SamplingDefaults.__struct_fields__) == names


@pytest.mark.slow
def test_experts_of_one_file(
    converted: Callable[[str], Made], tmp_path: Path, ran: Ran, refused: Refused
) -> None:
    """A file of one expert alone changes no other; one for both is in each."""
    _, base = converted("wan2.2-t2v")
    path = of(base, tmp_path)
    ran("--lora-low", path, "-o", tmp_path / "low.safetensors", place=base)
    assert open_adapter(tmp_path / "low.safetensors").content.experts == ("transformer_2",)
    ran(path, "-o", tmp_path / "both.safetensors", place=base)
    both = open_adapter(tmp_path / "both.safetensors")
    assert both.content.experts == TRANSFORMERS
    first, second = both.of("transformer"), both.of("transformer_2")
    assert first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
    refused("unsupported", "--lora-high", path, named=["FILE"])


# --- names, places ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_names_and_their_files(artifact: Path, ran: Ran, refused: Refused, tmp_path: Path) -> None:
    """Named after its file; another of the name is refused, or takes its place and its file away."""
    path = of(artifact, tmp_path)
    said = ran(path)
    made = read_manifest(artifact).adapters
    (name,) = made
    assert name == path.stem and f"added adapter {name} to {artifact}: rank 4" in said
    assert [one.name for one in (artifact / "adapters").iterdir()] == [Path(made[name].file).name]
    assert run(wanbuild, ["verify", str(artifact)]) == 0
    refused("unknown_name", path, named=[name, "--force"])
    ran(f"{path}:2", "--force")
    again = read_manifest(artifact).adapters
    assert again.keys() == {name} and again[name].sha256 != made[name].sha256
    assert [one.name for one in (artifact / "adapters").iterdir()] == [Path(again[name].file).name]
    ran(path, "--name", "second")
    assert read_manifest(artifact).adapters.keys() == {name, "second"}
    refused("missing_parameter", path, path, named=["--name"])
    for wrong in ("a:1", "../a", "a b", ""):
        refused("unsupported", path, "--name", wrong, named=[wrong, "--name"])
    refused("unknown_name", "--remove", "third", named=["third", "second"])
    refused("conflict", path, "--remove", "second", named=["--remove"])
    ran("--remove", "second", "--remove", name)
    assert not read_manifest(artifact).adapters and not list((artifact / "adapters").iterdir())
    refused("missing_file", named=["--artifact DIR"])


@pytest.mark.slow
def test_what_a_conversion_keeps(
    converted: Callable[[str], Made], artifact: Path, ran: Ran, tmp_path: Path
) -> None:
    """Adapters fit the new weights of an artifact that is replaced, unless these have another layout."""
    source, _ = converted("wan2.1-t2v")
    ran(of(artifact, tmp_path), "--name", "kept")
    before = read_manifest(artifact).adapters
    arguments = ["convert", str(source), "--artifact", str(artifact), "--force"]
    assert run(wanbuild, [*arguments, "--weights-dtype", "float32"]) == 0
    assert read_manifest(artifact).adapters == before
    listed_adapter(artifact, "kept")
    assert run(wanbuild, arguments) == 0  # in bfloat16
    assert not read_manifest(artifact).adapters and not (artifact / "adapters").exists()


def test_inspect_lists_adapters(
    artifact: Path, ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = of(artifact, tmp_path)
    ran(f"{path}:0.5", "--name", "fast", "--sampling", "causvid-3")
    assert run(wanbuild, ["inspect", str(artifact)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("adapter ")]
    for part in ("fast: rank 4", f"{path.name} at strength 0.5", "solver dmd", "timesteps 1000, 757, 522"):
        assert part in line


@pytest.mark.slow
def test_a_damaged_adapter_is_found(artifact: Path, ran: Ran, tmp_path: Path) -> None:
    ran(of(artifact, tmp_path), "--name", "x")
    flip(artifact / read_manifest(artifact).adapters["x"].file, -1)
    assert run(wanbuild, ["verify", str(artifact)]) == 3
    with pytest.raises(ArtifactError, match=r"adapters/x-\w+\.safetensors"):
        listed_adapter(artifact, "x")


@pytest.mark.slow
def test_an_artifact_that_cannot_be_changed(
    converted: Callable[[str], Made],
    artifact: Path,
    ran: Ran,
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of one that is elsewhere, and a read-only one: ``-o`` writes the file, which says the same."""
    path = of(artifact, tmp_path)
    ran(path, "--name", "x")
    listed = read_manifest(artifact).adapters["x"]
    (artifact / MARKER).write_text("{}")
    refused("unwritable", path, "--name", "y", named=["-o FILE"])
    for _ in range(2):  # an adapter's file that is there is replaced
        ran(path, "-o", tmp_path / "x.safetensors")
    assert open_adapter(tmp_path / "x.safetensors").sha256 == listed.sha256
    (artifact / MARKER).unlink()
    refused("no_effect", path, "--name", "y", "-o", tmp_path / "y.safetensors", named=["--name"])
    monkeypatch.setattr("os.access", lambda *_: False)
    refused("unwritable", path, "--name", "y", named=["-o FILE"])


# --- what is refused --------------------------------------------------------------------------------------

Q, ARRAY = "diffusion_model.blocks.0.self_attn.q", np.ones((40, 40), np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [("diff",), ("diff", "lora_down.weight", "lora_up.weight")])
def test_a_change_of_a_whole_matrix(refused: Refused, tmp_path: Path, keys: tuple[str, ...]) -> None:
    tensors = {f"{Q}.{key}": ARRAY for key in keys}
    tensors |= {"diffusion_model.patch_embedding.diff": np.ones((40, 16, 1, 2, 2), np.float32)}
    path = write(tmp_path, PUBLISHED["kohya"], tensors)
    named = ("2 changes", f"{Q}.diff", "patch_embedding.diff", "wanbuild convert --lora")
    refused("mismatch", path, "-o", tmp_path / "x.safetensors", ends=4, named=named)


def test_pairs_of_convolutions(converted: Callable[[str], Made], refused: Refused, tmp_path: Path) -> None:
    """The motion encoder's kernels have no slots."""
    _, animate = converted("wan2.2-animate")
    rows, inputs, *_ = transformer_shapes(read_manifest(animate))["motion_encoder.conv_out.weight"]
    tensors = {
        "transformer.motion_encoder.conv_out.lora_A.weight": np.ones((2, inputs, 4, 4), np.float32),
        "transformer.motion_encoder.conv_out.lora_B.weight": np.ones((rows, 2, 1, 1), np.float32),
    }
    path = write(tmp_path, PUBLISHED["kohya"], tensors)
    named = ("motion_encoder.conv_out.weight", "wanbuild convert --lora")
    refused("mismatch", path, "-o", tmp_path / "x.safetensors", ends=4, place=animate, named=named)


@pytest.mark.slow
def test_another_model(artifact: Path, refused: Refused, tmp_path: Path) -> None:
    """One short line with the widths; and that of the matcher for what is no LoRA."""
    wide = {
        f"{Q}.lora_down.weight": np.ones((4, 80), np.float32),
        f"{Q}.lora_up.weight": np.ones((80, 4), np.float32),
    }
    path = write(tmp_path, PUBLISHED["kohya"], wide)
    refused("unsupported", path, ends=4, named=["80 wide", "40 wide"])
    refused("missing_file", tmp_path / "none.safetensors", named=[tmp_path / "none.safetensors"])
    refused("unreadable", "a:b", named=["FILE:SCALE"])


def test_values_that_overflow(artifact: Path, refused: Refused, tmp_path: Path) -> None:
    refused("not_finite", f"{of(artifact, tmp_path)}:3.4e38", "--name", "x", ends=4, named=["float32"])


@pytest.mark.slow
def test_a_build_that_is_stopped_changes_nothing(
    artifact: Path, ran: Ran, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the file and the manifest, with a file of the name that is replaced."""
    path = of(artifact, tmp_path)
    ran(path, "--name", "x")
    monkeypatch.setattr(Artifact, "write", lambda self: (_ for _ in ()).throw(OSError(28, "full")))
    refused("no_space", f"{path}:2", "--name", "x", "--force", ends=4)
    listed_adapter(artifact, "x")
