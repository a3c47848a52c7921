"""The artifact's manifest: its contents, its sources, and the digest of every part.

``manifest.json`` is written last and replaced atomically: every file that it lists is complete, and a file
that it does not list is left over from an interrupted build. Two digests cover it. ``content_digest`` covers
the facts that decide results, and is the same for equal sources and options; ``manifest_digest`` covers all.
"""

from __future__ import annotations

__all__ = ["MAX_BYTES", "TINY_VAE", "TRANSFORMERS", "manifest_of", "runs_here", "spelled"]

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from wanrun import __version__
from wanrun.artifact.adapter import Adapter, Lora, check_names
from wanrun.artifact.formats import FORMAT_VERSION, is_read, upgraded
from wanrun.artifact.header import FORMAT, header_of, of_another_format, undecodable
from wanrun.artifact.model import Model
from wanrun.artifact.parameters import Component, DtypePolicy
from wanrun.artifact.programs import LATER_OPTIONS, Profile, Program, ProgramSet
from wanrun.artifact.record import AtLeastOne, Dtype, ListedFile, NotNegative, Record
from wanrun.artifact.schedules import Schedule
from wanrun.artifact.targets import Executable, Target
from wanrun.artifact.wrong_path import wrong_path
from wanrun.codes import ErrorCode
from wanrun.errors import ArtifactError
from wanrun.files import canonical_json, plain_relative, read_bounded, replace_file, sha256_of

MANIFEST = "manifest.json"
MAX_BYTES = 2**26
"""The largest manifest; that of a 14B model with two experts and one profile has a quarter of a megabyte."""

TRANSFORMERS = ("transformer", "transformer_2")
"""Component names of the experts, the high-noise one first; most models have only the first."""

NEEDED = ("text_encoder", TRANSFORMERS[0], "vae")
"""Components that every model has."""

TINY_VAE = "tiny_vae"
"""The component that is a tiny decoder; an artifact has one if its user has given one."""

EXPERT_OPTIONS = ("guidance_scale_2", "boundary")
"""The options of a model with two experts."""

_CONTENT = ("model", "configs", "loras", "dtypes", "components", "tokenizer")
"""The fields that the content digest covers whole."""

_LATER = ("schedules", "adapters", "preview", "verdicts")
"""The fields that are left out where they are empty: then all is as before there were any."""


class Tokenizer(ListedFile, frozen=True, kw_only=True):
    """The tokenizer's file, and the length and padding of prompts.

    Attributes:
        max_length: tokens of a prompt, padding included.
        pad_id: id of the padding token.
    """

    what: ClassVar[str] = "the tokenizer"

    max_length: AtLeastOne
    pad_id: NotNegative


class Embedding(ListedFile, frozen=True, kw_only=True):
    """A precomputed prompt embedding.

    Attributes:
        prompt: the cleaned prompt.
        dtype: compute dtype of the text encoder that made it.
        length: its rows, one per token of the prompt, with the end token.
    """

    what: ClassVar[str] = "a prompt embedding"

    prompt: str
    dtype: Dtype
    length: AtLeastOne


Colours = tuple[tuple[float, float, float], ...]
"""A linear map from latents to red, green and blue: of each channel at 1, then of latents that are 0."""


class Recorded(ListedFile, frozen=True, kw_only=True, omit_defaults=True):
    """A profile's recorded result.

    Attributes:
        preview: as the manifest's, in artifacts that have it here: it was fitted to each profile.
    """

    preview: Colours = ()


class Attested(ListedFile, frozen=True, kw_only=True):
    """A verdict about executables that were built elsewhere: on a chip of their kind they were right.

    Attributes:
        target: the target.
        profile: the name of the profile.
        device_kind: JAX's name of the device that tried them.
        made: when, in UTC.
    """

    what: ClassVar[str] = "a recorded verdict"

    target: str
    profile: str
    device_kind: str
    made: str


class Manifest(Record, frozen=True, kw_only=True):
    """All records of an artifact.

    Attributes:
        model: the facts and defaults that the runtime needs.
        configs: each component's config, as read from the source.
        source: repository, revision, and a digest of every source file.
        loras: LoRAs merged at conversion.
        dtypes: dtype policy by component.
        components: weights by component.
        tokenizer: the tokenizer's file and facts.
        profiles: static shapes by name.
        program_sets: programs by the key of their set.
        targets: executables by target name.
        golden: the recorded outputs, by profile name.
        embeddings: every precomputed prompt embedding, by key.
        tool: name of the tool that wrote the artifact, and the version of its release.
        times: when each part was made.
        schedules: steps that were chosen for the model, by name.
        adapters: low-rank changes of the transformers that a video may choose, by name.
        preview: shows roughly what latents decode to; empty if it was not fitted.
        verdicts: those of other machines, by the digest of the facts for which each holds: see
            ``wanrun.trust``.
        content_digest: sha256 of the facts that decide results, the same for equal sources and options.
        manifest_digest: sha256 of the content digest, and of every field that it does not cover whole. Both
            digests are computed unless they are given: an artifact that is read has those that it was written
            with, whatever fields its records have got since.
    """

    format: Literal["wan-artifact"] = FORMAT
    format_version: Literal[5] = FORMAT_VERSION
    model: Model
    configs: Mapping[str, Mapping[str, Any]]
    source: Mapping[str, Any]
    loras: tuple[Lora, ...]
    dtypes: Mapping[str, DtypePolicy]
    components: Mapping[str, Component]
    tokenizer: Tokenizer
    profiles: Mapping[str, Profile]
    program_sets: Mapping[str, ProgramSet]
    targets: Mapping[str, Target]
    golden: Mapping[str, Recorded]
    embeddings: Mapping[str, Embedding]
    tool: Mapping[str, str]
    times: Mapping[str, str]
    schedules: Mapping[str, Schedule] = {}
    adapters: Mapping[str, Adapter] = {}
    preview: Colours = ()
    verdicts: Mapping[str, Attested] = {}
    content_digest: str = ""
    manifest_digest: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.source.get("files"), Mapping):
            raise ValueError("the source has no files")
        self._check_references()
        if not self.manifest_digest:  # else it is read, or made of one that is
            for name, digest in digests_of(self._records()).items():
                msgspec.structs.force_setattr(self, name, digest)

    def _check_references(self) -> None:
        """Raises ValueError for a name that differs from its record's, or that refers to no record."""
        if TRANSFORMERS[1] in self.components:
            for name in EXPERT_OPTIONS:
                if type(self.model.options.get(name)) not in (int, float):
                    raise ValueError(f"the model has two experts and no default {name}")
        check_names(self.adapters)
        for name in self.components:  # copies have folders of these names
            plain_relative(name, "a component's name")
        if len(self.colours) not in (0, self.model.latent_channels + 1):
            raise ValueError(f"the map of previews is of {len(self.colours)} rows")
        for name, profile in self.profiles.items():
            if name != profile.name:
                raise ValueError(f"profile {name} has the shape of {profile.name}")
        for key, programs in self.program_sets.items():
            if key != programs.key:
                raise ValueError(f"key {key} holds the program set of {programs.key}")
            if unknown := programs.programs.keys() - self.profiles.keys():
                raise ValueError(f"program set {key} names unknown profiles: {sorted(unknown)}")
        for name, target in self.targets.items():
            used = self.program_sets.get(target.program_set)
            if used is None or used.platform != target.environment["platform"]:
                raise ValueError(f"target {name} refers to program set {target.program_set}")
            if unknown := target.executables.keys() - used.programs.keys():
                raise ValueError(f"target {name} has executables without programs: {sorted(unknown)}")

    @property
    def colours(self) -> Colours:
        """The map of previews; empty if there is none."""
        return self.preview or next((one.preview for one in self.golden.values() if one.preview), ())

    @property
    def digests(self) -> dict[str, str]:
        """Both digests by name, for comparing artifacts."""
        return {"content digest": self.content_digest, "manifest digest": self.manifest_digest}

    def programs(self, target: Target, profile: Profile) -> Mapping[str, Program]:
        """Returns the programs of a profile for a target, by name; empty if they are not built."""
        return self.program_sets[target.program_set].programs.get(profile.name, {})

    def skippable_layers(self, profile: Profile) -> int:
        """Returns of how many layers steps of a profile can skip some; 0 if it is not built for that."""
        if "skip-layer" not in profile.options.guiders:
            return 0
        return max(one.skippable_layers(profile.name) for one in self.program_sets.values())

    @property
    def written_by(self) -> str:
        """The release that wrote the artifact, such as ``wanbuild 0.2.0``."""
        return f"{self.tool.get('name', 'wanbuild')} {self.tool.get('version', '')}".rstrip()

    def _records(self) -> dict[str, Any]:
        """Returns all records; of fields that came later, those that are not empty."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        for profile in content["profiles"].values():
            for name in LATER_OPTIONS:
                if not profile["options"][name]:
                    del profile["options"][name]
        for own in content["program_sets"].values():
            for program in itertools.chain.from_iterable(one.values() for one in own["programs"].values()):
                if program["plain"] is None:
                    del program["plain"]
        if content["model"]["task"]["start"] is None:
            del content["model"]["task"]["start"]
        for item in content["model"]["task"]["inputs"].values():
            for name in ("count", "past"):
                if not item[name]:
                    del item[name]
        for name in ("flow_map", "chunks"):
            if not content["model"][name]:
                del content["model"][name]
        return {name: content[name] for name in content if content[name] or name not in _LATER}

    def as_json(self) -> dict[str, Any]:
        """Returns the content of ``manifest.json``, with the digests of just this content."""
        content = self._records()
        return content | digests_of(content)

    def changed(self, **fields: Any) -> Manifest:
        """Returns a copy with these fields replaced, as this release writes it.

        A verdict goes with the executables that it is about.
        """
        if self.verdicts and "targets" in fields:
            fields = {"verdicts": self._still_about(fields["targets"]), **fields}
        written = {"tool": {**self.tool, "version": __version__}, "content_digest": "", "manifest_digest": ""}
        return msgspec.structs.replace(self, **written | fields)

    def _still_about(self, targets: Mapping[str, Target]) -> dict[str, Attested]:
        """Returns the verdicts about executables that these targets have too."""

        def built(where: Mapping[str, Target], one: Attested) -> Mapping[str, Executable]:
            return where[one.target].executables.get(one.profile, {}) if one.target in where else {}

        there = ((name, one, built(targets, one)) for name, one in self.verdicts.items())
        return {name: one for name, one, found in there if found and found == built(self.targets, one)}

    def renewed(self) -> Manifest:
        """Returns what is read where this is written: itself, unless its release had other records."""
        records = self._records()
        return self if records == records | digests_of(records) else self.changed()

    def encoded(self) -> bytes:
        """The bytes of ``manifest.json``."""
        return spelled(self.as_json())

    def write(self, artifact: Path) -> None:
        """Commits the artifact: replaces manifest.json atomically and durably."""
        replace_file(artifact / MANIFEST, self.encoded())


def spelled(content: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a manifest with this content."""
    return json.dumps(content, sort_keys=True, indent=1, allow_nan=False).encode("utf-8") + b"\n"


def digests_of(content: Mapping[str, Any]) -> dict[str, str]:
    """Returns both digests of a manifest's content as JSON has it, of whatever format.

    Raises:
        KeyError, TypeError, AttributeError: if there are no such records.
    """
    facts = {
        **{name: content[name] for name in _CONTENT},
        "source": content["source"]["files"],
        # All of a profile except its index, the place in the order of building; and no days of export.
        "profiles": {name: {**profile, "index": 0} for name, profile in content["profiles"].items()},
        "program_sets": {
            key: {name: programs[name] for name in programs if name != "exported"}
            for key, programs in content["program_sets"].items()
        },
    }
    whole = {name: content[name] for name in content if name not in {*_CONTENT, "manifest_digest"}}
    whole["content_digest"] = _digest(facts)
    return {"content_digest": whole["content_digest"], "manifest_digest": _digest(whole)}


def _digest(content: Any) -> str:
    """Returns the sha256 of canonical JSON."""
    return "sha256:" + sha256_of(canonical_json(content))


def read_manifest(artifact: str | os.PathLike[str], again: bool = False) -> Manifest:
    """Reads and checks an artifact's manifest.

    Args:
        artifact: the artifact's folder.
        again: whether all programs are about to be built again: then they may be of an older format.

    Raises:
        ArtifactError: if there is no artifact, or if the manifest is damaged.
        OtherReleaseError: if it has a format that is not read.
    """
    path = Path(artifact) / MANIFEST
    try:
        data = read_bounded(path, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        found, remedy = wrong_path(path.parent, MANIFEST)
        code: ErrorCode = "wrong_kind" if path.parent.exists() else "missing_file"
        what = f"{path.parent} is not an artifact"
        raise ArtifactError(code, what, found=found, remedy=remedy) from None
    except OSError as error:
        raise ArtifactError("unreadable", f"{path} cannot be read: {error}", remedy="rebuild it") from None
    return manifest_of(data, path, again)


def runs_here(artifact: Path) -> bool:
    """Whether the programs of an artifact have a form that this release runs; as ``read_manifest`` else."""
    header = header_of(read_bounded(artifact / MANIFEST, MAX_BYTES), artifact / MANIFEST)
    return is_read(header.format_version, again=False)


def manifest_of(data: bytes, path: Path, again: bool = False) -> Manifest:
    """Decodes and checks the bytes of a manifest.

    Args:
        data: the bytes.
        path: the file that they are from, for messages.
        again: as of ``read_manifest``.

    Raises:
        ArtifactError, OtherReleaseError: as ``read_manifest``.
    """
    header = header_of(data, path)
    if not is_read(header.format_version, again):
        raise of_another_format(header, path)
    try:
        content = msgspec.json.decode(data)
        manifest = msgspec.convert(upgraded(content), type=Manifest)
        written = digests_of(content)
    except ArtifactError as error:  # of a record that names a file
        raise error.located(str(path)) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise undecodable(header, path, error) from None
    _check_complete(manifest, path)
    for name, digest in written.items():
        if content.get(name) != digest:
            raise ArtifactError(
                "changed",
                f"{path} was changed after it was written",
                expected=f"{name} {content.get(name)}",
                found=digest,
                remedy="build the artifact again",
            )
    return manifest


def _check_complete(manifest: Manifest, path: Path) -> None:
    """Raises ArtifactError unless all components are there that every model has."""
    for field in ("components", "configs", "dtypes"):
        there = getattr(manifest, field)
        if not there.keys() >= set(NEEDED):
            raise ArtifactError(
                "damaged",
                f"{path} is damaged: {field} are not complete",
                expected=", ".join(NEEDED),
                found=", ".join(sorted(there)) or "none",
                remedy="build the artifact again",
            )
