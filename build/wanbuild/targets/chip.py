"""The facts about one kind of chip, as records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from wanrun import EIGHT_BITS
from wanrun.artifact.programs import Kernels
from wanrun.artifact.target_names import W8A8
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
    """The facts that XLA's compiler needs about an NVIDIA GPU in addition to its memory.

    Source: the CUDA C++ Programming Guide, "Compute Capabilities", and the vendor's white papers.

    Args:
        capability: its compute capability, major and minor.
        cores: streaming multiprocessors.
        lanes: float32 lanes of one.
        threads: the most that reside on one.
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
        topologies: TPU topologies by their number of devices; None for a chip of which any number up to
            ``MAX_GPUS`` is a topology.
        options: the compiler's options, which programs are compiled and loaded with.
        program_options: further ones by program.
        also: other names that JAX has for the same device.
        gpu: the facts that XLA needs about a GPU; None for a TPU, whose compiler knows them.
        mosaic: fields of its ``Kernels`` with the attention in Mosaic GPU; empty for a chip without one.
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
    mosaic: Mapping[str, Any] = field(default_factory=dict)
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

CUDNN = Kernels(
    "cudnn",
    "direct",
    weight_bits=False,
    image_multiple=1,
    float32_precision="highest",
    products="rounded",
)
"""Kernels of an NVIDIA GPU."""


def flash(matrix_unit: int) -> Kernels:
    """Returns the kernels of a TPU with a matrix unit of so many rows and columns."""
    return Kernels(
        "flash",
        "direct",
        weight_bits=False,
        image_multiple=matrix_unit,
        attention_blocks=(4096, 256, 512),  # queries, and queries and keys that are computed at once
        float32_precision="highest",
        pieces_alike=True,
        products="rounded",
    )
