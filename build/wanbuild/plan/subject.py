"""The subject of a plan: a published model, a checkpoint's folder, a recipe or an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from wanbuild.build_options import DTYPE_OF
from wanbuild.conversion.chosen import Quantise, parse_quantise
from wanbuild.hub.repository import locate_tokenizer
from wanbuild.plan.published_model import (
    model_manifest,
    published_manifest,
    published_names,
    published_variant,
)
from wanbuild.recipe import Recipe, read_recipe
from wanbuild.source.all_in_one import all_in_one
from wanbuild.source.checkpoint import Source, open_source
from wanbuild.source.checkpoint_parts import TOKENIZER
from wanbuild.source.match import variant_of
from wanbuild.source.single_files import open_files
from wanbuild.variants.table import variant_named
from wanrun.artifact.manifest import MANIFEST, Manifest, read_manifest
from wanrun.artifact.record import Dtype
from wanrun.errors import UsageError, shortened

INDEX = "model_index.json"
"""The file that makes a folder a checkpoint."""


@dataclass(frozen=True)
class Subject:
    """A model to plan.

    Args:
        manifest: its manifest; of an artifact its own, else one without files.
        sizes: the sizes in pixels that it is made for, the first by default.
        choices: options of ``wanbuild compile`` that a recipe gives, by name.
        defaults: default options of a generation that a recipe gives, by name.
    """

    name: str
    manifest: Manifest
    sizes: tuple[tuple[int, int], ...]
    choices: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


def read_subject(text: str, quantise: Quantise | None = None) -> Subject:
    """Returns the subject that a user names.

    ``text`` is a published model's name or hub id, or the path of a recipe, an artifact or a checkpoint.
    ``quantise`` is which layers a conversion would store in 8 bits; None: as the recipe says, or none.

    Raises UsageError if there is no such model, listing the published ones, or for ``quantise`` with an
    artifact, which is converted already; ArtifactError for a damaged artifact, and SourceError for a damaged
    checkpoint.
    """
    path = Path(text)
    if path.suffix == ".toml":
        return _of_recipe(path, quantise)
    if (path / MANIFEST).is_file():
        if quantise is not None:
            raise UsageError(
                "wrong_kind",
                f"{text} is converted already",
                remedy="leave --quantise out, or plan its source",
            )
        manifest = read_manifest(path)
        return Subject(path.resolve().name, manifest, _sizes(manifest, text), _built(manifest))
    if (found := _of_source(text, {}, quantise)) is not None:
        return found
    names = ", ".join(published_names())
    raise UsageError(
        "unknown_name",
        f"there is no model {shortened(text)}",
        expected=f"a recipe (.toml), an artifact's or a checkpoint's folder, or one of {names}",
    )


def _of_recipe(path: Path, quantise: Quantise | None) -> Subject:
    recipe = read_recipe(path)
    if (found := model_of(recipe, quantise)) is None:
        raise UsageError(
            "unknown_name",
            f"the source of {path} is neither here nor a published model",
            expected=f"a folder with {INDEX}, or one of {', '.join(published_names())}",
            found=recipe.source,
        )
    return Subject(path.stem, found.manifest, found.sizes, recipe.compile, recipe.convert.get("defaults", {}))


def model_of(recipe: Recipe, quantise: Quantise | None = None) -> Subject | None:
    """Returns the model of a recipe; None if its source is neither here nor a published model.

    ``quantise`` replaces what the recipe says. Raises SourceError for a damaged checkpoint.
    """
    dtypes = {name: recipe.convert.get(option) for name, option in DTYPE_OF.items()}
    quantise = quantise or parse_quantise(recipe.convert.get("quantise"), recipe.convert.get("keep", ()))
    parts = all_in_one(recipe.source)
    if recipe.source is not None and not parts:
        places = recipe.source, Path(recipe.source).name
        found = (_of_source(place, dtypes, quantise) for place in places)
        return next((one for one in found if one is not None), None)
    files = {**parts, **recipe.parts}
    if TOKENIZER in files:
        files[TOKENIZER] = locate_tokenizer(files[TOKENIZER])
    with open_files(files, recipe.configs) as source:
        return _of_open(source, "files", dtypes, quantise)


def _of_source(text: str, dtypes: Mapping[str, Dtype | None], quantise: Quantise | None) -> Subject | None:
    """Returns the subject of a checkpoint's folder or a published model; None if it is neither."""
    if (Path(text) / INDEX).is_file():
        with open_source(Path(text)) as source:
            return _of_open(source, Path(text).name, dtypes, quantise)
    name = text.lower().rpartition("/")[2].removesuffix("-diffusers")
    if name not in published_names() or text.count("/") > 1:
        return None
    repository = published_names()[name]
    return Subject(name, published_manifest(repository, dtypes, quantise), published_sizes(repository))


def _of_open(
    source: Source, name: str, dtypes: Mapping[str, Dtype | None], quantise: Quantise | None
) -> Subject:
    """Returns the subject of an open checkpoint."""
    variant = variant_of(source)
    configs = {name: part.recorded_config for name, part in source.components.items()}
    places = {name: str(part.config_file) for name, part in source.components.items()}
    manifest = model_manifest(variant, configs, source.boundary_ratio, dtypes, quantise, places)
    return Subject(name, manifest, variant.sizes)


def published_sizes(repository: str) -> tuple[tuple[int, int], ...]:
    """Returns the sizes of a published model, or only that of the height with which its name ends."""
    sizes = published_variant(repository).sizes
    named = [size for size in sizes if f"-{size[1]}p" in repository.lower()]
    return tuple(named) or sizes


def _sizes(manifest: Manifest, where: str) -> tuple[tuple[int, int], ...]:
    """Returns the sizes of an artifact: those that are built, else its variant's."""
    built = sorted(manifest.profiles.values(), key=lambda profile: profile.index)
    sizes = dict.fromkeys((profile.width, profile.height) for profile in built)
    return tuple(sizes) or variant_named(manifest.model.variant, Path(where)).sizes


def _built(manifest: Manifest) -> dict[str, Any]:
    """Returns the choices of an artifact's first profile; empty if none is built."""
    profile = min(manifest.profiles.values(), key=lambda profile: profile.index, default=None)
    if profile is None:
        return {}
    options = structs.asdict(profile.options)
    names = ("guidance", "num_videos", "num_references")
    shape = {name: getattr(profile, name) for name in names} | {"frames": profile.num_frames}
    return {**shape, **{name: value for name, value in options.items() if not name.endswith("weights_dtype")}}
