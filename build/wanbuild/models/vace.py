"""The VACE transformer: the base model with a shorter stack of control blocks.

Source: diffusers' WanVACETransformer3DModel. The control blocks process the tokens of a control video. Their
outputs, times a scale, are added to the base's tokens after the blocks in ``vace_layers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from wanbuild.config import Index, Size
from wanbuild.models.blocks import KV, WanBlock
from wanbuild.models.layers import Linear
from wanbuild.models.params import stacked
from wanbuild.models.transformer import ApplyBlock, Carry, Condition, WanTransformer
from wanbuild.models.transformer_config import TransformerConfig


@dataclass(frozen=True)
class VACEConfig(TransformerConfig):
    """Config of WanVACETransformer3DModel: the base's fields and two more.

    ``vace_layers`` are the base's blocks that a control block follows. ``vace_in_channels`` are the channels
    of the control video's latents: twice the latents' channels, and 64 of the mask.
    """

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("WanVACETransformer3DModel",)

    vace_layers: tuple[Index, ...] = (0, 5, 10, 15, 20, 25, 30, 35)
    vace_in_channels: Size = 96

    def _problems(self) -> list[str]:
        layers = self.vace_layers
        problems = super()._problems()
        if self.image_dim is not None:
            problems.append(f"image_dim is {self.image_dim}, and no VACE model takes image tokens")
        if list(layers) != sorted(set(layers)) or not layers or layers[-1] >= self.num_layers:
            problems.append(f"vace_layers is {list(layers)}, not ascending layers of {self.num_layers}")
        elif layers[0] != 0:
            problems.append(f"vace_layers is {list(layers)}, and has to begin with 0")
        return problems


class ControlBlock(WanBlock):
    """A block over the control tokens, and the projection of its output to the base's tokens."""

    def __init__(self, config: TransformerConfig, dtype: Any, norm_dtype: Any) -> None:
        super().__init__(config, dtype, norm_dtype)
        self.proj_out = Linear(config.dim, config.dim, dtype, ("embed", "heads"))


class VACETransformer(WanTransformer):
    """The base and the control blocks.

    Its condition is ``control``, float32 (vace_in_channels, T, h, w), and ``scale``, float32 with one number
    per control block.
    """

    config: VACEConfig

    def __init__(self, config: VACEConfig, dtype: Any = jnp.bfloat16, norm_dtype: Any = jnp.float32) -> None:
        super().__init__(config, dtype, norm_dtype)
        patch_in = config.vace_in_channels * config.patch_volume
        self.vace_patch_embedding = Linear(patch_in, config.dim, dtype, ("embed", None))
        self.vace_proj_in = Linear(config.dim, config.dim, dtype, ("embed", "heads"))
        self.vace_blocks = stacked(ControlBlock(config, dtype, norm_dtype), len(config.vace_layers))

    @property
    def stacks(self) -> dict[str, Sequence[int]]:
        return {**super().stacks, "vace_blocks": self.config.vace_layers}

    def carry(self, x: jax.Array, condition: Condition) -> Carry:
        """Returns the base's tokens ``x`` and the ``control`` tokens, of embedded tokens (B, S, D)."""
        control = self.vace_patch_embedding(self.patchify(condition["control"][None]).astype(x.dtype))
        control = (self.vace_proj_in(control, out_dtype=jnp.float32) + x.astype(jnp.float32)).astype(x.dtype)
        return {"x": x, "control": control}

    def per_layer_beside(self, condition: Condition) -> jax.Array:
        return condition["scale"]

    def apply_beside(
        self, apply: ApplyBlock, layer: ControlBlock, carry: Carry, kv: KV, extra: jax.Array
    ) -> Carry:
        """Applies a control block, and adds its output to the base's tokens; ``extra`` is its scale."""
        control = apply(layer, carry["control"], kv)
        hint = layer.proj_out(control, out_dtype=jnp.float32)
        x = carry["x"]
        return {"x": (x.astype(jnp.float32) + hint * extra).astype(x.dtype), "control": control}
