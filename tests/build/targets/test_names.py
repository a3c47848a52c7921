"""Names of chips as users write them: near misses that mean one chip, and what means none."""

from __future__ import annotations

import pytest

from wanbuild.targets.chips import CHIPS
from wanbuild.targets.parsing import chip_named, choice


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        (("4090", "RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090"), "rtx4090"),
        (("4090-w8a8-2", "RTX 4090-2-W8A8"), "rtx4090-w8a8-2"),
        (("h100-8", "H100_8", "nvidia-h100-8"), "h100-8"),
        (("4060ti", "RTX 4060 Ti", "4060ti-16gb"), "rtx4060ti-16gb"),
        (("rtx4060ti-16gb-w8a8-4", "4060 ti-w8a8-4"), "rtx4060ti-16gb-w8a8-4"),
        (("RTX PRO 6000", "pro6000"), "rtxpro6000"),
        (("h20-0",), "h20-0"),
        (("V7X", "tpu-v7x"), "v7x"),
    ],
)
def test_near_misses_mean_one_chip(texts: tuple[str, ...], name: str) -> None:
    found = [chip_named(text) for text in texts]
    assert [one and one.text for one in found] == [name] * len(texts)
    assert {one and one.chip.kernels.w8a8 for one in found} == {"w8a8" in name}


def test_every_chip_has_its_own_name() -> None:
    for name, chip in CHIPS.items():
        for text in (name, name.upper(), name.removeprefix("rtx")):
            found = chip_named(text)
            assert found is not None and found.chip is chip and found.count is None


@pytest.mark.parametrize(
    ("text", "like"),
    [
        ("v5", "v5e or v5p"),
        ("100", "a100 or h100"),
        ("4070", "rtx4070ti"),  # which is another card
        ("6000", "rtxpro6000"),  # so are the RTX A6000 and the RTX 6000 Ada
        ("l40-2", None),
        ("rtx4090-24gb", None),
        ("v7x-", "v7x"),
        *((text, None) for text in ("", "-8", "v7x-08000", "local", "cpu-v3", "h200-local", "4060ti-8gb")),
    ],
)
def test_what_means_no_chip(text: str, like: str | None) -> None:
    assert chip_named(text) is None
    assert (choice(text) or "").rpartition("--target ")[2] == (like or "")
