"""The artifact's manifest: what it holds, what it was made from, and the digest of every part.

``manifest.json`` is written last and replaced atomically: what it lists is complete, and a file that it
does not list is rubbish of a build that was cut short. Times are in a block that no digest covers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wanrun.artifact.environment import check_environment
from wanrun.artifact.layout import ArrayLayout
from wanrun.errors import ArtifactError
from wanrun.files import canonical_json, plain_relative, replace_file, sha256_of

FORMAT = "wan-artifact"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TRANSFORMERS = ("transformer", "transformer_2")
"""Component names of the experts, the high-noise one first; most models have the first alone."""


@dataclass(frozen=True)
class Parameter:
    """One array of a component.

    Args:
        layout: shape, dtype, rows and chunk files.
        crc32c: checksum of every row, 8 hexadecimal digits each.
        sha256: sha256 over the concatenated sha256 digests of the rows.
    """

    layout: ArrayLayout
    crc32c: tuple[str, ...]
    sha256: str

    def as_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.layout.shape),
            "dtype": self.layout.dtype,
            "rows": self.layout.rows,
            "chunks": self.layout.chunks,
            "crc32c": list(self.crc32c),
            "sha256": self.sha256,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Parameter:
        layout = ArrayLayout(tuple(data["shape"]), data["dtype"], data["rows"], data["chunks"])
        checksums = tuple(data["crc32c"])
        if len(checksums) != layout.rows:
            raise ValueError(f"{len(checksums)} checksums for {layout.rows} rows")
        return cls(layout, checksums, data["sha256"])


@dataclass(frozen=True)
class Component:
    """One Orbax checkpoint: a model's parameters by path."""

    folder: str
    parameters: Mapping[str, Parameter]

    @property
    def nbytes(self) -> int:
        return sum(parameter.layout.nbytes for parameter in self.parameters.values())

    def as_json(self) -> dict[str, Any]:
        parameters = {path: parameter.as_json() for path, parameter in self.parameters.items()}
        return {"folder": self.folder, "bytes": self.nbytes, "parameters": parameters}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Component:
        parameters = {path: Parameter.from_json(item) for path, item in data["parameters"].items()}
        for path in parameters:
            plain_relative(path, "a parameter")
        return cls(plain_relative(data["folder"], "a component"), parameters)


def aval(text: str) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of an array that is described as ``float32[2,3]``."""
    dtype, _, sizes = text.removesuffix("]").partition("[")
    return dtype, tuple(int(size) for size in sizes.split(",") if size)


@dataclass(frozen=True)
class Program:
    """One exported program.

    Args:
        file: its serialized ``jax.export`` module.
        sha256: digest of that file.
        inputs: argument names in order; a component's name stands for its weights.
        donate: indices of donated arguments.
        weight_bits: whether bfloat16 weights are passed as uint16 of the same bits.
        avals: input and output avals as text, ``float32[2,3]``; in nested dicts where an input is one.
    """

    file: str
    sha256: str
    inputs: tuple[str, ...]
    donate: tuple[int, ...]
    weight_bits: bool
    avals: Mapping[str, Any] = field(default_factory=dict)

    def array(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of an input that is one array."""
        return aval(self.avals["inputs"][name])

    def as_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "sha256": self.sha256,
            "inputs": list(self.inputs),
            "donate": list(self.donate),
            "weight_bits": self.weight_bits,
            "avals": dict(self.avals),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Program:
        return cls(
            plain_relative(data["file"], "a program"),
            data["sha256"],
            tuple(data["inputs"]),
            tuple(data["donate"]),
            data["weight_bits"],
            data["avals"],
        )


@dataclass(frozen=True)
class Profile:
    """One static shape and the programs built for it.

    Args:
        width: pixels.
        height: pixels.
        num_frames: frames of one video.
        num_videos: videos per prompt in one run.
        guidance: whether classifier-free guidance is on, as one doubled batch.
        index: position in the order of building; the first is the default.
        options: build options that change the programs: dtypes, chunk sizes.
        programs: by platform and name; platforms differ in their attention.
        num_references: reference images of a VACE model, each a latent frame in front of the video's.
    """

    width: int
    height: int
    num_frames: int
    num_videos: int
    guidance: bool
    index: int
    options: Mapping[str, Any]
    programs: Mapping[str, Mapping[str, Program]]
    num_references: int = 0

    @property
    def name(self) -> str:
        guidance = "cfg" if self.guidance else "nocfg"
        references = f"-r{self.num_references}" if self.num_references else ""
        return f"{self.width}x{self.height}x{self.num_frames}-b{self.num_videos}-{guidance}{references}"

    def as_json(self) -> dict[str, Any]:
        # Without references the key is left out: an artifact that is older than it keeps its digest.
        references = {"num_references": self.num_references} if self.num_references else {}
        return {
            **references,
            "width": self.width,
            "height": self.height,
            "num_frames": self.num_frames,
            "num_videos": self.num_videos,
            "guidance": self.guidance,
            "index": self.index,
            "options": dict(self.options),
            "programs": {
                platform: {name: program.as_json() for name, program in programs.items()}
                for platform, programs in self.programs.items()
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        programs = {
            platform: {name: Program.from_json(item) for name, item in items.items()}
            for platform, items in data["programs"].items()
        }
        sizes = [data[name] for name in ("width", "height", "num_frames", "num_videos")]
        if any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(f"sizes {sizes}")
        width, height, num_frames, num_videos = sizes
        references = data.get("num_references", 0)
        if type(references) is not int or references < 0:
            raise ValueError(f"num_references {references!r}")
        return cls(
            width,
            height,
            num_frames,
            num_videos,
            data["guidance"],
            data["index"],
            data["options"],
            programs,
            references,
        )

    @classmethod
    def all_from_json(cls, data: Mapping[str, Any]) -> dict[str, Profile]:
        """Profiles by name; a name has to be that of the shape."""
        profiles = {name: cls.from_json(item) for name, item in data.items()}
        for name, profile in profiles.items():
            if name != profile.name:
                raise ValueError(f"profile {name} has the shape of {profile.name}")
        return profiles


@dataclass(frozen=True)
class Executable:
    """One entry of the JAX compilation cache; its digest guards what is, after all, code."""

    file: str
    nbytes: int
    sha256: str

    def as_json(self) -> dict[str, Any]:
        return {"file": self.file, "bytes": self.nbytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Executable:
        return cls(plain_relative(data["file"], "an executable"), data["bytes"], data["sha256"])


@dataclass(frozen=True)
class Target:
    """One kind of machine and the executables compiled for it.

    Args:
        folder: the compilation cache.
        environment: every fact that the executables depend on: see ``wanrun.artifact.environment``.
        executables: by profile and program name.
        statistics: compile seconds, FLOPs and predicted bytes, by profile and program name.
    """

    folder: str
    environment: Mapping[str, Any]
    executables: Mapping[str, Mapping[str, Executable]]
    statistics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        executables = {
            profile: {name: entry.as_json() for name, entry in entries.items()}
            for profile, entries in self.executables.items()
        }
        return {
            "folder": self.folder,
            "environment": dict(self.environment),
            "executables": executables,
            "statistics": dict(self.statistics),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Target:
        executables = {
            profile: {name: Executable.from_json(item) for name, item in entries.items()}
            for profile, entries in data["executables"].items()
        }
        folder = plain_relative(data["folder"], "a target")
        environment = data["environment"]
        check_environment(environment)
        statistics = {profile: dict(numbers) for profile, numbers in data["statistics"].items()}
        return cls(folder, environment, executables, statistics)


@dataclass(frozen=True)
class Manifest:
    """Everything an artifact says about itself.

    Args:
        model: variant, family, task and the facts and defaults the runtime needs.
        configs: each component's config as it was read.
        source: repository, revision, and a digest of every source file.
        loras: LoRAs merged at conversion.
        dtypes: dtype policy by component.
        components: weights by component.
        tokenizer: file, sha256, max_length and pad_id.
        profiles: programs by profile name.
        targets: executables by target name.
        golden: file and sha256 of the recorded outputs, by profile name.
        embeddings: file, sha256, prompt, dtype and length of every precomputed prompt embedding, by key.
        tool: name and version of the tool that wrote the artifact.
        times: when each part was made; no digest covers them.
    """

    model: Mapping[str, Any]
    configs: Mapping[str, Any]
    source: Mapping[str, Any]
    loras: tuple[Mapping[str, Any], ...]
    dtypes: Mapping[str, Any]
    components: Mapping[str, Component]
    tokenizer: Mapping[str, Any]
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    targets: Mapping[str, Target] = field(default_factory=dict)
    golden: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    embeddings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tool: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content_digest(self) -> str:
        """sha256 of what the artifact is made from and computes; the same for equal sources and options."""
        parameters = {name: component.as_json() for name, component in self.components.items()}
        # All of a profile but its place in the order of building.
        profiles = {name: {**entry.as_json(), "index": 0} for name, entry in self.profiles.items()}
        content = {
            "model": self.model,
            "configs": self.configs,
            "source": self.source["files"],
            "loras": list(self.loras),
            "dtypes": self.dtypes,
            "parameters": parameters,
            "tokenizer": self.tokenizer,
            "profiles": profiles,
        }
        return "sha256:" + sha256_of(canonical_json(content))

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "content_digest": self.content_digest,
            "model": self.model,
            "configs": self.configs,
            "source": self.source,
            "loras": list(self.loras),
            "dtypes": self.dtypes,
            "components": {name: item.as_json() for name, item in self.components.items()},
            "tokenizer": self.tokenizer,
            "profiles": {name: item.as_json() for name, item in self.profiles.items()},
            "targets": {name: item.as_json() for name, item in self.targets.items()},
            "golden": self.golden,
            "embeddings": self.embeddings,
            "tool": self.tool,
            "times": self.times,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        for where, record in (("the tokenizer", data["tokenizer"]), *data["golden"].items()):
            plain_relative(record["file"], where)
        for key, record in data["embeddings"].items():
            _check_embedding(key, record)
        return cls(
            model=data["model"],
            configs=data["configs"],
            source=data["source"],
            loras=tuple(data["loras"]),
            dtypes=data["dtypes"],
            components={name: Component.from_json(item) for name, item in data["components"].items()},
            tokenizer=data["tokenizer"],
            profiles=Profile.all_from_json(data["profiles"]),
            targets={name: Target.from_json(item) for name, item in data["targets"].items()},
            golden=data["golden"],
            embeddings=data["embeddings"],
            tool=data["tool"],
            times=data["times"],
        )

    def changed(self, **fields: Any) -> Manifest:
        """A copy with these fields replaced."""
        return replace(self, **fields)

    def write(self, artifact: Path) -> None:
        """Commits the artifact: replaces manifest.json atomically and durably."""
        text = json.dumps(self.as_json(), sort_keys=True, indent=1, allow_nan=False)
        replace_file(artifact / MANIFEST, text.encode("utf-8") + b"\n")


def _check_embedding(key: str, record: Mapping[str, Any]) -> None:
    """Raises unless a precomputed embedding's record has every field, of its type."""
    plain_relative(record["file"], "a prompt embedding")
    fields = {name: type(record[name]) for name in ("sha256", "prompt", "dtype", "length")}
    if fields != {"sha256": str, "prompt": str, "dtype": str, "length": int} or record["length"] < 1:
        raise ValueError(f"the record of the prompt embedding {key}")
    if record["dtype"] not in ("bfloat16", "float32"):
        raise ValueError(f"the prompt embedding {key} is of dtype {record['dtype']}")


def read_manifest(artifact: Path) -> Manifest:
    """Reads and checks an artifact's manifest.

    Raises:
        ArtifactError: if there is no artifact, it has another format or version, or the manifest is damaged.
    """
    path = artifact / MANIFEST
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        found = "no such folder" if not artifact.is_dir() else f"no {MANIFEST} in it"
        raise ArtifactError(
            f"{artifact} is not an artifact", found=found, remedy="make one with wanbuild convert"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", remedy="build the artifact again") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        kind = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ArtifactError(f"{path} is not a Wan artifact", expected=f"format {FORMAT}", found=kind)
    if data.get("format_version") != FORMAT_VERSION:
        raise ArtifactError(
            f"{artifact} has another format version",
            expected=FORMAT_VERSION,
            found=data.get("format_version"),
            remedy="build it again with this version of wanbuild, or use the wanrun that matches it",
        )
    try:
        manifest = Manifest.from_json(data)
        digest = manifest.content_digest
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            f"{path} is damaged: {type(error).__name__}: {error}", remedy="build the artifact again"
        ) from None
    if digest != data.get("content_digest"):
        raise ArtifactError(
            f"{path} was changed after it was written",
            expected=f"content_digest {data.get('content_digest')}",
            found=digest,
            remedy="build the artifact again",
        )
    return manifest
