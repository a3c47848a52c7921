"""Where the two experts of a model stay: both on the device, one of them in host memory, or one at a time.

A pure policy over predicted sizes, and the two facts about this machine that it needs.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanrun.artifact.manifest import TRANSFORMERS, Manifest
from wanrun.artifact.programs import Program
from wanrun.errors import ArtifactError

if TYPE_CHECKING:
    import jax

PLACEMENTS = ("both", "host", "one")
"""Both experts stay on the device; one is there and the other in host memory, moved at the boundary; one at
a time, the other read again from the artifact."""

DEVICE_MARGIN = 0.05
"""Share of the device's memory that is left free: a program's temporaries are one block, which the allocator
has to find between the weights, and the attention's keys and values stay while another program runs that
does not take them (0.8 GB for 14B with guidance)."""

HOST_MARGIN = 0.1
"""Share of the host's memory that is left free, for the interpreter, the device's driver (some GB for a GPU)
and whatever else runs."""

_ARRAY = re.compile(r"\b[a-z]+(\d*)\[([\d,]*)\]")
"""An aval as text: ``bfloat16[2,512]`` or ``bool[2]``."""

_PHRASES = {
    "both": "both resident",
    "host": "one resident, the other in host memory and moved at the boundary",
    "one": "one at a time, read again at the boundary",
}


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
    device_memory: int | None,
    host_memory: int,
    separate: bool,
    memory: str = "auto",
    text_encoder: bool = True,
) -> Placement:
    """Chooses the first placement of ``PLACEMENTS`` that fits.

    On the device are the experts that stay, the VAE, the text encoder unless memory is low (it is then gone
    before the first expert, for the prompts that ``load`` was told), and what the largest program takes
    beside weights. With one transformer it is always 'both'. Where not even one expert fits, 'one' is chosen
    all the same, for these are predictions, and ``describe`` says so.

    Args:
        manifest: the artifact's manifest.
        programs: of the chosen profile and target, by name.
        statistics: the target's for this profile, by program; where a program has none, only weights count.
        device_memory: bytes of the device, None if it does not say; unused where memory is shared.
        host_memory: bytes of the host.
        separate: whether the device has memory of its own; otherwise 'host' is no choice.
        memory: 'low' asks for one expert at a time.
        text_encoder: whether the text encoder runs on the device.

    Raises:
        ArtifactError: if the statistics are not numbers of bytes.
    """
    sizes = {name: component.nbytes for name, component in manifest.components.items()}
    experts = [sizes.pop(name) for name in TRANSFORMERS if name in sizes]
    # What else is read passes through host memory while both experts lie there.
    on_host = sum(experts) + max(sizes.values(), default=0)
    low = memory == "low"
    if low or (separate and not text_encoder):  # where memory is shared it counts wherever it runs
        sizes.pop("text_encoder", None)
    beside = sum(sizes.values()) + _working_bytes(programs, statistics)
    both, one = sum(experts) + beside, max(experts, default=0) + beside
    available, margin = (device_memory, DEVICE_MARGIN) if separate else (host_memory, HOST_MARGIN)

    def fits(needed: int) -> bool:
        return available is None or needed <= (1 - margin) * available

    if len(experts) < 2 or (fits(both) and not low):
        has = "of an unknown size" if available is None else f"of {_gigabytes(available)}"
        return Placement("both", both, available, f"{_gigabytes(both)} {has}")
    owner = "device" if separate else "host"
    usable = _gigabytes(int((1 - margin) * (available or 0)))
    has = f"{usable} of the {owner}'s {_gigabytes(available or 0)} may be used"
    reasons = [f"both need {_gigabytes(both)}, {has}"]
    if low:
        reasons = ["memory is low by choice"]
    elif separate and fits(one):
        if on_host <= (1 - HOST_MARGIN) * host_memory:
            return Placement("host", one, available, "; ".join(reasons))
        reasons.append(f"host memory takes {_gigabytes(on_host)} and has {_gigabytes(host_memory)}")
    if not fits(one):
        reasons.append(f"one needs {_gigabytes(one)}, which may not fit either")
        if not low:
            reasons.append("--memory low needs less")
    return Placement("one", one, available, "; ".join(reasons))


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


def device_memory_bytes(device: jax.Device) -> int | None:
    """Bytes that this process may take of a device's own memory; None for the CPU or where it does not say.

    On a GPU that is what JAX's allocator was given, by default three quarters of the memory.
    """
    if device.platform == "cpu":
        return None
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return limit if limit > 0 else None


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process may take of the host: physical memory, or its control group's limit if smaller.

    Args:
        root: where /proc and /sys are.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *control_group_limits(root)])


def control_group_limits(root: Path) -> Iterator[int]:
    """The memory limits, in bytes, of this process's control group and the groups that it is in.

    Sources: cgroups(7); the kernel's admin-guide/cgroup-v2 (memory.max) and cgroup-v1/memory
    (memory.limit_in_bytes). A container may see its own group as the root of the tree while
    /proc/self/cgroup names its path outside, so groups that are not there are passed over.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            tree, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            tree, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts) + 1):
            try:
                text = (
                    tree.joinpath(*parts[:depth], file).read_text(encoding="ascii", errors="replace").strip()
                )
            except OSError:
                continue
            if text.isdecimal():  # or 'max'
                yield int(text)
