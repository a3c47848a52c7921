"""The programs of a profile, in place of executables: functions of NumPy arrays, whose calls are noted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

from wanbuild.programs.kinds import PROGRAMS
from wanbuild.programs.wiring import aval_text
from wanrun.artifact.programs import with_role

Arrays = Mapping[str, Any]

ROLES: Mapping[str, str] = MappingProxyType({row.name: row.role for row in PROGRAMS})


@dataclass
class FakeProgram:
    """A program's record, and what it computes.

    Attributes:
        inputs: names in order, weights among them.
        arrays: dtype and shape of the inputs that are arrays.
        compute: of the inputs by name.
        role: when it runs; by default as a program of its name does.
        place: its place among those of its role.
        donated: names of its state.
    """

    inputs: tuple[str, ...]
    arrays: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    compute: Callable[..., Arrays] = dict
    sha256: str = "digest"
    role: str = ""
    place: int = 0
    donated: tuple[str, ...] = ()

    @property
    def avals(self) -> Mapping[str, Any]:
        return {"inputs": {name: aval_text(dtype, *shape) for name, (dtype, shape) in self.arrays.items()}}

    def array(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self.arrays[name]


class FakePrograms(Mapping[str, FakeProgram]):
    """Programs by name.

    Attributes:
        programs: their records.
        calls: names and arguments, in order; a component that was released is a call of ``release``.
    """

    def __init__(self, **programs: FakeProgram) -> None:
        self.programs = programs
        for name, program in programs.items():
            program.role = program.role or ROLES[name]
        self.calls: list[tuple[str, Any]] = []

    def __contains__(self, name: object) -> bool:
        return name in self.programs

    def __len__(self) -> int:
        return len(self.programs)

    def __iter__(self) -> Iterator[str]:
        return iter(self.programs)

    def __getitem__(self, name: str) -> FakeProgram:
        return self.programs[name]

    def with_role(self, *roles: str) -> tuple[str, ...]:
        return with_role(cast(Any, self.programs), *roles)

    def bound(self, name: str) -> Callable[..., Arrays]:
        def call(**arguments: Any) -> Arrays:
            self.calls.append((name, arguments))
            return self.programs[name].compute(**arguments)

        return call

    def components(self, name: str) -> list[str]:
        """What a program takes of weights."""
        known = ("transformer", "text_encoder", "image_encoder", "vae")
        return [item for item in self.programs[name].inputs if item in known]

    def request(self, programs: Iterable[str] = (), components: Iterable[str] = ()) -> list[Future[Any]]:
        self.calls.append(("request", (list(programs), list(components))))
        return []

    def release(self, name: str) -> None:
        self.calls.append(("release", name))

    @property
    def weights(self) -> FakePrograms:
        """What keeps the weights: this too."""
        return self

    @staticmethod
    def put(tree: Any) -> Any:
        """What is brought to the device, as it is."""
        return tree

    @property
    def names(self) -> list[str]:
        """What was called, in order."""
        return [name for name, _ in self.calls]
