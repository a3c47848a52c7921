"""Chooses where a model's two experts stay: both on the device, one in host memory, or one at a time.

A pure function of predicted sizes and available memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from wanrun.artifact.manifest import TRANSFORMERS, Manifest
from wanrun.artifact.programs import Program
from wanrun.artifact.roles import ROLES
from wanrun.artifact.slots import LORA
from wanrun.machine.memory import Machine
from wanrun.opened.policy import LoadPolicy
from wanrun.units import in_bytes

PLACEMENTS = ("both", "host", "one")
"""Both experts stay on the device; one does while the other waits in host memory, and they swap at the
boundary; or one is held at a time and the other is read again from the artifact."""

_ARRAY = re.compile(r"\b[a-z]+(\d*)\[([\d,]*)\]")
"""An aval as text: ``bfloat16[2,512]`` or ``bool[2]``."""

_PHRASES: Mapping[str, str] = MappingProxyType(
    {
        "both": "both resident",
        "host": "one resident, the other in host memory and moved at the boundary",
        "one": "one at a time, read again at the boundary",
    }
)


@dataclass(frozen=True)
class Placement:
    """The chosen placement, one of ``PLACEMENTS``, and the figures behind the choice in words.

    ``needed`` are bytes of device memory, or of host memory where memory is shared; ``available`` is None if
    the device does not report them.
    """

    kind: str
    needed: int
    available: int | None
    reason: str

    def describe(self) -> str:
        """Returns one line for people."""
        return f"experts: {_PHRASES[self.kind]} ({self.reason})"


@dataclass(frozen=True)
class Footprint:
    """The bytes that a component takes in the memories of a process.

    ``host`` are those of the host copy that is read, ``device`` of its parameters on one device, ``shared``
    of both together, on all devices of the process, where their memory is the host's.
    """

    host: int
    device: int
    shared: int

    @classmethod
    def whole(cls, nbytes: int) -> Footprint:
        """Returns the bytes of a component on one device; a CPU device has no other copy than the host's."""
        return cls(nbytes, nbytes, nbytes)


@dataclass(frozen=True)
class Division:
    """How a mesh divides weights and work: over its devices, of which ``local`` are this process's.

    ``footprints`` are by component.
    """

    devices: int
    local: int
    footprints: Mapping[str, Footprint]


def choose_placement(
    manifest: Manifest,
    programs: Mapping[str, Program],
    statistics: Mapping[str, Any],
    machine: Machine,
    policy: LoadPolicy,
    division: Division | None = None,
) -> Placement:
    """Chooses the first placement of ``PLACEMENTS`` that fits; 'host' never where memory is shared.

    The device holds the resident experts, the VAE, the text encoder and what the largest program needs
    besides weights. The text encoder does not count if memory is low: it is then released before the first
    expert, for the prompts given to ``load``. With one transformer the placement is always 'both'. If not
    even one expert fits, the choice is still 'one', as sizes are predictions; ``Placement.reason`` says so.

    On a mesh, which ``division`` describes, all figures are those of one device, or of all devices of the
    process where they share the host's memory. The inputs of programs count whole: how they are cut is not
    recorded, and only ``kv`` is large. A program without ``statistics`` of the target counts with only its
    inputs.
    """
    if division is None:
        whole = {name: Footprint.whole(one.nbytes) for name, one in manifest.components.items()}
        division = Division(1, 1, whole)
    footprints = division.footprints
    sizes = {name: one.device if machine.separate else one.shared for name, one in footprints.items()}
    experts = [sizes.pop(name) for name in TRANSFORMERS if name in sizes]
    # Every other component passes through host memory while both experts are in it.
    passing = max((footprints[name].host for name in sizes), default=0)
    on_host = sum(footprints[name].host for name in TRANSFORMERS if name in footprints) + passing
    if policy.low_memory:
        sizes.pop("text_encoder", None)
    working = _working_bytes(programs, statistics, division.devices)
    beside = sum(sizes.values()) + working * (1 if machine.separate else division.local)
    # Each expert on the device has its slots, and one's are among a program's inputs.
    slots = max(
        (_bytes(program.avals.get("inputs", {}).get(LORA)) for program in programs.values()), default=0
    )
    both, one = sum(experts) + slots * (len(experts) > 1) + beside, max(experts, default=0) + beside
    available = machine.available
    if len(experts) < 2 or (machine.fits(both) and not policy.low_memory):
        has = "of an unknown size" if available is None else f"of {in_bytes(available)}"
        return Placement("both", both, available, f"{in_bytes(both)} {has}")
    reasons = [f"both need {in_bytes(both)}, {_usable(machine)}"]
    if policy.low_memory:
        reasons = ["memory is low by choice"]
    elif machine.separate and machine.fits(one):
        if machine.host_fits(on_host):
            return Placement("host", one, available, "; ".join(reasons))
        has = f"has {in_bytes(machine.host_bytes)}"
        reasons.append(f"host memory takes {in_bytes(on_host)} and {has}")
    if not machine.fits(one):
        reasons.append(f"one needs {in_bytes(one)}, which may not fit either")
        if not policy.low_memory:
            reasons.append("--memory low needs less")
    return Placement("one", one, available, "; ".join(reasons))


def _usable(machine: Machine) -> str:
    """Returns how much memory may be used, in words."""
    owner, available = "device" if machine.separate else "host", machine.available or 0
    usable = in_bytes(int((1 - machine.margin) * available))
    return f"{usable} of the {owner}'s {in_bytes(available)} may be used"


def _working_bytes(programs: Mapping[str, Program], statistics: Mapping[str, Any], devices: int) -> int:
    """Returns the bytes that the largest program needs besides weights, plus the code of all programs."""
    inputs = {name: _inputs_bytes(program) for name, program in programs.items()}
    spreading = {name for name, program in programs.items() if ROLES[program.role].when == "loading"}
    for name in spreading:  # their inputs are cut over all devices, and their outputs are weights
        inputs[name] //= devices
    working, code = list(inputs.values()), 0
    for name, numbers in statistics.items():
        output, temporary = (int(numbers.get(f"{part}_bytes", 0)) for part in ("output", "temporary"))
        working.append(inputs.get(name, 0) + (0 if name in spreading else output) + temporary)
        code += int(numbers.get("code_bytes", 0))
    return max(working, default=0) + code


def _inputs_bytes(program: Program) -> int:
    """Returns the bytes of a program's inputs without its weights."""
    # The compiler's argument_bytes less the components' bytes would be too small: it counts only the
    # parameters that the program reads, and neither `prepare` nor a step reads the whole model.
    return _bytes(program.avals.get("inputs"))


def _bytes(avals: Any) -> int:
    """Returns the bytes of arrays that are described as text, in nested dicts."""
    arrays = _ARRAY.findall(str(avals))
    return sum(
        int(bits or 8) // 8 * math.prod(int(size) for size in shape.split(",") if size)
        for bits, shape in arrays
    )
