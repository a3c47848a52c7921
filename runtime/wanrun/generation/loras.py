"""The adapters' files of a generation's LoRAs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wanrun.artifact.artifact import Artifact
from wanrun.errors import AdapterError
from wanrun.request.adapters import ChosenLora, read_adapter
from wanrun.weights.loras import AppliedLora


def applied_loras(loras: Sequence[ChosenLora], artifact: Artifact) -> tuple[AppliedLora, ...]:
    """Returns LoRAs with their adapters, whose values are read when they are used.

    Raises AdapterError if a file is missing, damaged, or not the one that was chosen; UsageError if it is not
    an adapter.
    """
    found = []
    for lora in loras:
        file = read_adapter(_path_of(lora, artifact))
        if file.sha256 != lora.sha256:
            raise AdapterError(
                "changed",
                f"the adapter {file.path} is not the one that was chosen",
                expected=lora.sha256,
                found=file.sha256,
                remedy="put that file back, or load the artifact again and choose anew",
            )
        found.append(AppliedLora(file, lora.strengths))
    return tuple(found)


def _path_of(lora: ChosenLora, artifact: Artifact) -> Path:
    """Returns the path of a LoRA's adapter; raises AdapterError if the artifact has it no more."""
    if lora.file is not None:
        return Path(lora.file)
    if (own := artifact.adapters.get(lora.name)) is None:
        raise AdapterError(
            "changed",
            f"the artifact has no adapter {lora.name} any more",
            remedy="load it again and choose one that it has",
        )
    return own.path
