"""The bill of materials of an artifact, in the format of CycloneDX 1.6: its origin, parts and packages."""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from wanbuild.share.card import LICENCE_OF, licence_of
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Component, Manifest
from wanrun.artifact.named import REQUIREMENTS
from wanrun.errors import UsageError
from wanrun.files import canonical_json, sha256_of

if TYPE_CHECKING:
    from cyclonedx.model.bom import Bom

_PINNED = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==([^\s;]+)", re.MULTILINE)


def bill_of_materials(artifact: Artifact, licence: str | None = None) -> str:
    """Returns the bill of materials as JSON; the same artifact gives the same text.

    It has the model with its source, revision, licence and digests; each component's weights, merged LoRAs,
    the tokenizer, the executables of each target; and the packages with which the executables load.

    ``licence`` is of the weights, as SPDX names it; None for that of a known source. Raises
    ArtifactError if a requirements file is damaged, and UsageError without cyclonedx-python-lib.
    """
    try:
        from cyclonedx.model.bom import Bom, BomMetaData
        from cyclonedx.model.component import Component as Part
        from cyclonedx.model.component import ComponentType
        from cyclonedx.model.tool import ToolRepository
        from cyclonedx.output.json import JsonV1Dot6
    except ImportError as error:
        remedy = "pip install '.[share]' in the checkout"
        raise UsageError("not_installed", f"wanbuild sbom needs {error.name}", remedy=remedy) from None
    manifest = artifact.manifest
    model = _model(manifest, licence)
    tool = Part(name=manifest.tool["name"], version=manifest.tool["version"], type=ComponentType.APPLICATION)
    made = datetime.datetime.fromisoformat(max(manifest.times.values(), default="1970-01-01T00:00:00+00:00"))
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_OID, manifest.manifest_digest),
        metadata=BomMetaData(component=model, timestamp=made, tools=ToolRepository(components=[tool])),
    )
    for part in (*_weights(manifest), *_loras(manifest), *_files(manifest), *_packages(artifact)):
        bom.components.add(part)
    _depends(bom, model)
    return str(JsonV1Dot6(bom).output_as_string(indent=2)) + "\n"


def _depends(bom: Bom, model: Any) -> None:
    """Records that the model depends on all other parts."""
    bom.register_dependency(model, bom.components)


def _part(kind: str, name: str, sha256: str = "", **facts: Any) -> Any:
    """Returns a component of the bill with a digest and properties."""
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.component import Component as Part
    from cyclonedx.model.component import ComponentType

    properties = facts.pop("properties", {})
    return Part(
        name=name,
        type=ComponentType(kind),
        bom_ref=f"{kind}:{name}",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else [],
        properties=[Property(name=f"wan:{key}", value=str(value)) for key, value in properties.items()],
        **facts,
    )


def _model(manifest: Manifest, licence: str | None) -> Any:
    from cyclonedx.model import ExternalReference, ExternalReferenceType, XsUri

    repository, revision = manifest.source.get("repository"), manifest.source.get("revision")
    references, licence = [], licence or licence_of(manifest)
    if repository:
        url = f"https://huggingface.co/{repository}" + (f"/tree/{revision}" if revision else "")
        references = [ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=XsUri(url))]
    facts = {
        "content-digest": manifest.content_digest,
        "manifest-digest": manifest.manifest_digest,
        "source": repository or "a folder without a published name",
        "source-revision": revision or "none",
        "targets": ", ".join(sorted(manifest.targets)),
    }
    return _part(
        "machine-learning-model",
        manifest.model.variant,
        version=manifest.content_digest.removeprefix("sha256:")[:16],
        licenses=_licences(licence),
        external_references=references,
        properties=facts,
    )


def _licences(licence: str | None) -> list[Any]:
    from cyclonedx.contrib.license.factories import LicenseFactory

    return [LicenseFactory().make_from_string(licence)] if licence else []


def _weights(manifest: Manifest) -> Iterator[Any]:
    for name, component in manifest.components.items():
        policy = manifest.dtypes[name]
        dtypes = sorted({policy.weights, policy.norms, *policy.eight_bit.values()})
        facts = {
            "parameters": len(component.parameters),
            "bytes": component.nbytes,
            "dtypes": ", ".join(dtypes),
        }
        own = _licences(LICENCE_OF.get(name))
        yield _part("data", f"weights/{name}", weights_digest(component), licenses=own, properties=facts)
    for file, facts in sorted(manifest.source["files"].items()):
        yield _part("data", f"source/{file}", properties=facts)


def weights_digest(component: Component) -> str:
    """Returns the sha256 over the paths and sha256 digests of a component's parameters."""
    return sha256_of(canonical_json({path: one.sha256 for path, one in component.parameters.items()}))


def _loras(manifest: Manifest) -> Iterator[Any]:
    for number, lora in enumerate(manifest.loras):  # two may be files of one name
        facts = {"scale": lora.scale, "component": lora.component or ""}
        yield _part("data", f"lora/{number}/{lora.file}", lora.sha256, properties=facts)
    for name, adapter in sorted(manifest.adapters.items()):
        facts = {"loras": ", ".join(f"{lora} (sha256 {lora.sha256})" for lora in adapter.content.loras)}
        yield _part("data", f"adapter/{name}", adapter.sha256, properties=facts)


def _files(manifest: Manifest) -> Iterator[Any]:
    yield _part("file", manifest.tokenizer.file, manifest.tokenizer.sha256)
    for key, target in sorted(manifest.targets.items()):
        digests = {
            f"{profile}/{name}": entry.sha256
            for profile, named in target.executables.items()
            for name, entry in named.items()
        }
        facts = {"platform": target.environment["platform"], "executables": len(digests)}
        yield _part("file", f"target/{key}", sha256_of(canonical_json(digests)), properties=facts)


def _packages(artifact: Artifact) -> Iterator[Any]:
    """Yields the packages with which executables load, in the versions that they need."""
    from packageurl import PackageURL

    found: dict[tuple[str, str], list[str]] = {}
    for key, target in sorted(artifact.manifest.targets.items()):
        data = artifact.listed(REQUIREMENTS, target.requirements)
        for name, version in _PINNED.findall(data.decode("utf-8", "replace")):
            found.setdefault((name.lower().replace("_", "-"), version), []).append(key)
    for (name, version), targets in sorted(found.items()):
        part = _part("library", f"{name}@{version}", properties={"targets": ", ".join(targets)})
        part.name, part.version, part.purl = name, version, PackageURL("pypi", None, name, version)
        yield part
