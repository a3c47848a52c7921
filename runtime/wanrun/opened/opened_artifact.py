"""An artifact opened on a device, shared by everything that is loaded from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile, Program, ProgramSet
from wanrun.artifact.select import SelectedTarget
from wanrun.artifact.targets import Target
from wanrun.machine.environment import device_environment, host_environment
from wanrun.opened.cancel import Waits
from wanrun.opened.device import OpenDevice
from wanrun.opened.policy import LoadPolicy
from wanrun.timing.timings import Recorder


def trust_all(profile: Profile) -> Collection[str]:
    """Trusts all executables of a profile: they were compiled where they run."""
    return ()


@dataclass(eq=False)
class OpenedArtifact:
    """An artifact, one of its targets for all profiles, and an open device. Only ``grow`` changes it.

    ``recorder`` passes loading times on to the timings of running generations. ``report`` receives decisions,
    such as the placement of experts. ``check_trust`` returns the names of a profile's programs whose
    executables give other results on this chip; it raises ArtifactError for one whose executables were built
    elsewhere and have not been attested here: see ``wanrun.trust``.
    """

    artifact: Artifact
    selected: SelectedTarget
    device: OpenDevice
    policy: LoadPolicy
    recorder: Recorder
    warn: Callable[[str], None]
    report: Callable[[str], None]
    check_trust: Callable[[Profile], Collection[str]] = trust_all
    waits: Waits = field(default_factory=Waits)

    def grow(self, artifact: Artifact) -> None:
        """Takes the same artifact with more profiles, and what the chosen target has of them."""
        target = artifact.manifest.targets[self.selected.name]
        self.artifact, self.selected = artifact, replace(self.selected, target=target)

    @property
    def manifest(self) -> Manifest:
        """The artifact's manifest."""
        return self.artifact.manifest

    @property
    def target(self) -> Target:
        """The target, without executables if they do not fit the device."""
        target = self.selected.target
        return msgspec.structs.replace(target, executables={}) if self.device.foreign else target

    @property
    def environment(self) -> Mapping[str, Any]:
        """Facts about where executables run: the target's, or this machine's if it compiles programs.

        Of a target that was built elsewhere, those of devices are this machine's.
        """
        environment = self.selected.target.environment
        if self.device.foreign:
            environment = host_environment(environment["platform"])
        elif not self.selected.built_elsewhere:
            return environment
        return {**environment, **device_environment(self.device.devices)}

    def programs(self, profile: Profile) -> Mapping[str, Program]:
        """Returns a profile's programs for this target, by name."""
        return self.manifest.programs(self.selected.target, profile)

    @property
    def program_set(self) -> ProgramSet:
        """The program set of this target."""
        return self.manifest.program_sets[self.selected.target.program_set]

    @property
    def staged(self) -> bool:
        """Whether the rows of large parameters are spread by a program: see ``LoadPolicy.transfer``."""
        import jax

        if self.device.mesh is None:
            return False
        if self.policy.transfer != "auto":
            return self.policy.transfer == "staged"
        return self.device.device.platform != "cpu" or jax.process_count() > 1
