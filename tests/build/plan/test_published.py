"""Manifests without weights: of published models, and of a checkpoint as its conversion writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.refusals import refuses
from wanbuild.plan.published_model import (
    model_manifest,
    published_manifest,
    published_names,
    published_variant,
)
from wanbuild.plan.subject import read_subject
from wanbuild.published.variant_configs import PUBLISHED_MODELS
from wanbuild.source.checkpoint import open_source
from wanbuild.source.match import variant_of
from wanbuild.toy.toy_checkpoint import write_toy
from wanrun.artifact.manifest import TRANSFORMERS, read_manifest


@pytest.mark.slow
@pytest.mark.parametrize("repository", PUBLISHED_MODELS)
def test_every_published_model_has_a_manifest(repository: str) -> None:
    manifest = published_manifest(repository)
    assert manifest.model.variant == published_variant(repository).name
    assert manifest.components.keys() == PUBLISHED_MODELS[repository].keys()
    assert manifest.components["text_encoder"].nbytes == pytest.approx(11.36e9, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("wan2.1-t2v-1.3b", 1.42),
        ("wan2.1-t2v-14b", 14.29),
        ("wan2.2-ti2v-5b", 5.0),
        ("wan2.1-i2v-14b-480p", 16.4),
    ],
)
def test_transformers_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    component = published_manifest(published_names()[name]).components["transformer"]
    count = sum(
        one.layout.nbytes / {"bfloat16": 2, "float32": 4}[one.layout.dtype]
        for one in component.parameters.values()
    )
    assert count == pytest.approx(billions * 1e9, rel=0.01)


def test_a_checkpoint_has_the_layouts_that_its_conversion_writes(toy_artifact: Path, tmp_path: Path) -> None:
    write_toy(tmp_path / "toy")
    with open_source(tmp_path / "toy") as source:
        configs = {
            name: {**part.config, **({"_class_name": part.class_name} if name in TRANSFORMERS else {})}
            for name, part in source.components.items()
        }
        dtypes = {name: policy.weights for name, policy in read_manifest(toy_artifact).dtypes.items()}
        planned = model_manifest(variant_of(source), configs, dtypes=dtypes)
    converted = read_manifest(toy_artifact)
    for name, component in converted.components.items():
        layouts = {path: (one.layout, one.axes) for path, one in component.parameters.items()}
        found = planned.components[name].parameters
        assert {path: (one.layout, one.axes) for path, one in found.items()} == layouts
    left_out = {"defaults", "options"}
    fields = set(type(converted.model).__struct_fields__) - left_out
    assert {n: getattr(planned.model, n) for n in fields} == {n: getattr(converted.model, n) for n in fields}


@pytest.mark.parametrize("text", ["wan2.1-t2v-14b", "Wan-AI/Wan2.1-T2V-14B-Diffusers", "WAN2.1-T2V-14B"])
def test_names_of_a_published_model(text: str) -> None:
    subject = read_subject(text)
    assert subject.name == "wan2.1-t2v-14b"
    assert subject.sizes == ((832, 480), (1280, 720))


def test_a_model_for_one_height_is_planned_for_it() -> None:
    assert read_subject("wan2.1-i2v-14b-720p").sizes == ((1280, 720),)


@pytest.mark.slow
def test_a_checkpoint_an_artifact_and_a_recipe(toy_artifact: Path, tmp_path: Path) -> None:
    write_toy(tmp_path / "toy", "wan2.2-t2v")
    assert read_subject(str(tmp_path / "toy")).manifest.model.options["boundary"] == 0.875
    artifact = read_subject(str(toy_artifact))
    assert artifact.sizes[0] == (96, 64)
    assert (artifact.choices["frames"], artifact.choices["guidance"]) == (9, True)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'source = "toy"\nartifact = "a"\n[convert]\nweights_dtype = "float32"\n'
        "[convert.defaults]\nsteps = 4\n"
        '[compile]\nsizes = ["64x64"]\nmesh = "ring=2"\n'
    )
    subject = read_subject(str(recipe))
    assert subject.manifest.dtypes["transformer_2"].weights == "float32"
    assert subject.choices == {"sizes": [(64, 64)], "mesh": {"ring": 2}}
    assert subject.defaults == {"steps": 4}
    recipe.write_text('source = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"\nartifact = "a"\n')
    assert read_subject(str(recipe)).manifest.model.variant == "wan2.1-t2v"


def test_an_unknown_model_lists_the_known_ones(tmp_path: Path) -> None:
    with refuses("unknown_name", what="'wan3'", expected="wan2.1-t2v-1.3b, "):
        read_subject("wan3")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('source = "nowhere"\nartifact = "a"\n')
    with refuses("unknown_name", what=recipe):
        read_subject(str(recipe))
