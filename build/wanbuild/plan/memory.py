"""The memory that a generation takes on each device, by formula.

A device holds weights, with each transformer's slots, and the largest program's inputs, outputs and
temporaries, as ``wanrun`` counts it too. The programs' code, some ten MB, is left out. Weights lie there in
one of four ways (``HELD``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from wanbuild.models.blocks import HIDDEN_BYTES
from wanbuild.plan.planned_generation import PlannedCalls, PlannedGeneration
from wanbuild.programs.shape import Shape
from wanrun import EIGHT_BITS
from wanrun.artifact.manifest import TINY_VAE
from wanrun.artifact.mesh import Sizes, num_devices
from wanrun.artifact.roles import ROLES
from wanrun.machine.memory import DEVICE_MARGIN
from wanrun.weights.layers import AHEAD

HELD: Mapping[str, str] = MappingProxyType(
    {
        "all": "all weights on the device",
        "one": "one expert on the device, the other in host memory",
        "low": "--memory low: the text encoder leaves before the first step",
        "stream": "--loop stream: layers pass through the device, from the host's memory",
    }
)
"""The ways to hold weights, the fastest first."""


@dataclass(frozen=True)
class VaeCopies:
    """Activations at the VAE's largest level that a compiler keeps at once.

    ``piece`` is of a decoder's piece, without the history of each convolution, which is among its inputs. A
    window's ``decoder`` and an ``encoder`` have their history within; the largest level of a ``tile`` is its
    own.
    """

    piece: float
    decoder: float
    tile: float
    encoder: float


VAE_COPIES: Mapping[str, VaeCopies] = MappingProxyType(
    {
        "cuda": VaeCopies(piece=6.5, decoder=12.5, tile=18.5, encoder=9.5),
        "tpu": VaeCopies(piece=9.5, decoder=16, tile=16, encoder=16),
        "cpu": VaeCopies(piece=9.5, decoder=13, tile=13, encoder=11),
    }
)
"""The same by platform, of compiled programs of two sizes (docs/notes/media.md)."""

KEPT_WIDTH = 1.75
"""How much more a decoder with patches keeps: its upsampling does not halve the channels, so that its largest
level begins with twice as many. Of programs compiled for three platforms: 1.6 to 1.9."""

LANES = 128
"""Channels that a TPU's activations have at least, and a multiple of."""

TINY_COPIES = 3
"""The same of the tiny decoder's largest level. Of one compiled for a CPU: 2.4 to 2.6."""

PAST_COPIES = 2.5
"""How often one layer's keys and values of earlier chunks are held at once: cut out, and with the chunk's."""

CHIP_VALUES = 9
"""Values of the width, in the compute dtype, that a chip holds at once of a pass. Of compiled programs
(docs/notes/quantised.md, "What programs keep"): 8.2 to 11.2."""


@dataclass(frozen=True)
class Figures:
    """The bytes of one program on one device.

    ``arguments`` are weights, inputs and outputs; ``temporaries`` are the largest block of intermediate
    results.
    """

    arguments: int
    temporaries: int


@dataclass(frozen=True)
class Need:
    """The bytes that a device needs: those of weights, and those of everything else, ``working``.

    ``held`` is how weights lie, a key of ``HELD``; ``limit`` is the bytes of the device that may be used.
    """

    held: str
    weights: int
    working: int
    limit: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.working

    @property
    def fits(self) -> bool:
        """Whether a device has so much."""
        return self.total <= self.limit


def usable(memory_bytes: int) -> int:
    """Returns the bytes of a device that may be used: ``wanrun`` leaves a margin."""
    return int(memory_bytes * (1 - DEVICE_MARGIN))


def need(generation: PlannedGeneration, sizes: Sizes, figures: Mapping[str, Figures]) -> Need:
    """Returns what a generation needs on each device: with the fastest way to hold weights that fits.

    If none fits, that is the need of the last. ``sizes`` has devices by axis, and ``figures`` those of its
    programs, by name.
    """
    weights = {name: generation.weights(name, sizes) for name in generation.components}
    working = {
        call.name: generation.beside_bytes(call.name, sizes)
        + generation.kept_bytes(call.name)
        + figures[call.name].temporaries
        for call in generation.calls
    }
    during_text = max(working[call.name] for call in generation.calls if ROLES[call.role].when == "prompts")
    largest = max(working.values())
    slots = generation.slots_bytes(sizes)
    experts = [weights.pop(name) + slots for name in generation.experts]
    text = weights.pop("text_encoder")
    others, limit = sum(weights.values()), usable(generation.chip.memory_bytes)

    def phased(transformer: int) -> tuple[int, int]:
        """Returns the larger need: with only the text encoder, or with the transformer after it has left."""
        return max((text + others, during_text), (transformer + others, largest), key=sum)

    ways = {
        "all": (sum(experts) + others + text, largest),
        "one": (max(experts) + others + text, largest),
        "low": phased(max(experts)),
    }
    if num_devices(sizes) == 1 and not generation.chunked:
        ways["stream"] = phased(generation.streamed_bytes(1 + AHEAD) + slots)
    if generation.streams:
        ways = {"stream": ways["stream"]}
    needs = [Need(held, nbytes, beside, limit) for held, (nbytes, beside) in ways.items()]
    return next((one for one in needs if one.fits), needs[-1])


def estimated(generation: PlannedGeneration, sizes: Sizes) -> dict[str, Figures]:
    """Returns the figures of every program by formula.

    A pass holds the feed-forward's hidden values in float32 and bfloat16, and four values of the width; with
    ``fsdp`` a layer's weights too. On a chip that holds fewer hidden values (``FeedForward.parts``) it has
    ``CHIP_VALUES`` of the width of one video, and of several videos two of all. A pass of the VAE holds
    ``VAE_COPIES`` of its largest level. A chunk's holds one layer's keys and values of earlier chunks too.
    """
    figures = {}
    for call in generation.calls:
        weights = 0 if call.component is None else generation.weights(call.component, sizes)
        slots = generation.slots_bytes(sizes) if call.component in generation.experts else 0
        arguments = weights + slots + generation.beside_bytes(call.name, sizes)
        figures[call.name] = Figures(arguments, int(_temporary_bytes(generation, call, sizes)))
    return figures


def _temporary_bytes(generation: PlannedGeneration, call: PlannedCalls, sizes: Sizes) -> float:
    if call.component is None:  # it computes a little of what it is given
        return 0.0
    if ROLES[call.role].when == "steps":
        past = generation.past_bytes(call.name) / generation.step.layers
        return _step_bytes(generation, call, sizes) + PAST_COPIES * past
    if call.component == TINY_VAE:
        return _tiny_bytes(generation)
    if call.component == "vae":
        return _vae_bytes(generation, call, sizes)
    return _gathered_bytes(generation, call.component, sizes)


def _step_bytes(generation: PlannedGeneration, call: PlannedCalls, sizes: Sizes) -> float:
    config: Any = generation.step.config
    item, tensor = 4 if generation.options.dtype == "float32" else 2, sizes.get("tensor", 1)
    tokens = generation.step_of(call).tokens_of(sizes)
    in_parts = num_devices(sizes) == 1 and generation.chip.platform != "cpu"
    if in_parts and 4 * tokens * config.ffn_dim > HIDDEN_BYTES:
        videos, values = generation.step.batch(sizes), item * tokens * config.dim
        hidden = min(HIDDEN_BYTES, item * tokens / videos * config.ffn_dim) * (
            3 if _scales_rows(generation) else 1
        )
        return 2 * values * (videos > 1) + max(CHIP_VALUES * values, hidden * videos + 6 * values) / videos
    hidden, width = (4 + item) * config.ffn_dim / tensor, (4 + 2 * item) * config.dim
    layer = _gathered_bytes(generation, generation.experts[0], sizes)
    return tokens * (hidden + width) + layer


def _scales_rows(generation: PlannedGeneration) -> bool:
    """Whether products are scaled, and so are kept in float32 as well as rounded."""
    layers = generation.manifest.dtypes[generation.experts[0]].eight_bit
    return any(not EIGHT_BITS[form].block for form in layers.values())


def _vae_bytes(generation: PlannedGeneration, call: PlannedCalls, sizes: Sizes) -> float:
    decoder = ROLES[call.role].when == "video"
    config, shape, options = generation.config("vae"), generation.shape, generation.options
    chunk = options.vae_decode_chunk if decoder else options.vae_encode_chunk
    patch, tile = config.patch_size or 1, options.vae_tile if num_devices(sizes) == 1 else 0
    pixels, joined = shape.width * shape.height / patch**2, 0
    # diffusers' tiles of an encoder with patches are of patches.
    side = tile // patch if decoder else tile
    tiled = tile > 0 and max(shape.width, shape.height) > side * patch
    if tiled:
        pixels = min(pixels, side**2)
        joined = _joined_bytes(shape, tile) if decoder else 0
    if tiled and decoder and generation.chip.platform == "cuda":  # which lays weights out anew for the loop
        joined += generation.weights("vae", sizes)
    channels = config.decoder_dim if decoder else config.base_dim
    if generation.chip.platform == "tpu":
        channels = -(-channels // LANES) * LANES
    item = 4 if options.vae_dtype == "float32" else 2
    frames = 1 if call.role == "decode_first" else chunk * generation.manifest.model.vae_temporal
    largest = frames * pixels * channels * item / num_devices(sizes)
    return _vae_copies(generation, call, tiled) * largest + joined


def _vae_copies(generation: PlannedGeneration, call: PlannedCalls, tiled: bool) -> float:
    copies = VAE_COPIES[generation.chip.platform]
    if ROLES[call.role].when != "video":
        return copies.encoder
    held = copies.tile if tiled else copies.piece if generation.carried(call.name) else copies.decoder
    return held * (KEPT_WIDTH if generation.config("vae").patch_size else 1)


def _joined_bytes(shape: Shape, tile: int) -> int:
    """Returns the bytes of decoded tiles: of two in float32, of the row above's ends, and of whole parts."""
    step = tile * 3 // 4
    width, height = (-(-side // step) * step for side in (shape.width, shape.height))
    return 3 * shape.num_frames * (4 * (2 * tile**2 + width * (tile - step)) + width * height)


def _tiny_bytes(generation: PlannedGeneration) -> float:
    config, shape, options = generation.config(TINY_VAE), generation.shape, generation.options
    pixels = shape.width * shape.height / config.patch_size**2
    item = 4 if options.vae_dtype == "float32" else 2
    frames = options.vae_decode_chunk * generation.manifest.model.vae_temporal
    return TINY_COPIES * frames * pixels * config.widths[-1] * item


def _gathered_bytes(generation: PlannedGeneration, component: str, sizes: Sizes) -> float:
    """Returns the bytes of two layers that are gathered along ``fsdp``, the one in use and the next."""
    if sizes.get("fsdp", 1) == 1:
        return 0.0
    layers = generation.config(component).num_layers if component != "image_encoder" else 1
    return 2 * generation.weights(component, {"tensor": sizes.get("tensor", 1)}) / layers
