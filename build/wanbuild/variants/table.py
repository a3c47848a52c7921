"""The table of Wan variants: one row per variant, with the module that describes it.

The modules contain model code, so importing them imports JAX and Flax; the names here do not.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from wanbuild.config import shown
from wanbuild.variants.variant import Variant
from wanrun.errors import ArtifactError, SourceError

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "wan2.1-t2v": "text",
        "wan2.1-i2v": "image",
        "wan2.1-flf2v": "image",
        "wan2.1-vace": "control",
        "wan2.2-t2v": "text",
        "wan2.2-i2v": "image",
        "wan2.2-vace": "control",
        "wan2.2-ti2v": "first_frame",
        "wan2.2-animate": "character",
        "anyflow-wan2.1": "flow_map",
        "anyflow-far-wan2.1": "flow_map",
        "self-forcing-wan2.1": "text",
        "helios-wan2.1": "helios",
        "helios-mid-wan2.1": "helios",
        "helios-distilled-wan2.1": "helios",
    }
)
"""The module whose ``ROWS`` have a variant, by the name in ``--variant`` and the manifest."""


@lru_cache
def variants() -> Mapping[str, Variant]:
    """Returns every variant by name."""
    return MappingProxyType({name: _row(name) for name in MODULES})


def _row(name: str) -> Variant:
    rows: tuple[Variant, ...] = importlib.import_module(f"wanbuild.variants.{MODULES[name]}").ROWS
    return next(row for row in rows if row.name == name)


def variant_named(name: object, where: Path) -> Variant:
    """Returns the variant of a name in a manifest.

    Raises ArtifactError if there is no such variant; its message names ``where``, the artifact.
    """
    if not isinstance(name, str) or name not in MODULES:
        raise ArtifactError(
            "other_release",
            f"{where} is of a variant that this wanbuild does not know",
            expected=" or ".join(MODULES),
            found=shown(name),
            remedy="use the version of wanbuild that made it",
        )
    return _row(name)


def variants_of_pipeline(pipeline_class: object, where: str) -> tuple[Variant, ...]:
    """Returns the variants with this pipeline class.

    Raises SourceError if there are none; it names the known ones.
    """
    rows = tuple(
        variant
        for variant in variants().values()
        if pipeline_class in (variant.pipeline_class, *variant.also_saved_as)
    )
    if not rows:
        names: dict[str, list[str]] = {}
        for variant in variants().values():
            names.setdefault(variant.pipeline_class, []).append(variant.name)
        raise SourceError(
            "unsupported",
            f"{where} describes a pipeline that is not supported",
            expected=" or ".join(f"{cls} ({', '.join(found)})" for cls, found in names.items()),
            found=shown(pipeline_class),
            remedy="use a checkpoint of a supported variant, in the diffusers layout",
        )
    return rows
