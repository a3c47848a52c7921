"""Programs over a mesh give what they give on one device, in float32 to 1e-5 of the largest value.

Eight virtual CPU devices. ``python -m helpers.mesh_comparison ARTIFACT --all`` compares every mesh of 1, 2, 4
and 8 devices (benchmarks/RESULTS.md, "Meshes"). Here are those that a mistake would show in: lengths (84
tokens) and widths (14 columns of latents) that do not divide, each axis, and each family's own inputs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]

Differences = dict[str, dict[str, float]]


def differences(artifact: Path, meshes: Sequence[str], *options: str) -> Differences:
    """The largest relative difference of each program, by mesh."""
    command = [sys.executable, "-m", "helpers.mesh_comparison", str(artifact), *meshes, *options]
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["mesh"] for line in found] == list(meshes)
    return {line["mesh"]: line["differences"] for line in found}


def check(found: Differences, programs: str) -> None:
    for mesh, values in found.items():
        assert set(values) == set(programs.split(",")), mesh
        assert max(values.values()) < 1e-5, (mesh, values)


def test_text_to_video(toy_artifact: Path) -> None:
    """Ulysses, and a ring with it; tensor parallelism of the text encoder; the decoder's columns."""
    meshes = ["context=8", "data=2,ring=2,context=2"]
    check(differences(toy_artifact, meshes, "--programs", "prepare,denoise_step"), "prepare,denoise_step")
    check(differences(toy_artifact, ["tensor=8"], "--programs", "encode_text,decode"), "encode_text,decode")


def test_several_videos(toy_artifact: Path) -> None:
    """The guidance pair and the videos share the axis ``data``."""
    found = differences(
        toy_artifact, ["data=4,ring=2"], "--videos", "2", "--programs", "prepare,denoise_loop"
    )
    check(found, "prepare,denoise_loop")


@pytest.mark.parametrize(
    ("variant", "mesh", "programs", "options"),
    [
        ("wan2.1-i2v", "data=2,context=4", "encode_image,encode_video,prepare,denoise_step", ("--guiders",)),
        ("wan2.1-vace", "ring=2,fsdp=2,tensor=2", "prepare,denoise_step", ("--lora-rank", "4", "--guiders")),
        ("wan2.2-animate", "context=4,tensor=2", "prepare,denoise_step", ("--size", "112x64x13")),
    ],
)
def test_media(
    media_toy: Callable[[str], tuple[Path, Path]],
    variant: str,
    mesh: str,
    programs: str,
    options: tuple[str, ...],
) -> None:
    """Image tokens with padding, control blocks, and faces by frame; the second with slots, in parts too.

    Guiders combine the passes of both halves, and those that follow one another.
    """
    _, artifact = media_toy(variant)
    check(differences(artifact, [mesh], "--programs", programs, *options), programs)


def test_a_timestep_per_token(ti2v_artifact: Path) -> None:
    """60 tokens over 8 devices, of which some have tokens of two frames; the residual VAE of a start."""
    programs = "encode_start,denoise_step,decode_alike"
    found = differences(ti2v_artifact, ["data=2,context=4"], "--size", "160x96x13", "--programs", programs)
    check(found, programs)


def test_bfloat16(toy_artifact: Path) -> None:
    """Within its own rounding: on a mesh it is as far from float32 as on one device."""
    meshes = ["one device", "data=2,ring=2,context=2"]
    options = ("--programs", "denoise_step", "--mesh-dtype", "bfloat16", "--guiders")
    alone, shared = (found["denoise_step"] for found in differences(toy_artifact, meshes, *options).values())
    assert 1e-3 < shared < 1.5 * alone  # the largest of 5 376 differences
