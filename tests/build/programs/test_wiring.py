"""A profile's programs fit together and the model, or the artifact is refused before it computes anything."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.damage import PROFILE, resealed
from wanbuild.programs.wiring import check_wiring
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.errors import ArtifactError


@pytest.fixture(scope="module")
def written(toy_artifact: Path) -> dict[str, Any]:
    """The toy's manifest as JSON. Not to be changed."""
    return read_manifest(toy_artifact).as_json()


def check(data: dict[str, Any]) -> None:
    manifest = msgspec.convert(resealed(data), Manifest)
    (profile,) = manifest.profiles.values()
    check_wiring(manifest, profile, manifest.program_sets[manifest.targets["cpu"].program_set])


def _avals(data: dict[str, Any], name: str) -> Any:
    (programs,) = data["program_sets"].values()
    return programs["programs"][PROFILE][name]["avals"]


def _programs(data: dict[str, Any]) -> Any:
    (programs,) = data["program_sets"].values()
    return programs["programs"][PROFILE]


IMAGE = {"image": {"kind": "image", "array": "image"}}

CHANGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda d: d["model"].update(latent_channels=17), "decode_video takes latents"),
    (lambda d: d["model"].update(vae_spatial=16), "decode_video takes latents"),
    (lambda d: d["model"].update(vae_temporal=2), "decode_video takes latents"),
    (lambda d: d["model"].update(leading_latents=1), "denoise_step takes latents"),
    (lambda d: d["model"].update(text_width=64), "embeddings of encode_text_64"),
    (lambda d: d["model"]["options"].update(conditioning_scale=1.0), "an array is missing"),
    (
        lambda d: d["model"]["options"].update(boundary=0.5),
        "there is a default boundary; expected two experts",
    ),
    (lambda d: d["tokenizer"].update(max_length=256), "prepare takes embeddings"),
    (lambda d: d["profiles"][PROFILE]["options"].update(dtype="bfloat16"), "embeddings of encode_text_64"),
    (
        lambda d: d["profiles"][PROFILE]["options"].update(scheduler_dtype="bfloat16"),
        "denoise_step takes latents",
    ),
    (lambda d: d["profiles"][PROFILE]["options"].update(max_steps=99), "denoise_loop takes coefficients"),
    (
        lambda d: _programs(d)["prepare"].update(role="once"),
        "prepare takes embeddings; expected no such input",
    ),
    (
        lambda d: _programs(d)["decode_video"].update(role="window"),
        "a program is missing; expected one of role",
    ),
    (lambda d: _programs(d)["prepare"].update(role="decode"), "prepare takes embeddings; expected no such"),
    (
        lambda d: _programs(d).update(other={**_programs(d)["denoise_step"], "place": 1}),
        "the loop's form step has several programs",
    ),
    (lambda d: d["model"]["task"].update(inputs=IMAGE), "no program takes the images and videos"),
    (
        lambda d: d["model"]["task"].update(
            windows=None, held={"condition": "c", "latents": "l", "mask": "m"}
        ),
        "missing",
    ),
    (lambda d: _avals(d, "prepare")["outputs"].pop("rope"), "denoise_step takes rope"),
    (lambda d: _avals(d, "prepare")["outputs"].update(rope="float32[1]"), "denoise_step takes rope"),
    (
        lambda d: _avals(d, "denoise_step")["inputs"].update(timestep="float32[1]"),
        "denoise_step takes timestep",
    ),
    (lambda d: _avals(d, "denoise_step")["inputs"].pop("timestep"), "denoise_step takes timestep"),
    (
        lambda d: _avals(d, "denoise_step")["outputs"].update(history="float32[2]"),
        "what denoise_step carries (history)",
    ),
    (lambda d: _avals(d, "decode_video")["outputs"].update(frames="uint8[9,64,96,4]"), "the frames"),
    (lambda d: _avals(d, "decode_video")["inputs"].clear(), "decode_video takes latents"),
    (lambda d: _programs(d).pop("decode_video"), "a program is missing"),
    (lambda d: _programs(d).pop("denoise_loop"), "a program is missing"),
    (lambda d: _programs(d).pop("encode_text"), "a program is missing"),
]


@pytest.mark.parametrize(("change", "part"), CHANGES)
def test_what_does_not_fit_is_refused(
    written: dict[str, Any], change: Callable[[dict[str, Any]], object], part: str
) -> None:
    check(written)
    data = copy.deepcopy(written)
    data["targets"]["cpu"]["executables"] = {}
    change(data)
    with pytest.raises(
        ArtifactError, match=f"the programs of profile {PROFILE} do not fit together"
    ) as caught:
        check(data)
    assert part in str(caught.value) and caught.value.exit_code == 3


@pytest.mark.parametrize("variant", ["wan2.1-i2v", "wan2.1-vace", "wan2.2-animate"])
def test_models_with_images_and_videos_fit(
    media_toy: Callable[[str], tuple[Path, Path]], variant: str
) -> None:
    manifest = read_manifest(media_toy(variant)[1])
    for profile in manifest.profiles.values():
        check_wiring(manifest, profile, manifest.program_sets[manifest.targets["cpu"].program_set])


def test_it_costs_nothing(toy_artifact: Path) -> None:
    """Less than 5 ms, seen: 0.2."""
    manifest = read_manifest(toy_artifact)
    (profile,) = manifest.profiles.values()
    programs = manifest.program_sets[manifest.targets["cpu"].program_set]
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        check_wiring(manifest, profile, programs)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.005
