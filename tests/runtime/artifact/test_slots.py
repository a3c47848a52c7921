"""Which inputs the slots are, by the manifest: those that the build declares, for every published model."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from wanbuild.components import kind_of
from wanbuild.models.low_rank import declare_slots
from wanbuild.models.params import abstract_params, flatten, parameter_axes
from wanbuild.plan.published_model import published_manifest, published_names
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.artifact.slots import Slot, slots_of


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["wan2.1-t2v-1.3b", "wan2.1-i2v-14b-480p", "wan2.1-vace-1.3b", "wan2.2-animate-14b"]
)
def test_what_the_build_declares(model: str) -> None:
    manifest = published_manifest(published_names()[model])
    (name, *_), config = TRANSFORMERS, manifest.configs[TRANSFORMERS[0]]
    kind = kind_of(name, config["_class_name"])
    module = declare_slots(kind.module(kind.parse(config, name), manifest.dtypes[name]), 16, jnp.bfloat16)
    axes = parameter_axes(module)
    declared = {
        path: Slot(leaf.shape, axes[path])
        for path, leaf in flatten(abstract_params(module))
        if path.endswith(("lora_a", "lora_b"))
    }
    assert slots_of(manifest.components[name], 16) == declared
    assert slots_of(manifest.components[name], 0) == {}
