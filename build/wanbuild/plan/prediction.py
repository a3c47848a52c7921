"""How long a program takes on a chip: this file is the whole model behind the predictions.

    time = products + bytes + passes + exchange
    products = sum over kinds of product of FLOP / (peak x fill x efficiency)
    bytes = bytes of products' operands and results / (bandwidth x efficiency)
    passes = layers x (passes x bytes of a layer's tokens / (bandwidth x efficiency) + launches)
    exchange = bytes sent to other devices / (links x efficiency)

*Peak* is the chip's for the product's dtype: float32 products are computed at highest precision, which is six
passes in bfloat16 on a TPU, and the units for single numbers on an NVIDIA GPU; those of the VAE by default in
three passes, or in TF32. *Fill* is the part of the matrix unit that the shape uses: heads of 128 fill half of
a unit of 256 x 256, and 96 channels to 96 fill 0.14 of it. *Passes* read or write all tokens of a
transformer's layer once between its products: norms, rotation, modulation, sums, layouts. The terms are
added: a program mostly waits for one of them before the next.

*Efficiency* is what remains of the chip's figure in long runs, the same for all models and sizes. Those of a
TPU's products and attention, and the passes, are the chips' compilers' figures for our programs
(docs/notes/chips.md, "What a layer takes"); the others are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from wanbuild.plan.work import Product, Work
from wanbuild.targets.chip import Chip
from wanbuild.targets.gpus import GPUS
from wanrun import EIGHT_BITS
from wanrun.artifact.programs import Precision
from wanrun.artifact.target_names import split_w8a8


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
        passes: reads and writes of a layer's tokens outside of its products, of two bytes a value.
        launches: seconds between the kernels of a layer.
    """

    matmul: float
    attention: float
    convolution: float
    passes: float
    launches: float
    memory: float = 0.8
    links: float = 0.5
    host: float = 0.7


EFFICIENCIES: Mapping[str, Efficiency] = MappingProxyType(
    {
        # As compiled for v5p: products by XLA's estimate, attention by the kernel's instructions and 15 % for
        # what they wait for. MaxDiffusion measured 91 % of what heads of 128 fill of v7x, we have 89 % so.
        "tpu": Efficiency(matmul=0.78, attention=0.79, convolution=0.5, passes=30, launches=2e-5),
        # FlashAttention-3 (arXiv:2407.08608) and cuDNN reach 60 to 75 % on an H100 with heads of 128, and
        # large products 65 to 75 %, as its power allows.
        "cuda": Efficiency(matmul=0.7, attention=0.65, convolution=0.5, passes=19, launches=7e-5),
        # Of what one product reaches there, which is measured (``wanbuild.plan.here``): attention in blocks
        # of queries has 40 % of it, convolutions as sums of two-dimensional ones nearly all.
        "cpu": Efficiency(matmul=0.95, attention=0.4, convolution=0.95, passes=30, launches=0),
    }
)
"""Efficiencies by platform."""

HALF_RATE: Mapping[str, float] = MappingProxyType({"matmul": 0.85, "attention": 0.9})
"""Shares of a GeForce card, whose products with sums in float32 have half of the rate of its units: a kernel
gets nearly all of that. Measured by others: cuDNN's attention 97 % on an RTX 5090, cuBLAS 99 % on an RTX
5060 Ti, whose peak is that of the RTX 5090 by multiprocessors and clock (docs/notes/chips.md, "Cards")."""

OF_CHIPS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "v4": {"attention": 0.65},
        "v5e": {"attention": 0.80},
        "v6e": {"matmul": 0.56, "attention": 0.87},
        "v7x": {"matmul": 0.65, "attention": 0.89},
        # An H100 whose rate is held back, and not by its power: Wan 2.2's steps in FlashAttention-3.
        "h20": {"attention": 0.9},
        # cuDNN, as SGLang measured it there.
        "rtxpro6000": {"attention": 0.74},
        **{gpu.name: HALF_RATE for gpu in GPUS if gpu.device_kind.startswith("NVIDIA GeForce")},
    }
)
"""Efficiencies that differ from the platform's: of TPUs by their compiler, of GPUs by measurements."""

PAST_PASSES = 3
"""Reads and writes of the cache of earlier chunks, in each step: keys are rotated, keys and values joined
with those of the chunk. Assumed, not measured."""

BOUNDS = ("products", "bytes", "passes", "exchange")
"""The terms of a time, by name."""


@dataclass(frozen=True)
class Time:
    """The predicted time of one call of a program, in seconds, by what it is spent on."""

    products: float
    bytes: float
    exchange: float
    passes: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.products + self.bytes + self.passes + self.exchange

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
        layers: how often it computes a layer of a transformer.
        tokens: bytes of a layer's tokens, of two bytes a value.
        past: bytes of the keys and values of earlier chunks, of all layers.
    """

    products: float = 1.0
    weights: float = 0.0
    whole_weights: float = 0.0
    sent: float = 0.0
    layers: float = 0.0
    tokens: float = 0.0
    past: float = 0.0


def predicted(work: Work, chip: Chip, share: Share, precision: Precision = "highest") -> Time:
    """Returns the time of a program, by its work on one device and the share that a device of a mesh does.

    ``work`` is that of the whole program. ``precision`` is that of its float32 products.
    """
    efficiency = efficiency_of(chip)
    products = sum(flops / rate(product, chip, precision) for product, flops in work.flops.items())
    activations = max(0.0, work.nbytes - share.whole_weights)
    moved, rate_of_memory = activations * share.products + share.weights, chip.bandwidth * efficiency.memory
    one_layer = efficiency.passes * share.tokens / rate_of_memory + efficiency.launches
    return Time(
        products=products * share.products,
        bytes=moved / rate_of_memory,
        exchange=share.sent / (chip.link * efficiency.links),
        passes=share.layers * one_layer + PAST_PASSES * share.past / rate_of_memory,
    )


def efficiency_of(chip: Chip) -> Efficiency:
    """Returns the efficiencies of a chip."""
    name, _ = split_w8a8(chip.name)
    return replace(EFFICIENCIES[chip.platform], **OF_CHIPS.get(name, {}))


def rate(product: Product, chip: Chip, precision: Precision) -> float:
    """Returns how fast a chip computes products of a kind, FLOP/s."""
    float32 = chip.float32 if precision == "highest" else chip.fast_float32
    own = {"float32": float32, **{name: chip.eight_bit_rate(name) for name in EIGHT_BITS}}
    peak = own.get(product.dtype) or chip.bf16
    used = math.prod(_fill(size, chip.matrix_unit) for size in (product.summed, product.features))
    efficiency: float = getattr(efficiency_of(chip), product.kind)
    return peak * used * efficiency


def _fill(size: int, unit: int) -> float:
    """Returns the used share of a unit that takes so many rows, or columns, at a time."""
    return size / (math.ceil(size / unit) * unit)


def transfer_seconds(total: float, each: float, devices: int, chip: Chip) -> float:
    """Returns how long weights take from the host's memory to all devices.

    Staged, as ``wanrun`` does it on a mesh: a device gets its share over its own link to the host, and the
    rest from the others. ``total`` is bytes of the weights, ``each`` bytes of them on one device in the end.
    """
    efficiency = efficiency_of(chip)
    given = total / devices
    spread = max(0.0, each - given) / (chip.link * efficiency.links)
    return given / (chip.host_link * efficiency.host) + spread


def _digits(tera: float) -> str:
    return f"{tera:.0f}" if tera >= 10 else f"{tera:.2g}"


def assumptions(chip: Chip) -> str:
    """Returns the efficiencies that the predictions for a chip assume, in words."""
    e = efficiency_of(chip)
    tera, giga = [_digits(value / 1e12) for value in (chip.bf16, chip.float32)], 1e9
    return (
        f"assumed of {chip.name}'s {tera[0]} TFLOP/s (float32 {tera[1]}), as far as a shape fills "
        f"its matrix units of {chip.matrix_unit}: {e.matmul:.0%} in matrix products, {e.attention:.0%} in "
        f"attention, {e.convolution:.0%} in convolutions; {e.passes:.0f} passes over a layer's tokens; "
        f"{e.memory:.0%} of {chip.bandwidth / giga:.0f} GB/s "
        f"of memory, {e.links:.0%} of {chip.link / giga:.0f} GB/s of links, {e.host:.0%} of "
        f"{chip.host_link / giga:.0f} GB/s of host link"
    )
