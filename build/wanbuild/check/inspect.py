"""Prints what an artifact holds, as a table or as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from wanrun.artifact.export_age import readable_until
from wanrun.artifact.manifest import Manifest


def summary(manifest: Manifest) -> dict[str, Any]:
    """The artifact in short, for ``--json``: the manifest without checksums."""
    components = {
        name: {
            "bytes": component.nbytes,
            "parameters": len(component.parameters),
            "values": sum(math.prod(parameter.layout.shape) for parameter in component.parameters.values()),
            "bytes_by_dtype": dict(_dtype_bytes(component.parameters.values())),
            "shapes": {
                path: [parameter.layout.dtype, list(parameter.layout.shape)]
                for path, parameter in component.parameters.items()
            },
            "axes": {path: list(parameter.axes) for path, parameter in component.parameters.items()},
        }
        for name, component in manifest.components.items()
    }
    profiles = {
        profile.name: {
            "options": msgspec.to_builtins(profile.options),
            "recorded": profile.name in manifest.golden,
        }
        for profile in sorted(manifest.profiles.values(), key=lambda profile: profile.index)
    }
    program_sets = {
        key: {
            "platform": programs.platform,
            "kernels": msgspec.to_builtins(programs.kernels),
            "mesh": dict(programs.mesh),
            "jax": programs.jax,
            "exported": {profile: f"{day}" for profile, day in programs.exported.items()},
            "profiles": {
                profile: {
                    name: {"inputs": list(program.inputs), "donate": list(program.donate), **program.avals}
                    for name, program in entries.items()
                }
                for profile, entries in programs.programs.items()
            },
        }
        for key, programs in manifest.program_sets.items()
    }
    targets = {
        name: {
            "program_set": target.program_set,
            "requirements": target.requirements.file,
            "environment": dict(target.environment),
            "profiles": sorted(target.executables),
            "bytes": sum(e.nbytes for entries in target.executables.values() for e in entries.values()),
            "statistics": dict(target.statistics),
        }
        for name, target in manifest.targets.items()
    }
    return {
        "content_digest": manifest.content_digest,
        "model": msgspec.to_builtins(manifest.model),
        "source": dict(manifest.source),
        "loras": list(manifest.loras),
        "dtypes": msgspec.to_builtins(manifest.dtypes),
        "components": components,
        "profiles": profiles,
        "program_sets": program_sets,
        "targets": targets,
        "embeddings": sorted(
            (
                {"prompt": record.prompt, "dtype": record.dtype, "length": record.length}
                for record in manifest.embeddings.values()
            ),
            key=lambda record: (record["prompt"], record["dtype"]),
        ),
        "tool": dict(manifest.tool),
        "times": dict(manifest.times),
    }


def _dtype_bytes(parameters: Any) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for parameter in parameters:
        sizes[parameter.layout.dtype] += parameter.layout.nbytes
    return sizes


def table(manifest: Manifest) -> Iterator[str]:
    """The artifact in lines for a terminal."""
    data = summary(manifest)
    model, defaults = manifest.model, manifest.model.default_options()
    yield f"variant         {model.variant} ({model.task.name})"
    yield f"content digest  {data['content_digest']}"
    source = data["source"]
    yield f"source          {source['repository'] or 'a folder'}, {len(source['files'])} files"
    guidance = f"guidance {defaults['guidance_scale']:g}"
    if "guidance_scale_2" in defaults:
        guidance += f" and {defaults['guidance_scale_2']:g} below boundary {defaults['boundary']:g}"
    steps = f"{defaults['num_steps']} steps"
    if "timesteps" in defaults:
        steps += f" at {', '.join(f'{timestep:g}' for timestep in defaults['timesteps'])}"
    yield (
        f"defaults        {defaults['solver']}, {steps}, {guidance}, "
        f"shift {defaults['flow_shift']:g}, {defaults['fps']:g} fps"
    )
    yield ""
    yield f"{'component':<14} {'parameters':>10} {'values':>15} {'bytes':>15}  dtypes"
    for name, item in data["components"].items():
        dtypes = ", ".join(f"{dtype} {size:,}" for dtype, size in sorted(item["bytes_by_dtype"].items()))
        yield f"{name:<14} {item['parameters']:>10} {item['values']:>15,} {item['bytes']:>15,}  {dtypes}"
    yield ""
    yield f"{'profile':<24} {'targets':<12} {'golden':<7} options"
    for name, profile in data["profiles"].items():
        targets = ",".join(sorted(t for t, item in data["targets"].items() if name in item["profiles"]))
        options = ", ".join(
            f"{key}={value}" for key, value in sorted(profile["options"].items()) if value is not None
        )
        yield f"{name:<24} {targets or 'none':<12} {'yes' if profile['recorded'] else 'no':<7} {options}"
    if not data["profiles"]:
        yield "none: run wanbuild compile"
    for number, item in enumerate(data["embeddings"]):
        if number == 0:
            yield ""
            yield f"{'embedding':<10} {'tokens':>6}  prompt"
        prompt = item["prompt"] if len(item["prompt"]) <= 80 else item["prompt"][:77] + "..."
        yield f"{item['dtype']:<10} {item['length']:>6}  {prompt!r}"
    yield from _exports(manifest)
    for name, target in data["targets"].items():
        environment = target["environment"]
        packages = ", ".join(f"{key} {value}" for key, value in sorted(environment["packages"].items()))
        yield ""
        yield (
            f"target {name}: {environment['device_count']} x {environment['device_kind']} "
            f"({environment['machine']}), {packages} ({target['requirements']}), "
            f"programs {target['program_set']}, {target['bytes']:,} bytes of executables"
        )
        for profile_name, programs in target["statistics"].items():
            for program, facts in programs.items():
                yield (
                    f"  {profile_name} {program:<13} {facts['flops'] / 1e9:>12,.1f} GFLOP, "
                    f"temporaries {facts['temporary_bytes'] / 1e6:,.1f} MB, "
                    f"compiled in {facts['compile_seconds']:.1f} s"
                )


def _exports(manifest: Manifest) -> Iterator[str]:
    """When the programs of each set were exported, and until when newer versions of JAX read them."""
    for key, programs in manifest.program_sets.items():
        days = sorted(set(programs.exported.values()))
        if days:
            yield ""
            yield (
                f"programs {key}: exported by jax {programs.jax} on {', '.join(map(str, days))}, "
                f"read by newer versions until {readable_until(days[0])}"
            )
