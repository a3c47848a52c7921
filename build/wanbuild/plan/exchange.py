"""The bytes that one device of a mesh sends in a pass of a denoising step, by formula.

Shown equal to the compiled HLO, but for the latents once a step, by ``benchmarks/mesh.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from wanbuild.models.params import LAYERS
from wanbuild.models.partition import PARAMETERS, SEQUENCE
from wanbuild.programs.shape import Shape
from wanrun.artifact.manifest import Component
from wanrun.artifact.mesh import GATHERED, Sizes, cut, jax_sizes, paired

PREPARED = ("blocks/attn2/to_k", "blocks/attn2/to_v")
"""Parameters that a step does not use: ``prepare`` does, once."""


@dataclass(frozen=True)
class PlannedStep:
    """A denoising step of the transformer, with its entry in a manifest.

    ``latent_shape`` is latent frames, rows and columns; ``text_length`` is tokens of a prompt with its
    padding. ``activation_bytes`` are bytes of a value that travels: two on a chip, four between CPU devices.
    """

    config: Any
    component: Component
    shape: Shape
    latent_shape: tuple[int, int, int]
    text_length: int
    activation_bytes: int = 2

    def passes(self, sizes: Sizes) -> int:
        """Returns the passes that a device makes one after the other, of both prompts unless ``paired``."""
        return 2 if self.shape.guidance and not paired(sizes) else 1

    def batch(self, sizes: Sizes) -> int:
        """Returns the videos of a pass; where both prompts' are made at once, each counts twice."""
        return self.shape.num_videos * (1 + self.shape.guidance) // self.passes(sizes)

    @property
    def tokens(self) -> int:
        """Tokens of a video."""
        return math.prod(self.config.grid(self.latent_shape))

    @property
    def layers(self) -> int:
        """Layers of the transformer, those of controls too."""
        return int(self.config.num_layers + _more_layers(self.config))

    def tokens_of(self, sizes: Sizes) -> float:
        """Returns the tokens of one device, padding included, of all videos that it computes in a pass."""
        parts = math.prod(sizes.get(axis, 1) for axis in SEQUENCE)
        return self.batch(sizes) / sizes.get("data", 1) * -(-self.tokens // parts)

    def sent(self, sizes: Sizes) -> dict[str, float]:
        """Returns the bytes that one device sends in a pass, by kind of collective.

        ``sizes`` has devices by axis.
        """
        config = self.config
        ring, fsdp, context, tensor, data = (
            sizes.get(axis, 1) for axis in ("ring", "fsdp", "context", "tensor", "data")
        )
        exchanged, parts = fsdp * context, ring * fsdp * context
        tokens, layers = self.tokens_of(sizes), self.layers
        # Queries, or keys, or values of one device.
        values = tokens * config.dim / tensor * self.activation_bytes
        # Keys and values of a prompt are kept in parts of heads, as bits of bfloat16.
        cache, stored = 2 * self.text_length * config.dim / tensor * 2, self.stored_parts(sizes)
        out = config.patch_volume * config.out_channels * 4
        return {
            "all-to-all": 4 * layers * values * (exchanged - 1) / exchanged,
            "collective-permute": 2 * layers * values * (ring - 1),
            "all-reduce": 2 * (tensor - 1) / tensor * layers * tokens * (3 * config.dim + 3) * 4,
            "all-gather": layers * cache * (stored - 1) / stored
            + self._gathered_bytes(sizes) * (fsdp - 1) / fsdp
            + (parts - 1) * tokens * out
            + (data - 1) * tokens * parts * out,
        }

    def stored_parts(self, sizes: Sizes) -> int:
        """Returns into how many parts of heads keys and values of text are cut, in addition to ``tensor``."""
        tensor, stored = sizes.get("tensor", 1), 1
        for size in (sizes.get(axis, 1) for axis in ("context", "fsdp", "ring")):
            if self.config.num_attention_heads % (tensor * stored * size) == 0:
                stored *= size
        return stored

    def _gathered_bytes(self, sizes: Sizes) -> float:
        """Returns the bytes of the layers' parameters that are gathered along ``fsdp``."""
        named, total = jax_sizes(sizes), 0.0
        for name, one in self.component.parameters.items():
            cuts = cut(one.axes, one.layout.shape, PARAMETERS, named)
            along = [axis for axes in cuts for axis in axes]
            if one.axes[0] == LAYERS and GATHERED in along and not name.startswith(PREPARED):
                total += one.layout.nbytes / math.prod(named[axis] for axis in along if axis != GATHERED)
        return total


def _more_layers(config: Any) -> int:
    """Returns the control blocks of a VACE model, which are like the others."""
    return len(getattr(config, "vace_layers", ()))
