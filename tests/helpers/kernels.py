"""An artifact with a program of an attention's kernel, which a CPU's programs do not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from msgspec.structs import replace

from helpers.damage import PROFILE
from helpers.manifests import plain_program
from wanbuild.programs.export import describe, export_program
from wanbuild.programs.spec import program
from wanrun.artifact.manifest import read_manifest
from wanrun.artifact.programs import PlainFile
from wanrun.files import sha256_of

Function = Callable[[jax.Array], jax.Array]


def put_attention(artifact: Path, kernel: Function = jnp.negative, plain: Function = jnp.negative) -> None:
    """Gives the profile a program ``attention`` of a function of three numbers, and its plain form.

    Its executable is that of another program.
    """
    manifest = read_manifest(artifact)
    (key, own), (name, target) = *manifest.program_sets.items(), *manifest.targets.items()
    arguments = {"q": jax.ShapeDtypeStruct((3,), jnp.float32)}
    spec = program("attention", lambda q: {"out": kernel(q)}, arguments)
    other = program("attention", lambda q: {"out": plain(q)}, arguments)
    files: list[dict[str, Any]] = []
    for one in (spec, other):
        data = export_program(one, "cpu")
        file = f"programs/{PROFILE}/attention-{sha256_of(data)[:12]}.stablehlo"
        (artifact / file).write_bytes(data)
        files.append({"file": file, "sha256": sha256_of(data)})
    record = plain_program(
        **files[0], role="attention", inputs=("q",), avals=describe(spec, ()), plain=PlainFile(**files[1])
    )
    programs = {**own.programs[PROFILE], "attention": record}
    entries = target.executables[PROFILE]
    manifest.changed(
        program_sets={key: replace(own, programs={**own.programs, PROFILE: programs})},
        targets={name: replace(target, executables={PROFILE: {**entries, "attention": entries["prepare"]}})},
    ).write(artifact)
