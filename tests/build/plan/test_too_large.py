"""A program that a device's memory cannot hold: the number, and what would fit instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.refusals import check_refusal
from wanbuild.build_options import BuildOptions
from wanbuild.plan.plan import fitting_instead
from wanbuild.plan.published_model import published_manifest, published_names
from wanbuild.programs.export import profile_of
from wanbuild.programs.shape import Shape
from wanbuild.programs.xla import TooLargeError, refused_bytes
from wanbuild.targets.chips import CHIPS
from wanbuild.targets.target import CPU, TargetSpec


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 24.50G of 15.75G hbm. Exceeded "
            "hbm capacity by 8.75G.",
            int(24.5 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
            "(27.88G) exceeds available HBM (15.75G).",
            int(27.88 * 2**30),
        ),
        ("RESOURCE_EXHAUSTED: too many threads", None),
        ("INTERNAL: Used 24.50G of 15.75G hbm.", None),
    ],
)
def test_what_the_compiler_says(text: str, nbytes: int | None) -> None:
    assert refused_bytes(RuntimeError(text)) == nbytes


def too_large(name: str, shape: Shape, tmp_path: Path, **mesh: int) -> TooLargeError:
    """The error for Wan 2.1 14B on a chip, whose artifact's manifest is in the folder."""
    manifest = published_manifest(published_names()["wan2.1-t2v-14b"])
    manifest.write(tmp_path)
    nothing: Any = None
    chip = CHIPS.get(name)
    target = TargetSpec(name, "", CPU, nothing, chip.memory_bytes if chip else 2**30, {}, mesh)
    error = TooLargeError("denoise_step", target, 60 * 10**9)
    error.profile = profile_of(manifest, shape, BuildOptions())
    return error


@pytest.mark.thorough
def test_what_fits_instead(tmp_path: Path) -> None:
    error = fitting_instead(tmp_path, too_large("rtx4090", Shape(1280, 720, 81, 1, True), tmp_path))
    assert error.exit_code == 2 and "\n" not in str(error)
    check_refusal(error, "too_large", what="denoise_step ", expected="25.77 GB", remedy="--loop stream")
    check_refusal(error, "too_large", what="rtx4090", found=" 34.23 GB")
    error = fitting_instead(tmp_path, too_large("rtx4080", Shape(1280, 720, 81, 1, True), tmp_path))
    assert all(option in str(error) for option in ("--vae-tile 256", "--loop stream"))
    error = fitting_instead(tmp_path, too_large("rtx4080", Shape(1280, 720, 161, 1, True), tmp_path))
    check_refusal(error, "too_large", found=" 42.82 GB", remedy="--target rtx4080-")


def test_a_target_that_is_no_chip_keeps_its_error(tmp_path: Path) -> None:
    error = too_large("cpu", Shape(832, 480, 81, 1, True), tmp_path)
    assert fitting_instead(tmp_path, error) is error
