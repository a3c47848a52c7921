"""The kinds of component: for each, its config, its module, its mapping table and its dtype policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx

from wanbuild.config import ConfigClass, parse_config
from wanbuild.mapping.encoder_rules import CLIP_RULES, UMT5_RULES
from wanbuild.mapping.rules import Rule
from wanbuild.mapping.transformer_rules import ANIMATE_RULES, HELIOS_RULES, TRANSFORMER_RULES, VACE_RULES
from wanbuild.mapping.vae_rules import TINY_VAE_RULES, VAE_RULES
from wanbuild.models.animate import AnimateTransformer
from wanbuild.models.animate_config import AnimateConfig
from wanbuild.models.anyflow import AnyFlowConfig, AnyFlowTransformer
from wanbuild.models.anyflow_far import AnyFlowFARConfig, AnyFlowFARTransformer
from wanbuild.models.clip import CLIPImageEncoder
from wanbuild.models.clip_config import ImageEncoderConfig
from wanbuild.models.eight_bit import store_in_eight_bits
from wanbuild.models.helios import HeliosConfig, HeliosTransformer
from wanbuild.models.self_forcing import SelfForcingConfig, SelfForcingTransformer
from wanbuild.models.tiny_vae import TinyVAE
from wanbuild.models.transformer import WanTransformer
from wanbuild.models.transformer_config import TransformerConfig
from wanbuild.models.umt5 import TextEncoderConfig, UMT5Encoder
from wanbuild.models.vace import VACEConfig, VACETransformer
from wanbuild.models.vae import WanVAE
from wanbuild.models.vae_config import TinyVAEConfig, VAEConfig
from wanrun.artifact.manifest import TINY_VAE
from wanrun.artifact.parameters import DtypePolicy
from wanrun.artifact.record import Dtype


@dataclass(frozen=True)
class ComponentKind:
    """The classes, mapping table and dtypes with which one kind of component is read and built.

    ``build`` makes the abstract module from a config, a weights dtype and a norms dtype. ``option`` is the
    command-line option that sets the weights dtype, otherwise ``default_dtype``.
    """

    config_class: type[Any]
    rules: tuple[Rule, ...]
    build: Callable[[Any, Any, Any], nnx.Module]
    default_dtype: Dtype
    option: str

    def parse(self, data: Mapping[str, Any], where: str) -> Any:
        """Returns the config; raises SourceError as ``parse_config`` does. ``where`` names the file."""
        config_class: type[ConfigClass] = self.config_class
        return parse_config(config_class, data, where)

    def module(self, config: Any, policy: DtypePolicy) -> nnx.Module:
        """Returns the abstract module whose parameters have the policy's dtypes."""
        module = self.build(config, jnp.dtype(policy.weights), jnp.dtype(policy.norms))
        return store_in_eight_bits(module, policy.eight_bit)

    def policy(self, dtype: Dtype | None) -> DtypePolicy:
        """Returns the policy for a weights dtype, None for the default one; norms are always in float32."""
        return DtypePolicy(dtype or self.default_dtype, "float32")


def _transformer(config_class: type[Any], rules: tuple[Rule, ...], build: type[Any]) -> ComponentKind:
    return ComponentKind(config_class, rules, build, "bfloat16", "--weights-dtype")


_TRANSFORMER = _transformer(TransformerConfig, TRANSFORMER_RULES, WanTransformer)

_VARIANTS: tuple[ComponentKind, ...] = (
    _transformer(VACEConfig, VACE_RULES, VACETransformer),
    _transformer(AnimateConfig, ANIMATE_RULES, AnimateTransformer),
    _transformer(AnyFlowConfig, TRANSFORMER_RULES, AnyFlowTransformer),
    _transformer(AnyFlowFARConfig, TRANSFORMER_RULES, AnyFlowFARTransformer),
    _transformer(HeliosConfig, HELIOS_RULES, HeliosTransformer),
    _transformer(SelfForcingConfig, TRANSFORMER_RULES, SelfForcingTransformer),
)
"""The kinds of transformer whose class is not the base class, ``WanTransformer3DModel``."""

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
        TINY_VAE: ComponentKind(
            TinyVAEConfig,
            TINY_VAE_RULES,
            lambda config, weights, norms: TinyVAE(config, weights),
            "float32",
            "--vae-weights-dtype",
        ),
        "text_encoder": ComponentKind(
            TextEncoderConfig, UMT5_RULES, UMT5Encoder, "bfloat16", "--text-weights-dtype"
        ),
        "image_encoder": ComponentKind(
            ImageEncoderConfig, CLIP_RULES, CLIPImageEncoder, "bfloat16", "--text-weights-dtype"
        ),
    }
)
"""The kinds by component name. A transformer's is that of the base class; ``kind_of`` finds the others."""


def kind_of(name: str, class_name: str | None) -> ComponentKind:
    """Returns the kind of a component of ``KINDS``; for a transformer it depends on the class.

    ``class_name`` has no library: it is model_index.json's, which the config must not contradict, or that of
    the config in a manifest. None means the base class.
    """
    for variant in _VARIANTS:
        if KINDS[name] is _TRANSFORMER and class_name in variant.config_class.CLASS_NAMES:
            return variant
    return KINDS[name]
