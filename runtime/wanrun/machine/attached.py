"""The accelerators of this machine as the system describes them, without JAX, which would open them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from wanrun.machine.cpu import cpu_features

ROOT = Path("/")

GOOGLE = "0x1ae0"
"""The PCI vendor of TPUs."""

TPU_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "0x005e": "TPU v4",
        "0x0062": "TPU v5",
        "0x0063": "TPU v5 lite",
        "0x006f": "TPU v6 lite",
        "0x0076": "TPU7x",
    }
)
"""JAX's name of a TPU by its PCI device."""

TWO_DEVICES = ("TPU7x",)
"""TPUs that are two of JAX's devices each."""

NVIDIA_FILES = ("proc/driver/nvidia/version", "dev/nvidia0", "dev/nvidiactl", "dev/dxg")
"""Device files: one of them exists where a GPU may be; the last one in WSL."""

WORDS: Mapping[str, str] = MappingProxyType({"tpu": "TPU", "cuda": "NVIDIA GPU"})
"""The names of a platform's accelerators in messages."""

MAX_TEXT = 4096
"""The most characters that are read from a file of the system."""


@dataclass(frozen=True)
class Attached:
    """The devices of one platform.

    ``driver`` is the version of the driver or the library that runs executables; empty for a CPU. ``chips``
    are the system's descriptions of the devices, sorted. ``kinds`` are JAX's names of them, each once; empty
    where they are not known.
    """

    driver: str
    chips: tuple[str, ...]
    kinds: tuple[str, ...]

    @property
    def devices(self) -> int | None:
        """The number of JAX's devices; None where it is not known."""
        if not self.kinds:
            return None
        return sum(2 if TPU_KINDS.get(chip) in TWO_DEVICES else 1 for chip in self.chips)


def attached(platform_name: str, root: Path = ROOT) -> Attached | None:
    """Returns the devices of a platform, 'cpu', 'cuda' or 'tpu'; None if this machine has none.

    If JAX_PLATFORMS names the platform, its devices count as present though the system does not show them.
    """
    asked = os.environ.get("JAX_PLATFORMS", "").split(",")
    named = platform_name in asked or (platform_name == "cuda" and "gpu" in asked)
    if platform_name == "cuda":
        there = any((root / name).exists() for name in NVIDIA_FILES)
        return _nvidia(root) if there or named else None
    if platform_name == "tpu":
        ids = tuple(sorted(_tpu_ids(root)))
        return _tpu(ids) if ids or named else None
    return Attached("", (platform.machine(), *cpu_features()), ())


def _nvidia(root: Path) -> Attached:
    folder = root / "proc/driver/nvidia"
    models = []
    for file in sorted(folder.glob("gpus/*/information")):
        for line in _text(file).splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "Model":
                models.append(value.strip())
    said = _text(folder / "version").partition("\n")[0].strip()
    version = re.search(r"\d+(\.\d+)+", said)  # there may also be when it was compiled, by whom and where
    return Attached(
        said if version is None else version[0], tuple(sorted(models)), tuple(sorted(set(models)))
    )


def _tpu_ids(root: Path) -> Iterator[str]:
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        if _text(vendor).strip() == GOOGLE:
            yield _text(vendor.with_name("device")).strip()


def _tpu(ids: tuple[str, ...]) -> Attached:
    try:
        version = f"libtpu {importlib.metadata.version('libtpu')}"
    except importlib.metadata.PackageNotFoundError:
        version = ""
    known = all(one in TPU_KINDS for one in ids)
    return Attached(version, ids, tuple(sorted({TPU_KINDS[one] for one in ids})) if known else ())


def _text(path: Path) -> str:
    """The beginning of a file of the system; empty if it cannot be read."""
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(MAX_TEXT)
    except OSError:
        return ""
