"""Plans a generation by formula: the mesh, its memory and its times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from wanbuild.build_options import BuildOptions, PlanRequest
from wanbuild.plan.here import NAMES, this_machine
from wanbuild.plan.meshes import Candidate, candidate, candidate_meshes, in_tiles, refusal
from wanbuild.plan.planned_generation import PlannedGeneration
from wanbuild.plan.subject import Subject, read_subject
from wanbuild.programs.export import in_form_of
from wanbuild.programs.jax_flags import pinned
from wanbuild.programs.shape import Shape
from wanbuild.programs.shardings import check_mesh
from wanbuild.programs.xla import TooLargeError
from wanbuild.targets.chip import Chip
from wanbuild.targets.chips import CHIPS
from wanbuild.targets.parsing import chip_named, choice
from wanbuild.variants.table import variant_named
from wanrun.artifact.mesh import name_suffix, num_devices
from wanrun.artifact.roles import FORMS, STEPWISE
from wanrun.artifact.target_names import W8A8, split_w8a8
from wanrun.errors import UsageError, shortened
from wanrun.request.profiles import has_guidance
from wanrun.rows import record_of

_HERE = re.compile(rf"({'|'.join(NAMES)})(?:-(\d{{1,4}}))?")


@dataclass(frozen=True)
class Plan:
    """A planned generation of a model, and the chosen mesh with its predictions.

    ``devices`` is how many there are; ``others`` has all meshes, if they are asked for.
    """

    subject: Subject
    generation: PlannedGeneration
    devices: int
    chosen: Candidate
    others: Sequence[Candidate] = ()


def parse_chip(text: str, chips: Mapping[str, Chip] = CHIPS) -> tuple[Chip, int | None]:
    """Returns the chip and the number of devices that ``v7x-w8a8-8`` names; None where it names no number.

    ``local`` and ``cpu`` name this machine, whose CPU is measured the first time. Raises UsageError for a
    chip that is not known.
    """
    if (named := chip_named(text, chips)) is not None:
        return named.chip, named.count
    plain, w8a8 = split_w8a8(text)
    if (found := _HERE.fullmatch(plain)) is None:
        raise UsageError(
            "unknown_name",
            f"there is no chip {shortened(text)} to plan for",
            expected=f"one of {', '.join([*chips, *NAMES])}; after it {W8A8}, a number of devices, or both: "
            f"v7x{W8A8}-8",
            remedy=choice(text),
        )
    chip, count = this_machine(found[1]), None if found[2] is None else int(found[2])
    return chip.in_eight_bits() if w8a8 else chip, count


def make_plan(subject: Subject, request: PlanRequest, chips: Mapping[str, Chip] = CHIPS) -> Plan:
    """Returns the plan of a generation.

    Raises UsageError for an unknown chip, a number of devices that it does not come in, an impossible mesh
    or shape, or a generation that does not fit.
    """
    chip, count = parse_chip(request.target, chips)
    # Work is counted in jaxprs, for which JAX starts a platform too.
    with pinned("cpu"):
        return _planned(subject, request, chip, count)


def _planned(subject: Subject, request: PlanRequest, chip: Chip, count: int | None) -> Plan:
    """Returns the plan for a chip; see ``make_plan``."""
    mesh = request.choices.get("mesh") or subject.choices.get("mesh", {})
    devices = num_devices(mesh) if count is None else count
    if devices not in chip.counts:
        raise UsageError(
            "unsupported",
            f"{chip.name} does not come with {devices} devices",
            expected="one of " + ", ".join(map(str, chip.counts)),
            found=devices,
        )
    generation = _generation(subject, request, chip)
    if mesh:
        check_mesh(mesh, generation.step.config, generation.shape, devices, generation.options.nag)
    found = [candidate(generation, mesh)] if mesh else candidate_meshes(generation, devices)
    if not found:
        raise UsageError(
            "unsupported",
            f"no mesh of {devices} devices makes a video of {subject.manifest.model.variant}",
            expected=f"one {chip.name}",
            found=f"{chip.name}-{devices}",
        )
    if not found[0].need.fits and (tiled := in_tiles(generation, devices)) is not None:
        generation, found = tiled, candidate_meshes(tiled, devices)
    if not (found[0].need.fits or request.all_meshes):
        raise refusal(generation, devices, found[0], subject.sizes)
    others = candidate_meshes(generation, devices) if request.all_meshes else ()
    return Plan(subject, generation, devices, found[0], others)


@contextmanager
def fitting_offered(artifact: Path) -> Iterator[None]:
    """Gives the error of a program that is too large, raised inside the block, a remedy that fits."""
    try:
        yield
    except TooLargeError as error:
        raise fitting_instead(artifact, error) from error


def fitting_instead(artifact: Path, error: TooLargeError) -> UsageError:
    """Returns the error of a build, with the nearest mesh, size or dtype that fits in place of its remedy.

    An error for a target that is not a chip of the table stays as it is.
    """
    name, profile = error.target.name.removesuffix(name_suffix(error.target.mesh)), error.profile
    if split_w8a8(name)[0] not in CHIPS or profile is None:
        return error
    asked = PlanRequest(
        f"{name}-{num_devices(error.target.mesh)}",
        {
            "sizes": (profile.width, profile.height),
            "frames": profile.num_frames,
            "guidance": profile.guidance,
            "num_videos": profile.num_videos,
            "num_references": profile.num_references,
            "mesh": error.target.mesh,
            **structs.asdict(BuildOptions.of(profile.options)),
        },
    )
    try:
        plan = make_plan(read_subject(str(artifact)), asked)
    except UsageError as refused:
        remedy = refused.remedy
    else:
        tile = plan.generation.options.vae_tile
        tiles = [] if tile == profile.options.vae_tile else [f"--vae-tile {tile}, whose decoder takes less"]
        streams = plan.chosen.need.held == "stream"
        ways = [*tiles, *(["--loop stream, whose layers pass through the device"] if streams else [])]
        if not ways:
            return error
        remedy = f"what fits: {', and '.join(ways)}"
    return UsageError(error.code, error.what, expected=error.expected, found=error.found, remedy=remedy)


def _generation(subject: Subject, request: PlanRequest, chip: Chip) -> PlannedGeneration:
    """Returns the generation: what the request says, else the subject, else the variant."""
    manifest, defaults = subject.manifest, subject.defaults
    variant = variant_named(manifest.model.variant, Path(subject.name))
    scale = defaults.get("guidance_scale")
    choices: dict[str, Any] = {
        "sizes": subject.sizes[0],
        "frames": variant.num_frames,
        "guidance": has_guidance(manifest) if scale is None else scale > 1,
        "num_videos": 1,
        "num_references": 0,
    }
    for name, value in {**subject.choices, **request.choices}.items():
        choices[name] = value[0] if isinstance(value, list) else value  # a recipe may list several
    width, height = choices["sizes"]
    shape = Shape(
        width,
        height,
        choices["frames"],
        choices["num_videos"],
        choices["guidance"],
        choices["num_references"],
    )
    options = in_form_of(manifest.model, record_of(BuildOptions, choices))
    steps = request.steps or defaults.get("steps") or manifest.model.defaults.num_steps
    loop = STEPWISE if manifest.model.chunks is None else next(one for one in FORMS if FORMS[one].chunked)
    form = FORMS.get(options.loop, FORMS[loop])  # of several, that of single steps, or the model's only one
    options = structs.replace(options, loop=STEPWISE if form.streams else form.name)
    return PlannedGeneration(manifest, shape, options, chip, steps, form.streams)
