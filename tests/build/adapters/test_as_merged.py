"""Adapters hold what ``wanbuild convert --lora`` of the same files adds to every parameter."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from helpers.loras import PUBLISHED, listed_adapter, lora, stored_weights, write
from wanbuild.cli import wanbuild
from wancli.console import run
from wanrun.artifact.manifest import TRANSFORMERS, read_manifest
from wanrun.weights.adapters import check_fits

TOLERANCE = 1e-6
"""Of the largest value of a parameter; both round to float32."""

Made = tuple[Path, Path]


def options(files: Mapping[str, Path], scale: float, command: str) -> list[str]:
    """The files of each expert on a command line."""
    flags = {"": "--lora", "high": "--lora-high", "low": "--lora-low"}
    texts = [(flags[noise], f"{path}:{scale}") for noise, path in files.items()]
    return [
        part
        for flag, text in texts
        for part in ((text,) if (command, flag) == ("lora", "--lora") else (flag, text))
    ]


def assert_as_merged(made: Made, files: Mapping[str, Path], folder: Path, scale: float) -> set[str]:
    """Compares every parameter of base and adapter with those of a conversion; returns those of neither."""
    source, base = made
    artifact, merged = folder / "artifact", folder / "merged"
    shutil.copytree(base, artifact)
    given = options(files, scale, "lora")
    assert run(wanbuild, ["lora", *given, "--artifact", str(artifact), "--name", "x"]) == 0
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


NO_SLOT = r"motion_encoder/.*conv.*/weight"
"""Kernels of convolutions, which no published file changes."""

WHOLE = {"wan2.1-t2v": "", "wan2.2-t2v": "", "wan2.1-i2v": "", "wan2.1-vace": "", "wan2.2-animate": NO_SLOT}
"""By variant, the parameters that LoRAs of every layer leave as they are."""

NOT_IN_BLOCKS = r"(?!.*blocks/.*/(to_.*|up|down)/weight).*"
FILES = (
    *(("lightx2v", variant) for variant in ("wan2.1-t2v", "wan2.1-i2v", "wan2.2-t2v", "wan2.2-i2v")),
    *(("Lightning", "wan2.2-t2v"), ("Kijai", "wan2.2-t2v"), ("CausVid", "wan2.1-t2v")),
    *(("FastWan", "wan2.2-ti2v"), ("musubi", "wan2.1-t2v"), ("musubi", "wan2.1-vace")),
    *(("kohya", "wan2.1-i2v"), ("PEFT", "wan2.1-t2v"), ("ai-toolkit", "wan2.2-i2v")),
    ("lightx2v", "wan2.2-animate"),
)
"""Whose layout, and for which model."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "variant", "scale", "unchanged"),
    [
        *(("diffusers", variant, 0.7, left) for variant, left in WHOLE.items()),
        *((*file, 1.0, NOT_IN_BLOCKS) for file in FILES),
    ],
)
def test_an_adapter_is_what_conversion_merges(
    layout: str,
    variant: str,
    scale: float,
    unchanged: str,
    converted: Callable[[str], Made],
    tmp_path: Path,
) -> None:
    """Pairs on every product, changes of every bias, norm and table, and the layouts of published files."""
    made, published = converted(variant), PUBLISHED[layout]
    manifest = read_manifest(made[1])
    noises = ("high", "low") if "transformer_2" in manifest.components else ("",)
    files = {
        noise: write(tmp_path / noise, published, lora(published, manifest, seed), noise)
        for seed, noise in enumerate(noises)
    }
    left = assert_as_merged(made, files, tmp_path, scale)
    assert all(re.fullmatch(unchanged, path) for path in left)
