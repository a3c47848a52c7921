"""The logical axes in a manifest are those of the modules that its programs are made of."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from wanbuild.build import convert
from wanbuild.build_options import BuildOptions
from wanbuild.components import kind_of
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.models.params import parameter_axes
from wanbuild.models.partition import ROTARY
from wanbuild.programs.kinds import ProgramBuilder
from wanbuild.programs.shape import Shape
from wanbuild.targets.target import CPU
from wanbuild.toy.toy_checkpoint import write_toy
from wanbuild.variants.from_video import with_start
from wanbuild.variants.table import variants
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.errors import ArtifactError

pytestmark = pytest.mark.slow


@pytest.mark.thorough
@pytest.mark.parametrize("variant", variants())
def test_axes_are_the_modules(variant: str, tmp_path: Path) -> None:
    write_toy(tmp_path / "toy", variant)
    manifest = convert(ConvertRequest(tmp_path / "toy", tmp_path / "artifact"))
    for name, component in manifest.components.items():
        kind = kind_of(name, manifest.configs[name].get("_class_name"))
        module = kind.module(kind.parse(manifest.configs[name], name), manifest.dtypes[name])
        recorded = {path: parameter.axes for path, parameter in component.parameters.items()}
        assert recorded == parameter_axes(module)
        named = {axis for axes in recorded.values() for axis in axes} - {None, "layers"}
        assert bool(named) == (name != "vae")  # which is not split: its convolutions are small


def in_pairs(manifest: Manifest) -> Manifest:
    """A manifest as versions wrote it whose queries and keys had the rows of rotated pairs side by side."""
    components = {
        name: msgspec.structs.replace(
            component,
            parameters={
                path: msgspec.structs.replace(
                    one, axes=tuple("heads" if a == ROTARY else a for a in one.axes)
                )
                for path, one in component.parameters.items()
            },
        )
        for name, component in manifest.components.items()
    }
    assert components != manifest.components
    return manifest.changed(components=components)


def started(manifest: Manifest) -> Manifest:
    """The manifest of an artifact whose profiles are built for a video to begin with."""
    profiles = {
        name: msgspec.structs.replace(one, options=msgspec.structs.replace(one.options, video_to_video=True))
        for name, one in manifest.profiles.items()
    }
    return manifest.changed(**with_start(manifest, True), profiles=profiles)


def test_rows_in_pairs_make_no_programs(artifact_copy: Path, toy_checkpoint: Path) -> None:
    """Neither new ones, nor do a new conversion's weights take over the old ones."""
    old = in_pairs(read_manifest(artifact_copy))
    said = "transformer/blocks/attn1/norm_k/weight was stored by an earlier version, .*convert the checkpoint"
    with pytest.raises(ArtifactError, match=said):
        ProgramBuilder(old, Shape(96, 64, 9, 1, True), BuildOptions(), CPU)
    stored = {name: policy.weights for name, policy in old.dtypes.items()}
    started(read_manifest(artifact_copy)).write(artifact_copy)
    kept = convert(ConvertRequest(toy_checkpoint, artifact_copy, stored, force=True))
    assert kept.program_sets and kept.model.task.start == "video" and kept.preview == old.preview != ()
    in_pairs(read_manifest(artifact_copy)).write(artifact_copy)
    assert not convert(ConvertRequest(toy_checkpoint, artifact_copy, stored, force=True)).program_sets
