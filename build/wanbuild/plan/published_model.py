"""Manifests of models without their weights: from the published configs, or from a checkpoint's own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from wanbuild.components import kind_of
from wanbuild.conversion.chosen import Quantise, chosen_layers
from wanbuild.conversion.defaults import model_record
from wanbuild.conversion.orbax import plan_layout
from wanbuild.models.eight_bit import store_in_eight_bits
from wanbuild.models.params import LAYERS, abstract_params, flatten, parameter_axes
from wanbuild.published.base_configs import MODEL_INDEXES
from wanbuild.published.variant_configs import PUBLISHED_MODELS
from wanbuild.source.image_processor import ImageProcessorConfig
from wanbuild.variants.table import variants
from wanbuild.variants.variant import Variant
from wanrun.artifact.manifest import Component, Manifest, Tokenizer
from wanrun.artifact.model import Defaults, Model
from wanrun.artifact.parameters import Parameter
from wanrun.artifact.record import Dtype
from wanrun.errors import UsageError

TEXT_LENGTH = 512
"""Tokens of a prompt with its padding."""

Configs = Mapping[str, Mapping[str, Any]]
"""A checkpoint's config.json by component, of those with weights."""


@lru_cache
def published_names() -> Mapping[str, str]:
    """Returns the published repositories by the name of their model, such as ``wan2.1-t2v-14b``."""
    return MappingProxyType({name.lower().removesuffix("-diffusers"): name for name in PUBLISHED_MODELS})


def published_variant(repository: str) -> Variant:
    """Returns the variant of a published repository: its name begins with the longest of the variants'."""
    name = f"{repository.lower()}-"
    keys = [key for key in variants() if name.startswith(f"{key.removesuffix('-wan2.1')}-")]
    return variants()[max(keys, key=len)]


def published_manifest(
    repository: str, dtypes: Mapping[str, Dtype | None] | None = None, quantise: Quantise | None = None
) -> Manifest:
    """Returns the manifest of a published model, named as in the organisation Wan-AI.

    ``dtypes`` are stored dtypes by component, the default ones where not given; ``quantise`` is which layers
    are stored in 8 bits.
    """
    variant = published_variant(repository)
    boundary = MODEL_INDEXES[variant.name].get("boundary_ratio")
    return model_manifest(variant, PUBLISHED_MODELS[repository], boundary, dtypes, quantise)


def model_manifest(
    variant: Variant,
    configs: Configs,
    boundary: float | None = None,
    dtypes: Mapping[str, Dtype | None] | None = None,
    quantise: Quantise | None = None,
    places: Mapping[str, str] | None = None,
) -> Manifest:
    """Returns the manifest that a conversion would write, without files and checksums.

    ``boundary`` is the share of the training timesteps below which the low-noise expert runs; None for one
    expert. ``dtypes`` are stored dtypes by component, the default ones where not given; ``quantise`` is which
    layers are stored in 8 bits; ``places`` are the names of the configs' files, for errors.

    Raises SourceError for a config that the variant cannot have, and UsageError if the layers do not exist or
    are only known after conversion, as those of the source.
    """
    kinds = {name: kind_of(name, config.get("_class_name")) for name, config in configs.items()}
    named = {name: f"config of {name}" for name in configs} | dict(places or {})
    parsed = {name: kinds[name].parse(config, named[name]) for name, config in configs.items()}
    policies = {name: kind.policy((dtypes or {}).get(name)) for name, kind in kinds.items()}
    if quantise is not None and quantise.form == "source":
        raise UsageError(
            "unsupported",
            "--quantise source cannot be planned",
            remedy="plan int8, or q8_0 for a GGUF of Q8_0: as large",
        )
    modules = {name: kind.module(parsed[name], policies[name]) for name, kind in kinds.items()}
    for name, layers in chosen_layers(quantise, modules).items():
        policies[name] = replace(policies[name], eight_bit=layers)
        modules[name] = store_in_eight_bits(modules[name], layers)
    return Manifest(
        model=_model(variant, parsed, boundary),
        configs={name: dict(config) for name, config in configs.items()},
        source={"files": {}},
        loras=(),
        profiles={},
        program_sets={},
        targets={},
        golden={},
        embeddings={},
        tool={},
        times={},
        dtypes=policies,
        components={name: _component(name, module) for name, module in modules.items()},
        tokenizer=Tokenizer(file="tokenizer.json", sha256="", max_length=TEXT_LENGTH, pad_id=0),
    )


def _model(variant: Variant, parsed: Mapping[str, Any], boundary: float | None) -> Model:
    defaults = Defaults(
        num_steps=variant.steps,
        guidance_scale=variant.guidance_scale,
        flow_shift=variant.flow_shift,
        solver=variant.solver,
        fps=variant.fps,
        negative_prompt=variant.negative_prompt,
    )
    options = {name: value for name, value in variant.options.items() if not isinstance(value, str)}
    if boundary is not None:
        options["boundary"] = boundary
    return model_record(
        variant,
        parsed,
        image_processor=ImageProcessorConfig().record if variant.encoded_images else None,
        expand_timesteps=variant.expand_timesteps,
        defaults=defaults,
        options=options,
        pyramid=variant.pyramid,
    )


def _component(name: str, module: Any) -> Component:
    """Returns a component's entry, with every checksum zero."""
    axes, parameters = parameter_axes(module), dict[str, Parameter]()
    for path, leaf in flatten(abstract_params(module)):
        layout = plan_layout(leaf.shape, str(leaf.dtype), stacked=axes[path][0] == LAYERS)
        parameters[path] = Parameter(
            layout=layout, axes=axes[path], crc32c=("00000000",) * layout.rows, sha256=""
        )
    return Component(f"weights/{name}", parameters)
