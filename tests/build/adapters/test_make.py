"""Adapters against ``wanbuild convert --lora`` of the same files, and what is refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from helpers.loras import PUBLISHED, lora, stored_weights, write
from wanbuild.cli import wanbuild
from wanbuild.conversion.convert import ConvertRequest, convert
from wanbuild.toy.checkpoint import write_toy
from wancli.console import run
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import TRANSFORMERS, read_manifest
from wanrun.weights.adapters import check_fits, open_listed_adapter

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
    adapter = open_listed_adapter(open_artifact(artifact), "x")
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
