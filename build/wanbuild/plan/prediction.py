"""How long a program takes on a chip: this file is the whole model behind the predictions.

    time = products + bytes + exchange
    products = sum over kinds of product of FLOP / (peak x fill x efficiency)
    bytes = bytes of products' operands and results / (bandwidth x efficiency)
    exchange = bytes sent to other devices / (links x efficiency)

*Peak* is the chip's for the product's dtype: float32 products are computed at highest precision, which is six
passes in bfloat16 on a TPU, and the units for single numbers on an NVIDIA GPU. *Fill* is the part of the
matrix unit that the shape uses: heads of 128 fill half of a unit of 256 x 256, and 96 channels to 96 fill
0.14 of it. The three terms are added: a program mostly waits for one of them before the next.

*Efficiency* is what remains of the chip's figure in long runs. It is assumed, the same for all models and
sizes, and the only part of this that is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from wanbuild.plan.work import Product, Work
from wanbuild.targets.chips import Chip


@dataclass(frozen=True)
class Efficiency:
    """The shares of a chip's figures that programs reach.

    Args:
        matmul: the share of the peak in large matrix products.
        attention: the share of the peak, times the fill, in an attention kernel.
        convolution: the share of the peak, times the fill, in convolutions.
        memory: the share of the memory's bandwidth.
        links: the share of the rate at which a device can send to its neighbours; exchanges with devices
            further away share links.
        host: the share of the host link's rate.
    """

    matmul: float
    attention: float
    convolution: float
    memory: float = 0.8
    links: float = 0.5
    host: float = 0.7


EFFICIENCIES: Mapping[str, Efficiency] = MappingProxyType(
    {
        # Training runs of large models on TPUs report 55 to 75 % of the peak over all; of their attention
        # kernel for v7x, whose unit heads of 128 half fill, MaxDiffusion reports 91 % of what is left.
        "tpu": Efficiency(matmul=0.75, attention=0.8, convolution=0.5),
        # FlashAttention-3 (arXiv:2407.08608) and cuDNN reach 60 to 75 % on an H100 with heads of 128, and
        # large products 65 to 75 %, as its power allows.
        "cuda": Efficiency(matmul=0.7, attention=0.65, convolution=0.5),
        # For tests: nobody rents such a device.
        "cpu": Efficiency(matmul=0.7, attention=0.7, convolution=0.7),
    }
)
"""Efficiencies by platform."""

BOUNDS = ("products", "bytes", "exchange")
"""The terms of a time, by name."""


@dataclass(frozen=True)
class Time:
    """The predicted time of one call of a program, in seconds, by what it is spent on."""

    products: float
    bytes: float
    exchange: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.products + self.bytes + self.exchange

    @property
    def bound(self) -> str:
        """The term that takes most: one of ``BOUNDS``."""
        return max(BOUNDS, key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class Share:
    """The share of a program's work that one device of a mesh does.

    Args:
        products: its share of the program's products.
        weights: bytes of weights that it reads, once.
        whole_weights: the bytes that the program's weights have in all.
        sent: bytes that it sends to other devices.
    """

    products: float = 1.0
    weights: float = 0.0
    whole_weights: float = 0.0
    sent: float = 0.0


def predicted(work: Work, chip: Chip, share: Share) -> Time:
    """Returns the time of a program.

    Args:
        work: the work of the whole program on one device.
        chip: the chip.
        share: the share of one device of the mesh.
    """
    efficiency = EFFICIENCIES[chip.platform]
    products = sum(flops / rate(product, chip) for product, flops in work.flops.items())
    activations = max(0.0, work.nbytes - share.whole_weights)
    moved = activations * share.products + share.weights
    return Time(
        products=products * share.products,
        bytes=moved / (chip.bandwidth * efficiency.memory),
        exchange=share.sent / (chip.link * efficiency.links),
    )


def rate(product: Product, chip: Chip) -> float:
    """Returns how fast a chip computes products of a kind, FLOP/s."""
    own = {"float32": chip.float32, "int8": chip.int8, "float8_e4m3fn": chip.fp8}
    peak = own.get(product.dtype) or chip.bf16
    used = math.prod(_fill(size, chip.matrix_unit) for size in (product.summed, product.features))
    efficiency: float = getattr(EFFICIENCIES[chip.platform], product.kind)
    return peak * used * efficiency


def _fill(size: int, unit: int) -> float:
    """Returns the used share of a unit that takes so many rows, or columns, at a time."""
    return size / (math.ceil(size / unit) * unit)


def transfer_seconds(total: float, each: float, devices: int, chip: Chip) -> float:
    """Returns how long weights take from the host's memory to all devices.

    Staged, as ``wanrun`` does it on a mesh: a device gets its share over its own link to the host, and the
    rest from the others.

    Args:
        total: bytes of the weights.
        each: bytes of them on one device in the end.
        devices: devices of the mesh.
        chip: the chip.
    """
    efficiency = EFFICIENCIES[chip.platform]
    given = total / devices
    spread = max(0.0, each - given) / (chip.link * efficiency.links)
    return given / (chip.host_link * efficiency.host) + spread


def assumptions(chip: Chip) -> str:
    """Returns the efficiencies that the predictions for a chip assume, in words."""
    e = EFFICIENCIES[chip.platform]
    tera, giga = [value / 1e12 for value in (chip.bf16, chip.float32)], 1e9
    return (
        f"assumed of {chip.name}'s {tera[0]:.0f} TFLOP/s (float32 {tera[1]:.0f}), as far as a shape fills "
        f"its matrix units of {chip.matrix_unit}: {e.matmul:.0%} in matrix products, {e.attention:.0%} in "
        f"attention, {e.convolution:.0%} in convolutions; {e.memory:.0%} of {chip.bandwidth / giga:.0f} GB/s "
        f"of memory, {e.links:.0%} of {chip.link / giga:.0f} GB/s of links, {e.host:.0%} of "
        f"{chip.host_link / giga:.0f} GB/s of host link"
    )
