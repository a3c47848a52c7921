"""Chooses and opens the text encoder's CPU program beside an accelerator, whose memory it leaves free."""

from __future__ import annotations

from dataclasses import replace

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.mesh import num_devices
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import SelectedTarget, compared_targets
from wanrun.errors import ArtifactError, artifact_mismatch, field
from wanrun.machine.cpu import cpu_level_rank
from wanrun.machine.environment import device_mismatches, open_devices
from wanrun.opened.device import OpenDevice
from wanrun.opened.opened_artifact import OpenedArtifact, trust_all


def cpu_target(artifact: Artifact, profile: Profile) -> SelectedTarget:
    """Returns the artifact's CPU target that fits this host and has a profile.

    Raises ArtifactError if there is none, listing the mismatches of the nearest one.
    """
    found = [
        one
        for one in compared_targets(artifact, profile)
        if one.target.environment["platform"] == "cpu"
        and num_devices(one.mesh) == 1
        and profile.name in one.target.executables
        and not one.built_elsewhere
    ]
    if not found:
        raise ArtifactError(
            "not_built",
            f"no CPU target has the text encoder of profile {profile.name}",
            expected=f"one for {field('text_encoder_device')} cpu",
            found=", ".join(sorted(artifact.manifest.targets)),
            remedy="run wanbuild compile --target cpu for this profile, or leave the option out",
        )
    best = min(found, key=lambda one: (len(one.mismatches), -cpu_level_rank(one.target.environment)))
    if best.mismatches:
        raise artifact_mismatch(f"target {best.name}, for the text encoder,", best.mismatches)
    return best


def wants_cpu(device: str | None, selected: SelectedTarget) -> bool:
    """Whether the text encoder's CPU program runs beside the target's, which are not on the CPU."""
    native = selected.target.environment["platform"] == "cpu" and not selected.built_elsewhere
    return device == "cpu" and not native


def opened_on_cpu(opened: OpenedArtifact, selected: SelectedTarget) -> OpenedArtifact:
    """Opens the artifact's CPU target on the CPU, which JAX has started with the accelerator.

    Raises ArtifactError if JAX has no CPU device, or another one than the target's.
    """
    devices = open_devices("cpu")
    if mismatches := device_mismatches(selected.target.environment, devices):
        raise artifact_mismatch(f"target {selected.name}, for the text encoder,", mismatches)
    return replace(opened, selected=selected, device=OpenDevice(devices[0], False), check_trust=trust_all)
