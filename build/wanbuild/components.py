"""The kinds of component: for each, its config, its module, its mapping table and its dtype policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx

from wanbuild.config import ConfigClass, parse_config
from wanbuild.mapping.rules import Rule
from wanbuild.mapping.transformer import TRANSFORMER_RULES
from wanbuild.mapping.umt5 import UMT5_RULES
from wanbuild.mapping.vae import VAE_RULES
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.transformer_config import TransformerConfig
from wanbuild.models.umt5 import TextEncoderConfig, UMT5Encoder
from wanbuild.models.vae import WanVAE
from wanbuild.models.vae_config import VAEConfig


@dataclass(frozen=True)
class DtypePolicy:
    """Storage dtypes of one component.

    Args:
        weights: matmul and convolution weights with their biases.
        norms: norms, and in the transformer the condition embedder and scale_shift_table.
    """

    weights: str
    norms: str

    def as_json(self) -> dict[str, str]:
        return {"weights": self.weights, "norms": self.norms}


@dataclass(frozen=True)
class ComponentKind:
    """How one kind of component is read, mapped and built.

    Args:
        config_class: the dataclass of its config.json.
        rules: its mapping table.
        build: makes the abstract module from a config, a weights dtype and a norms dtype.
        default_dtype: of the weights, where the user names none.
        option: the command-line option that sets it.
    """

    config_class: type[Any]
    rules: tuple[Rule, ...]
    build: Callable[[Any, Any, Any], nnx.Module]
    default_dtype: str
    option: str

    def parse(self, data: Mapping[str, Any], where: str) -> Any:
        """The config; raises SourceError for anything in it that is not understood."""
        config_class: type[ConfigClass] = self.config_class
        return parse_config(config_class, data, where)

    def module(self, config: Any, policy: DtypePolicy) -> nnx.Module:
        """The abstract module whose parameters have the policy's dtypes."""
        return self.build(config, jnp.dtype(policy.weights), jnp.dtype(policy.norms))

    def policy(self, dtype: str | None) -> DtypePolicy:
        """The policy for a weights dtype; norms stay in float32 whatever it is."""
        return DtypePolicy(dtype or self.default_dtype, "float32")


_TRANSFORMER = ComponentKind(
    TransformerConfig, TRANSFORMER_RULES, WanTransformer, "bfloat16", "--weights-dtype"
)

KINDS: Mapping[str, ComponentKind] = MappingProxyType(
    {
        "transformer": _TRANSFORMER,
        "transformer_2": _TRANSFORMER,
        "vae": ComponentKind(
            VAEConfig,
            VAE_RULES,
            lambda config, weights, norms: WanVAE(config, weights),
            "float32",
            "--vae-weights-dtype",
        ),
        "text_encoder": ComponentKind(
            TextEncoderConfig, UMT5_RULES, UMT5Encoder, "bfloat16", "--text-weights-dtype"
        ),
    }
)
"""By component name."""
