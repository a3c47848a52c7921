"""What an option needs of an artifact: which rows say it, and of which artifacts it holds."""

from __future__ import annotations

from helpers.manifests import built_with
from helpers.options import ONE, TWO
from wanrun.request.offered import offered
from wanrun.request.schema import rows

ROWS = {row.name: row for row in rows()}


def test_a_model_has_what_its_manifest_tells() -> None:
    both = {name for name, row in ROWS.items() if offered(row, TWO)} - {
        name for name, row in ROWS.items() if offered(row, ONE)
    }
    assert both == {"guidance_scale_2", "boundary", "steps_high", "steps_low"}
    here = {
        name for name in ("window_frames", "clips", "decoder", "mode", "image") if offered(ROWS[name], ONE)
    }
    assert here == {"window_frames"}


def test_a_profile_is_built_for_some_options() -> None:
    built = {name: row.built for name, row in ROWS.items() if row.built is not None}
    for options, among in (
        ({"guiders": ("cfg-zero",)}, {"guider", "zero_steps"}),
        ({"nag": True}, {"nag_scale", "nag_tau", "nag_alpha"}),
        ({"lora_rank": 4}, {"lora"}),
    ):
        assert {name for name, test in built.items() if test(built_with(**options))} == among
