"""The chips that programs can be compiled for, as data: a new chip is one row, here or in ``targets.gpus``.

Every figure is of one JAX device: half a chip of TPU v7x, which has two devices, else a whole chip. Peaks
are those of dense matrices. Sources of TPUs: the pages of cloud.google.com/tpu/docs with the system
architecture of each version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from wanbuild.targets.chip import GIB, GIGA, PASSES, TERA, Chip, flash
from wanbuild.targets.gpus import GPUS


def _topologies(*names: str) -> Mapping[int, str]:
    """Returns topologies by their number of chips."""
    return MappingProxyType({math.prod(map(int, name.split("x"))): name for name in names})


_PLANE = _topologies("1x1", "1x2", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBE = _topologies("1x1x1", "1x2x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")
_PAIRS = MappingProxyType({1: "1x1x1", **{2 * count: name for count, name in _CUBE.items() if count < 256}})
"""Topologies by number of devices, of a chip with two devices."""

_OVERLAP = MappingProxyType(
    {
        "xla_tpu_enable_async_all_to_all": "true",
        "xla_tpu_overlap_compute_collective_tc": "true",
    }
)
"""Exchanges between devices may overlap computations: those of keys and queries overlap the projections of
queries and values. Those of values and of the result wait, because the attention is next to them."""


_SMALL_TILES = MappingProxyType({"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"})
"""Stacks of weights keep the tiles in which they come, 8 x 128. For v7x the compiler otherwise prefers
16 x 128, and copies all of them in every step."""


_VAE_EFFORT = MappingProxyType(
    dict.fromkeys(
        ("encode_video", "decode_video", "decode_tiny"), MappingProxyType({"optimization_level": 19})
    )
)
"""XLA's level O1 for the VAE. At its own level the compiler makes each convolution, which is a product of
float32 in six passes, in two forms of megabytes of code, and takes minutes."""


def _tpu(name: str, device_kind: str, *, bf16: float, matrix_unit: int, **others: Any) -> Chip:
    """Returns a TPU; ``others`` are fields of ``Chip``."""
    kernels = flash(matrix_unit)
    fields = {"options": _OVERLAP, "program_options": _VAE_EFFORT, "float32": bf16 / PASSES, **others}
    return Chip(name, "tpu", device_kind, bf16=bf16, matrix_unit=matrix_unit, kernels=kernels, **fields)


_TPUS = (
    _tpu(
        "v4",
        "TPU v4",
        memory_bytes=32 * GIB,
        bf16=275 * TERA,
        int8=275 * TERA,
        matrix_unit=128,
        bandwidth=1228 * GIGA,
        link=6 * 45 * GIGA,
        host_link=8 * GIGA,
        topologies=_CUBE,
        host_chips=4,
    ),
    _tpu(
        "v5e",
        "TPU v5 lite",
        memory_bytes=16 * GIB,
        bf16=197 * TERA,
        int8=394 * TERA,
        matrix_unit=128,
        bandwidth=819 * GIGA,
        link=4 * 45 * GIGA,
        host_link=8 * GIGA,
        topologies=_PLANE,
        also=("TPU v5e",),
    ),
    _tpu(
        "v5p",
        "TPU v5",
        memory_bytes=95 * GIB,
        bf16=459 * TERA,
        int8=918 * TERA,
        matrix_unit=128,
        bandwidth=2765 * GIGA,
        link=6 * 90 * GIGA,
        host_link=16 * GIGA,
        topologies=_CUBE,
        host_chips=4,
        also=("TPU v5p",),
    ),
    _tpu(
        "v6e",
        "TPU v6 lite",
        memory_bytes=32 * GIB,
        bf16=918 * TERA,
        int8=1836 * TERA,
        matrix_unit=256,
        bandwidth=1640 * GIGA,
        link=4 * 90 * GIGA,
        host_link=16 * GIGA,
        topologies=_PLANE,
        also=("TPU v6e",),
    ),
    _tpu(
        "v7x",
        "TPU7x",
        memory_bytes=96 * GIB,
        bf16=1153 * TERA,
        fp8=2307 * TERA,
        matrix_unit=256,
        bandwidth=3690 * GIGA,
        link=3 * 90 * GIGA,
        host_link=16 * GIGA,
        topologies=_PAIRS,
        host_chips=4,
        options=_OVERLAP | _SMALL_TILES,
    ),
)

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in (*_TPUS, *GPUS)})
"""All chips, by the names of their targets."""
