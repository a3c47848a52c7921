"""Every variant from prompt and media to frames, through the command line, against diffusers' pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import wanrun
from helpers.loras import PUBLISHED, lora
from helpers.reference_models import relative_error
from helpers.tiers import thorough_but
from helpers.whole_path import LATENTS, LOOPS, NEGATIVE, PROMPT, WITH_REFERENCE, Case, Drawn, Row, WholePath
from wanbuild.cli import wanbuild
from wanbuild.variants.table import variants
from wancli.console import run
from wanrun.artifact.manifest import TRANSFORMERS, read_manifest
from wanrun.artifact.roles import forms_of
from wanrun.media.inputs import Media

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")

# A landscape and a portrait picture, of sizes that are no multiples of anything.
FIRST, LAST, OTHER = Drawn(131, 75, 1), Drawn(83, 121, 2), Drawn(53, 87, 2)
BOTH = {"image": FIRST, "last_image": LAST}
# Larger than the profile, of its aspect: it is scaled down.
VIDEO, MASK = Drawn(144, 96, 1, frames=9), Drawn(144, 96, frames=9, mask=True)
CONTROL = {"video": VIDEO, "mask": MASK}
REFERENCES = {"reference_image": (FIRST, OTHER)}


def scales(first: float, second: float, **more: Any) -> dict[str, Any]:
    """Options of two experts."""
    return {"guidance_scale": first, "guidance_scale_2": second, **more}


def moves(frames: int, seed: int) -> dict[str, Drawn]:
    """What a character does; the face's video is shorter than the pose's: it goes on backwards."""
    return {
        "image": FIRST,
        "pose_video": Drawn(96, 64, seed, frames),
        "face_video": Drawn(21, 25, seed + 10, frames - 4),
    }


SKIPPING = {"skip_layers": [1], "skip_scale": 2.0, "skip_start": 0.1, "skip_end": 0.9}
SCALED = {"conditioning_scale": 0.3}
BACKGROUND = {
    "background_video": Drawn(100, 70, 20, 32),
    "mask_video": Drawn(96, 64, frames=30, mask=True),
}

ROWS: Mapping[str, Row] = {
    # Once as a user runs it.
    "wan2.1-t2v": Row(
        "wan2.1-t2v",
        {solver: Case(6, seed=7, options={"solver": solver}) for solver in WITH_REFERENCE},
        scale=4.0,
        process=True,
    ),
    "wan2.1-i2v": Row(
        "wan2.1-i2v",
        {
            "unipc": Case(4, {"image": FIRST}, 7),
            "dpm++": Case(3, {"image": LAST}, 1, {"solver": "dpm++", "flow_shift": 5.0}),
        },
    ),
    "wan2.1-flf2v": Row(
        "wan2.1-flf2v",
        {"unipc": Case(4, BOTH, 2), "swapped": Case(3, {"image": LAST, "last_image": FIRST}, 3)},
    ),
    "wan2.1-vace": Row(
        "wan2.1-vace",
        {
            "masked video": Case(4, {**CONTROL, **REFERENCES}, 1),
            "no mask": Case(3, {"video": VIDEO, **REFERENCES}, 2),
            "references alone": Case(3, REFERENCES, 3),
            "scaled": Case(3, {**CONTROL, **REFERENCES}, 1, SCALED),
        },
    ),
    # Another profile.
    "wan2.1-vace, no references": Row(
        "wan2.1-vace", {"masked video": Case(3, CONTROL, 4), "text alone": Case(3, seed=5)}
    ),
    # The checkpoint says shift 3 and boundary 0.875: five steps of UniPC are at 999, 923 | 818, 667, 429. A
    # run loads one length of encode_text, prepare, a form of the loop and the decoder's two.
    "wan2.2-t2v": Row(
        "wan2.2-t2v",
        {
            "crossed": Case(5, seed=7, options=scales(4, 2.5), calls=(4, 6)),
            "a boundary that is a timestep": Case(
                6, seed=1, options=scales(2.5, 4, boundary=0.856, solver="dpm++"), calls=(6, 6)
            ),
            "euler": Case(
                6, seed=2, options={"guidance_scale": 3, "flow_shift": 8, "solver": "euler"}, calls=(6, 6)
            ),
            "one scale of two off": Case(6, seed=3, options=scales(4, 1, flow_shift=5), calls=(6, 6)),
            "guidance in some steps": Case(
                6, seed=10, options=scales(4, 2.5, guidance_start=0.2, guidance_end=0.8), calls=(3, 6)
            ),
            "cfg-zero": Case(
                6, seed=11, options=scales(4, 2.5, guider="cfg-zero", guidance_end=0.9), calls=(4, 7)
            ),
            # A third pass in steps 1 to 4.
            "skip-layer": Case(
                6, seed=12, options=scales(4, 2.5, guider="skip-layer", **SKIPPING), calls=(5, 11)
            ),
            "cfg and nag": Case(4, seed=12, options=scales(4, 1, nag_scale=5), calls=(4, 4)),
            "low-noise alone": Case(3, seed=4, options=scales(4, 2, boundary=1), calls=(0, 6)),
            "high-noise alone": Case(3, seed=5, options=scales(4, 2, boundary=0), calls=(6, 0)),
        },
        loops=LOOPS,
        programs=5,
    ),
    "wan2.2-t2v, no guidance": Row(
        "wan2.2-t2v",
        {
            "cfg": Case(5, seed=6, calls=(2, 3)),
            "nag": Case(4, seed=13, options={"nag_scale": 11}, calls=(2, 2)),
        },
        scale=1.0,
        loops=LOOPS,
        programs=5,
    ),
    "wan2.2-i2v": Row(
        "wan2.2-i2v",
        {
            "two experts": Case(4, {"image": FIRST}, 4, {"guidance_scale_2": 2.0}),
            "with a last image": Case(4, BOTH, 5, {"guidance_scale_2": 2.0}),
        },
    ),
    # A timestep per token. With an image, which is encoded, a run loads one program more.
    "wan2.2-ti2v": Row(
        "wan2.2-ti2v",
        {
            "text": Case(5, seed=7, options={"guidance_scale": 4}, calls=(10, 0)),
            "euler": Case(
                4,
                seed=8,
                options={"guidance_scale": 2.5, "flow_shift": 7, "solver": "euler"},
                calls=(8, 0),
            ),
            "image": Case(4, {"image": FIRST}, 6),
            "another image": Case(3, {"image": LAST}, 7),
        },
        size=(160, 96, 13),
        loops=LOOPS,
        alike=True,
        programs=6,
    ),
    # VACE-Fun-A14B: a high-noise and a low-noise expert, each with its own control blocks.
    "wan2.2-vace": Row(
        "wan2.2-vace",
        {
            "masked video": Case(5, {**CONTROL, **REFERENCES}, 1),
            "scaled": Case(3, {**CONTROL, **REFERENCES}, 2, SCALED),
        },
        alike=True,
    ),
    # Segments have 13 frames, of which they share one or five. With lcm each goes on with the noise of the
    # one before.
    "wan2.2-animate": Row(
        "wan2.2-animate",
        {
            "replace": Case(3, {**moves(30, 0), **BACKGROUND}, 0, {"mode": "replace"}, frames=30),
            "overlap of five": Case(3, moves(19, 1), 1, {"segment_overlap": 5}, frames=19),
            "one segment": Case(3, moves(13, 2), 2, frames=13),
            "lcm": Case(3, moves(23, 3), 3, {"solver": "lcm"}, frames=23),
        },
        (96, 64, 13),
    ),
    "wan2.2-animate, no guidance": Row(
        "wan2.2-animate",
        {"two segments": Case(3, moves(16, 4), 4, frames=16)},
        (96, 64, 13),
        scale=1.0,
        alike=True,
    ),
    "anyflow": Row(
        "anyflow-wan2.1",
        {f"{steps} steps": Case(steps, seed=steps) for steps in (1, 4, 7)},
        scale=1.0,
        loops=forms_of("all"),
        thorough=True,
    ),
    "anyflow-far": Row(
        "anyflow-far-wan2.1",
        {
            "image": Case(2, {"image": Drawn(96, 64)}, 2),
            "video": Case(2, {"video": Drawn(96, 64, frames=13)}, 3),
        },
        size=(96, 64, 45),
        scale=1.0,
        loops=("chunks",),
        thorough=True,
    ),
}

Paths = Callable[[str], WholePath]


def cases(loops: Callable[[Row], tuple[str, ...]]) -> list[Any]:
    """Each case of each row, in these forms of the loop."""
    return [
        pytest.param(name, case, loop, marks=[pytest.mark.thorough] if row.thorough else [])
        for name, row in ROWS.items()
        for loop in loops(row)
        for case in row.cases
    ]


@pytest.mark.parametrize(("row", "case", "loop"), cases(lambda row: row.loops))
def test_latents_and_frames(paths: Paths, row: str, case: str, loop: str, record_property: Any) -> None:
    path = paths(row)
    path.check(case, record_property, loop)
    with_tokens = getattr(path.reference.pipe.transformer.config, "added_kv_proj_dim", None) is not None
    assert with_tokens == bool(variants()[path.row.toy].encoded_images)


IN_TEST = [("wan2.2-vace", "scaled"), ("wan2.2-animate, no guidance", "two segments")]
ALIKE = [(name, case) for name, row in ROWS.items() if row.alike for case in row.cases]


@pytest.mark.parametrize(
    ("row", "case"), thorough_but(len(IN_TEST), [*IN_TEST, *(one for one in ALIKE if one not in IN_TEST)])
)
def test_forms_of_the_loop_are_the_same(paths: Paths, row: str, case: str) -> None:
    """One executable for all steps computes what one for each does: on the CPU to the bit."""
    for one, other in zip(*(paths(row).ours(case, loop) for loop in LOOPS), strict=True):
        assert np.array_equal(one, other)


def test_the_first_frame_is_held(paths: Paths) -> None:
    """TI2V's first latent frame is the image's, whatever the seed; the others are not."""
    path = paths("wan2.2-ti2v")
    (one, _), (other, _) = path.ours("image"), path.ours("text")
    held = path.theirs("image").calls[0].latents[:, :, 0]
    assert np.abs(one[:, :, 0] - held).max() < 1e-5
    assert np.abs(other[:, :, 0] - held).max() > 0.1


def test_the_toy_of_ti2v_has_what_is_published(paths: Paths) -> None:
    pipe = paths("wan2.2-ti2v").reference.pipe
    assert (
        pipe.config.expand_timesteps and pipe.vae.config.z_dim == 48 and pipe.vae_scale_factor_spatial == 16
    )
    assert np.ptp(pipe.vae.config.latents_mean) > 0.1 and np.ptp(pipe.vae.config.latents_std) > 0.1


@pytest.mark.parametrize(("row", "case"), [("wan2.2-t2v", "crossed"), ("wan2.2-vace", "masked video")])
def test_swapped_experts_and_scales_are_noticed(paths: Paths, row: str, case: str) -> None:
    """The reference with either of them swapped is far from what we make."""
    path = paths(row)
    given, (latents, _) = path.row.cases[case], path.ours(case)

    def error(**options: float) -> float:
        made = path.run(replace(given, options=options)).latents
        return relative_error(latents, made[:, :, made.shape[2] - latents.shape[2] :])

    errors = {}
    if row == "wan2.2-t2v":
        errors["scales"] = error(guidance_scale=2.5, guidance_scale_2=4)
        errors["one scale"] = error(guidance_scale=4)
        errors["boundary"] = error(**given.options, boundary=0.8)
    pipe = path.reference.pipe
    pipe.transformer, pipe.transformer_2 = pipe.transformer_2, pipe.transformer
    try:
        errors["experts"] = error(**given.options)
    finally:
        pipe.transformer, pipe.transformer_2 = pipe.transformer_2, pipe.transformer
    print(*(f"{name} {error:.1e}" for name, error in errors.items()), flush=True)
    assert min(errors.values()) > 100 * LATENTS


@pytest.mark.thorough
def test_the_scale_of_the_high_noise_expert_decides(paths: Paths) -> None:
    """In Python too: with one of at most 1 there is no guidance, in neither expert.

    The programs of a profile with guidance have the bits then of those of one without.
    """
    experts = paths("wan2.2-t2v")
    with wanrun.load(experts.artifact, embeddings="none") as pipeline:
        for first, second in ((0.5, None), (1.0, 0.5), (-1.0, 1.0), (1.5, 0.5)):
            options = {"guidance_scale": first} | ({} if second is None else {"guidance_scale_2": second})
            expected = experts.run(Case(4, seed=9, options=options))
            prompts = 2 if first > 1 else 1
            assert [expected.count(name) for name in TRANSFORMERS] == [2 * prompts] * 2
            found = pipeline.generate(PROMPT, NEGATIVE, num_steps=4, seed=9, **options)
            assert relative_error(found.latents, expected.latents) < LATENTS, options
            assert pipeline.profile.guidance
            if first <= 1:
                other = pipeline.generate(PROMPT, profile="96x64x9-b1-nocfg", num_steps=4, seed=9)
                assert np.array_equal(found.latents, other.latents)


def test_options_of_the_command_line(paths: Paths, commands: Any, tmp_path: Path) -> None:
    """What a line of a prompts file asks for can be asked for by options."""
    experts = paths("wan2.2-t2v")
    for loop, name in zip(LOOPS, ("crossed", "a boundary that is a timestep"), strict=True):
        latents, video = tmp_path / f"{loop}-latents.npy", tmp_path / f"{loop}.npy"
        options = [(f"--{key.replace('_', '-')}", value) for key, value in experts.line(name).items()]
        commands.succeeds(
            *("wanrun", "--artifact", experts.artifact, "--negative-prompt", NEGATIVE),
            *(item for option in options for item in option),
            *("--loop", loop, "--save-latents", latents, "--output", video),
        )
        for path, array in zip((latents, video), experts.ours(name, loop), strict=True):
            assert np.array_equal(np.load(path), array)


@pytest.mark.thorough
def test_flow_maps_are_converted_with_their_sampling(paths: Paths) -> None:
    model = read_manifest(paths("anyflow").artifact).model
    assert (model.variant, model.flow_map, model.options) == ("anyflow-wan2.1", True, {})
    found = model.defaults
    assert (found.solver, found.num_steps, found.guidance_scale) == ("flow-map", 4, 1.0)
    assert found.flow_shift == 5.0 and found.timesteps is None
    model = read_manifest(paths("anyflow-far").artifact).model
    assert (model.variant, model.flow_map) == ("anyflow-far-wan2.1", True)
    assert model.chunks is not None and model.chunks.lengths(12) == (1, 3, 3, 3, 2)


@pytest.mark.thorough
def test_a_lora_changes_the_chunks_that_are_made_and_kept(paths: Paths, tmp_path: Path) -> None:
    """The reference computes all chunks anew by the changed weights. Live it is the same video."""
    path, pairs, adapter = (
        paths("anyflow-far"),
        tmp_path / "lora.safetensors",
        tmp_path / "adapter.safetensors",
    )
    tensors = lora(PUBLISHED["diffusers"], read_manifest(path.artifact), seed=3)
    save_file({key: one for key, one in tensors.items() if ".lora_" in key}, pairs)
    assert run(wanbuild, ["lora", str(pairs), "--artifact", str(path.artifact), "-o", str(adapter)]) == 0
    case = path.row.cases["image"]
    how: Any = {"num_steps": case.steps, "seed": case.seed, "media": Media(**case.files(tmp_path))}
    how["lora"] = [{"name": str(adapter), "strength": 0.25}]
    with wanrun.load(path.artifact, embeddings="none") as pipeline:
        made = pipeline.generate(PROMPT, **how)
        live = list(pipeline.live(PROMPT, max_frames=45, **how))
    assert np.array_equal(np.concatenate([chunk.latents for chunk in live], 2), made.latents)
    plain = path.theirs("image").latents
    path.reference.pipe.load_lora_weights(pairs, adapter_name="own")
    path.reference.pipe.set_adapters("own", 0.25)
    expected = path.run(case).latents
    path.reference.pipe.unload_lora_weights()
    assert relative_error(made.latents, expected) < LATENTS < 1e-1 < relative_error(expected, plain)
