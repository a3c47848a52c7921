"""Marks for tests that need the compiler of a chip, which the extra ``compilers`` brings."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from wanbuild.targets.topology import COMPILERS
from wanrun.machine.environment import has_package

REQUIRED = "WAN_TEST_COMPILERS"
"""With this variable of the environment, such tests fail where a compiler is missing."""


def _needs(packages: Sequence[str]) -> pytest.MarkDecorator:
    without = not all(map(has_package, packages)) and REQUIRED not in os.environ
    return pytest.mark.skipif(without, reason="without the extra compilers")


needs_libtpu, needs_cuda = _needs(COMPILERS["tpu"][1]), _needs(COMPILERS["cuda"][1])
