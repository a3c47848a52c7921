"""Makes the programs of a profile: the rows of ``kinds.PROGRAMS`` that it has."""

from __future__ import annotations

import dataclasses
from collections import Counter

from wanbuild.programs.kinds import PROGRAMS, kinds_of
from wanbuild.programs.parts import Parts
from wanbuild.programs.spec import ProgramSpec
from wanrun.artifact.roles import RoleName


class ProgramBuilder(Parts):
    """Makes the programs of one profile; arguments and errors as of ``Parts``."""

    def programs(self) -> tuple[ProgramSpec, ...]:
        """Returns all programs of the profile; raises UsageError if the model's parts do not fit together."""
        places = Counter[RoleName]()
        made = []
        for kind in kinds_of(self):
            spec, place = kind.make(self), places[kind.role]
            made.append(dataclasses.replace(spec, name=kind.name, role=kind.role, place=place))
            places[kind.role] += 1
        return tuple(made)

    def named(self, name: str) -> ProgramSpec:
        """Returns a program by its name."""
        (spec,) = (spec for spec in self.programs() if spec.name == name)
        return spec

    def first(self, role: RoleName) -> ProgramSpec:
        """Returns the first program of a role, whether the profile has it or not."""
        kind = next(kind for kind in PROGRAMS if kind.role == role)
        return dataclasses.replace(kind.make(self), name=kind.name, role=role)
