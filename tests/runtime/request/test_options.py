"""Options of a generation: defaults, what has an effect with which model, and the forms of the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.manifests import built_with, with_model
from helpers.media_files import task_of
from helpers.options import ONE, TWO, profile, refusal, resolve
from helpers.refusals import check_refusal
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.guiders import NAG_DEFAULTS, OWN_OPTIONS
from wanrun.artifact.manifest import Manifest
from wanrun.denoising.guided_steps import GUIDED
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
@settings(deadline=None)
def test_the_scales_of_two_experts(
    scale: float | None, scale_2: float | None, boundary: float | None, guidance: bool
) -> None:
    on = guidance and (scale is None or scale > 1)
    given = {"guidance_scale": scale, "guidance_scale_2": scale_2, "boundary": boundary}
    if scale_2 is not None and scale_2 > 1 and not on:
        check_refusal(refusal(TWO, profile(guidance), **given), "no_effect", what="guidance_scale_2")
        return
    if scale is not None and scale > 1 and not guidance:
        error = refusal(TWO, profile(guidance), **given)
        check_refusal(error, "no_effect", what="96x64x9")
        assert error.fields == ("guidance_scale",)
        return
    found = resolve(TWO, profile(guidance), **given)
    assert found["boundary"] == (0.875 if boundary is None else boundary)
    if not on:
        assert found["guidance_scale"] == found["guidance_scale_2"] == 1.0
        return
    assert found["guidance_scale"] == (4.0 if scale is None else scale)
    if scale_2 is not None:
        assert found["guidance_scale_2"] == scale_2
    else:  # the given scale is both experts', a default one is the high-noise expert's alone
        assert found["guidance_scale_2"] == (3.0 if scale is None else scale)
    assert all(type(found[name]) is float for name in given)


def test_the_numbers_that_metadata_can_hold() -> None:
    given = {"guidance_scale": np.float32(2.5), "guidance_scale_2": 3, "boundary": np.float64(0.5)}
    found = resolve(TWO, profile(), **given)
    assert [(type(found[name]), found[name]) for name in given] == [(float, 2.5), (float, 3.0), (float, 0.5)]


def test_options_without_effect_are_refused() -> None:
    for name in ("guidance_scale_2", "boundary"):
        for value in (0.0, 0.5, 1.0):
            for where in (profile(), profile(False)):
                error = refusal(ONE, where, **{name: value})
                check_refusal(error, "no_effect", what=name, remedy="two experts")
    for where, scale in ((profile(False), None), (profile(False), 1.0), (profile(), 1.0)):
        error = refusal(TWO, where, guidance_scale=scale, guidance_scale_2=3.0)
        check_refusal(error, "no_effect", what="guidance_scale_2", found=3.0, remedy="guidance_scale")
    # Off is off: one that asks for nothing is no contradiction.
    assert resolve(TWO, profile(False), guidance_scale_2=0.5)["guidance_scale_2"] == 1.0


# What some models have.


def having(**options: Any) -> Manifest:
    return with_model(ONE, options=options)


def test_options_of_some_models() -> None:
    names = ("conditioning_scale", "segment_overlap")
    for name, default, value in [
        ("conditioning_scale", 1.0, 0.25),
        ("conditioning_scale", 1.0, 0),
        ("segment_overlap", 1, 5),
    ]:
        (other,) = set(names) - {name}
        manifest = having(**{name: default})
        plain = resolve(manifest, profile())
        assert plain[name] == default and other not in plain
        for nothing in ({}, dict.fromkeys(names)):
            assert resolve(manifest, profile(), **nothing) == plain
        found = resolve(manifest, profile(), **{name: value, other: None})
        assert found == {**plain, name: value} and type(found[name]) is type(default)
    half = having(conditioning_scale=0.5)
    assert resolve(half, profile())["conditioning_scale"] == 0.5
    whole = having(conditioning_scale=1)  # as JSON may have it
    assert resolve(whole, profile(), conditioning_scale=0.5)["conditioning_scale"] == 0.5
    assert resolve(whole, profile(), conditioning_scale=np.float32(0.5))["conditioning_scale"] == 0.5
    assert not {*names} & resolve(ONE, profile()).keys()
    chained = with_model(ONE, task=task_of("wan2.2-ti2v", encoder=False))
    assert "clip_prompts" not in resolve(chained, profile(), clips=2, clip_prompts="")


def test_options_of_other_models_are_refused() -> None:
    for name, models, value in [("conditioning_scale", "VACE", 1.0), ("segment_overlap", "Animate", 1)]:
        others = {"conditioning_scale": 1.0, "segment_overlap": 1}
        others.pop(name)
        for manifest in (ONE, having(**others)):
            error = refusal(manifest, profile(), **{name: value})
            check_refusal(error, "no_effect", what=name, remedy=models)


# The loop.


def test_the_forms_of_the_loop_that_are_built() -> None:
    assert profile().options.forms == ("step", "scan")
    assert profile(loop="scan").options.forms == ("scan",)
    assert profile(loop="step").options.forms == ("step",)


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
