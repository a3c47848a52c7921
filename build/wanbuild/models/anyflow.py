"""The transformer of AnyFlow, a flow map: its steps know the timestep at which they end.

Source: diffusers' AnyFlowTransformer3DModel, which is Wan's with a second embedder of timesteps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from wanbuild.config import Number
from wanbuild.models.condition_embedder import MLP, ConditionEmbedder
from wanbuild.models.transformer import Condition, WanTransformer
from wanbuild.models.transformer_config import TransformerConfig


@dataclass(frozen=True)
class AnyFlowConfig(TransformerConfig):
    """Config of AnyFlowTransformer3DModel: the base's fields and two more.

    ``gate_value`` is the share of the second embedding in the time's. ``deltatime_type`` says what it embeds:
    the timestep at which a step ends ("r"), or the difference to it ("t-r").
    """

    CLASS_NAMES: ClassVar[tuple[str, ...]] = ("AnyFlowTransformer3DModel",)

    gate_value: Number = 0.25
    deltatime_type: Literal["r", "t-r"] = "r"

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.image_dim is not None:
            problems.append(f"image_dim is {self.image_dim}, and AnyFlow takes no image tokens")
        return problems


class AnyFlowEmbedder(ConditionEmbedder):
    """Embeds two timesteps, and text, in float32."""

    def __init__(self, config: AnyFlowConfig, dtype: Any) -> None:
        super().__init__(config, dtype)
        self.delta_embedder = MLP(config.freq_dim, config.dim, config.dim, dtype, "silu")
        self.gate, self.difference = config.gate_value, config.deltatime_type == "t-r"

    def between(self, timesteps: jax.Array, ends: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns what ``time`` does, for steps between float32 timesteps (...,) and those they end at."""
        delta = self.embedded(self.delta_embedder, timesteps - ends if self.difference else ends)
        embedding = (1 - self.gate) * self.embedded(self.time_embedder, timesteps) + self.gate * delta
        return embedding, self.modulation(embedding)


class AnyFlowTransformer(WanTransformer):
    """The base with the second embedder; its condition is ``next_timestep``, a float32 scalar."""

    config: AnyFlowConfig
    condition_embedder: AnyFlowEmbedder

    def __init__(
        self, config: AnyFlowConfig, dtype: Any = jnp.bfloat16, norm_dtype: Any = jnp.float32
    ) -> None:
        super().__init__(config, dtype, norm_dtype)
        self.condition_embedder = AnyFlowEmbedder(config, norm_dtype)

    def time(self, timesteps: jax.Array, condition: Condition) -> tuple[jax.Array, jax.Array]:
        """Embeds timesteps together with the one at which the step ends."""
        return self.condition_embedder.between(timesteps, condition["next_timestep"])
