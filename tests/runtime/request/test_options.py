"""Options of a generation: defaults, guidance, the form of the loop; what has an effect with which model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.manifests import built_with, with_model
from helpers.media_files import task_of
from helpers.options import ONE, PROFILE, TWO, profile, refusal, resolve
from helpers.refusals import check_refusal
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.guiders import NAG_DEFAULTS, OWN_OPTIONS, GuiderName
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.model import Chunking
from wanrun.artifact.programs import Profile, Program, ProgramSet
from wanrun.denoising.guided_steps import GUIDED
from wanrun.errors import UsageError
from wanrun.request.options import resolve_loop
from wanrun.request.schema import rows


def test_defaults() -> None:
    common = {
        "prompt": "a fox",
        "seed": 0,
        "num_steps": 40,
        "flow_shift": 12.0,
        "solver": "unipc",
        "loop": "step",
    }
    common |= {"width": 96, "height": 64, "num_frames": 9}
    one = {**common, "guidance_scale": 4.0, "negative_prompt": "blurry"}
    assert resolve(ONE, profile()).items() >= one.items()
    two = {**one, "guidance_scale_2": 3.0, "boundary": 0.875}
    assert resolve(TWO, profile()) == resolve(ONE, profile()) | two
    off = {**common, "guidance_scale": 1.0, "negative_prompt": None}
    assert resolve(ONE, profile(guidance=False)).items() >= off.items()
    assert resolve(TWO, profile(guidance=False)).items() >= {**off, "guidance_scale_2": 1.0}.items()


def test_every_option_of_a_model_is_resolved() -> None:
    """But those that are the profile's, or the file's; timesteps and another decoder where there are some."""
    everywhere = {row.name for row in rows() if not row.models}
    others = {"profile", "schedule", "lora", "size", "num_frames", "num_videos", "fps", "timesteps", *GUIDED}
    others |= {"decoder", "window_frames", "window_overlap"}
    others |= {"guider", *OWN_OPTIONS}  # where it is another guider than cfg
    others |= NAG_DEFAULTS.keys()  # where NAG is on
    assert resolve(ONE, profile()).keys() == (everywhere - others) | {"width", "height", "num_frames"}


LIGHTNING = [1000, 937.5, 833.33, 625]
DISTILLED = with_model(ONE, {"num_steps": 4, "timesteps": tuple(LIGHTNING)})


def test_default_timesteps() -> None:
    """A distilled model's are used until something else is asked for than the model has anyway."""
    found = resolve(DISTILLED, profile())
    assert (found["timesteps"], found["num_steps"]) == (LIGHTNING, 4)
    own = DISTILLED.model.defaults
    same = {"num_steps": 4, "solver": own.solver, "flow_shift": own.flow_shift}
    assert resolve(DISTILLED, profile(), **same) == found
    for name, value in (("num_steps", 8), ("solver", "lcm"), ("flow_shift", 11.0)):
        found = resolve(DISTILLED, profile(), **{**same, name: value})
        assert "timesteps" not in found and found[name] == value
        assert found["num_steps"] == (value if name == "num_steps" else 4)
    assert "timesteps" not in resolve(ONE, profile(), timesteps=None)


def test_given_timesteps() -> None:
    for manifest in (ONE, DISTILLED):
        others = {"solver": "lcm", "flow_shift": 3.0}
        found = resolve(manifest, profile(), timesteps=(1000, 757, 522), **others)
        assert (found["timesteps"], found["num_steps"]) == ([1000.0, 757.0, 522.0], 3)
        assert found.items() >= others.items()
        # What is resolved resolves to itself: a run hands it on to the pipeline.
        again = {row.name: found[row.name] for row in rows() if row.name in found.keys() - {"prompt"}}
        assert resolve(manifest, profile(), **again) == found
    error = refusal(ONE, profile(), timesteps=[1000, 500], num_steps=3)
    check_refusal(error, "conflict", expected="2 steps", found=3, remedy="num_steps")
    assert error.fields == ("num_steps", "timesteps")
    many = refusal(ONE, profile(), timesteps=list(range(60, 0, -1)), loop="scan")
    check_refusal(many, "out_of_range", expected=50, found=60)


finite = st.floats(-1e38, 1e38)


@given(st.none() | finite, st.none() | finite, st.none() | st.floats(0, 1), st.booleans())
@example(1.0, 0.5, None, False)
@example(1.0, 0.5, None, True)
@example(1.0, 3.0, None, True)
@example(None, 1.0, None, False)
@settings(deadline=None)
def test_the_scales_of_two_experts(
    scale: float | None, scale_2: float | None, boundary: float | None, guidance: bool
) -> None:
    """One above 1 needs guidance, any other suits both kinds; the high-noise expert's decides."""
    on = guidance and (scale is None or scale > 1)
    scales = {"guidance_scale": scale, "guidance_scale_2": scale_2, "boundary": boundary}
    given = {**scales, "negative_prompt": "blurred"}
    if scale_2 is not None and scale_2 > 1 and not on:
        error = refusal(TWO, profile(guidance), **given)
        check_refusal(error, "no_effect", what="guidance_scale_2", remedy="guidance_scale")
        return
    if scale is not None and scale > 1 and not guidance:
        error = refusal(TWO, profile(guidance), **given)
        check_refusal(error, "no_effect", what="96x64x9-b1-nocfg")
        assert error.fields == ("guidance_scale",)
        return
    found = resolve(TWO, profile(guidance), **given)
    assert found["boundary"] == (0.875 if boundary is None else boundary)
    if not on:
        assert found["guidance_scale"] == found["guidance_scale_2"] == 1.0
        assert found["negative_prompt"] is None
        return
    assert found["guidance_scale"] == (4.0 if scale is None else scale)
    if scale_2 is not None:
        assert found["guidance_scale_2"] == scale_2
    else:  # the given scale is both experts', a default one is the high-noise expert's alone
        assert found["guidance_scale_2"] == (3.0 if scale is None else scale)
    assert all(type(found[name]) is float for name in scales) and found["negative_prompt"] == "blurred"


def test_one_transformer_has_no_options_of_two() -> None:
    for name in ("guidance_scale_2", "boundary"):
        for where in (profile(), profile(False)):
            error = refusal(ONE, where, **{name: 0.5})
            check_refusal(error, "no_effect", what=name, remedy="two experts")
    given = {"guidance_scale": np.float32(2.5), "guidance_scale_2": 3, "boundary": np.float64(0.5)}
    found = resolve(TWO, profile(), **given)  # as metadata can hold them
    assert [(type(found[name]), found[name]) for name in given] == [(float, 2.5), (float, 3.0), (float, 0.5)]


# What some models have.


def having(**options: Any) -> Manifest:
    return with_model(ONE, options=options)


def test_options_of_some_models() -> None:
    kinds: list[tuple[str, str, Any, Any]] = [
        ("conditioning_scale", "VACE", 1.0, 0.25),
        ("conditioning_scale", "VACE", 1.0, 0),
        ("conditioning_scale", "VACE", 1.0, np.float32(0.5)),
        ("segment_overlap", "Animate", 1, 5),
    ]
    for name, models, default, value in kinds:
        other = "segment_overlap" if models == "VACE" else "conditioning_scale"
        manifest = having(**{name: default})
        plain = resolve(manifest, profile())
        assert plain[name] == default and other not in plain
        found = resolve(manifest, profile(), **{name: value})
        assert found == {**plain, name: value} and type(found[name]) is type(default)
        for without in (ONE, having(**{other: 1})):
            error = refusal(without, profile(), **{name: value})
            check_refusal(error, "no_effect", what=name, remedy=models)
    half = having(conditioning_scale=0.5)
    assert resolve(half, profile())["conditioning_scale"] == 0.5
    whole = having(conditioning_scale=1)  # as JSON may have it
    assert resolve(whole, profile(), conditioning_scale=0.5)["conditioning_scale"] == 0.5
    chained = with_model(ONE, task=task_of("wan2.2-ti2v", encoder=False))
    assert "clip_prompts" not in resolve(chained, profile(), clips=2, clip_prompts="")


COMPILING = "wanbuild compile --size 96x64 --frames 9 --guidance --loop {} --artifact 'my art'"


def test_the_form_of_the_loop() -> None:
    for loop, asked, found in [
        ("both", None, "step"),
        ("both", "step", "step"),
        ("both", "scan", "scan"),
        ("scan", None, "scan"),
        ("step", None, "step"),
    ]:
        assert resolve(ONE, profile(loop=loop), loop=asked)["loop"] == found
        assert resolve_loop(Artifact(ONE, Path()), profile(loop=loop), asked) == found
    for built, asked in [("step", "scan"), ("scan", "step")]:
        error = refusal(ONE, profile(loop=built), loop=asked)
        check_refusal(error, "not_built", what="96x64x9-b1-cfg", found=built, remedy=COMPILING.format("both"))
        assert error.what.endswith(asked) and error.fields == ("loop",)
    error = refusal(ONE, profile(), loop="while")
    check_refusal(error, "invalid_value", what="loop", expected="step or scan", found='"while"')


def test_the_most_steps_of_the_scan_form() -> None:
    both, scan = profile(), profile(loop="scan")
    for where, loop, steps, built in (
        (both, "scan", 51, "both"),
        (scan, "scan", 200, "scan"),
        (scan, None, 200, "scan"),
    ):
        error = refusal(ONE, where, loop=loop, num_steps=steps)
        larger = COMPILING.format(f"{built} --max-steps {steps}")
        check_refusal(error, "out_of_range", what=where.name, expected=50, found=steps, remedy=larger)
        assert error.fields == (("loop",) if built == "both" else ())  # step, which has no limit
    assert resolve(ONE, both, loop="scan", num_steps=50)["num_steps"] == 50
    assert resolve(ONE, both, loop="step", num_steps=51)["num_steps"] == 51
    assert resolve(ONE, both, num_steps=51)["loop"] == "step"
    short = msgspec.structs.replace(scan, options=built_with(loop="scan", max_steps=39))
    check_refusal(refusal(ONE, short), "out_of_range", expected=39, found=40)  # the artifact's default


# Guidance.


def test_a_model_of_its_own_accord_without_guidance() -> None:
    distilled = with_model(ONE, {"guidance_scale": 0.5})
    for where, options, scale in ((True, {}, 1.0), (False, {}, 1.0), (True, {"guidance_scale": 2}, 2.0)):
        assert resolve(distilled, profile(where), **options)["guidance_scale"] == scale


def test_shares_of_the_steps_that_have_guidance() -> None:
    """Recorded unless they are all steps; refused where they have no effect, or leave no step."""
    assert resolve(ONE, profile(), guidance_start=0, guidance_end=1) == resolve(ONE, profile())
    found = resolve(ONE, profile(), guidance_end=0.5)
    assert (found["guidance_start"], found["guidance_end"]) == (0.0, 0.5)
    assert resolve(ONE, profile(), guidance_start=0.9, num_steps=10)["guidance_end"] == 1.0
    own = with_model(ONE, options={"guidance_start": 0.25, "guidance_end": 0.75})
    assert resolve(own, profile(), guidance_end=0.5)["guidance_start"] == 0.25
    for where, others in ((profile(False), {}), (profile(), {"guidance_scale": 1})):
        assert "guidance_start" not in resolve(own, where, **others)
        error = refusal(ONE, where, guidance_end=0.5, **others)
        check_refusal(error, "no_effect", what="guidance_end")
        assert "guidance_scale" in error.fields
    half = {"num_steps": 10, "strength": 0.5}  # five of the steps run
    assert resolve(ONE, profile(), guidance_end=0.2, **half)["guidance_end"] == 0.2
    for shares in (
        {"guidance_start": 0.5, "guidance_end": 0.5},
        {"guidance_end": 0.09, "num_steps": 11},
        {"guidance_end": 0.19, **half},
    ):
        assert {"guidance_start", "guidance_end"} <= {*refusal(ONE, profile(), **shares).fields}


# What some models have.


def test_nag_needs_a_profile_that_is_built_for_it() -> None:
    """Then a generation has the negative prompt without guidance too."""
    able = msgspec.structs.replace(PROFILE, guidance=False, options=built_with(nag=True))
    settings = {"nag_scale": 11.0, "nag_tau": 2.5, "nag_alpha": 0.25}
    found = resolve(ONE, able, nag_scale=11)
    assert found == resolve(ONE, able) | settings | {"negative_prompt": "blurry"}
    assert resolve(ONE, able, nag_scale=11, nag_tau=3).items() >= {**settings, "nag_tau": 3.0}.items()
    for none in ({}, {"nag_scale": 1}):
        assert not resolve(ONE, able, **none).keys() & NAG_DEFAULTS.keys()
        check_refusal(refusal(ONE, able, nag_alpha=0.5, **none), "no_effect", remedy="nag_scale")
    check_refusal(refusal(ONE, profile(), nag_scale=11), "not_built", remedy="--nag")
    chunks = msgspec.structs.replace(ONE.model, chunks=Chunking(first=3, each=3))
    assert "--nag" not in str(refusal(ONE.changed(model=chunks), able, nag_scale=11))


def guided(*guiders: GuiderName) -> tuple[Manifest, Profile]:
    """A profile of three layers that is built for these, and its manifest."""
    where = msgspec.structs.replace(profile(), options=built_with(loop="both", max_steps=50, guiders=guiders))
    avals: Any = {"inputs": {"skip_layers": "float32[3]"}, "outputs": {}}
    program = Program(
        file="a", sha256="0" * 64, inputs=("skip_layers",), donate=(), avals=avals, role="layer", place=0
    )
    one: Any = ProgramSet(
        platform="cpu",
        kernels=cast(Any, None),
        mesh={},
        jax="0",
        programs={where.name: {"a": program}},
    )
    return ONE.changed(profiles={where.name: where}, program_sets={one.key: one}), where


def test_the_options_of_a_guider() -> None:
    """Recorded with it alone, and complete."""
    both = guided("cfg-zero", "skip-layer")
    assert resolve(*both, guider="cfg") == resolve(*both) == resolve(ONE, profile())
    zero = resolve(*both, guider="cfg-zero")
    assert zero == resolve(ONE, profile()) | {"guider": "cfg-zero", "zero_steps": 1}
    found = resolve(*both, guider="skip-layer", skip_layers=[2, 1, 2], skip_end=0.5)
    own = {"skip_layers": [1, 2], "skip_scale": 2.8, "skip_start": 0.01, "skip_end": 0.5}
    assert {name: found[name] for name in OWN_OPTIONS if name in found} == own


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"zero_steps": 1}, ("zero_steps", "guider")),
        ({"guider": "skip-layer", "zero_steps": 1}, ("zero_steps", "guider")),
        ({"guider": "cfg-zero", "skip_layers": [1]}, ("skip_layers", "guider")),
        ({"guider": "cfg-zero", "guidance_scale": 1}, ("guider", "guidance_scale")),
        ({"guider": "cfg-zero", "zero_steps": 40}, ("zero_steps",)),
        ({"guider": "skip-layer"}, ("skip_layers", "guider")),
        ({"guider": "skip-layer", "skip_layers": [3]}, ("skip_layers",)),
        ({"guider": "skip-layer", "skip_layers": [0, 1, 2]}, ("skip_layers",)),
        ({"guider": "skip-layer", "skip_layers": [1], "num_steps": 5}, ("skip_end", "guider")),
        ({"guider": "skip-layer", "skip_layers": [1], "skip_scale": 0}, ("skip_scale", "guider")),
        ({"guider": "skip-layer", "skip_layers": [1], "strength": 0.1}, ("skip_end", "guider")),
        ({"guider": "skip-layer", "skip_layers": [1], "guidance_start": 0.2}, ("skip_end", "guider")),
    ],
    ids=str,
)
def test_a_guider_that_cannot_be(options: dict[str, Any], fields: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(*guided("cfg-zero", "skip-layer"), **options)
    assert {*fields} <= {*caught.value.fields}


def test_a_guider_that_the_profile_is_not_built_for() -> None:
    """The remedy keeps those that it is built for."""
    error = refusal(*guided("cfg-zero"), guider="skip-layer", skip_layers=[1])
    for name in ("cfg-zero", "skip-layer"):
        check_refusal(error, "not_built", remedy=f"--guider {name}")
