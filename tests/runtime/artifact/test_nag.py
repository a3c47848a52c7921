"""What steps are told of NAG."""

from __future__ import annotations

from wanrun.artifact.guiders import NAG_DEFAULTS, nag_settings


def test_options_are_in_their_order_and_off_by_default() -> None:
    assert nag_settings({}).tolist() == [1, 2.5, 0.25] and nag_settings({}).dtype == "float32"
    given = dict(zip(reversed(NAG_DEFAULTS), (0.5, 3, 11), strict=True))
    assert nag_settings(given).tolist() == [11, 3, 0.5]
