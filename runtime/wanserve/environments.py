"""The devices of this machine, and the environment that gives one of them to a worker."""

from __future__ import annotations

__all__ = ["environments"]

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path("/")


def environments(manifests: Sequence[Any], workers: int | None, root: Path = ROOT) -> list[dict[str, str]]:
    """Returns each worker's environment variables besides the server's: the device that it may see.

    Args:
        manifests: those of the artifacts.
        workers: the number of workers; None for one on a CPU and for a mesh, else one for each device.
        root: where the system describes its devices.
    """
    gpus, tpus = _gpus(root), _tpus(root)
    if workers == 1 or (workers is None and (_has_mesh(manifests) or not (gpus or tpus))):
        return [{}]
    if gpus:
        alone = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
    elif tpus:
        alone = [
            {
                "TPU_VISIBLE_CHIPS": chip,
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
                "TPU_PROCESS_BOUNDS": "1,1,1",
            }
            for chip in tpus
        ]
    else:
        alone = [{}]
    count = len(alone) if workers is None else workers
    return [alone[number % len(alone)] for number in range(count)]


def _has_mesh(manifests: Sequence[Any]) -> bool:
    """Whether an artifact was built for several devices that run it together."""
    return any(made.mesh for manifest in manifests for made in manifest.program_sets.values())


def _gpus(root: Path) -> list[str]:
    """The names by which CUDA knows the NVIDIA GPUs that this process may use."""
    count = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(count)]
    return [name.strip() for name in visible.split(",") if name.strip()] if count else []


def _tpus(root: Path) -> list[str]:
    """The numbers of the TPU chips of this machine."""
    names = [path.name for folder in ("dev", "dev/vfio") for path in (root / folder).glob("*")]
    chips = [name for name in names if re.fullmatch(r"accel[0-9]+", name)]
    chips = chips or [name for name in names if name.isdigit()]
    return [str(number) for number in range(len(chips))]
