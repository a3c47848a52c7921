"""The LoRAs that a server offers besides those of its artifacts: the adapters in a folder."""

from __future__ import annotations

__all__ = ["read_loras", "with_loras"]

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from wanrun import Artifact
from wanrun.artifact.adapter import NAME, SUFFIX, PlacedAdapter
from wanrun.errors import UsageError, shortened
from wanrun.request.adapters import placed, read_adapter
from wanrun.weights.adapters import AdapterFile, check_fits


def read_loras(folder: Path) -> dict[str, AdapterFile]:
    """Returns the adapters in a folder by name, in order; a file's name without its suffix is the adapter's.

    Raises:
        UsageError: if it cannot be read or has none, and for a file that is not one or has an unusable name.
        ArtifactError: for one that is damaged, or of another release.
    """
    try:
        files = sorted(one for one in folder.iterdir() if one.suffix == SUFFIX)
    except OSError as error:
        raise UsageError(
            "unreadable", f"--loras {folder} cannot be read", found=error.strerror or error
        ) from None
    if not files:
        raise UsageError(
            "unknown_name",
            f"--loras {folder} has no adapters",
            expected=f"files such as NAME{SUFFIX}",
            remedy="wanbuild lora --help says how one is made",
        )
    for file in files:
        if not NAME.fullmatch(file.stem):
            raise UsageError(
                "invalid_value",
                f"the adapter {shortened(file.name)} has a name that no request could give",
                expected="letters, digits and any of . _ + -",
                remedy="rename it",
            )
    return {file.stem: read_adapter(file.absolute()) for file in files}


def with_loras(
    artifacts: Mapping[str, Artifact], loras: Mapping[str, AdapterFile]
) -> tuple[dict[str, Artifact], dict[str, str]]:
    """Returns the artifacts with those adapters beside each that fit it, and why some fit none.

    Args:
        artifacts: by the model's name.
        loras: the adapters by name.

    Raises:
        UsageError: for a name that an artifact has for another adapter, and if none has slots for any.
    """
    if not any(map(_most_rank, artifacts.values())):
        first, rank = next(iter(artifacts.values())), max(one.content.rank for one in loras.values())
        raise UsageError(
            "no_effect",
            "--loras has no effect: no profile of these artifacts has slots",
            remedy=f"leave it out, or run {_building(first, rank)}",
        )
    made, misfits = dict[str, Artifact](), dict[str, list[str]]()
    for model, artifact in artifacts.items():
        fitting, most = dict[str, PlacedAdapter](), _most_rank(artifact)
        for name, lora in loras.items():
            try:
                check_fits(lora, artifact.manifest)
            except UsageError as error:
                misfits.setdefault(name, []).append(str(error))
                continue
            if not most or lora.content.rank > most:
                why = f"it has rank {lora.content.rank}, and the slots of {model} have {most}"
                misfits.setdefault(name, []).append(f"{why}; run {_building(artifact, lora.content.rank)}")
            own = artifact.manifest.adapters.get(name)
            if own is not None and own.sha256 != lora.sha256:
                raise UsageError(
                    "invalid_value",
                    f"--loras has another LoRA {name} than the artifact of {model}",
                    remedy="rename the file",
                )
            if own is None:
                fitting[name] = placed(lora)
        made[model] = replace(artifact, beside=fitting)
    return made, {name: why[0] for name, why in misfits.items() if len(why) == len(artifacts)}


def _building(artifact: Artifact, rank: int) -> str:
    """Returns the command that builds an artifact's first profile with slots of a rank."""
    first = min(artifact.manifest.profiles.values(), key=lambda one: one.index)
    return artifact.compiling(first, lora_rank=rank)


def _most_rank(artifact: Artifact) -> int:
    """Returns the largest rank of an artifact's slots; 0 if it has none."""
    return max((one.options.lora_rank for one in artifact.manifest.profiles.values()), default=0)
