"""The chips that programs can be compiled for, as data: a new chip is one row.

Every figure is of one JAX device: half a chip of TPU v7x, which has two devices, else a whole chip. Peaks are
those of dense matrices. Sources: the vendors' product pages and data sheets, and for TPUs the pages of
cloud.google.com/tpu/docs with the system architecture of each version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from wanrun.artifact.programs import Kernels
from wanrun.artifact.targets import Option

KIB, MIB, GIB = 2**10, 2**20, 2**30
TERA = 1e12
GIGA = 1e9
PASSES = 6
"""Products in bfloat16 that a float32 product at highest precision takes on a TPU."""


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
    fp8: float
    float32: float
    matrix_unit: int
    bandwidth: float
    link: float
    host_link: float
    kernels: Kernels
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
    def counts(self) -> tuple[int, ...]:
        """The numbers of devices that the chip comes in."""
        return tuple(range(1, MAX_GPUS + 1)) if self.topologies is None else tuple(self.topologies)


MAX_GPUS = 8
"""GPUs of one host."""

_PLANE = MappingProxyType(
    {1: "1x1", 2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
)
_CUBE = MappingProxyType(
    {
        1: "1x1x1",
        2: "1x2x1",
        4: "2x2x1",
        8: "2x2x2",
        16: "2x2x4",
        32: "2x4x4",
        64: "4x4x4",
        128: "4x4x8",
        256: "4x8x8",
    }
)
_PAIRS = MappingProxyType({1: "1x1x1", **{2 * count: name for count, name in _CUBE.items() if count < 256}})
"""Topologies by number of devices, of a chip with two devices."""

_OVERLAP = MappingProxyType(
    {
        "xla_tpu_enable_async_all_to_all": "true",
        "xla_tpu_overlap_compute_collective_tc": "true",
    }
)
"""Attention exchanges heads in parts, while others are computed."""


_SMALL_TILES = MappingProxyType({"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"})
"""Stacks of weights keep the tiles in which they come, 8 x 128. For v7x the compiler else prefers 16 x 128,
and copies all of them in every step."""


_VAE_EFFORT = MappingProxyType(
    dict.fromkeys(("encode_video", "decode_video"), MappingProxyType({"optimization_level": 19}))
)
"""XLA's level O1 for the VAE. At its own level the compiler makes each convolution, which is a product of
float32 in six passes, in two forms of megabytes of code, and takes minutes."""


def _splash(image_multiple: int, blocks: tuple[int, int, int] = (1024, 1024, 512)) -> Kernels:
    """Kernels of a TPU; blocks are queries, keys, and keys that are computed at once."""
    return Kernels(
        "splash",
        "direct",
        weight_bits=False,
        image_multiple=image_multiple,
        attention_blocks=blocks,
        float32_precision="highest",
        pieces_alike=True,
    )


CUDNN = Kernels("cudnn", "direct", weight_bits=False, image_multiple=1, float32_precision="highest")
"""Kernels of an NVIDIA GPU."""

_CUBLAS = MappingProxyType({"xla_gpu_enable_triton_gemm": "False"})
"""Matrix products go to cuBLAS, which chooses its kernel by shape when it runs. XLA's own kernels have to be
tuned on the GPU: without one, XLA takes tiles of 16 x 8."""


def _table(*chips: Chip) -> Mapping[str, Chip]:
    return MappingProxyType({chip.name: chip for chip in chips})


CHIPS = _table(
    Chip(
        name="v4",
        platform="tpu",
        device_kind="TPU v4",
        memory_bytes=32 * GIB,
        bf16=275 * TERA,
        fp8=0,
        float32=275 / PASSES * TERA,
        matrix_unit=128,
        bandwidth=1228 * GIGA,
        link=6 * 45 * GIGA,
        host_link=8 * GIGA,
        kernels=_splash(128),
        topologies=_CUBE,
        host_chips=4,
        options=_OVERLAP,
        program_options=_VAE_EFFORT,
    ),
    Chip(
        name="v5e",
        platform="tpu",
        device_kind="TPU v5 lite",
        memory_bytes=16 * GIB,
        bf16=197 * TERA,
        fp8=0,
        float32=197 / PASSES * TERA,
        matrix_unit=128,
        bandwidth=819 * GIGA,
        link=4 * 45 * GIGA,
        host_link=8 * GIGA,
        kernels=_splash(128),
        topologies=_PLANE,
        options=_OVERLAP,
        program_options=_VAE_EFFORT,
        also=("TPU v5e",),
    ),
    Chip(
        name="v5p",
        platform="tpu",
        device_kind="TPU v5",
        memory_bytes=95 * GIB,
        bf16=459 * TERA,
        fp8=0,
        float32=459 / PASSES * TERA,
        matrix_unit=128,
        bandwidth=2765 * GIGA,
        link=6 * 90 * GIGA,
        host_link=16 * GIGA,
        kernels=_splash(128),
        topologies=_CUBE,
        host_chips=4,
        options=_OVERLAP,
        program_options=_VAE_EFFORT,
        also=("TPU v5p",),
    ),
    Chip(
        name="v6e",
        platform="tpu",
        device_kind="TPU v6 lite",
        memory_bytes=32 * GIB,
        bf16=918 * TERA,
        fp8=0,
        float32=918 / PASSES * TERA,
        matrix_unit=256,
        bandwidth=1640 * GIGA,
        link=4 * 90 * GIGA,
        host_link=16 * GIGA,
        kernels=_splash(256),
        topologies=_PLANE,
        options=_OVERLAP,
        program_options=_VAE_EFFORT,
        also=("TPU v6e",),
    ),
    Chip(
        name="v7x",
        platform="tpu",
        device_kind="TPU7x",
        memory_bytes=96 * GIB,
        bf16=1153 * TERA,
        fp8=2307 * TERA,
        float32=1153 / PASSES * TERA,
        matrix_unit=256,
        bandwidth=3690 * GIGA,
        link=3 * 90 * GIGA,
        host_link=16 * GIGA,
        kernels=_splash(256),
        topologies=_PAIRS,
        host_chips=4,
        options=_OVERLAP | _SMALL_TILES,
        program_options=_VAE_EFFORT,
    ),
    Chip(
        name="a100",
        platform="cuda",
        device_kind="NVIDIA A100-SXM4-80GB",
        memory_bytes=80 * GIB,
        bf16=312 * TERA,
        fp8=0,
        float32=19.5 * TERA,
        matrix_unit=16,
        bandwidth=2039 * GIGA,
        link=300 * GIGA,
        host_link=25 * GIGA,
        kernels=CUDNN,
        options=_CUBLAS,
        gpu=GpuFacts((8, 0), 108, 64, 2048, shared=164 * KIB, cache=40 * MIB, clock=1.41),
    ),
    Chip(
        name="l40s",
        platform="cuda",
        device_kind="NVIDIA L40S",
        memory_bytes=45 * GIB,
        bf16=362 * TERA,
        fp8=733 * TERA,
        float32=91.6 * TERA,
        matrix_unit=16,
        bandwidth=864 * GIGA,
        link=25 * GIGA,
        host_link=25 * GIGA,
        kernels=CUDNN,
        options=_CUBLAS,
        gpu=GpuFacts((8, 9), 142, 128, 1536, shared=100 * KIB, cache=96 * MIB, clock=2.52),
    ),
    Chip(
        name="h100",
        platform="cuda",
        device_kind="NVIDIA H100 80GB HBM3",
        memory_bytes=80 * GIB,
        bf16=989 * TERA,
        fp8=1979 * TERA,
        float32=67 * TERA,
        matrix_unit=16,
        bandwidth=3350 * GIGA,
        link=450 * GIGA,
        host_link=50 * GIGA,
        kernels=CUDNN,
        options=_CUBLAS,
        gpu=GpuFacts((9, 0), 132, 128, 2048, shared=228 * KIB, cache=50 * MIB, clock=1.98),
    ),
    Chip(
        name="h200",
        platform="cuda",
        device_kind="NVIDIA H200",
        memory_bytes=140 * GIB,
        bf16=989 * TERA,
        fp8=1979 * TERA,
        float32=67 * TERA,
        matrix_unit=16,
        bandwidth=4800 * GIGA,
        link=450 * GIGA,
        host_link=50 * GIGA,
        kernels=CUDNN,
        options=_CUBLAS,
        gpu=GpuFacts((9, 0), 132, 128, 2048, shared=228 * KIB, cache=50 * MIB, clock=1.98),
    ),
    Chip(
        name="b200",
        platform="cuda",
        device_kind="NVIDIA B200",
        memory_bytes=179 * GIB,
        bf16=2250 * TERA,
        fp8=4500 * TERA,
        float32=75 * TERA,
        matrix_unit=16,
        bandwidth=7700 * GIGA,
        link=900 * GIGA,
        host_link=50 * GIGA,
        kernels=CUDNN,
        options=_CUBLAS,
        gpu=GpuFacts((10, 0), 148, 128, 2048, shared=228 * KIB, cache=126 * MIB, clock=1.965),
    ),
    Chip(
        name="rtx4090",
        platform="cuda",
        device_kind="NVIDIA GeForce RTX 4090",
        memory_bytes=24 * GIB,
        bf16=165 * TERA,
        fp8=330 * TERA,
        float32=82.6 * TERA,
        matrix_unit=16,
        bandwidth=1008 * GIGA,
        link=12 * GIGA,
        host_link=25 * GIGA,
        kernels=CUDNN,
        options=_CUBLAS,
        gpu=GpuFacts((8, 9), 128, 128, 1536, shared=100 * KIB, cache=72 * MIB, clock=2.52),
    ),
)
"""All chips, by the names of their targets."""
