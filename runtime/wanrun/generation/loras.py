"""The adapters' files of a generation's LoRAs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wanrun.artifact.artifact import Artifact
from wanrun.errors import ArtifactError
from wanrun.request.adapters import ChosenLora, read_adapter
from wanrun.weights.loras import AppliedLora


def applied_loras(loras: Sequence[ChosenLora], artifact: Artifact) -> tuple[AppliedLora, ...]:
    """Returns LoRAs with their adapters, whose values are read when they are used.

    Raises:
        ArtifactError: if a file is missing, damaged, or another one than was chosen.
        UsageError: if one is no adapter.
    """
    found = []
    for lora in loras:
        path = artifact.adapters[lora.name].path if lora.file is None else Path(lora.file)
        file = read_adapter(path)
        if file.sha256 != lora.sha256:
            raise ArtifactError(
                f"the adapter {path} is not the one that was chosen",
                expected=lora.sha256,
                found=file.sha256,
                remedy="choose it again, or copy the artifact again",
            )
        found.append(AppliedLora(file, lora.strengths))
    return tuple(found)
