"""Checks of a checkpoint with two experts: it needs a boundary, and both transformers must be alike.

``transformer`` is the high-noise expert. ``transformer_2`` is the low-noise one, which takes the steps whose
timestep is below ``boundary_ratio`` (diffusers' WanPipeline). One program serves both, so their configs,
shapes and dtypes must be the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanbuild.config import shown
from wanbuild.source.checkpoint_parts import OPTIONS
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.errors import SourceError, UsageError
from wanrun.terminal.lines import warn

LOW_NOISE = TRANSFORMERS[1]
"""The component that only a checkpoint with two experts has."""

NOISE: Mapping[str, str] = MappingProxyType(dict(zip(TRANSFORMERS, ("high", "low"), strict=True)))
"""The words for the experts in names of published files, such as ``wan2.2_i2v_A14b_high_noise_lora``."""

_AFTER = r"fp|bf|int|q\d|e\dm|scaled|kj|lora|light(?:x2v|ning)|model|cn"
"""The words after an expert's name in published files; after others, high and low are a quality or a rank."""

_NAMED = (
    re.compile(r"(high|low)[ _.-]?noise"),
    re.compile(rf"(?<![a-z])(high|low)(?=$|\.|[ _-]*v?\d|[ _-]+(?:{_AFTER}))"),
)
"""How they are named, the surer way first: by Wan, lightx2v and Comfy-Org (``high_noise_model``), QuantStack
(``HighNoise``), Kijai and trainers (``A14B-HIGH_fp8``, ``lora_LOW_fp16``)."""


def expert_named(file: Path) -> str | None:
    """Returns the transformer that a file, or else its folder, is named after; None if neither or both."""
    for name, named in itertools.product((file.name.lower(), file.parent.name.lower()), _NAMED):
        if found := {*named.findall(name)}:
            return next((part for part, word in NOISE.items() if found == {word}), None)
    return None


_LETTER = re.compile(r"(?<![a-z])[hl](?![a-z])")


def experts_named(files: Sequence[Path]) -> list[str | None]:
    """Returns the transformer that each file is named after, or None.

    It is that of ``expert_named``, or by an H or an L if another file's name differs only in this letter
    (``wan22_H``, ``wan22_L``).
    """
    names = {file.name.lower() for file in files}
    return [expert_named(file) or _by_letter(file.name.lower(), names) for file in files]


def _by_letter(name: str, names: Collection[str]) -> str | None:
    parts = {noise[0]: part for part, noise in NOISE.items()}
    for letter in _LETTER.finditer(name):
        (other,) = parts.keys() - {letter[0]}
        if f"{name[: letter.start()]}{other}{name[letter.end() :]}" in names:
            return parts[letter[0]]
    return None


def check_experts(files: Mapping[str, Path], variant: str, given: bool = True) -> None:
    """Raises UsageError for one file for both experts, or one named after the other; warns of a single one.

    ``files`` has a weight file of each transformer, by component. ``given`` is whether an option names one: a
    SOURCE may have one file for both. ``variant`` is the name of the model that they make.
    """
    together = len({file.parent for file in files.values()}) < len(files)  # their folder is named after both
    looked = {name: Path(file.name) if together else file for name, file in files.items()}
    found_in = zip(looked, experts_named([*looked.values()]), strict=True)
    named = {name: expert for name, expert in found_in if expert is not None}
    if len(files) == 1:
        for expert in named.values():
            warn(
                f"{files['transformer']} is one of two experts by its name, {NOISE[expert]} noise, and is "
                f"converted alone as {variant}; give both: {_PLACES}"
            )
        return
    first, second = files.values()
    if given and first.samefile(second):
        raise UsageError(
            "conflict",
            "one file is given for both experts",
            expected=_PLACES,
            found=f"{first} and {second}",
            remedy="give two files; a model with one transformer takes only --transformer",
        )
    wrong = [name for name, found in named.items() if found != name]
    if len(wrong) == 2:
        what, remedy = "the experts are swapped, by their names", "swap the two"
    elif wrong:
        what = "an expert is named after the other one"
        remedy = f"give it as {OPTIONS[named[wrong[0]]]}, or rename it"
    else:
        return
    found = ", ".join(f"{files[name]} as {name}" for name in wrong)
    raise UsageError("invalid_value", what, expected=_PLACES, found=found, remedy=remedy)


_PLACES = f"{OPTIONS['transformer']} for high noise and {OPTIONS[LOW_NOISE]} for low noise"


def read_boundary(index: Mapping[str, Any], where: Path) -> float | None:
    """Returns ``boundary_ratio`` of a model_index.json; None if it is absent or null.

    Raises SourceError if it is not a number from 0 to 1.
    """
    value = index.get("boundary_ratio")
    if value is None:
        return None
    if type(value) not in (float, int) or not 0 <= value <= 1:
        raise SourceError(
            "wrong_type",
            f"boundary_ratio in {where} has a wrong type or value",
            expected="a number from 0 to 1, the share of the timesteps below which transformer_2 takes over",
            found=shown(value),
            remedy="use the published model_index.json",
        )
    return float(value)


def check_boundary(boundary_ratio: float | None, two_experts: bool, where: Path) -> None:
    """Raises SourceError if a model_index.json has only one of a boundary and a second expert."""
    if boundary_ratio is not None and not two_experts:
        raise SourceError(
            "conflict",
            f"boundary_ratio and transformer_2 contradict each other in {where}",
            expected="both, for two experts, or neither",
            found=f"boundary_ratio {boundary_ratio} and no transformer_2",
            remedy="check that the entry and the folder transformer_2, the low-noise expert, are there, or "
            "that model_index.json is this checkpoint's",
        )
    if two_experts and boundary_ratio is None:
        raise SourceError(
            "conflict",
            f"boundary_ratio and transformer_2 contradict each other in {where}",
            expected="both, for two experts, or neither",
            found="transformer_2 and no boundary_ratio",
            remedy="check that model_index.json is this checkpoint's: the published one says where the "
            "low-noise expert takes over, e.g. 0.875",
        )


def check_same_config(configs: Mapping[Path, Any]) -> None:
    """Raises SourceError with every field in which the experts' parsed configs, by file, differ."""
    (first, expected), *others = ((file, dataclasses.asdict(config)) for file, config in configs.items())
    for file, found in others:
        different = [name for name in expected if found[name] != expected[name]]
        if different:
            raise SourceError(
                "mismatch",
                f"{file} differs from {first}, and the experts of a checkpoint have the same config",
                expected=", ".join(f"{name} {shown(expected[name])}" for name in different),
                found=", ".join(f"{name} {shown(found[name])}" for name in different),
                remedy="check that both transformers are of the same checkpoint",
            )
