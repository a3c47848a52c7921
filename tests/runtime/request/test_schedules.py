"""A request with a schedule: what it fills in, and which it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from helpers.fake_pipeline import make_two_experts
from helpers.refusals import check_refusal
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.schedules import Schedule
from wanrun.codes import ErrorCode
from wanrun.errors import UsageError, WanError
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


def refusal(manifest: Manifest, **options: Any) -> WanError:
    with pytest.raises(UsageError) as caught:
        of(manifest, **options)
    return caught.value


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
    assert re.findall(r"\d+ \w+", fitted.describe()) == ["5 fitted", "10 evaluations"]
    file = tmp_path / "mine.json"
    file.write_bytes(msgspec.json.encode(fitted))
    assert of(manifest, schedule=str(file)).options == found.options
    file.write_bytes(file.read_bytes().replace(b"[0.5,0.0,-0.1,0.02],", b""))
    check_refusal(refusal(manifest, schedule=str(file)), "unreadable", found="coefficients")


def test_the_steps_of_each_expert(artifact: Path) -> None:
    make_two_experts(artifact)
    manifest = read_manifest(artifact).changed(schedules={"two": TWO, "one": FIVE})
    found = of(manifest, schedule="two")
    assert [(part.first, part.last, part.guidance_scales) for part in found.ranges] == [
        (0, 3, (4.0,) * 3),
        (3, 5, (3.0,) * 2),
    ]
    assert of(manifest, schedule="two", boundary=0.6, guidance_scale=4).options == found.options
    for given, fields in (
        ({"boundary": 0.9}, ("schedule", "boundary")),
        ({"guidance_scale_2": 2}, ("schedule", "guidance_scale_2")),
        ({"schedule": "one"}, ("schedule",)),
    ):
        error = refusal(manifest, **{"schedule": "two", **given})
        assert (error.code, error.fields) == ("mismatch", fields)


@pytest.mark.parametrize(
    "given", [{"num_steps": 6}, {"solver": "unipc"}, {"flow_shift": 30}, {"timesteps": STEPS[1:]}]
)
def test_what_contradicts_it(manifest: Manifest, given: Mapping[str, Any]) -> None:
    (name,) = given
    error = refusal(manifest, schedule="five", **given)
    check_refusal(error, "conflict", remedy=name)
    assert error.fields == ("schedule", name)


@pytest.mark.parametrize(
    ("given", "code", "parts"),
    [
        ({"guidance_scale": 1}, "mismatch", {"what": " 4, not 1", "expected": "few"}),
        ({"guidance_scale": 7}, "mismatch", {"what": " 4, not 7", "remedy": "wanbuild calibrate"}),
        ({"guidance_end": 0.5}, "mismatch", {"what": "guidance_end", "remedy": "schedule"}),
        ({"schedule": "two"}, "mismatch", {"what": "'two'", "expected": "five, few"}),
        ({"boundary": 0.5}, "mismatch", {"what": "boundary", "remedy": "schedule"}),
        ({"schedule": "six"}, "unknown_name", {"what": "'six'", "expected": "five, few"}),
        ({"schedule": "none.json"}, "unreadable", {"what": "'none.json'"}),
    ],
)
def test_what_does_not_fit(
    manifest: Manifest, given: Mapping[str, Any], code: ErrorCode, parts: Mapping[str, str]
) -> None:
    check_refusal(refusal(manifest, **{"schedule": "five", **given}), code, **parts)


def test_a_file(manifest: Manifest, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_bytes(msgspec.json.encode(FIVE))
    assert of(manifest, schedule=str(file)).options == of(manifest, schedule="five").options
    for damaged in (b"[]", b"[" * 10_000, b'{"solver": "euler"}', b"\xff"):
        file.write_bytes(damaged)
        error = refusal(manifest, schedule=str(file))
        check_refusal(error, "unreadable", what="schedule")
        assert error.found
