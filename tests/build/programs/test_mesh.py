"""Programs over a mesh give what they give on one device, in float32 to 1e-5 of the largest value.

Eight virtual CPU devices. ``python -m helpers.mesh_comparison ARTIFACT --all`` compares every mesh of 1, 2, 4
and 8 devices (benchmarks/RESULTS.md, "Meshes"). Here are those that a mistake would show in: lengths (84
tokens) and widths (14 columns of latents) that do not divide, each axis, and each family's own inputs.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

TESTS = Path(__file__).parents[2]

Differences = dict[str, dict[str, float]]

COMPARED: Mapping[str, tuple[str, Sequence[str], str, Sequence[str]]] = {
    "Ulysses, and a ring with it": (
        "wan2.1-t2v",
        ("context=8", "data=2,ring=2,context=2"),
        "prepare,denoise_step",
        (),
    ),
    "tensor parallelism of the text encoder; the decoder's columns": (
        "wan2.1-t2v",
        ("tensor=8",),
        "encode_text,decode",
        ("--size", "112x16x9"),
    ),
    "the guidance pair and the videos share the axis data": (
        "wan2.1-t2v",
        ("data=4,ring=2",),
        "prepare,denoise_loop",
        ("--videos", "2"),
    ),
    "image tokens with padding; guiders combine the passes of both halves": (
        "wan2.1-i2v",
        ("data=2,context=4",),
        "encode_image,encode_video,prepare,denoise_step",
        ("--guiders",),
    ),
    "control blocks, slots, in parts too; guiders, whose passes follow one another": (
        "wan2.1-vace",
        ("ring=2,fsdp=2,tensor=2",),
        "prepare,denoise_step",
        ("--lora-rank", "4", "--guiders"),
    ),
    "faces by frame": (
        "wan2.2-animate",
        ("context=4,tensor=2",),
        "prepare,denoise_step",
        ("--size", "112x64x13"),
    ),
    "15 tokens over 4 devices, some with tokens of two frames; the residual VAE of a start": (
        "wan2.2-ti2v",
        ("data=2,context=4",),
        "encode_start,denoise_step,decode_alike",
        ("--size", "160x32x9"),
    ),
}

BFLOAT16 = (
    "wan2.1-t2v",
    ("one device", "data=2,ring=2,context=2"),
    "denoise_step",
    ("--mesh-dtype", "bfloat16", "--guiders"),
)


@pytest.fixture(scope="module")
def found(
    toy_artifact: Path, ti2v_artifact: Path, media_toy: Callable[[str], tuple[Path, Path]]
) -> dict[str, Differences]:
    """The largest relative difference of each program, by mesh; one process compares all."""
    artifacts = {"wan2.1-t2v": toy_artifact, "wan2.2-ti2v": ti2v_artifact}
    lines = [
        [str(artifacts.get(variant) or media_toy(variant)[1]), *meshes, "--programs", programs, *options]
        for variant, meshes, programs, options in (*COMPARED.values(), BFLOAT16)
    ]
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "helpers.mesh_comparison"],
        input="\n".join(map(shlex.join, lines)),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = [map(json.loads, answer.splitlines()) for answer in done.stdout.split("\n\n")]
    by_mesh = [{line["mesh"]: line["differences"] for line in answer} for answer in answers]
    return dict(zip((*COMPARED, "bfloat16", ""), by_mesh, strict=True))


@pytest.mark.parametrize("what", COMPARED)
def test_a_mesh_beside_one_device(found: dict[str, Differences], what: str) -> None:
    _, meshes, programs, _ = COMPARED[what]
    assert list(found[what]) == list(meshes)
    for mesh, values in found[what].items():
        assert set(values) == set(programs.split(",")), mesh
        assert all(0 < value < 1e-5 for value in values.values()), (mesh, values)


def test_bfloat16(found: dict[str, Differences]) -> None:
    """Within its own rounding: on a mesh it is as far from float32 as on one device."""
    alone, shared = (found["bfloat16"][mesh]["denoise_step"] for mesh in BFLOAT16[1])
    assert 1e-3 < shared < 1.5 * alone  # the largest of 5 376 differences
