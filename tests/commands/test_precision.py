"""The choices of precision: what a profile records, and what its programs then do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest

import wanrun
from helpers.artifacts import shared
from helpers.manifests import programs_of
from wanbuild.build import compile_artifact, convert
from wanbuild.build_options import BuildOptions, CompileRequest
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.programs import decode_programs
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.targets.target import resolve_target
from wanrun import relative_error
from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.denoising.noise import initial_noise

pytestmark = pytest.mark.thorough

STEPS = 4
ROUNDING = 2.0**-9
"""The most that rounding to bfloat16 changes a number, relative to it: it has eight significant bits."""


def recorded(manifest: Manifest, profile: str) -> dict[str, str]:
    options = msgspec.structs.asdict(manifest.profiles[profile].options)
    return {name: value for name, value in options.items() if name.endswith("dtype") and value is not None}


ALL_FLOAT32 = dict.fromkeys(
    ("dtype", "vae_dtype", "scheduler_dtype", "weights_dtype", "text_weights_dtype", "vae_weights_dtype"),
    "float32",
)


@dataclass(frozen=True)
class Generated:
    """Latents of both forms of the loop, and the programs' inputs and outputs."""

    latents: Mapping[str, np.ndarray]
    avals: Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def coarse(toy_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The float32 toy with latents and history kept in bfloat16: only the loop's programs are compiled."""
    options = BuildOptions(dtype="float32", scheduler_dtype="bfloat16")

    def build(folder: Path) -> None:
        shutil.copytree(toy_artifact, folder)
        compile_artifact(CompileRequest(folder, ["cpu"], [(96, 64)], [9], options=options), print)

    return shared(tmp_path_factory, "coarse-artifact", build)


def generate(artifact: Path) -> Generated:
    with wanrun.load(artifact, embeddings="none") as pipeline:
        latents = {
            loop: pipeline.generate("a red fox", num_steps=STEPS, guidance_scale=2, loop=loop).latents
            for loop in ("step", "scan")
        }
        programs = programs_of(pipeline.manifest, pipeline.profile.name)
        avals = {name: program.avals for name, program in programs.items()}
        return Generated(latents, avals)


@pytest.fixture(scope="module")
def made(coarse: Path, toy_artifact: Path) -> Mapping[str, Generated]:
    return {"bfloat16": generate(coarse), "float32": generate(toy_artifact)}


def test_dtypes_are_recorded(toy_artifact: Path, coarse: Path, bfloat16_vae_artifact: Path) -> None:
    assert recorded(read_manifest(toy_artifact), "96x64x9-b1-cfg") == ALL_FLOAT32
    scheduler = ALL_FLOAT32 | {"scheduler_dtype": "bfloat16"}
    assert recorded(read_manifest(coarse), "96x64x9-b1-cfg") == scheduler
    everything_else = dict.fromkeys(ALL_FLOAT32, "bfloat16") | {"scheduler_dtype": "float32"}
    assert recorded(read_manifest(bfloat16_vae_artifact), "32x16x1-b1-cfg") == everything_else


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_latents_and_history_have_the_scheduler_dtype(
    made: Mapping[str, Generated], request: pytest.FixtureRequest, dtype: str
) -> None:
    artifact = request.getfixturevalue({"bfloat16": "coarse", "float32": "toy_artifact"}[dtype])
    exported = programs_of(read_manifest(artifact), "96x64x9-b1-cfg")
    avals = made[dtype].avals
    for name in ("denoise_step", "denoise_loop"):
        state = [avals[name]["inputs"], avals[name]["outputs"]]
        arrays = [array for s in state for array in (s["latents"], *s["history"].values())]
        assert arrays == [f"{dtype}[1,16,3,8,12]"] * 8
        assert avals[name]["inputs"]["coefficients"].startswith("float32[")
        # And the program itself, whatever the manifest says of it.
        program = jax.export.deserialize(bytearray(open_artifact(artifact).program(exported[name])))
        found = [aval.dtype for aval in program.in_avals if aval.shape == (1, 16, 3, 8, 12)]
        assert found == [dtype] * 4
    # What they are not a part of stays as it is.
    assert avals["decode_video"]["inputs"]["latents"] == "float32[16,1,8,12]"


def test_both_loops_keep_bfloat16_latents(made: Mapping[str, Generated]) -> None:
    step, scan = made["bfloat16"].latents["step"], made["bfloat16"].latents["scan"]
    assert np.array_equal(step, scan)
    assert step.dtype == np.float32 and np.isfinite(step).all() and step.std() > 0.5
    # They come from bfloat16, so no bit is lost by going there; of float32 latents nearly all would be.
    assert np.array_equal(step.astype(ml_dtypes.bfloat16).astype(np.float32), step)
    exact = made["float32"].latents["step"]
    assert np.mean(exact.astype(ml_dtypes.bfloat16).astype(np.float32) == exact) < 0.01


def test_bfloat16_latents_are_near_float32(made: Mapping[str, Generated]) -> None:
    """As far apart as independent roundings take them, of the noise and at every step; seen 3.0e-3."""
    error = relative_error(made["bfloat16"].latents["step"], made["float32"].latents["step"])
    print(f"{error:.1e}")
    # The bound takes each rounding of the latents at its largest. They are 0.4 of that on average, which
    # leaves room for the history and the transformer's gain; sums in bfloat16 do not fit it, at 6.4e-3. Below
    # is half of the last rounding alone, 8e-4 on average.
    assert ROUNDING / 5 < error < np.sqrt(STEPS + 1) * ROUNDING


class Seen:
    """In place of the VAE: keeps what it is given to decode."""

    z: Any
    dtype: Any

    def decode_piece(self, z: Any, past: None, *, dtype: Any, **_: Any) -> Any:
        self.z, self.dtype = z, dtype
        return z, past


@pytest.mark.parametrize("variant", ["wan2.1-t2v", "wan2.2-ti2v"])
def test_mean_and_std_stay_in_float32(
    variant: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The VAE is given latents * std + mean to float32's precision, whatever it is stored and computes in."""
    checkpoint = {"wan2.1-t2v": "toy_checkpoint", "wan2.2-ti2v": "ti2v_checkpoint"}[variant]
    source = request.getfixturevalue(checkpoint)
    convert(ConvertRequest(source, tmp_path / "artifact", {"vae": "bfloat16"}))
    manifest = read_manifest(tmp_path / "artifact")
    config = json.loads((source / "vae" / "config.json").read_text())
    mean, std = (np.array(config[f"latents_{name}"]).reshape(-1, 1, 1, 1) for name in ("mean", "std"))
    latents = initial_noise(5, (1, len(mean), 2, 4, 6))[0]
    # What is compared below is noticed if mean or std are rounded: in these numbers they have more bits.
    for values in (mean, std):
        assert np.abs(values.astype(ml_dtypes.bfloat16) / values - 1).max() > 1e-3
    for dtype in ("float32", "bfloat16"):
        seen = Seen()
        width, height = (size * manifest.model.vae_spatial for size in (6, 4))
        builder = ProgramBuilder(
            manifest,
            Shape(width, height, 5, 1, True),
            BuildOptions(vae_dtype=dtype),
            resolve_target("cpu").kernels,
        )
        decode = builder.named("decode_first").function
        with monkeypatch.context() as patched:
            patched.setattr(decode_programs, "bind", lambda module, weights, seen=seen: seen)
            decode({}, latents)
        z = np.asarray(seen.z[0])
        assert (z.dtype, seen.dtype) == (np.float32, jnp.dtype(dtype))
        # Three roundings of float32: 1 / std, the quotient, the sum.
        assert (np.abs(z - (latents * std + mean)) <= 2e-7 * (np.abs(latents * std) + np.abs(mean))).all()
