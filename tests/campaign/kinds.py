"""The kinds of faults, with their weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from campaign.addresses import odd_address, odd_pin
from campaign.damaged import damaged_inspect, damaged_run, damaged_source, damaged_verify, edited_manifest
from campaign.fault import Maker
from campaign.given import hostile_recipe, odd_scales, other_output, placed_output
from campaign.moments import killed, raced, signalled
from campaign.sources import Sources
from campaign.surroundings import full_disk, odd_client, odd_environment, small_limits

WEIGHTS: tuple[tuple[Callable[..., Any], int], ...] = (
    (damaged_run, 60),
    (damaged_verify, 20),
    (damaged_inspect, 30),
    (damaged_source, 60),
    (edited_manifest, 60),
    (hostile_recipe, 20),
    (odd_scales, 10),
    (other_output, 12),
    (signalled, 12),
    (killed, 6),
    (raced, 5),
    (odd_environment, 5),
    (full_disk, 8),
    (small_limits, 3),
    (odd_address, 6),
    (odd_pin, 3),
    (placed_output, 12),
    (odd_client, 2),
)


def kinds(sources: Sources) -> dict[Maker, int]:
    """The makers of faults that can be made here, with their weights."""
    return {
        functools.partial(maker, sources): weight
        for maker, weight in WEIGHTS
        if maker is not full_disk or sources.small is not None
    }
