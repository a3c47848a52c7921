"""Modules of diffusers with random values for every parameter, and ours with the same.

A transformer's kind is a row of ``KINDS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import diffusers
import jax.numpy as jnp
import numpy as np
import torch
from diffusers.models.transformers.transformer_wan_animate import MotionConv2d, MotionLinear

from helpers.compiling import fast_jit
from helpers.naive import load_params
from wanbuild.mapping.rules import Rule
from wanbuild.mapping.transformer_rules import ANIMATE_RULES, HELIOS_RULES, TRANSFORMER_RULES, VACE_RULES
from wanbuild.models.animate import AnimateTransformer
from wanbuild.models.animate_config import AnimateConfig
from wanbuild.models.anyflow import AnyFlowConfig, AnyFlowTransformer
from wanbuild.models.anyflow_far import AnyFlowFARConfig, AnyFlowFARTransformer
from wanbuild.models.attention import blocked_attention
from wanbuild.models.helios import HeliosConfig, HeliosTransformer
from wanbuild.models.params import bind
from wanbuild.models.self_forcing import SelfForcingConfig, SelfForcingTransformer
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.transformer_config import TransformerConfig
from wanbuild.models.vace import VACEConfig, VACETransformer


def randomise(module: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """Gives every parameter a random value that keeps activations near one; returns the state dict.

    Norm scales are near 1, biases and small tables near 0, matrices have 1/√fan_in. The published initial
    values (scales of one, biases of zero) would hide a swapped or missing parameter. Weights of the motion
    encoder, which scales them as it uses them, have a deviation of one: scaled twice, a motion would hardly
    depend on the face.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim == 1 or "table" in name or "attention_bias" in name:
                parameter.copy_(0.2 * noise)
            elif name == "shared.weight":
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / np.sqrt(parameter[0].numel()))
        for part in module.modules():
            if isinstance(part, MotionConv2d | MotionLinear):
                part.weight.mul_(math.sqrt(part.weight[0].numel()))
    return {name: value.numpy() for name, value in module.state_dict().items()}


def relative_error(value: Any, reference: Any) -> float:
    """‖value − reference‖ / ‖reference‖ in float64."""
    reference = np.asarray(reference, np.float64)
    return float(np.linalg.norm(np.asarray(value, np.float64) - reference) / np.linalg.norm(reference))


def normal(seed: int, *shape: int) -> np.ndarray:
    """Random float32 numbers, others for each shape."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)


class Kind(NamedTuple):
    """A kind of transformer: diffusers' class, our config and module, mapping rules, fields of a config."""

    reference: str
    config: Callable[..., Any]
    module: Callable[..., Any]
    rules: Sequence[Rule]
    fields: Mapping[str, Any] = {}


SIZES: Mapping[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "ffn_dim": 64,
    "num_layers": 4,
    "text_dim": 32,
    "freq_dim": 64,
}
CHUNKED: Mapping[str, Any] = {"attention_head_dim": 20, "ffn_dim": 56, "num_layers": 3}
IMAGES: Mapping[str, Any] = {"image_dim": 40, "added_kv_proj_dim": 48}
"""The image branch."""

FACES: Mapping[str, Any] = {
    "motion_encoder_channel_sizes": {"4": 12, "8": 10, "16": 6, "32": 7, "64": 5},
    "motion_encoder_size": 16,
    "motion_style_dim": 18,
    "motion_dim": 5,
    "motion_encoder_dim": 14,
    "face_encoder_hidden_dim": 20,
    "face_encoder_num_heads": 3,
    "inject_face_latents_blocks": 2,
    "motion_encoder_batch_size": 4,
}
FLOW_MAP: Mapping[str, Any] = {**CHUNKED, "gate_value": 0.3}
KINDS: Mapping[str, Kind] = {
    "wan": Kind("WanTransformer3DModel", TransformerConfig, WanTransformer, TRANSFORMER_RULES),
    "vace": Kind(
        "WanVACETransformer3DModel", VACEConfig, VACETransformer, VACE_RULES, {"vace_in_channels": 96}
    ),
    "animate": Kind(
        "WanAnimateTransformer3DModel",
        AnimateConfig,
        AnimateTransformer,
        ANIMATE_RULES,
        {**IMAGES, **FACES},
    ),
    "anyflow": Kind(
        "AnyFlowTransformer3DModel", AnyFlowConfig, AnyFlowTransformer, TRANSFORMER_RULES, FLOW_MAP
    ),
    "anyflow-far": Kind(
        "AnyFlowFARTransformer3DModel",
        AnyFlowFARConfig,
        AnyFlowFARTransformer,
        TRANSFORMER_RULES,
        FLOW_MAP,
    ),
    "helios": Kind(
        "HeliosTransformer3DModel",
        HeliosConfig,
        HeliosTransformer,
        HELIOS_RULES,
        {**CHUNKED, "rope_dim": (8, 6, 6)},
    ),
    "self-forcing": Kind(
        "WanTransformer3DModel",
        SelfForcingConfig,
        SelfForcingTransformer,
        TRANSFORMER_RULES,
        {**CHUNKED, "num_layers": 30},
    ),
}


class Transformers:
    """A transformer of diffusers, and ours with the same random weights.

    Args:
        kind: one of ``KINDS``.
        seed: of the weights.
        own: fields of our config alone.
        changes: of the kind's fields.
    """

    def __init__(
        self, kind: str, seed: int = 0, own: Mapping[str, Any] | None = None, **changes: Any
    ) -> None:
        self._kind = row = KINDS[kind]
        fields = {**SIZES, **row.fields, **changes}
        self.reference = getattr(diffusers, row.reference)(**fields).eval()
        self.config = row.config(**fields, **(own or {}))
        self.module = self.of(jnp.float32)
        self.state = randomise(self.reference, seed)
        self.params = load_params(self.state, row.rules, self.module)
        self._compiled = fast_jit(self._forward, static_argnums=(6, 7))

    def of(self, dtype: Any) -> Any:
        """Our module with weights of this dtype."""
        return self._kind.module(self.config, dtype, dtype)

    def _forward(
        self, params: Any, x: Any, t: Any, text: Any, condition: Any, inputs: Any, multiple: int, dtype: Any
    ) -> Any:
        model = bind(self.of(dtype), params)
        more = {"image_multiple": multiple} if "image_tokens" in inputs else {}
        cache, rope = model.prepare(text, x.shape[2:], dtype, **inputs, **more)
        return model(x, t, cache, rope, condition, blocked_attention, dtype)

    def ours(
        self,
        x: np.ndarray,
        t: Any,
        text: np.ndarray,
        condition: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
        params: Any = None,
        multiple: int = 1,
        dtype: Any = jnp.float32,
    ) -> np.ndarray:
        """Our velocity.

        Args:
            x: the latents (B, C, T, h, w).
            t: the timestep, or one of each group of tokens.
            text: embeddings of the prompts (P, 512, text_dim).
            condition: what each step is given.
            inputs: what is prepared once.
            params: in place of the weights.
            multiple: image tokens are padded to it.
            dtype: of weights and computation.
        """
        params = self.params if params is None else params
        given = np.asarray(t, np.float32), text, condition or {}, inputs or {}
        return np.asarray(self._compiled(params, x, *given, multiple, dtype))

    def theirs(self, x: np.ndarray, t: Any, text: np.ndarray, **inputs: np.ndarray) -> np.ndarray:
        """The reference's velocity; a timestep is one for all, or one for each token."""
        times = torch.full((len(x),), t) if isinstance(t, int | float) else torch.from_numpy(t)
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        with torch.no_grad():
            made = self.reference(
                torch.from_numpy(x), times, torch.from_numpy(text), **tensors, return_dict=False
            )
        return made[0].numpy()  # type: ignore[no-any-return]
