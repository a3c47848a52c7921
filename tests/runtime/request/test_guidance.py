"""Options of guidance: what is refused, and what a generation records."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from helpers.manifests import built_with, with_model
from helpers.options import ONE, PROFILE, TWO, profile, refusal, resolve
from helpers.refusals import check_refusal
from wanrun.artifact.guiders import NAG_DEFAULTS, OWN_OPTIONS, GuiderName
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.model import Chunking
from wanrun.artifact.programs import Profile, Program, ProgramSet
from wanrun.errors import UsageError


def test_a_scale_belongs_to_its_profile() -> None:
    """One above 1 needs guidance, any other suits both kinds; the high-noise expert's decides alone."""
    for guidance in (False, True):
        given = {"guidance_scale": 1, "guidance_scale_2": 0.5, "negative_prompt": "blurred"}
        found = resolve(TWO, profile(guidance), **given)
        assert (found["guidance_scale"], found["guidance_scale_2"]) == (1.0, 1.0)
        assert found["negative_prompt"] is None
    error = refusal(ONE, profile(False), guidance_scale=5)
    check_refusal(error, "no_effect", what="96x64x9-b1-nocfg", found=5)
    assert error.fields == ("guidance_scale",)
    distilled = with_model(ONE, {"guidance_scale": 0.5})
    assert resolve(distilled, profile())["guidance_scale"] == 1.0
    assert resolve(distilled, profile(), guidance_scale=2)["guidance_scale"] == 2.0
    assert resolve(distilled, profile(False))["guidance_scale"] == 1.0


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
