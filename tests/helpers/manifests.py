"""Manifests that say no more than a test needs."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from wanrun.artifact.layout import plan_layout
from wanrun.artifact.manifest import Manifest, Tokenizer
from wanrun.artifact.model import Defaults, Model
from wanrun.artifact.parameters import Parameter
from wanrun.artifact.programs import Kernels, Profile, ProfileOptions, Program, ProgramSet
from wanrun.artifact.targets import Requirements, Target
from wanrun.artifact.task import Task


def plain_manifest(**fields: Any) -> Manifest:
    """A manifest of nothing but these fields."""
    tokenizer = Tokenizer(file="tokenizer.json", sha256="", max_length=512, pad_id=0)
    nothing: dict[str, Any] = {
        "model": plain_model(),
        "configs": {},
        "source": {"files": {}},
        "dtypes": {},
        "components": {},
        "tokenizer": tokenizer,
        "loras": (),
        **{
            name: {}
            for name in ("profiles", "program_sets", "targets", "golden", "embeddings", "tool", "times")
        },
    }
    return Manifest(**{**nothing, **fields})


def plain_model(**fields: Any) -> Model:
    """A model of text to video with these fields."""
    defaults = Defaults(
        num_steps=40, guidance_scale=4.0, flow_shift=12.0, solver="unipc", fps=16, negative_prompt="blurry"
    )
    plain: dict[str, Any] = {
        "variant": "wan2.1-t2v",
        "text_width": 32,
        "latent_channels": 16,
        "vae_spatial": 8,
        "vae_temporal": 4,
        "size_multiple": 16,
        "num_train_timesteps": 1000,
        "defaults": defaults,
        "options": {},
        "task": Task(name="t2v", inputs={}),
    }
    return Model(**{**plain, **fields})


def with_model(manifest: Manifest, defaults: Mapping[str, Any] | None = None, **fields: Any) -> Manifest:
    """The manifest with these fields of its model, and these of its defaults."""
    changed = msgspec.structs.replace(manifest.model.defaults, **(defaults or {}))
    return manifest.changed(model=msgspec.structs.replace(manifest.model, defaults=changed, **fields))


def plain_parameter(shape: tuple[int, ...], dtype: str) -> Parameter:
    """A parameter whose checksums nobody reads."""
    layout = plan_layout(shape, dtype, stacked=False)
    return Parameter(layout=layout, axes=(None,) * len(shape), crc32c=("00000000",) * layout.rows, sha256="")


def built_with(**options: Any) -> ProfileOptions:
    """Options of a profile, the defaults of ``wanbuild compile`` where none are given."""
    defaults: dict[str, Any] = {
        "dtype": "bfloat16",
        "vae_dtype": "float32",
        "scheduler_dtype": "float32",
        "vae_decode_chunk": 1,
        "vae_encode_chunk": 1,
        "loop": "both",
        "max_steps": 100,
        "weights_dtype": "bfloat16",
        "text_weights_dtype": "bfloat16",
        "vae_weights_dtype": "float32",
    }
    return ProfileOptions(**{**defaults, **options})


def programs_of(manifest: Manifest, profile: str, target: str = "cpu") -> Mapping[str, Program]:
    """The programs of a profile for a target, by name."""
    return manifest.programs(manifest.targets[target], manifest.profiles[profile])


def plain_program(**fields: Any) -> Program:
    """A program of nothing but these fields."""
    return Program(**{"file": "f", "sha256": "", "inputs": (), "donate": (), "avals": {}, **fields})


EXPORTED = datetime.date(2026, 11, 1)
"""When programs of a test were exported."""


def program_set(programs: Mapping[str, Mapping[str, Program]]) -> ProgramSet:
    """A set of these programs, by profile and name."""
    kernels = Kernels("cpu", "winograd", weight_bits=True, image_multiple=1)
    return ProgramSet(
        platform="cpu",
        kernels=kernels,
        mesh={},
        jax="0",
        programs=programs,
        exported=dict.fromkeys(programs, EXPORTED),
    )


ENVIRONMENT: Mapping[str, Any] = MappingProxyType(
    {
        "platform": "cpu",
        "machine": "x86_64",
        "packages": {"jax": "0", "jaxlib": "0"},
        "variables": {},
        "zstandard": True,
        "device_kind": "cpu",
        "device_count": 1,
        "platform_version": "cpu",
    }
)
"""Of a machine that there is not."""


def plain_target(environment: Mapping[str, Any] = MappingProxyType({}), **fields: Any) -> Target:
    """A target of nothing but these facts and fields."""
    nothing: dict[str, Any] = {
        "program_set": "",
        "folder": "executables/cpu",
        "requirements": Requirements(file="requirements.txt", sha256=""),
        "executables": {},
        "statistics": {},
    }
    return Target(environment={**ENVIRONMENT, **environment}, **{**nothing, **fields})


def with_profiles(manifest: Manifest, profiles: Iterable[Profile]) -> Manifest:
    """The manifest with other profiles, all of which have the programs and executables of its first."""
    first, new = next(iter(manifest.profiles)), {profile.name: profile for profile in profiles}

    def of_first(entries: Mapping[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(new, entries[first]) if first in entries else {}

    sets = {
        key: msgspec.structs.replace(old, programs=of_first(old.programs), exported=of_first(old.exported))
        for key, old in manifest.program_sets.items()
    }
    targets = {
        name: msgspec.structs.replace(
            old, executables=of_first(old.executables), statistics=of_first(old.statistics)
        )
        for name, old in manifest.targets.items()
    }
    return manifest.changed(profiles=new, program_sets=sets, targets=targets)


def without_profiles(manifest: Manifest) -> Manifest:
    """The manifest as ``wanbuild convert`` made it."""
    return manifest.changed(profiles={}, program_sets={}, targets={}, golden={})
