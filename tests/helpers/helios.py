"""The transformer of Helios and diffusers', with the same random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from diffusers import HeliosTransformer3DModel

from helpers.fast_compile import fast_jit
from helpers.naive import load_params
from helpers.reference_models import randomise
from wanbuild.mapping.transformer_rules import HELIOS_RULES
from wanbuild.models.attention import blocked_attention
from wanbuild.models.helios import HeliosConfig, HeliosTransformer
from wanbuild.models.params import bind

FIELDS: Mapping[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 20,
    "ffn_dim": 56,
    "num_layers": 3,
    "text_dim": 32,
    "freq_dim": 64,
    "rope_dim": (8, 6, 6),
}


class Pair:
    """The reference and ours, of one config."""

    def __init__(self, **changes: Any) -> None:
        fields = {**FIELDS, **changes}
        self.reference = HeliosTransformer3DModel(**fields).eval()
        module = HeliosTransformer(HeliosConfig(**fields), jnp.float32)
        self.params = load_params(randomise(self.reference, seed=7), HELIOS_RULES, module)

        def forward(params: Any, x: Any, t: Any, embeddings: Any, first: Any, past: Any) -> Any:
            model = bind(module, params)
            kv, _ = model.prepare(embeddings, x.shape[2:], jnp.float32)
            rope = model.tables(x.shape[2:], past.shape[3:])
            condition = {"first": first, "past": past}
            return model(x, t, kv, rope, condition, blocked_attention, jnp.float32)

        self.forward = fast_jit(forward)

    def expected(self, x: Any, t: float, embeddings: Any, first: Any, past: Any) -> np.ndarray:
        """The reference's velocity, given what its pipeline gives it."""
        ends = np.cumsum([1, 16, 2, 1, x.shape[2]])
        zero, long, mid, recent, chunk = np.split(np.arange(ends[-1]), ends[:-1])
        indices = {"hidden_states": chunk, "latents_history_short": np.concatenate([zero, recent])}
        indices |= {"latents_history_mid": mid, "latents_history_long": long}
        history = {
            "latents_history_short": np.concatenate([first, past[:, :, -1:]], axis=2),
            "latents_history_mid": past[:, :, -3:-1],
            "latents_history_long": past[:, :, :16],
        }
        with torch.no_grad():
            return self.reference(  # type: ignore[no-any-return]
                torch.from_numpy(x),
                torch.full((len(x),), t),
                torch.from_numpy(embeddings),
                **{f"indices_{name}": torch.from_numpy(at)[None] for name, at in indices.items()},
                **{name: torch.from_numpy(value) for name, value in history.items()},
                return_dict=False,
            )[0].numpy()
