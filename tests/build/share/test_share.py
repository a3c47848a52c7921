"""An artifact as an OCI image layout, read here by the specification, and its bill of materials."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import wanhub
from helpers.damage import flip, own
from helpers.elsewhere import TARGET, build_elsewhere, record_verdict
from helpers.hub_server import read_folder
from helpers.manifests import put_adapter
from helpers.refusals import refuses
from wanbuild.cli import wanbuild
from wanbuild.share import oci
from wanbuild.share.oci import write_layout
from wanbuild.share.sbom import bill_of_materials
from wanbuild.share.share_options import OciRequest
from wancli.command import fetch_all
from wanrun.artifact.adapter import Lora
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import read_manifest
from wanrun.codes import ErrorCode
from wanrun.errors import ArtifactError
from wanrun.intact import check_intact
from wanrun.trust.recorded import known_verdict
from wanrun.trust.verdict import Verdict


def blob(layout: Path, descriptor: Mapping[str, Any]) -> bytes:
    """The bytes that a descriptor names, which must have its size and digest."""
    kind, digest = descriptor["digest"].split(":")
    data = (layout / "blobs" / kind / digest).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (descriptor["size"], digest)
    return data


def images(layout: Path) -> dict[str, Any]:
    """The manifests of a layout's images, by name."""
    assert json.loads((layout / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((layout / "index.json").read_bytes())
    assert index["schemaVersion"] == 2
    named = {one["annotations"]["org.opencontainers.image.ref.name"]: one for one in index["manifests"]}
    assert len(named) == len(index["manifests"])
    return {name: json.loads(blob(layout, one)) for name, one in named.items()}


def unpacked(layout: Path, image: Mapping[str, Any], folder: Path) -> list[str]:
    """Unpacks an image's layers over one another; returns their titles."""
    config = json.loads(blob(layout, image["config"]))
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in image["layers"]]
    assert config["os"] == "linux" and config["architecture"] in ("amd64", "arm64")
    for layer in image["layers"]:
        assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar"
        with tarfile.open(fileobj=io.BytesIO(blob(layout, layer)), mode="r:") as archive:
            for entry in archive.getmembers():
                assert (entry.uid, entry.gid, entry.mtime, entry.uname) == (0, 0, 0, "")
                assert entry.mode == (0o755 if entry.isdir() else 0o644)
            archive.extractall(folder, filter="data")
    return [layer["annotations"]["org.opencontainers.image.title"] for layer in image["layers"]]


@pytest.mark.slow
def test_what_is_unpacked_is_the_artifact(artifact: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    put_adapter(artifact)
    digest = write_layout(OciRequest(artifact, tmp_path / "o", licence="Apache-2.0"), lines.append)
    (image,) = images(tmp_path / "o").values()
    titles = unpacked(tmp_path / "o", image, tmp_path / "unpacked")
    manifest = read_manifest(artifact)
    (key,) = manifest.program_sets
    weights = [f"weights of {name}" for name in manifest.components]
    assert titles == [*weights, "tokenizer", f"programs {key}", "target cpu", "adapter style", "records"]
    unlinked = {path.name: path.resolve() for path in artifact.iterdir()}
    expected = {
        name if path.is_file() else f"{name}/{below}": data
        for name, path in unlinked.items()
        for below, data in ({"": path.read_bytes()} if path.is_file() else read_folder(path)).items()
    }
    assert read_folder(tmp_path / "unpacked") == expected
    check_intact(open_artifact(tmp_path / "unpacked"), lines.append)
    assert image["annotations"]["wan-artifact.content-digest"] == manifest.content_digest
    assert image["annotations"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    copied = wanhub.find(artifact.as_uri())
    fetch_all(copied)
    for one in (artifact, copied):  # and of an address
        again = OciRequest(one, tmp_path / "again", licence="Apache-2.0")
        assert write_layout(again, lines.append) == digest


@pytest.mark.slow
def test_one_target_of_two_shares_its_layers(artifact: Path, tmp_path: Path) -> None:
    build_elsewhere(artifact, beside=True)
    facts = record_verdict(artifact, Verdict(outcome="passed", reason="they agree"))
    layout = tmp_path / "o"
    command = ["oci", str(artifact), "-o", str(layout)]
    for more in ([], ["--tag", "one", "--target", TARGET]):
        result = CliRunner().invoke(wanbuild, [*command, *more])
        assert result.exit_code == 0, result.output
    index = json.loads((layout / "index.json").read_bytes())
    index["manifests"].append({**index["manifests"][0], "annotations": None})
    (layout / "index.json").write_text(json.dumps(index))
    meanwhile = OciRequest(artifact, layout, "meanwhile", [TARGET])
    first = iter([lambda: write_layout(meanwhile, lambda line: None)])
    write_layout(OciRequest(artifact, layout), lambda line: next(first, str)() and None)
    index = json.loads((layout / "index.json").read_bytes())
    assert None in [one["annotations"] for one in index["manifests"]] and len(index["manifests"]) == 4
    index["manifests"] = [one for one in index["manifests"] if one["annotations"]]
    (layout / "index.json").write_text(json.dumps(index))
    both, one = (images(layout)[name] for name in ("latest", "one"))
    digests = [{layer["digest"] for layer in image["layers"]} for image in (both, one)]
    assert len(digests[0] - digests[1]) == 2  # the other target, and the manifest's
    unpacked(layout, one, tmp_path / "unpacked")
    opened = open_artifact(tmp_path / "unpacked")
    manifest = opened.manifest
    assert list(manifest.targets) == [TARGET] and one["annotations"]["wan-artifact.targets"] == TARGET
    assert {one.name for one in opened.named() if one.parameter is None} <= read_folder(
        tmp_path / "unpacked"
    ).keys()
    check_intact(opened, lambda line: None)
    assert known_verdict(opened, facts) is not None  # without the other target it is about the same


def test_what_is_refused_changes_nothing(artifact: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "letter.txt").write_text("dear")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "oci-layout").write_text("{")
    requests: list[tuple[OciRequest, ErrorCode, object]] = [
        (OciRequest(artifact, theirs), "exists", theirs),
        (OciRequest(artifact, tmp_path / "damaged"), "wrong_kind", "damaged"),
        (OciRequest(artifact, tmp_path / "o", "a b"), "invalid_value", "tag"),
        (OciRequest(artifact, tmp_path / "o", targets=["v5e"]), "unknown_name", "v5e"),
    ]
    for request, code, what in requests:
        with refuses(code, what=what):
            write_layout(request, lambda line: None)
    own(artifact, "programs")
    flip(next(path for path in (artifact / "programs").rglob("*") if path.is_file()), 100)
    with refuses("damaged", ArtifactError):
        write_layout(OciRequest(artifact, tmp_path / "o"), lambda line: None)
    assert read_folder(tmp_path / "theirs") == {"letter.txt": b"dear"} and not (tmp_path / "o").exists()


@pytest.mark.slow
def test_a_layout_keeps_its_images_when_the_disk_is_full(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = OciRequest(artifact, tmp_path / "o")
    write_layout(request, lambda line: None)
    before = read_folder(tmp_path / "o")
    own_tar = oci.write_tar

    def full(file: Any, content: Mapping[str, Any], advance: Any) -> Any:
        if "manifest.json" in content:
            raise OSError(errno.ENOSPC, "No space left on device")
        return own_tar(file, content, advance)

    monkeypatch.setattr(oci, "write_tar", full)
    manifest = read_manifest(artifact)
    manifest.changed(times={**manifest.times, "another": "day"}).write(artifact)
    with refuses("no_space", what=tmp_path / "o"):
        write_layout(request, lambda line: None)
    assert read_folder(tmp_path / "o") == before


# The bill of materials: the library's own validator takes it, and it says what the manifest does.


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
    with refuses("damaged", ArtifactError):
        bill_of_materials(Artifact(manifest, artifact))
