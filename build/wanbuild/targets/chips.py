"""The chips that programs can be compiled for, as data: a new chip is one row.

Every figure is of one JAX device: half a chip of TPU v7x, which has two devices, else a whole chip. Peaks are
those of dense matrices. Sources: the vendors' product pages and data sheets, and for TPUs the pages of
cloud.google.com/tpu/docs with the system architecture of each version.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from wanrun import EIGHT_BITS
from wanrun.artifact.programs import Kernels
from wanrun.artifact.targets import Option

KIB, MIB, GIB = 2**10, 2**20, 2**30
TERA = 1e12
GIGA = 1e9
PASSES = 6
"""Products in bfloat16 that a float32 product at highest precision takes on a TPU; half of them at high."""

TF32 = 0.5
"""The rate of an NVIDIA GPU's matrix units for TF32, by that for bfloat16."""


@dataclass(frozen=True)
class GpuFacts:
    """The facts that XLA's compiler needs about an NVIDIA GPU besides its memory. Source: the CUDA C++
    Programming Guide,
    "Compute Capabilities", and the vendor's white papers.

    Args:
        capability: its compute capability, major and minor.
        cores: streaming multiprocessors.
        lanes: float32 lanes of one.
        threads: that reside on one at most.
        shared: bytes of shared memory of one; a block may ask for all but 1 KiB of it.
        cache: bytes of the second-level cache.
        clock: GHz.
    """

    capability: tuple[int, int]
    cores: int
    lanes: int
    threads: int
    shared: int
    cache: int
    clock: float


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator.

    Args:
        name: the target's name.
        platform: JAX's platform name, ``tpu`` or ``cuda``.
        device_kind: JAX's name of the device, where it is attached.
        memory_bytes: memory of a device that programs may use.
        bf16: matrix operations in bfloat16, FLOP/s.
        fp8: matrix operations in 8-bit floating point, FLOP/s; zero where the chip has none.
        int8: likewise, in 8-bit integers.
        float32: matrix operations in float32 at highest precision, FLOP/s: six passes in bfloat16 on a TPU,
            and on an NVIDIA GPU its units for single numbers.
        matrix_unit: rows and columns of the matrix unit. With fewer terms in a sum, or fewer columns of the
            result, a part of it idles.
        bandwidth: rate of the device's memory, bytes/s.
        link: rate at which one device sends to its neighbours, bytes/s, all links in one direction.
        host_link: rate at which one device gets data from its host, bytes/s.
        kernels: the implementations that programs for it use.
        topologies: TPU topologies by their number of devices; None for a chip of which any number up to
            ``MAX_GPUS`` is a topology.
        options: the compiler's options, which programs are compiled and loaded with.
        program_options: further ones by program.
        also: other names that JAX has for the same device.
        gpu: the facts that XLA needs about a GPU; None for a TPU, whose compiler knows them.
        host_chips: chips of one host; larger topologies have several hosts, of 2 x 2 chips each.
    """

    name: str
    platform: str
    device_kind: str
    memory_bytes: int
    bf16: float
    float32: float
    matrix_unit: int
    bandwidth: float
    link: float
    host_link: float
    kernels: Kernels
    fp8: float = 0
    int8: float = 0
    topologies: Mapping[int, str] | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    program_options: Mapping[str, Mapping[str, Option]] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    gpu: GpuFacts | None = None
    host_chips: int = 8

    @property
    def device_kinds(self) -> list[str]:
        """JAX's names of the device."""
        return [self.device_kind, *self.also]

    @property
    def fast_float32(self) -> float:
        """Matrix operations in float32 at high precision, FLOP/s."""
        return {"tpu": self.bf16 / (PASSES / 2), "cuda": self.bf16 * TF32}.get(self.platform, self.float32)

    def eight_bit_rate(self, dtype: str) -> float:
        """Returns the rate of matrix operations in an 8-bit dtype, FLOP/s; zero where the chip has none."""
        return self.int8 if EIGHT_BITS[dtype].whole else self.fp8

    def in_eight_bits(self) -> Chip:
        """Returns the chip as a target whose layers of 8-bit weights multiply in 8 bits."""
        kernels = msgspec.structs.replace(self.kernels, w8a8=True)
        return dataclasses.replace(self, name=f"{self.name}{W8A8}", kernels=kernels)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of devices that the chip comes in."""
        return tuple(range(1, MAX_GPUS + 1)) if self.topologies is None else tuple(self.topologies)


MAX_GPUS = 8
"""GPUs of one host."""

W8A8 = "-w8a8"
"""The end of the name of a target whose layers of 8-bit weights multiply with activations of 8 bits."""


def split_w8a8(name: str) -> tuple[str, bool]:
    """Returns a target's name without ``W8A8``, and whether it ended in it, but for a number of devices."""
    end, dash, count = name.rpartition("-")
    if dash and count.isdecimal() and end.endswith(W8A8):
        return f"{end.removesuffix(W8A8)}-{count}", True
    return name.removesuffix(W8A8), name.endswith(W8A8)


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
"""Exchanges between devices may run beside computations: those of keys and queries do beside the projections
of queries and values. Those of values and of the result wait, for the attention is next to them."""


_SMALL_TILES = MappingProxyType({"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"})
"""Stacks of weights keep the tiles in which they come, 8 x 128. For v7x the compiler else prefers 16 x 128,
and copies all of them in every step."""


_VAE_EFFORT = MappingProxyType(
    dict.fromkeys(
        ("encode_video", "decode_video", "decode_tiny"), MappingProxyType({"optimization_level": 19})
    )
)
"""XLA's level O1 for the VAE. At its own level the compiler makes each convolution, which is a product of
float32 in six passes, in two forms of megabytes of code, and takes minutes."""


CUDNN = Kernels(
    "cudnn",
    "direct",
    weight_bits=False,
    image_multiple=1,
    float32_precision="highest",
    products="rounded",
)
"""Kernels of an NVIDIA GPU."""

_CUBLAS = MappingProxyType({"xla_gpu_enable_triton_gemm": "False"})
"""Matrix products go to cuBLAS, which chooses its kernel by shape when it runs. XLA's own kernels have to be
tuned on the GPU: without one, XLA takes tiles of 16 x 8."""


def _tpu(name: str, device_kind: str, *, bf16: float, matrix_unit: int, **others: Any) -> Chip:
    """Returns a TPU; ``others`` are fields of ``Chip``."""
    kernels = Kernels(
        "flash",
        "direct",
        weight_bits=False,
        image_multiple=matrix_unit,
        attention_blocks=(4096, 256, 512),  # queries, and queries and keys that are computed at once
        float32_precision="highest",
        pieces_alike=True,
        products="rounded",
    )
    fields = {"options": _OVERLAP, "program_options": _VAE_EFFORT, "float32": bf16 / PASSES, **others}
    return Chip(name, "tpu", device_kind, bf16=bf16, matrix_unit=matrix_unit, kernels=kernels, **fields)


def _gpu(name: str, device_kind: str, **others: Any) -> Chip:
    """Returns an NVIDIA GPU; ``others`` are fields of ``Chip``."""
    return Chip(name, "cuda", device_kind, matrix_unit=16, kernels=CUDNN, options=_CUBLAS, **others)


def _table(*chips: Chip) -> Mapping[str, Chip]:
    return MappingProxyType({chip.name: chip for chip in chips})


CHIPS = _table(
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
    _gpu(
        "a100",
        "NVIDIA A100-SXM4-80GB",
        memory_bytes=80 * GIB,
        bf16=312 * TERA,
        int8=624 * TERA,
        float32=19.5 * TERA,
        bandwidth=2039 * GIGA,
        link=300 * GIGA,
        host_link=25 * GIGA,
        gpu=GpuFacts((8, 0), 108, 64, 2048, shared=164 * KIB, cache=40 * MIB, clock=1.41),
    ),
    _gpu(
        "l40s",
        "NVIDIA L40S",
        memory_bytes=45 * GIB,
        bf16=362 * TERA,
        fp8=733 * TERA,
        int8=733 * TERA,
        float32=91.6 * TERA,
        bandwidth=864 * GIGA,
        link=25 * GIGA,
        host_link=25 * GIGA,
        gpu=GpuFacts((8, 9), 142, 128, 1536, shared=100 * KIB, cache=96 * MIB, clock=2.52),
    ),
    _gpu(
        "h100",
        "NVIDIA H100 80GB HBM3",
        memory_bytes=80 * GIB,
        bf16=989 * TERA,
        fp8=1979 * TERA,
        int8=1979 * TERA,
        float32=67 * TERA,
        bandwidth=3350 * GIGA,
        link=450 * GIGA,
        host_link=50 * GIGA,
        gpu=GpuFacts((9, 0), 132, 128, 2048, shared=228 * KIB, cache=50 * MIB, clock=1.98),
    ),
    _gpu(
        "h200",
        "NVIDIA H200",
        memory_bytes=140 * GIB,
        bf16=989 * TERA,
        fp8=1979 * TERA,
        int8=1979 * TERA,
        float32=67 * TERA,
        bandwidth=4800 * GIGA,
        link=450 * GIGA,
        host_link=50 * GIGA,
        gpu=GpuFacts((9, 0), 132, 128, 2048, shared=228 * KIB, cache=50 * MIB, clock=1.98),
    ),
    _gpu(
        "b200",
        "NVIDIA B200",
        memory_bytes=179 * GIB,
        bf16=2250 * TERA,
        fp8=4500 * TERA,
        int8=4500 * TERA,
        float32=75 * TERA,
        bandwidth=7700 * GIGA,
        link=900 * GIGA,
        host_link=50 * GIGA,
        gpu=GpuFacts((10, 0), 148, 128, 2048, shared=228 * KIB, cache=126 * MIB, clock=1.965),
    ),
    _gpu(
        "rtx4090",
        "NVIDIA GeForce RTX 4090",
        memory_bytes=24 * GIB,
        bf16=165 * TERA,
        fp8=330 * TERA,
        int8=660 * TERA,
        float32=82.6 * TERA,
        bandwidth=1008 * GIGA,
        link=12 * GIGA,
        host_link=25 * GIGA,
        gpu=GpuFacts((8, 9), 128, 128, 1536, shared=100 * KIB, cache=72 * MIB, clock=2.52),
    ),
    # Peaks of these two: those of the same architecture, by multiprocessors and clock.
    _gpu(
        "rtx4080",
        "NVIDIA GeForce RTX 4080",
        memory_bytes=16 * GIB,
        bf16=97.5 * TERA,
        fp8=195 * TERA,
        int8=390 * TERA,
        float32=48.7 * TERA,
        bandwidth=717 * GIGA,
        link=12 * GIGA,
        host_link=25 * GIGA,
        gpu=GpuFacts((8, 9), 76, 128, 1536, shared=100 * KIB, cache=64 * MIB, clock=2.51),
    ),
    _gpu(
        "rtx4070ti",
        "NVIDIA GeForce RTX 4070 Ti",
        memory_bytes=12 * GIB,
        bf16=80.2 * TERA,
        fp8=160 * TERA,
        int8=321 * TERA,
        float32=40.1 * TERA,
        bandwidth=504 * GIGA,
        link=12 * GIGA,
        host_link=25 * GIGA,
        gpu=GpuFacts((8, 9), 60, 128, 1536, shared=100 * KIB, cache=48 * MIB, clock=2.61),
    ),
)
"""All chips, by the names of their targets."""
