"""Adapters against ``wanbuild convert --lora`` of the same files, and what is refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from helpers.damage import flip, one_error
from helpers.loras import PUBLISHED, listed_adapter, lora, stored_weights, transformer_shapes, write
from wanbuild.build import convert
from wanbuild.cli import wanbuild
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.convert_options import DEFAULTS, default_rows
from wanbuild.toy.toy_checkpoint import write_toy
from wancli.console import run
from wanhub.marker import MARKER
from wanrun.artifact.adapter import SamplingDefaults
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import TRANSFORMERS, read_manifest
from wanrun.errors import ArtifactError
from wanrun.weights.adapters import check_fits, open_adapter

TOLERANCE = 1e-6
"""Of the largest value of a parameter; both round to float32."""

Made = tuple[Path, Path]
"""A checkpoint, and an artifact of it in float32 without profiles."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Makes a variant's toy and its artifact, once. Not to be changed."""
    folder = tmp_path_factory.mktemp("converted")

    def make(variant: str) -> Made:
        source, artifact = folder / variant, folder / f"{variant}-artifact"
        if not artifact.exists():
            write_toy(source, variant)
            dtypes = dict.fromkeys(TRANSFORMERS, "float32")
            convert(ConvertRequest(source, artifact, dtypes))
        return source, artifact

    return make


def options(files: Mapping[str, Path], scale: float, command: str) -> list[str]:
    """The files of each expert on a command line."""
    flags = {"": "--lora", "high": "--lora-high", "low": "--lora-low"}
    texts = [(flags[noise], f"{path}:{scale}") for noise, path in files.items()]
    return [
        part
        for flag, text in texts
        for part in ((text,) if (command, flag) == ("lora", "--lora") else (flag, text))
    ]


def assert_as_merged(made: Made, files: Mapping[str, Path], folder: Path, scale: float = 0.7) -> set[str]:
    """Compares every parameter of base and adapter with those of a conversion; returns those of neither."""
    source, base = made
    artifact, merged = folder / "artifact", folder / "merged"
    shutil.copytree(base, artifact)
    assert (
        run(wanbuild, ["lora", *options(files, scale, "lora"), "--artifact", str(artifact), "--name", "x"])
        == 0
    )
    arguments = ["convert", str(source), "--artifact", str(merged), "--weights-dtype", "float32"]
    assert run(wanbuild, [*arguments, *options(files, scale, "convert")]) == 0
    adapter = listed_adapter(artifact, "x")
    check_fits(adapter, read_manifest(artifact))
    assert adapter.content.loras == read_manifest(merged).loras
    unchanged = set[str]()
    for expert in TRANSFORMERS[: 1 + ("transformer_2" in read_manifest(base).components)]:
        before, after = stored_weights(base, expert), stored_weights(merged, expert)
        arrays, changes = adapter.of(expert), dict[str, np.ndarray]()
        for name, array in arrays.items():
            if name.endswith("/lora_a"):
                path = name.removesuffix("/lora_a")
                b = arrays[f"{path}/lora_b"].astype(np.float64)
                changes[f"{path}/weight"] = b @ array.astype(np.float64)
            elif not name.endswith("/lora_b"):
                changes[name] = array
        for path, value in after.items():
            found = before[path] + changes.get(path, 0.0)
            assert np.abs(found - value).max() < TOLERANCE * np.abs(value).max(), (expert, path)
        assert changes.keys() == {path for path in after if not np.array_equal(before[path], after[path])}
        unchanged |= before.keys() - changes.keys()
    return unchanged


VARIANTS = {
    "wan2.1-t2v": "",
    "wan2.2-t2v": "",
    "wan2.1-i2v": "",
    "wan2.1-vace": "",
    "wan2.2-animate": r"motion_encoder/.*conv.*/weight",
}
"""By variant, the parameters that have no slot: kernels of convolutions, which no published file changes."""


@pytest.mark.thorough
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layer_of_a_variant(variant: str, converted: Callable[[str], Made], tmp_path: Path) -> None:
    """Pairs on every product, and changes of every bias, norm and table."""
    made = converted(variant)
    manifest, published = read_manifest(made[1]), PUBLISHED["diffusers"]
    both = len([name for name in TRANSFORMERS if name in manifest.components]) == 2
    files = {
        noise: write(tmp_path / noise, published, lora(published, manifest, seed))
        for seed, noise in enumerate(("high", "low") if both else ("",))
    }
    unchanged = assert_as_merged(made, files, tmp_path)
    assert all(re.fullmatch(VARIANTS[variant], path) for path in unchanged)


FILES = {
    "lightx2v 2.1": ("lightx2v", "wan2.1-t2v"),
    "lightx2v 2.1, images": ("lightx2v", "wan2.1-i2v"),
    "lightx2v 2.2": ("lightx2v", "wan2.2-t2v"),
    "lightx2v 2.2, images": ("lightx2v", "wan2.2-i2v"),
    "Lightning": ("Lightning", "wan2.2-t2v"),
    "Kijai": ("Kijai", "wan2.2-t2v"),
    "CausVid": ("CausVid", "wan2.1-t2v"),
    "FastWan": ("FastWan", "wan2.2-ti2v"),
    "musubi": ("musubi", "wan2.1-t2v"),
    "musubi, VACE": ("musubi", "wan2.1-vace"),
    "kohya": ("kohya", "wan2.1-i2v"),
    "PEFT": ("PEFT", "wan2.1-t2v"),
    "ai-toolkit": ("ai-toolkit", "wan2.2-i2v"),
    "Animate": ("lightx2v", "wan2.2-animate"),
}
"""By what is tried, whose layout, and for which model."""


@pytest.mark.thorough
@pytest.mark.parametrize("case", FILES)
def test_published_layouts(case: str, converted: Callable[[str], Made], tmp_path: Path) -> None:
    name, variant = FILES[case]
    made, published = converted(variant), PUBLISHED[name]
    manifest = read_manifest(made[1])
    both = "transformer_2" in manifest.components
    files = {
        noise: write(tmp_path / noise, published, lora(published, manifest, seed), noise)
        for seed, noise in enumerate(("high", "low") if both else ("",))
    }
    unchanged = assert_as_merged(made, files, tmp_path, scale=1.0)
    assert not [path for path in unchanged if re.fullmatch(r".*blocks/.*/(to_.*|up|down)/weight", path)]


# --- what is made -----------------------------------------------------------------------------------------

Ran = Callable[..., str]


@pytest.fixture
def artifact(converted: Callable[[str], Made], tmp_path: Path) -> Path:
    """An artifact of wan2.1-t2v of its own."""
    folder = tmp_path / "artifact"
    shutil.copytree(converted("wan2.1-t2v")[1], folder)
    return folder


@pytest.fixture
def ran(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ran:
    """Runs ``wanbuild lora``; returns what it prints, or the one line of its error.

    A run that fails leaves the artifact as it was, and nothing beside it.
    """

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def call(*arguments: object, code: int = 0, place: Path = artifact) -> str:
        before = files()
        capsys.readouterr()
        assert run(wanbuild, ["lora", *map(str, arguments), "--artifact", str(place)]) == code
        if not code:
            return capsys.readouterr().out
        assert files() == before
        return one_error(capsys)

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
    converted: Callable[[str], Made], ran: Ran, artifact: Path, tmp_path: Path
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
    assert "--strict" in ran(path, "--name", "none", "--strict", code=4)


@pytest.mark.slow
def test_a_way_to_sample(
    converted: Callable[[str], Made],
    ran: Ran,
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
    assert "default boundary" in ran(path, "--name", "x", "--sampling", own, code=2)
    ran(path, "--name", "images", "--sampling", "rcm-4-i2v")
    assert ran(path, "--name", "x", "--sampling", "lightning", code=2).startswith(
        "error: there is no sampling"
    )


def test_all_defaults_of_a_generation_can_be_brought() -> None:
    names = {default_rows()[key].name for key in DEFAULTS}
    assert set(SamplingDefaults.__struct_fields__) == names


@pytest.mark.slow
def test_experts_of_one_file(converted: Callable[[str], Made], tmp_path: Path, ran: Ran) -> None:
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
    line = ran("--lora-high", path, code=2)
    assert "one transformer" in line


# --- names, places ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_names_and_their_files(artifact: Path, ran: Ran, tmp_path: Path) -> None:
    """Named after its file; another of the name is refused, or takes its place and its file away."""
    path = of(artifact, tmp_path)
    said = ran(path)
    made = read_manifest(artifact).adapters
    (name,) = made
    assert name == path.stem and f"added adapter {name} to {artifact}: rank 4" in said
    assert [one.name for one in (artifact / "adapters").iterdir()] == [Path(made[name].file).name]
    assert run(wanbuild, ["verify", str(artifact)]) == 0
    assert "--force" in ran(path, code=2)
    ran(f"{path}:2", "--force")
    again = read_manifest(artifact).adapters
    assert again.keys() == {name} and again[name].sha256 != made[name].sha256
    assert [one.name for one in (artifact / "adapters").iterdir()] == [Path(again[name].file).name]
    ran(path, "--name", "second")
    assert read_manifest(artifact).adapters.keys() == {name, "second"}
    assert "a name" in ran(path, path, code=2)
    for wrong in ("a:1", "../a", "a b", ""):
        assert "cannot be named" in ran(path, "--name", wrong, code=2)
    assert "second" in ran("--remove", "third", code=2)
    assert "excludes other options" in ran(path, "--remove", "second", code=2)
    ran("--remove", "second", "--remove", name)
    assert not read_manifest(artifact).adapters and not list((artifact / "adapters").iterdir())
    assert "no LoRA file" in ran(code=2)


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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of one that is elsewhere, and a read-only one: ``-o`` writes the file, which says the same."""
    path = of(artifact, tmp_path)
    ran(path, "--name", "x")
    listed = read_manifest(artifact).adapters["x"]
    (artifact / MARKER).write_text("{}")
    line = ran(path, "--name", "y", code=2)
    assert "a copy" in line and "-o FILE" in line
    for _ in range(2):  # an adapter's file that is there is replaced
        ran(path, "-o", tmp_path / "x.safetensors")
    assert open_adapter(tmp_path / "x.safetensors").sha256 == listed.sha256
    (artifact / MARKER).unlink()
    assert "--name has no" in ran(path, "--name", "y", "-o", tmp_path / "y.safetensors", code=2)
    monkeypatch.setattr("os.access", lambda *_: False)
    line = ran(path, "--name", "y", code=2)
    assert "read-only" in line and "-o FILE" in line


# --- what is refused --------------------------------------------------------------------------------------

Q, ARRAY = "diffusion_model.blocks.0.self_attn.q", np.ones((40, 40), np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [("diff",), ("diff", "lora_down.weight", "lora_up.weight")])
def test_a_change_of_a_whole_matrix(artifact: Path, ran: Ran, tmp_path: Path, keys: tuple[str, ...]) -> None:
    tensors = {f"{Q}.{key}": ARRAY for key in keys}
    tensors |= {"diffusion_model.patch_embedding.diff": np.ones((40, 16, 1, 2, 2), np.float32)}
    line = ran(write(tmp_path, PUBLISHED["kohya"], tensors), "-o", tmp_path / "x.safetensors", code=4)
    for part in (
        "2 changes are of whole matrices",
        "merge it at convert",
        f"{Q}.diff",
        "patch_embedding.diff",
    ):
        assert part in line
    assert len(line) < 350


def test_pairs_of_convolutions(converted: Callable[[str], Made], ran: Ran, tmp_path: Path) -> None:
    """The motion encoder's kernels have no slots."""
    _, animate = converted("wan2.2-animate")
    rows, inputs, *_ = transformer_shapes(read_manifest(animate))["motion_encoder.conv_out.weight"]
    tensors = {
        "transformer.motion_encoder.conv_out.lora_A.weight": np.ones((2, inputs, 4, 4), np.float32),
        "transformer.motion_encoder.conv_out.lora_B.weight": np.ones((rows, 2, 1, 1), np.float32),
    }
    path = write(tmp_path, PUBLISHED["kohya"], tensors)
    line = ran(path, "-o", tmp_path / "x.safetensors", code=4, place=animate)
    assert "motion_encoder.conv_out.weight" in line and "wanbuild convert --lora" in line


@pytest.mark.slow
def test_another_model(artifact: Path, ran: Ran, tmp_path: Path) -> None:
    """One short line with the widths; and that of the matcher for what is no LoRA."""
    wide = {
        f"{Q}.lora_down.weight": np.ones((4, 80), np.float32),
        f"{Q}.lora_up.weight": np.ones((80, 4), np.float32),
    }
    line = ran(write(tmp_path, PUBLISHED["kohya"], wide), code=4)
    assert "is 80 wide" in line and "is 40 wide" in line and len(line) < 400
    assert "no LoRA file" in ran(tmp_path / "none.safetensors", code=2)
    assert "FILE:SCALE" in ran("a:b", code=2)


def test_values_that_overflow(artifact: Path, ran: Ran, tmp_path: Path) -> None:
    line = ran(f"{of(artifact, tmp_path)}:3.4e38", "--name", "x", code=4)
    assert "in float32" in line and "smaller scales" in line


@pytest.mark.slow
def test_a_build_that_is_stopped_changes_nothing(
    artifact: Path, ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the file and the manifest, with a file of the name that is replaced."""
    path = of(artifact, tmp_path)
    ran(path, "--name", "x")
    monkeypatch.setattr(Artifact, "write", lambda self: (_ for _ in ()).throw(OSError(28, "full")))
    ran(f"{path}:2", "--name", "x", "--force", code=4)
    listed_adapter(artifact, "x")
