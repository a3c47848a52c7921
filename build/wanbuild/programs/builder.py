"""Makes the programs of a profile: the rows of ``kinds.PROGRAMS`` that it has."""

from __future__ import annotations

import dataclasses
from collections import Counter

from wanbuild.programs.kinds import kinds_of
from wanbuild.programs.parts import Parts
from wanbuild.programs.spec import ProgramSpec
from wanrun.artifact.programs import Role


class ProgramBuilder(Parts):
    """Makes the programs of one profile; arguments and errors as of ``Parts``."""

    def programs(self) -> tuple[ProgramSpec, ...]:
        """Returns every program of the profile.

        Raises:
            UsageError: if the model's parts do not fit together.
        """
        places = Counter[Role]()
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

    def first(self, role: Role) -> ProgramSpec:
        """Returns the first program of a role: of steps, the full one."""
        return next(spec for spec in self.programs() if spec.role == role)
