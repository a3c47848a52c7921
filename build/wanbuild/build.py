"""How a checkpoint becomes an artifact: convert its weights, export and compile programs, record results.

Read this file first. ``build_recipe`` does all of it, and each command does one step: ``convert`` makes an
artifact that has weights and no programs, ``compile_artifact`` adds profiles for targets, and
``check.verify.record`` runs them. ``check.verify.replay`` later runs them again and compares the results.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from wanbuild.build_options import CompileRequest
from wanbuild.check import verify
from wanbuild.conversion.chosen import lost_lines, widened_lines
from wanbuild.conversion.component_plans import plan_components, write_components
from wanbuild.conversion.convert_request import ConvertRequest, convert_request, opened_loras, opened_source
from wanbuild.conversion.converted_manifest import (
    converted_lines,
    converted_manifest,
    converted_model,
    converted_warnings,
)
from wanbuild.conversion.defaults import check_defaults
from wanbuild.conversion.provenance import read_small_files
from wanbuild.conversion.replacement import check_place, keep_valid
from wanbuild.models.attention_forms import has_kernel
from wanbuild.plan.plan import fitting_offered
from wanbuild.plan.subject import model_of
from wanbuild.programs.compile import check_request, compile_target, requested_targets, shapes, write_built
from wanbuild.programs.export import builder_of, profile_of, used_sets, with_programs
from wanbuild.programs.jax_flags import pinned
from wanbuild.programs.limited import LimitedProcesses
from wanbuild.programs.preview import with_preview
from wanbuild.programs.requirements import with_requirements
from wanbuild.programs.wiring import check_set
from wanbuild.recipe import fingerprint, is_built, mark_built, options_of, read_recipe
from wanbuild.source.configs import scheduler_left
from wanbuild.source.experts import check_experts
from wanbuild.source.match import variant_of
from wanbuild.source.single_files import taken_as
from wanbuild.staging import build_lock, changing, check_free_space, check_leftover, commit, new_folder
from wanbuild.targets.parsing import chip_named
from wanbuild.targets.target import TargetSpec, platforms_of
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.files import write_durable
from wanrun.rows import record_of

SPARE_BYTES = 64 * 2**20
"""Free space required beyond the weights: metadata, programs and executables."""

Report = Callable[..., None]
"""Receives lines of text."""


def build_recipe(
    file: Path, report: Report, warn: Report, force: bool = False, if_changed: bool = False
) -> None:
    """Converts, compiles and records an artifact from a recipe.

    ``force`` replaces an artifact that exists. So does ``if_changed``, unless the artifact was built from
    this recipe, the same files and these versions. Raises WanError as the steps do; before anything is
    written, if the recipe or the published configs show that the artifact cannot be built.
    """
    recipe = read_recipe(file)
    digest = fingerprint(recipe)
    if if_changed and is_built(recipe.artifact, digest):
        report(f"{recipe.artifact} is built as {file} says, and nothing has changed")
        return
    force = force or if_changed
    check_place(recipe.artifact, force)
    with options_of(file):
        request = record_of(CompileRequest, {"artifact": recipe.artifact, **recipe.compile})
        if (model := model_of(recipe)) is not None:  # else the conversion finds out what depends on the model
            check_request(request, model.manifest)
    convert_aloud(
        convert_request(recipe.source, recipe.artifact, {**recipe.convert, "force": force}), report, warn
    )
    with options_of(file), fitting_offered(recipe.artifact):
        compile_artifact(request, report)
    if any(chip_named(name) is None for name in request.targets):  # else nothing runs here
        verify.record(recipe.artifact, report)
    mark_built(recipe.artifact, digest)


def convert_aloud(request: ConvertRequest, report: Report, warn: Report) -> None:
    """Converts, and reports doubts about the sampling, assumptions, and the weights' size and digest."""
    manifest = convert(request, report)
    for line in converted_warnings(manifest, request):
        warn(line)
    report(*converted_lines(manifest, request))


def convert(request: ConvertRequest, report: Report = lambda *lines: None) -> Manifest:
    """Creates an artifact with the source's weights, and returns its manifest.

    ``report`` gets lines about LoRAs, a scheduler that is not used, quantised weights that become larger, and
    errors of rounding to 8 bits. Raises UsageError if the artifact exists without ``force``, its folder holds
    other files, or defaults are invalid, and SourceError if the source is not usable or the disk is full.
    """
    artifact = Path(os.path.realpath(request.artifact))  # resolve() raises on a loop of links
    check_place(artifact, request.force)  # before any download; checked again under the build lock
    check_defaults(request.defaults)
    with ExitStack() as stack:
        source = stack.enter_context(opened_source(request))
        if request.variant is not None:
            source = taken_as(source, request.variant)
        variant = variant_of(source)
        files = {name: source.component(name).files[0] for name in variant.transformers}
        check_experts(files, variant.name, given=not request.files.keys().isdisjoint(files))
        loras = stack.enter_context(opened_loras(source, variant, request))
        report(*loras.lines, *scheduler_left(source.given, source.configs, source.scheduler_config))
        plans = plan_components(source, variant, request, loras)
        model = converted_model(source, variant, plans, request)
        small = read_small_files(source)
        with build_lock(artifact):
            check_place(artifact, request.force)
            check_leftover(artifact)
            check_free_space(artifact.parent, sum(plan.nbytes for plan in plans.values()) + SPARE_BYTES)
            with new_folder(artifact) as building:
                threads = request.threads or os.cpu_count() or 1
                written = write_components(source, plans, loras, building, threads)
                (building / "tokenizer").mkdir()
                write_durable(building / "tokenizer" / "tokenizer.json", small.tokenizer)
                manifest = converted_manifest(source, model, small, plans, written, loras)
                if request.force:
                    manifest = keep_valid(artifact, manifest, building)
                manifest.write(building)
                commit(artifact)
        if request.quantise is None:
            sizes = {name: plan.nbytes for name, plan in plans.items()}
            dtypes = {name: plan.policy.weights for name, plan in plans.items()}
            report(*widened_lines(source.components, sizes, dtypes))
    report(*lost_lines({name: item.lost for name, item in written.items()}))
    return manifest


def compile_artifact(request: CompileRequest, report: Callable[[str], None]) -> Manifest:
    """Adds profiles and targets to an artifact, and the map of its previews; executes no program of it.

    Executables that are intact and were built in this environment are kept. A target whose environment has
    changed is compiled again for all of its profiles. ``report`` gets one line per program. Returns the
    artifact's new manifest.

    Raises ArtifactError if there is no usable artifact, UsageError for a shape or a target that cannot be
    built.
    """
    with changing(request.artifact.resolve()) as artifact, pinned(platforms_of(request.targets)):
        manifest = artifact.manifest
        targets = list({target.name: target for target in requested_targets(request, manifest)}.values())
        head_dim = manifest.configs["transformer"]["attention_head_dim"]
        for target in targets:
            if not has_kernel(target.kernels, head_dim):
                report(f"{target.name}: the kernel takes no heads of {head_dim}, so attention is XLA's")
        wanted = [profile_of(manifest, shape, request.options) for shape in shapes(request, manifest)]
        for target in targets[1:]:  # the first one is about to be built
            builder_of(manifest, wanted[0], target)
        for target in targets:
            artifact = export_and_compile(artifact, target, wanted, report)
            write_built(artifact)
        if (shown := with_preview(artifact, report)) is not artifact:
            artifact = shown
            artifact.write()
    return artifact.manifest


def export_and_compile(
    artifact: Artifact, target: TargetSpec, wanted: Sequence[Profile], report: Callable[[str], None]
) -> Artifact:
    """Exports and compiles profiles for a target, added to those it has; ``write_built`` commits them.

    The caller holds the build lock and JAX's flags, and removes files that are not listed.
    """
    exported, key = with_programs(artifact, target, wanted)
    check_set(exported.manifest, key)
    names = [profile.name for profile in wanted]
    with LimitedProcesses() as processes:
        compiled = compile_target(exported, artifact, target, key, names, processes, report)
    targets = with_requirements({**exported.manifest.targets, target.name: compiled})
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return exported.changed(
        targets=targets,
        program_sets=used_sets(exported.manifest.program_sets, targets),
        times={**artifact.manifest.times, f"compiled {target.name}": now},
    )
