"""Describes an artifact's contents, as a table or as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import numpy as np

import wanrun
from wanrun.artifact.manifest import Component, Manifest
from wanrun.artifact.mesh import device_bytes, jax_sizes, mesh_text, num_devices, paired
from wanrun.artifact.model import Model
from wanrun.artifact.programs import ProgramSet
from wanrun.artifact.schedules import Schedule
from wanrun.artifact.targets import Target
from wanrun.units import in_bytes, scaled


def summary(manifest: Manifest, built: Collection[str] = ()) -> dict[str, Any]:
    """Returns the manifest without checksums, for ``--json``; ``built`` are the profiles built here."""
    profiles = sorted(manifest.profiles.values(), key=lambda profile: profile.index)
    embeddings = sorted(manifest.embeddings.values(), key=lambda record: (record.prompt, record.dtype))
    return {
        "content_digest": manifest.content_digest,
        "manifest_digest": manifest.manifest_digest,
        "model": msgspec.to_builtins(manifest.model),
        "source": dict(manifest.source),
        "loras": msgspec.to_builtins(manifest.loras),
        "dtypes": msgspec.to_builtins(manifest.dtypes),
        "components": {name: _component(item) for name, item in manifest.components.items()},
        "profiles": {
            profile.name: {
                "options": msgspec.to_builtins(profile.options),
                "guidance": profile.guidance,
                "recorded": profile.name in manifest.golden,
                "built_here": profile.name in built,
            }
            for profile in profiles
        },
        "program_sets": {key: _program_set(programs) for key, programs in manifest.program_sets.items()},
        "targets": {
            name: {**_target(target), **_division(manifest, target), **_attested(manifest, name)}
            for name, target in manifest.targets.items()
        },
        "embeddings": [
            {"prompt": record.prompt, "dtype": record.dtype, "length": record.length} for record in embeddings
        ],
        "schedules": msgspec.to_builtins(manifest.schedules),
        "adapters": msgspec.to_builtins(manifest.adapters),
        "tool": dict(manifest.tool),
        "times": dict(manifest.times),
    }


def _component(component: Component) -> dict[str, Any]:
    parameters = component.parameters
    sizes: Counter[str] = Counter()
    for parameter in parameters.values():
        sizes[parameter.layout.dtype] += parameter.layout.nbytes
    return {
        "bytes": component.nbytes,
        "parameters": len(parameters),
        "values": sum(math.prod(parameter.layout.shape) for parameter in parameters.values()),
        "bytes_by_dtype": dict(sizes),
        "shapes": {
            path: [parameter.layout.dtype, list(parameter.layout.shape)]
            for path, parameter in parameters.items()
        },
        "axes": {path: list(parameter.axes) for path, parameter in parameters.items()},
    }


def _program_set(programs: ProgramSet) -> dict[str, Any]:
    return {
        "platform": programs.platform,
        "kernels": msgspec.to_builtins(programs.kernels),
        "mesh": dict(programs.mesh),
        "jax": programs.jax,
        "profiles": {
            profile: {
                name: {"inputs": list(program.inputs), "donate": list(program.donate), **program.avals}
                for name, program in entries.items()
            }
            for profile, entries in programs.programs.items()
        },
    }


def _target(target: Target) -> dict[str, Any]:
    return {
        "program_set": target.program_set,
        "requirements": target.requirements.file,
        "environment": dict(target.environment),
        "profiles": sorted(target.executables),
        "bytes": sum(e.nbytes for entries in target.executables.values() for e in entries.values()),
        "statistics": dict(target.statistics),
    }


def _attested(manifest: Manifest, name: str) -> dict[str, Any]:
    """Returns where a target's executables were tried and found right; {} without a verdict."""
    found = [
        {"profile": one.profile, "device_kind": one.device_kind, "made": one.made}
        for one in manifest.verdicts.values()
        if one.target == name
    ]
    return {"attested": sorted(found, key=lambda one: (one["profile"], one["made"]))} if found else {}


def _division(manifest: Manifest, target: Target) -> dict[str, Any]:
    """Returns how a target's weights are divided among the devices of its mesh; {} for one device."""
    programs = manifest.program_sets[target.program_set]
    if not programs.mesh:
        return {}
    sizes = jax_sizes(programs.mesh)
    return {
        "mesh": dict(programs.mesh),
        "rules": {axis: list(along) for axis, along in programs.rules.items()},
        "bytes_per_device": {
            name: device_bytes(component, programs.rules, sizes)
            for name, component in manifest.components.items()
        },
    }


def table(manifest: Manifest, built: Collection[str] = ()) -> Iterator[str]:
    """Yields the lines that describe the artifact on a terminal; arguments as for ``summary``."""
    data = summary(manifest, built)
    for section in (_model_lines, _component_lines, _profile_lines, _embedding_lines):
        yield from section(manifest, data)
    yield from _exports(manifest)
    for name, target in data["targets"].items():
        yield from _target_lines(name, target)


def _model_lines(manifest: Manifest, data: dict[str, Any]) -> Iterator[str]:
    model, defaults = manifest.model, manifest.model.default_options()
    yield f"variant         {model.variant} ({model.task.name})"
    yield f"written by      {manifest.written_by}"
    yield f"content digest  {data['content_digest']}"
    yield f"manifest digest {data['manifest_digest']}"
    source = data["source"]
    yield f"source          {source['repository'] or 'a folder'}, {len(source['files'])} files"
    if assumed := source.get("assumed"):
        yield f"assumed         {', '.join(assumed)}: as published, files of weights do not say"
    if configs := source.get("configs"):
        yield f"configs given   {', '.join(dict.fromkeys(configs.values()))}"
    for lora in manifest.loras:
        left_out = f", {lora.left_out} of its tensors left out" if lora.left_out else ""
        yield f"LoRA            {lora}, sha256 {lora.sha256}{left_out}"
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
    if (chunks := model.chunks) is not None:
        yield f"live            in chunks of {chunks.each} latent frames, the first of {chunks.first}"
    if model.task.inputs:
        rows = {row.name: row for row in wanrun.options()}
        taken = [
            f"{rows[name].flag}{_needed(item.required, item.mode)}"
            for name, item in model.task.inputs.items()
        ]
        fit = f"; {rows['fit'].flag} {rows['fit'].value}" if model.task.fits else ""
        yield f"takes           {', '.join(taken)}{fit}"
    for name, schedule in sorted(manifest.schedules.items(), key=lambda one: -one[1].evaluations):
        yield f"schedule        {name}: {schedule.describe()}{_experts_steps(schedule, model)}"
    for name, adapter in sorted(manifest.adapters.items()):
        yield f"adapter         {name}: {adapter.describe()}"


def _needed(required: bool, mode: str | None) -> str:
    """Says whether an image or video must be given, and in which mode."""
    words = ["needed"] * required + ([f"in mode {mode}"] if mode else [])
    return f" ({' '.join(words)})" if words else ""


def _experts_steps(schedule: Schedule, model: Model) -> str:
    """Says which steps of a schedule each of two experts takes; nothing of one transformer."""
    if schedule.boundary is None:
        return ""
    least = np.float32(schedule.boundary * model.num_train_timesteps)
    high = sum(np.float32(timestep) >= least for timestep in schedule.timesteps)
    return f"; {high} by the high-noise expert, {len(schedule.timesteps) - high} by the other"


def _component_lines(manifest: Manifest, data: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"{'component':<14} {'parameters':>10} {'values':>15} {'bytes':>15}  dtypes"
    for name, item in data["components"].items():
        dtypes = ", ".join(f"{dtype} {size:,}" for dtype, size in sorted(item["bytes_by_dtype"].items()))
        yield f"{name:<14} {item['parameters']:>10} {item['values']:>15,} {item['bytes']:>15,}  {dtypes}"


def _profile_lines(manifest: Manifest, data: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"{'profile':<24} {'guidance':<8} {'targets':<12} {'golden':<7} options"
    for name, profile in data["profiles"].items():
        targets = ",".join(sorted(t for t, item in data["targets"].items() if name in item["profiles"]))
        options = ", ".join(
            f"{key}={' and '.join(value) if key == 'guiders' else value}"
            for key, value in sorted(profile["options"].items())
            if value not in (None, 0, ())
        )
        guidance = "by step" if profile["guidance"] else "none"
        recorded = "yes" if profile["recorded"] else "no"
        here = ", built here" if profile["built_here"] else ""
        yield f"{name:<24} {guidance:<8} {targets or 'none':<12} {recorded:<7} {options}{here}"
    if not data["profiles"]:
        yield "none: run wanbuild compile"


def _embedding_lines(manifest: Manifest, data: dict[str, Any]) -> Iterator[str]:
    if data["embeddings"]:
        yield ""
        yield f"{'embedding':<10} {'tokens':>6}  prompt"
    for item in data["embeddings"]:
        prompt = item["prompt"] if len(item["prompt"]) <= 80 else item["prompt"][:77] + "..."
        yield f"{item['dtype']:<10} {item['length']:>6}  {prompt!r}"


def _target_lines(name: str, target: dict[str, Any]) -> Iterator[str]:
    environment = target["environment"]
    packages = ", ".join(f"{key} {value}" for key, value in sorted(environment["packages"].items()))
    yield ""
    yield (
        f"target {name}: {environment['device_count']} x {environment['device_kind']} "
        f"({environment['machine']}), {packages} ({target['requirements']}), "
        f"programs {target['program_set']}, {target['bytes']:,} bytes of executables"
    )
    if "mesh" in target:
        yield from _division_lines(target)
    for one in target.get("attested", ()):
        yield f"  {one['profile']} attested on {one['device_kind']}, {one['made']}"
    for profile, programs in target["statistics"].items():
        for program, facts in programs.items():
            work = scaled(facts["flops"], "FLOP") if "flops" in facts else "? FLOP"
            yield (
                f"  {profile} {program:<19} {work:>11}, "
                f"temporaries {in_bytes(facts.get('temporary_bytes', 0)):>7}, "
                f"compiled in {facts.get('compile_seconds', 0):.1f} s"
            )


def _division_lines(target: dict[str, Any]) -> Iterator[str]:
    """Yields the mesh of a target, the axes that parameters are cut along, and what one device holds."""
    mesh = target["mesh"]
    rules = [
        f"{axis} over {' and '.join(used)}"
        for axis, along in target["rules"].items()
        if (used := [name for name in along if name in mesh])
    ]
    cut = f"are cut: {', '.join(rules)}" if rules else "are whole on every device"
    yield f"  mesh {mesh_text(mesh)}: {num_devices(mesh)} devices; parameters {cut}"
    if paired(mesh):
        yield "  guidance: halves of the devices make both passes at once, so a step without it is no faster"
    sizes = [f"{name} {nbytes:,}" for name, nbytes in target["bytes_per_device"].items()]
    yield f"  bytes per device: {', '.join(sizes)}"


def _exports(manifest: Manifest) -> Iterator[str]:
    """Yields, for each program set, the version of JAX that exported it."""
    for key, programs in manifest.program_sets.items():
        yield ""
        yield f"programs {key}: exported by jax {programs.jax}"
