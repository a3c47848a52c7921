"""Converts a checkpoint folder into an artifact's weights, in one pass over the source."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wanbuild.components import KINDS, DtypePolicy
from wanbuild.families import Family, family_of
from wanbuild.mapping.engine import Assignment, assign, describe_problems
from wanbuild.scheduler import read_scheduler
from wanbuild.source import Source, SourceComponent, open_source
from wanbuild.staging import build_lock, building_folder, check_free_space, commit
from wanbuild.writer import ComponentWriter, WrittenComponent, component_layouts
from wanrun import __version__
from wanrun.console import Progress
from wanrun.errors import ArtifactError, SourceError, UsageError
from wanrun.files import canonical_json, file_sha256, sha256_of, write_durable
from wanrun.manifest import MANIFEST, Manifest, read_manifest

SPARE_BYTES = 64 * 2**20
"""Free space asked for beyond the weights: metadata, programs and executables."""


@dataclass(frozen=True)
class ConvertRequest:
    """What to convert, and how.

    Args:
        source: a checkpoint folder in the diffusers layout.
        artifact: the folder to make.
        dtypes: weights dtype by component; the component's default where there is none.
        negative_prompt: default negative prompt; the family's where None.
        force: whether an existing artifact is replaced.
        threads: worker threads; one a core where None.
    """

    source: Path
    artifact: Path
    dtypes: Mapping[str, str | None] = field(default_factory=dict)
    negative_prompt: str | None = None
    force: bool = False
    threads: int | None = None


@dataclass(frozen=True)
class _Plan:
    """One component's part of the conversion."""

    config: Any
    policy: DtypePolicy
    assignments: tuple[Assignment, ...]

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in component_layouts(self.assignments).values())


def _plan_components(source: Source, family: Family, request: ConvertRequest) -> dict[str, _Plan]:
    """Plans every component; raises one error with the problems of all of them."""
    plans: dict[str, _Plan] = {}
    problems: list[str] = []
    for name in family.weight_components:
        component, kind = source.component(name), KINDS[name]
        config = kind.parse(component.config, str(component.config_file))
        policy = kind.policy(request.dtypes.get(name))
        shapes = {key: component.entry(key).shape for key in component.keys}
        assignments, found = assign(kind.rules, shapes, kind.module(config, policy), name)
        problems += found
        plans[name] = _Plan(config, policy, assignments)
    if problems:
        raise SourceError(
            f"{source.path} does not fit its config: {describe_problems(problems)}",
            remedy="check that the download is complete and is the checkpoint its config describes",
        )
    return plans


def _source_record(source: Source, crcs: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Repository, revision and a digest of every file that was read.

    A weight file's digest is the sha256 of its tensors' names, dtypes, shapes and crc32c, taken while
    they were converted; other files are small and have the sha256 of their bytes.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for name, component in source.components.items():
        for key, file in component.keys.items():
            entry = component.entry(key)
            record = [str(entry.dtype), list(entry.shape), crcs[name][key]]
            tensors.setdefault(file.path.relative_to(source.path).as_posix(), {})[key] = record
    files = {
        name: {
            "bytes": path.stat().st_size,
            "digest": f"tensors-crc32c-sha256:{sha256_of(canonical_json(tensors[name]))}"
            if name in tensors
            else f"sha256:{file_sha256(path)}",
        }
        for name, path in source.files().items()
    }
    return {"repository": source.repository, "revision": source.revision, "files": files}


def _model_record(
    source: Source, family: Family, plans: Mapping[str, _Plan], request: ConvertRequest
) -> dict[str, Any]:
    """The facts and defaults that the runtime needs; it knows no model code."""
    scheduler = read_scheduler(source.scheduler_config, default_shift=family.flow_shift)
    negative = family.negative_prompt if request.negative_prompt is None else request.negative_prompt
    return {
        "variant": family.name,
        "task": family.task,
        "latent_channels": plans["vae"].config.z_dim,
        "vae_spatial": family.vae_spatial,
        "vae_temporal": family.vae_temporal,
        "num_train_timesteps": 1000,
        "boundary_ratio": source.boundary_ratio,
        "expand_timesteps": source.expand_timesteps,
        "defaults": {
            "num_steps": family.steps,
            "guidance_scale": family.guidance_scale,
            "flow_shift": scheduler.flow_shift,
            "solver": scheduler.solver,
            "fps": family.fps,
            "negative_prompt": negative,
        },
    }


def _write_components(
    source: Source, plans: Mapping[str, _Plan], building: Path, threads: int
) -> dict[str, WrittenComponent]:
    total = sum(source.component(name).nbytes for name in plans)
    written = {}
    with Progress(total, "convert", unit="B") as progress, ThreadPoolExecutor(threads) as pool:
        for name, plan in plans.items():
            component: SourceComponent = source.component(name)
            writer = ComponentWriter(
                building / "weights" / name, plan.assignments, component, progress.advance
            )
            written[name] = writer.write(pool)
    return written


def _keep_valid(old: Path, new: Manifest, building: Path) -> Manifest:
    """Takes over programs and executables from the artifact being replaced, where they still fit.

    Weights are arguments of a program, so it stays valid as long as the model's facts, configs, dtypes
    and parameters' shapes are the same.
    """
    try:
        previous = read_manifest(old)
    except ArtifactError:
        return new  # whatever is wrong with the old artifact, it is being replaced

    def signature(manifest: Manifest) -> Any:
        layouts = {
            name: {path: dataclasses.astuple(p.layout) for path, p in component.parameters.items()}
            for name, component in manifest.components.items()
        }
        return manifest.configs, manifest.dtypes, layouts

    if signature(previous) != signature(new):
        return new
    for folder in ("programs", "executables"):
        if (old / folder).is_dir():
            shutil.copytree(old / folder, building / folder, copy_function=_link_or_copy)
    return new.changed(profiles=previous.profiles, targets=previous.targets)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # not every file system has hard links
        shutil.copyfile(source, target)


def convert(request: ConvertRequest) -> Manifest:
    """Makes an artifact that holds the source's weights.

    Args:
        request: source, artifact and options.

    Returns:
        The new artifact's manifest.

    Raises:
        UsageError: if the artifact exists and force is not set.
        SourceError: if the source is not usable or the disk is full.
    """
    artifact = request.artifact.resolve()
    with open_source(request.source) as source:
        family = family_of(source)
        plans = _plan_components(source, family, request)
        with build_lock(artifact):
            _refuse_existing(artifact, request.force)
            needed = sum(plan.nbytes for plan in plans.values()) + SPARE_BYTES
            check_free_space(artifact.parent, needed)
            building = building_folder(artifact)
            building.mkdir()
            try:
                threads = request.threads or os.cpu_count() or 1
                written = _write_components(source, plans, building, threads)
                tokenizer = source.tokenizer.file.read_bytes()
                (building / "tokenizer").mkdir()
                write_durable(building / "tokenizer" / "tokenizer.json", tokenizer)
                manifest = Manifest(
                    model=_model_record(source, family, plans, request),
                    configs={
                        **{name: dict(source.component(name).config) for name in plans},
                        "scheduler": dict(source.scheduler_config),
                    },
                    source=_source_record(source, {n: w.source_crc32c for n, w in written.items()}),
                    loras=(),
                    dtypes={name: plan.policy.as_json() for name, plan in plans.items()},
                    components={name: item.component for name, item in written.items()},
                    tokenizer={
                        "file": "tokenizer/tokenizer.json",
                        "sha256": sha256_of(tokenizer),
                        "max_length": 512,
                        "pad_id": source.tokenizer.pad_id,
                    },
                    tool={"name": "wanbuild", "version": __version__},
                    times={"converted": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
                )
                if request.force:
                    manifest = _keep_valid(artifact, manifest, building)
                manifest.write(building)
                commit(artifact)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
    return manifest


def _refuse_existing(artifact: Path, force: bool) -> None:
    if not artifact.exists() or (artifact.is_dir() and not any(artifact.iterdir())):
        return
    if not (artifact / MANIFEST).is_file():
        raise UsageError(
            f"{artifact} exists and is not an artifact", remedy="choose another folder; it is left as it is"
        )
    if not force:
        raise UsageError(f"the artifact {artifact} exists", remedy="pass --force to replace it")
