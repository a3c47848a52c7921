"""Finds a built profile of a shape, and the target of a run; ``request.profiles`` knows the shape."""

from __future__ import annotations

__all__ = [
    "BUILD_EXTRA",
    "SelectedTarget",
    "UnbuiltError",
    "can_build",
    "compared_targets",
    "named_profile",
    "select_target",
]

import importlib.util
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import msgspec

from wanrun.artifact.artifact import Artifact, named_requirements
from wanrun.artifact.mesh import Sizes, num_devices
from wanrun.artifact.model import Model
from wanrun.artifact.possible import check_possible
from wanrun.artifact.programs import Profile
from wanrun.artifact.targets import Target
from wanrun.errors import ArtifactError, Mismatch, UsageError, artifact_mismatch, shortened
from wanrun.errors import field as option
from wanrun.machine.cpu import cpu_level_rank
from wanrun.machine.environment import built_elsewhere, host_mismatches

BUILD_EXTRA = "pip install '.[build]' in the checkout"
"""The command that installs ``wanbuild``."""


def can_build() -> bool:
    """Whether ``wanbuild`` is installed here."""
    return importlib.util.find_spec("wanbuild") is not None


class UnbuiltError(ArtifactError):
    """A profile that is possible, and not built (exit 3).

    Attributes:
        lacking: the profile that was asked for, with the build options of the nearest.
        nearest: the built profile that is most alike.
    """

    lacking: Profile
    nearest: Profile


def select_profile(
    artifact: Artifact,
    size: tuple[int, int] | None = None,
    num_frames: int | None = None,
    num_videos: int = 1,
    guidance: bool = True,
    num_references: int = 0,
    begins: bool = False,
) -> Profile:
    """Returns the requested profile; if size or num_frames is None, the first built one that fits.

    The size is (width, height) in pixels. If the steps are to begin with a video, profiles that can do that
    come first. Raises UnbuiltError, listing the built profiles, if none fits; ArtifactError if none is built;
    UsageError for a size or a number of frames that cannot be built.
    """
    built = _built(artifact)
    asked: dict[str, object] = {} if size is None else {"size": size}
    asked |= {} if num_frames is None else {"num_frames": num_frames}
    asked |= {"num_videos": num_videos, "guidance": guidance, "num_references": num_references}

    def alike(profile: Profile) -> int:
        return len(asked.items() & profile.shape.items())

    first = sorted(built, key=lambda profile: begins and not profile.options.video_to_video)
    nearest = max(first, key=alike)  # the first of equals
    if alike(nearest) == len(asked):
        return nearest
    _check_possible(artifact.manifest.model, built, size, num_frames)
    wanted = (
        f"{f'{size[0]}x{size[1]}' if size else 'any size'}, "
        f"{'any number of' if num_frames is None else num_frames} frames, {num_videos} video(s), "
        f"guidance {'on' if guidance else 'off'}"
    )
    if num_references or any(profile.num_references for profile in built):
        wanted += f", {num_references} reference image(s)"
    shape = {**nearest.shape, **asked}
    width, height = shape.pop("size")
    lacking = msgspec.structs.replace(nearest, width=width, height=height, **shape)
    how = option("build") if can_build() else f"{option('build')} (after {BUILD_EXTRA})"
    error = UnbuiltError(
        "not_built",
        f"no profile is built for {wanted}",
        expected="one of " + ", ".join(profile.name for profile in built),
        remedy=f"choose one of these, or have it built with {how}, "
        f"or add one with {artifact.compiling(lacking)}",
    )
    error.lacking, error.nearest = lacking, nearest
    raise error


def _check_possible(
    model: Model, built: Sequence[Profile], size: tuple[int, int] | None, num_frames: int | None
) -> None:
    """Raises UsageError for a size or a number of frames that cannot be built, with what is built."""
    try:
        check_possible(model, size, num_frames)
    except UsageError as error:
        names = ", ".join(profile.name for profile in built)
        remedy = f"use a profile that is built, {names}, or build one: {error.remedy}"
        raise UsageError(error.code, error.what, expected=error.expected, remedy=remedy) from None


def _built(artifact: Artifact) -> list[Profile]:
    """Returns the profiles in the order of building; raises ArtifactError if there are none."""
    if not artifact.manifest.profiles:
        raise ArtifactError("not_built", f"{artifact} has no profiles", remedy="run wanbuild compile")
    return sorted(artifact.manifest.profiles.values(), key=lambda profile: profile.index)


def named_profile(artifact: Artifact, name: str) -> Profile:
    """Returns the built profile of this name.

    Raises:
        ArtifactError: listing the built profiles, if there is none.
    """
    built = _built(artifact)
    if name in artifact.manifest.profiles:
        return artifact.manifest.profiles[name]
    raise ArtifactError(
        "unknown_name",
        f"no profile is named {shortened(name)}",
        expected="one of " + ", ".join(profile.name for profile in built),
        remedy="choose one of these",
    )


@dataclass(frozen=True)
class SelectedTarget:
    """A target and its mismatches with this host.

    Args:
        mismatches: the host's facts that differ; empty for a target that fits.
        mesh: devices by axis of its programs' mesh; empty for one device.
        w8a8: whether its programs round activations to 8 bits.
        others: why other targets of the profile do not fit, one short text each; none if it was named.
        refusal: why its executables, which were built elsewhere, are not used; empty if they are.
    """

    name: str
    target: Target
    mismatches: tuple[Mismatch, ...]
    mesh: Sizes = field(default_factory=dict)
    w8a8: bool = False
    others: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def built_elsewhere(self) -> bool:
        """Whether its executables were built without their chip, and have never run."""
        return built_elsewhere(self.target.environment)

    @property
    def reason(self) -> str:
        """The target and its first mismatch, short: ``v5e (platform tpu, found no TPU)``."""
        first = self.mismatches[0]
        return f"{self.name} ({first.what} {first.expected}, found {first.found})"


_EXAMPLES: Mapping[str, str] = MappingProxyType(
    {"tpu": "v6e", "gpu": "h100", "cuda": "h100", "nvidia": "h100"}
)
"""An example of a target, by the names that users take for one."""


def select_target(
    artifact: Artifact, profile: Profile, name: str | None = None, allow_compile: bool = False
) -> SelectedTarget:
    """Returns the target that matches this host, or the named one.

    Args:
        profile: the chosen profile; a target that has executables for it is preferred.
        name: the target's name as a user writes it; None or ``local`` for the one that fits.
        allow_compile: whether a target that does not fit may be used, by compiling again.

    Raises:
        ArtifactError: if no target fits, listing every mismatch of the nearest one and a reason for each
            other one; or if the named target or the profile's executables are not built.
    """
    targets = artifact.manifest.targets
    if name == "local":
        name = None
    built = None if name is None else artifact.target_named(name)
    if name is not None and built is None:
        chip = _EXAMPLES.get(name)
        remedy = f"run {artifact.compiling(profile, f'--target {chip or shlex.quote(name)}')}"
        raise ArtifactError(
            "not_built",
            f"target {name} is not built",
            expected="one of " + (", ".join(sorted(targets)) or "none"),
            remedy=remedy if chip is None else f"targets are chips (docs/targets.md): {remedy}",
        )
    candidates = [one for one in compared_targets(artifact, profile) if built in (None, one.name)]
    if not candidates:
        raise ArtifactError(
            "not_built",
            f"profile {profile.name} has no executables for any target",
            remedy=f"run {artifact.compiling(profile)}",
        )
    best = min(candidates, key=lambda one: _order(one, profile))
    others = tuple(one.reason for one in candidates if one.mismatches and one is not best)
    if best.mismatches and not allow_compile:
        raise _unfit(best, others)
    if profile.name not in best.target.executables and not allow_compile:
        raise ArtifactError(
            "not_built",
            f"profile {profile.name} is not compiled for target {best.name}",
            remedy=f"run {artifact.compiling(profile)}",
        )
    return replace(best, others=others)


def compared_targets(artifact: Artifact, profile: Profile) -> Iterator[SelectedTarget]:
    """Yields the targets that have a profile's programs, compared with this host."""
    manifest = artifact.manifest
    for key, target in sorted(manifest.targets.items()):
        if manifest.programs(target, profile):
            programs, requirements = (
                manifest.program_sets[target.program_set],
                named_requirements(key, target),
            )
            devices = num_devices(programs.mesh)
            differs = host_mismatches(target.environment, artifact.path(requirements), devices)
            yield SelectedTarget(key, target, tuple(differs), programs.mesh, programs.kernels.w8a8)


def _unfit(best: SelectedTarget, others: Sequence[str]) -> ArtifactError:
    """Returns the error of the nearest target that does not fit; the others follow with a reason each."""
    error = artifact_mismatch(f"target {best.name}", best.mismatches)
    if not others:
        return error
    return ArtifactError(error.code, error.what, remedy=f"nor do others fit: {', '.join(others)}")


def _without_chip(one: SelectedTarget) -> bool:
    """Whether this machine has no such chip, or too few, so that JAX cannot open them."""
    return any(fact.what in ("platform", "device kind", "device count") for fact in one.mismatches)


def _order(one: SelectedTarget, profile: Profile) -> tuple[bool, int, bool, bool, int, bool, int]:
    """Returns a target's place: one that fits, then one with the profile; without its chip it is last."""
    # Then what rounds no activations; one device of a CPU, and all accelerators; what was compiled on its
    # chip and needs no trial; the highest CPU level that fits, but first a target for one CPU.
    devices = num_devices(one.mesh)
    fewer = devices if one.target.environment["platform"] == "cpu" else -devices
    lacks = profile.name not in one.target.executables
    rank = cpu_level_rank(one.target.environment) * (1 if one.mismatches else -1)
    return _without_chip(one), len(one.mismatches), lacks, one.w8a8, fewer, one.built_elsewhere, rank
