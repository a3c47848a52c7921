"""The bill of materials: the library's own validator takes it, and it says what the manifest does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.damage import flip
from helpers.manifests import put_adapter
from wanbuild.cli import wanbuild
from wanbuild.share.sbom import bill_of_materials
from wanrun.artifact.adapter import Lora
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.errors import ArtifactError


def test_the_bill_has_source_parts_and_packages(artifact: Path, tmp_path: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    adapter = put_adapter(artifact)
    manifest = read_manifest(artifact)
    manifest = manifest.changed(
        source={**manifest.source, "repository": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "revision": "abc"},
        loras=tuple(
            Lora(file="style.safetensors", sha256=digit * 64, scale=0.5, component="transformer")
            for digit in "01"
        ),
    )
    manifest.write(artifact)
    for _ in range(2):  # a bill that is there is replaced
        written = CliRunner().invoke(wanbuild, ["sbom", str(artifact), "-o", str(tmp_path / "bom.json")])
        assert written.exit_code == 0, written.output
    text = (tmp_path / "bom.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert CliRunner().invoke(wanbuild, ["sbom", str(artifact)]).output == text
    bom = json.loads(text)
    model = bom["metadata"]["component"]
    facts = {one["name"]: one["value"] for one in model["properties"]}
    assert facts["wan:manifest-digest"] == manifest.manifest_digest
    assert model["licenses"][0]["license"]["id"] == "Apache-2.0"
    assert model["externalReferences"][0]["url"].endswith("/Wan2.1-T2V-1.3B-Diffusers/tree/abc")
    parts = {part["bom-ref"]: part for part in bom["components"]}
    assert {f"data:weights/{name}" for name in manifest.components} <= parts.keys()
    for number in range(2):
        assert parts[f"data:lora/{number}/style.safetensors"]["hashes"][0]["content"] == str(number) * 64
    assert parts["data:adapter/style"]["hashes"][0]["content"] == adapter.sha256
    versions = manifest.targets["cpu"].environment["packages"]
    assert parts[f"library:jaxlib@{versions['jaxlib']}"]["purl"] == f"pkg:pypi/jaxlib@{versions['jaxlib']}"
    (needs,) = [one for one in bom["dependencies"] if one["ref"] == model["bom-ref"]]
    assert set(needs["dependsOn"]) == parts.keys()


def test_damaged_requirements_are_an_error(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    flip(artifact / manifest.targets["cpu"].requirements.file, 3)
    with pytest.raises(ArtifactError, match="is damaged"):
        bill_of_materials(Artifact(manifest, artifact))
