"""The instructions in a cache entry of a CPU's executable: which features of a CPU they need."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from wanbuild.targets.cpu_levels import CpuLevel
from wanrun.errors import ArtifactError

_ELF = b"\x7fELF"
_EXECUTABLE = 4  # SHF_EXECINSTR
_CONTENT = 1  # SHT_PROGBITS
_RECORD = re.compile(rb"[+-][a-z0-9.-]+(?:,[+-][a-z0-9.-]+){30,}")
"""LLVM's features of the CPU that an entry was compiled on, such as ``+avx2,-avx512f``."""


def features_used(entry: Path) -> frozenset[str]:
    """Returns the sets of features, such as ``AVX512F``, that the instructions in a cache entry need.

    The entry is of an executable for x86-64 CPUs, as JAX has written it. Raises ArtifactError if it holds no
    machine code, or code that cannot be decoded.
    """
    from iced_x86 import CpuidFeature, Decoder

    numbers: set[int] = set()
    instructions = 0
    for code in _code(_executable(entry)):
        for instruction in Decoder(64, code):
            instructions += 1
            if instruction.is_invalid:
                raise ArtifactError(
                    "damaged",
                    f"the machine code of {entry.name} cannot be decoded",
                    remedy="compile it again",
                )
            numbers.update(instruction.cpuid_features())
    if not instructions:
        raise ArtifactError("damaged", f"there is no machine code in {entry.name}", remedy="compile it again")
    names = {value: name for name, value in vars(CpuidFeature).items() if isinstance(value, int)}
    return frozenset(names[number] for number in numbers)


def beyond(entry: Path, allowed: Collection[str]) -> list[str]:
    """Returns the features that an entry's instructions need beyond the allowed ones, sorted.

    Raises ArtifactError as ``features_used`` does.
    """
    return sorted(features_used(entry) - set(allowed))


def record_cpu_level(entry: Path, level: CpuLevel) -> None:
    """Removes the features beyond a CPU level from the list of those that an entry needs.

    XLA records those of the CPU that compiles. On a CPU that lacks any of them it would warn of SIGILL at
    every start, in lines of 3 000 characters, whatever the instructions need. Call it only for an entry in
    which ``beyond`` has found no instruction beyond the level.
    """
    from jax._src import compilation_cache

    def within(record: re.Match[bytes]) -> bytes:
        names = (name.decode() for name in record.group().split(b","))
        kept = (name if name[1:] in level.recorded else f"-{name[1:]}" for name in names)
        return ",".join(kept).encode()

    restricted = _RECORD.sub(within, _executable(entry))
    entry.write_bytes(compilation_cache.compress_executable(restricted))


def _executable(entry: Path) -> bytes:
    """Returns the serialized executable in a cache entry."""
    from jax._src import compilation_cache

    return compilation_cache.decompress_executable(entry.read_bytes())


def _code(data: bytes) -> Iterator[bytes]:
    """Yields the sections of machine code of every object file (ELF64) in an executable."""
    at = data.find(_ELF)
    while at >= 0:
        (table,) = struct.unpack_from("<Q", data, at + 0x28)
        size, count = struct.unpack_from("<HH", data, at + 0x3A)
        for index in range(count):
            kind, flags, _, offset, length = struct.unpack_from("<IQQQQ", data, at + table + index * size + 4)
            if kind == _CONTENT and flags & _EXECUTABLE:
                yield data[at + offset : at + offset + length]
        at = data.find(_ELF, at + len(_ELF))
