"""A request with a schedule: what it fills in, and which it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from helpers.fake_pipeline import make_two_experts
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.schedules import Schedule
from wanrun.errors import UsageError
from wanrun.request.generation import Generation
from wanrun.request.resolve import request_of, resolve_request

STEPS = (1000.0, 900.0, 700.0, 450.0, 150.0)
FIVE = Schedule(solver="euler", timesteps=STEPS, guidance_scale=4.0)
TWO = structs.replace(FIVE, guidance_scale_2=3.0, boundary=0.6)


@pytest.fixture
def manifest(toy_artifact: Path) -> Manifest:
    """The toy with a schedule of guidance, and one without."""
    manifest = read_manifest(toy_artifact)
    (small,) = manifest.profiles.values()
    unguided = structs.replace(small, guidance=False, index=1)
    return manifest.changed(
        profiles={one.name: one for one in (small, unguided)},
        schedules={"five": FIVE, "few": structs.replace(FIVE, guidance_scale=1), "two": TWO},
    )


def of(manifest: Manifest, **options: Any) -> Generation:
    return resolve_request(request_of({"prompt": "a fox", **options}), Artifact(manifest, Path("artifact")))


def refusal(manifest: Manifest, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        of(manifest, **options)
    return str(caught.value)


def test_it_fills_in_what_it_was_made_for(manifest: Manifest) -> None:
    found = of(manifest, schedule="five")
    assert found.options.items() >= {"solver": "euler", "guidance_scale": 4.0, "num_steps": 5}.items()
    assert tuple(found.options["timesteps"]) == STEPS and len(found.table.timesteps) == 5
    assert "schedule" not in found.options  # a video says its steps, whoever chose them
    same = {"num_steps": 5, "solver": "euler", "timesteps": STEPS}
    assert of(manifest, schedule="five", **same).options == found.options
    by_hand = of(manifest, solver="euler", timesteps=STEPS, guidance_scale=4)
    assert by_hand.options == found.options
    assert of(manifest, schedule="few").profile.guidance is False


def test_fitted_coefficients_take_the_place_of_the_solver_s(manifest: Manifest, tmp_path: Path) -> None:
    rows = tuple((0.5, 0.1 * step, -0.1, 0.02) for step in range(5))
    fitted = structs.replace(FIVE, coefficients=rows)
    found = of(manifest.changed(schedules={"fitted": fitted}), schedule="fitted")
    assert found.options["coefficients"] == rows  # a video says them too
    for given, row in zip(rows, found.table.coefficients, strict=True):
        a, b_0, b_1, b_2 = given
        np.testing.assert_allclose(row[1:], [a, 0, 0, 0, b_2, 1, b_0, b_1], rtol=1e-6)
    assert "5 fitted steps, 10 evaluations" in fitted.describe()
    file = tmp_path / "mine.json"
    file.write_bytes(msgspec.json.encode(fitted))
    assert of(manifest, schedule=str(file)).options == found.options
    file.write_bytes(file.read_bytes().replace(b"[0.5,0.0,-0.1,0.02],", b""))
    assert "expected coefficients for each of the timesteps" in refusal(manifest, schedule=str(file))


def test_the_steps_of_each_expert(artifact: Path) -> None:
    make_two_experts(artifact)
    manifest = read_manifest(artifact).changed(schedules={"two": TWO, "one": FIVE})
    found = of(manifest, schedule="two")
    assert [(part.first, part.last, part.guidance_scales) for part in found.ranges] == [
        (0, 3, (4.0,) * 3),
        (3, 5, (3.0,) * 2),
    ]
    assert of(manifest, schedule="two", boundary=0.6, guidance_scale=4).options == found.options
    for given, said in (
        ({"boundary": 0.9}, "it was made for boundary 0.6, not 0.9"),
        ({"guidance_scale_2": 2}, "it was made for guidance_scale_2 3, not 2"),
        ({"schedule": "one"}, "it was made for one transformer; expected one of two"),
    ):
        assert said in refusal(manifest, **{"schedule": "two", **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_steps": 6}, "schedule and num_steps contradict each other; leave num_steps out"),
        ({"solver": "unipc"}, "schedule and solver contradict each other"),
        ({"flow_shift": 30}, "schedule and flow_shift contradict each other"),
        ({"timesteps": STEPS[1:]}, "schedule and timesteps contradict each other"),
        (
            {"guidance_scale": 1},
            "'five' is for another request: it was made for guidance_scale 4, not 1; expected one of few",
        ),
        (
            {"guidance_scale": 7},
            "it was made for guidance_scale 4, not 7; leave schedule out, or run wanbuild calibrate",
        ),
        ({"guidance_end": 0.5}, "it was made without guidance_end; leave schedule out"),
        ({"schedule": "two"}, "it was made for two experts; expected one of five, few"),
        ({"boundary": 0.5}, "it was made without boundary; leave schedule out"),
        (
            {"schedule": "six"},
            "no schedule 'six'; expected a .json file, or one of the artifact's: five, few",
        ),
        ({"schedule": "none.json"}, "the schedule 'none.json' cannot be read; found"),
    ],
)
def test_what_does_not_fit(manifest: Manifest, given: Mapping[str, Any], said: str) -> None:
    assert said in refusal(manifest, **{"schedule": "five", **given})


def test_a_file(manifest: Manifest, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_bytes(msgspec.json.encode(FIVE))
    assert of(manifest, schedule=str(file)).options == of(manifest, schedule="five").options
    for damaged in (b"[]", b"[" * 10_000, b'{"solver": "euler"}', b"\xff"):
        file.write_bytes(damaged)
        assert "cannot be read; found" in refusal(manifest, schedule=str(file))
