"""Options of guidance: what is refused, and what a generation records."""

from __future__ import annotations

import msgspec

from helpers.manifests import built_with, with_model
from helpers.options import ONE, PROFILE, TWO, profile, refusal, resolve
from wanrun.artifact.nag import NAG_DEFAULTS
from wanrun.errors import ArtifactError, UsageError


def test_a_scale_belongs_to_its_profile() -> None:
    """One above 1 needs guidance, any other suits both kinds; the high-noise expert's decides alone."""
    for guidance in (False, True):
        given = {"guidance_scale": 1, "guidance_scale_2": 0.5, "negative_prompt": "blurred"}
        found = resolve(TWO, profile(guidance), **given)
        assert (found["guidance_scale"], found["guidance_scale_2"]) == (1.0, 1.0)
        assert found["negative_prompt"] is None
    said = refusal(UsageError, ONE, profile(False), guidance_scale=5)
    assert said.startswith("guidance_scale") and "96x64x9-b1-nocfg" in said
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
    for where, others in ((profile(False), {}), (profile(), {"guidance_scale": 1})):
        said = refusal(UsageError, ONE, where, guidance_end=0.5, **others)
        assert said.startswith("guidance_end has no effect: guidance is off; expected guidance_scale above 1")
    for shares in ({"guidance_start": 0.5, "guidance_end": 0.5}, {"guidance_end": 0.09, "num_steps": 11}):
        said = refusal(UsageError, ONE, profile(), **shares)
        assert said.startswith("guidance_start and guidance_end leave no step with guidance")


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
        assert "nag_scale" in refusal(UsageError, ONE, able, nag_alpha=0.5, **none)
    assert "--nag" in refusal(ArtifactError, ONE, profile(), nag_scale=11)
