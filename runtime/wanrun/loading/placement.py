"""Where the two experts of a model stay: both on the device, one of them in host memory, or one at a time.

A pure policy over predicted sizes and the memory that there is.
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
from wanrun.errors import ArtifactError
from wanrun.loading.machine import Machine
from wanrun.loading.policy import LoadPolicy

PLACEMENTS = ("both", "host", "one")
"""Both experts stay on the device; one is there and the other in host memory, moved at the boundary; one at
a time, the other read again from the artifact."""

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
    """What was chosen, and why.

    Args:
        kind: one of ``PLACEMENTS``.
        needed: bytes that this takes of the device's memory, or of the host's where they are the same.
        available: bytes that there are; None where the device does not say.
        reason: the figures behind the choice, in words.
    """

    kind: str
    needed: int
    available: int | None
    reason: str

    def describe(self) -> str:
        """One line for people."""
        return f"experts: {_PHRASES[self.kind]} ({self.reason})"


def choose_placement(
    manifest: Manifest,
    programs: Mapping[str, Program],
    statistics: Mapping[str, Any],
    machine: Machine,
    policy: LoadPolicy,
) -> Placement:
    """Chooses the first placement of ``PLACEMENTS`` that fits.

    On the device are the experts that stay, the VAE, the text encoder unless memory is low (it is then gone
    before the first expert, for the prompts that ``load`` was told) or torch runs it, and what the largest
    program takes beside weights. With one transformer it is always 'both'. Where not even one expert fits,
    'one' is chosen all the same, for these are predictions, and ``describe`` says so.

    Args:
        manifest: the artifact's manifest.
        programs: of the chosen profile and target, by name.
        statistics: the target's for this profile, by program; where a program has none, only weights count.
        machine: the memory that there is. Where it is shared, 'host' is no choice.
        policy: whether memory is low, and what runs the text encoder.

    Raises:
        ArtifactError: if the statistics are not numbers of bytes.
    """
    sizes = {name: component.nbytes for name, component in manifest.components.items()}
    experts = [sizes.pop(name) for name in TRANSFORMERS if name in sizes]
    # What else is read passes through host memory while both experts lie there.
    on_host = sum(experts) + max(sizes.values(), default=0)
    # Where memory is shared the text encoder counts wherever it runs.
    if policy.low_memory or (machine.separate and policy.text_encoder != "jax"):
        sizes.pop("text_encoder", None)
    beside = sum(sizes.values()) + _working_bytes(programs, statistics)
    both, one = sum(experts) + beside, max(experts, default=0) + beside
    available = machine.available
    if len(experts) < 2 or (machine.fits(both) and not policy.low_memory):
        has = "of an unknown size" if available is None else f"of {_gigabytes(available)}"
        return Placement("both", both, available, f"{_gigabytes(both)} {has}")
    reasons = [f"both need {_gigabytes(both)}, {_usable(machine)}"]
    if policy.low_memory:
        reasons = ["memory is low by choice"]
    elif machine.separate and machine.fits(one):
        if machine.host_fits(on_host):
            return Placement("host", one, available, "; ".join(reasons))
        has = f"has {_gigabytes(machine.host_bytes)}"
        reasons.append(f"host memory takes {_gigabytes(on_host)} and {has}")
    if not machine.fits(one):
        reasons.append(f"one needs {_gigabytes(one)}, which may not fit either")
        if not policy.low_memory:
            reasons.append("--memory low needs less")
    return Placement("one", one, available, "; ".join(reasons))


def _usable(machine: Machine) -> str:
    """How much of its memory a machine lets us use, in words."""
    owner, available = "device" if machine.separate else "host", machine.available or 0
    usable = _gigabytes(int((1 - machine.margin) * available))
    return f"{usable} of the {owner}'s {_gigabytes(available)} may be used"


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _working_bytes(programs: Mapping[str, Program], statistics: Mapping[str, Any]) -> int:
    """What the largest program takes beside weights, and the code of all: bytes."""
    working = [_inputs_bytes(program) for program in programs.values()]
    code = 0
    for name, numbers in statistics.items():
        inputs = _inputs_bytes(programs[name]) if name in programs else 0
        output, temporary = _bytes(name, numbers, "output_bytes"), _bytes(name, numbers, "temporary_bytes")
        working.append(inputs + output + temporary)
        code += _bytes(name, numbers, "code_bytes")
    return max(working, default=0) + code


def _inputs_bytes(program: Program) -> int:
    """What a program's inputs take beside weights, which its avals leave out: bytes.

    The compiler's argument_bytes less the components' would be less than that: it counts of a component only
    what the program reads, and neither ``prepare`` nor ``denoise_step`` reads the whole transformer.
    """
    arrays = _ARRAY.findall(str(program.avals.get("inputs", "")))
    return sum(
        int(bits or 8) // 8 * math.prod(int(size) for size in shape.split(",") if size)
        for bits, shape in arrays
    )


def _bytes(program: str, numbers: Any, key: str) -> int:
    value = numbers.get(key, 0) if isinstance(numbers, Mapping) else None
    if type(value) is not int or value < 0:
        raise ArtifactError(
            f"the manifest's statistics of {program} are damaged",
            expected=f"{key} as a number of bytes",
            found=repr(value),
            remedy="copy the artifact again, or run wanbuild compile",
        )
    return value
