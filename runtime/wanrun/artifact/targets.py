"""The manifest's records of targets, the kinds of machine that programs are compiled for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct, convert, field

from wanrun.artifact.record import FileBytes, ListedFile, Record
from wanrun.files import plain_relative

Amount = Annotated[int, Meta(ge=0, le=2**53)] | Annotated[float, Meta(ge=0, le=1e30)]
"""Seconds, operations or bytes."""


Option = bool | Annotated[int, Meta(ge=-(2**53), le=2**53)] | float | str
"""The value of a compiler's option."""


class Executable(Record, frozen=True):
    """One entry of the JAX compilation cache. It holds machine code, so its digest is checked before use."""

    file: str
    nbytes: FileBytes = field(name="bytes")
    sha256: str

    def __post_init__(self) -> None:
        plain_relative(self.file, "an executable")


class Requirements(ListedFile, frozen=True, kw_only=True):
    """A requirements file."""

    what: ClassVar[str] = "a requirements file"


class Environment(Struct):
    """The facts of every target's environment, of which a platform may have more.

    Attributes:
        platform: JAX's name of it.
        machine: the architecture of the CPU.
        packages: versions of the packages that compile and load executables, by name.
        variables: values of the environment variables that change a compilation.
        zstandard: whether it is installed, for JAX's cache.
        device_kind: JAX's name of the device.
        device_count: how many JAX sees.
        platform_version: JAX's description of the compiler.
        cpu_features: of a CPU, the instructions that it has.
        cpu_level: the name of the CPU level that it is for; empty for no level.
        topology: of a target that was built without its chip, what it was built for.
        device_kinds: all of JAX's names of that chip.
    """

    platform: str
    machine: str
    packages: Mapping[str, str]
    variables: Mapping[str, str]
    zstandard: bool
    device_kind: str
    device_count: int
    platform_version: str
    cpu_features: Sequence[str] = ()
    cpu_level: str = ""
    topology: str = ""
    device_kinds: Sequence[str] = ()


class Target(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One kind of machine and the executables compiled for it.

    Attributes:
        program_set: key of its program set.
        folder: its compilation cache, relative to the artifact.
        environment: every fact that the executables depend on: those of ``Environment``, and others of
            ``wanrun.machine.environment``.
        requirements: a file with the versions of packages among those facts, for ``pip install -r``.
        executables: executables by profile and program name.
        statistics: compile seconds, FLOPs and predicted bytes, by profile and program name; of a loop whose
            number of turns is an input, as that of a step's passes, the FLOPs of one turn.
        options: the compiler's options that the executables were compiled with; they are in JAX's key.
        program_options: further options by program.
    """

    program_set: str
    folder: str
    environment: Mapping[str, Any]
    requirements: Requirements
    executables: Mapping[str, Mapping[str, Executable]]
    statistics: Mapping[str, Mapping[str, Mapping[str, Amount]]]
    options: Mapping[str, Option] = field(default_factory=dict)
    program_options: Mapping[str, Mapping[str, Option]] = field(default_factory=dict)

    def options_of(self, program: str) -> dict[str, Option]:
        """The compiler's options that a program was compiled with."""
        return {**self.options, **self.program_options.get(program, {})}

    def __post_init__(self) -> None:
        plain_relative(self.folder, "a target")
        convert(self.environment, Environment)
