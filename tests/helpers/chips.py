"""Marks for tests that need the compiler of a chip, which the extra ``compilers`` brings."""

from __future__ import annotations

import os

import pytest

from wanbuild.targets.topology import COMPILERS
from wanrun.machine.environment import has_package

REQUIRED = "WAN_TEST_COMPILERS"
"""With this variable of the environment, such tests fail where a compiler is missing."""


def _needs(platform: str) -> pytest.MarkDecorator:
    _, packages = COMPILERS[platform]
    without = not all(map(has_package, packages)) and REQUIRED not in os.environ
    return pytest.mark.skipif(without, reason="without the extra compilers")


needs_libtpu, needs_cuda = _needs("tpu"), _needs("cuda")
