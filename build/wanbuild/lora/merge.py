"""Opens LoRA files, for merging into the transformers during conversion or for an adapter.

Every tensor of every file is checked before anything is written: it changes a parameter of the model, or it
is of a layer that the model lacks, which is counted; otherwise the file is refused (``lora.lora_file``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

from wanbuild.lora.deltas import Delta, FullDelta, LowRankDelta, SummedDelta
from wanbuild.lora.lora_file import LoraFile, Match, lora_layers, shortly
from wanbuild.lora.scale import PEFT_CONFIG, uses_config_file
from wanbuild.mapping.engine import describe_problems
from wanbuild.mapping.lora_keys import Parameters
from wanbuild.mapping.original import LISTED
from wanbuild.source.experts import NOISE, experts_named
from wanbuild.source.safetensors import TensorFile
from wanrun.artifact.adapter import Lora
from wanrun.errors import SourceError, UsageError
from wanrun.files import file_sha256
from wanrun.request.lora import parse_lora as parse_choice

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True)
class LoraRequest:
    """A safetensors LoRA file to merge, or to make an adapter of.

    ``scale`` is the factor of its deltas. ``component`` is the transformer that it changes; None is every
    one.
    """

    path: Path
    scale: float = 1.0
    component: str | None = None


def misplaced(loras: Sequence[LoraRequest], transformers: Sequence[str]) -> Iterator[str]:
    """Yields a warning for each LoRA that is named after another expert, and if only one expert has LoRAs."""
    for lora, named in zip(loras, experts_named([lora.path for lora in loras]), strict=True):
        if named is None or named == lora.component:
            continue
        noise = NOISE[named]
        if lora.component is not None:
            yield f"{lora.path} is given to the {NOISE[lora.component]}-noise expert; its name says {noise}"
        elif len(transformers) == 1:
            yield f"{lora.path} is named after the {noise}-noise expert; this model has one transformer"
        else:
            yield f"{lora.path} goes into both experts; its name says {noise}: use --lora-{noise}"
    for name, noise in NOISE.items():
        if loras and all(lora.component == name for lora in loras):
            yield f"LoRAs go only into the {noise}-noise expert; the other one is not changed"


def parse_lora_file(text: str) -> tuple[Path, float]:
    """Parses ``FILE[:SCALE]``; an existing file whose name contains the colon takes precedence.

    Raises UsageError if the scale is not a finite number, or experts have separate ones.
    """
    try:
        choice = parse_choice(text)
    except UsageError:
        choice = None
    if choice is None or choice.of_experts:
        raise UsageError(
            "unreadable",
            f"the LoRA {text!r} is not understood",
            expected="FILE or FILE:SCALE, e.g. a:0.8",
            remedy=None if choice is None else "give each expert its own: --lora-high FILE, --lora-low FILE",
        )
    return Path(choice.name), 1.0 if choice.strength is None else choice.strength


@dataclass(frozen=True)
class Loras:
    """Open LoRA files, from ``open_loras``; a context manager.

    Attributes:
        changes: component -> diffusers key -> deltas in order, only for keys that a LoRA changes.
        records: one per LoRA, in order, for the manifest.
        lines: what each LoRA does, for people.
        left_out: the layers that the model lacks, with a * for every number.
    """

    changes: Mapping[str, Mapping[str, Sequence[LowRankDelta | FullDelta]]]
    records: tuple[Lora, ...]
    lines: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    files: tuple[TensorFile, ...] = ()

    def deltas(self, component: str) -> Mapping[str, Delta]:
        """Returns what is added to each weight of a component that a LoRA changes, by diffusers' key."""
        return {
            key: parts[0] if len(parts) == 1 else SummedDelta(parts)
            for key, parts in self.changes.get(component, {}).items()
        }

    def close(self) -> None:
        """Closes the files; afterwards the deltas cannot be used."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_loras(requests: Sequence[LoraRequest], shapes: Shapes, strict: bool = False) -> Loras:
    """Opens LoRA files and finds the parameters that each changes. Reads each file once for its digest.

    ``requests`` are in the order they are added; ``shapes`` is transformer component -> diffusers key ->
    shape. ``strict`` refuses a LoRA with tensors of layers that the model lacks. Raises UsageError if a file
    is missing, or the source has no such transformer. Raises SourceError with every problem of every file:
    pickled, damaged or quantized, not a plain LoRA, for another model, incomplete, or not finite.
    """
    _check_requests(requests, shapes)
    parameters = {name: Parameters(keys) for name, keys in shapes.items()}
    found: dict[str, dict[str, list[LowRankDelta | FullDelta]]] = {name: {} for name in shapes}
    records, lines, files, lacking, problems, remedies = [], [], [], list[str](), list[str](), []
    with ExitStack() as stack:
        for request in requests:
            try:
                file = stack.enter_context(TensorFile(request.path))
                lora = LoraFile(file, request.scale)
            except SourceError as error:
                problems.append(str(SourceError(**{**error.parts, "remedy": None})))
                remedies.append(error.remedy)
                continue
            names = tuple(shapes) if request.component is None else (request.component,)
            matches = {name: lora.match(parameters[name], shapes[name], strict) for name in names}
            problems += _said_once(request.path.name, matches)
            for name, match in matches.items():
                for key, delta in match.deltas.items():
                    found[name].setdefault(key, []).extend(delta)
            files.append(file)
            if not problems:
                left_out = matches[names[0]].left_out  # experts have the same layers
                lacking += left_out
                records.append(record := _record(request, len(left_out)))
                changed = sum(len(match.deltas) for match in matches.values())
                lines.append(_line(record, changed, left_out, len(file.entries)))
        if problems:
            own = remedies[0] if len(problems) == len(remedies) == 1 else None
            raise SourceError(
                "unsupported",
                f"{'a LoRA' if len(requests) == 1 else 'LoRAs'} cannot be used: "
                + describe_problems(problems),
                remedy=own or "use a LoRA that was made for this model, as plain safetensors",
            )
        stack.pop_all()
    return Loras(
        MappingProxyType({name: MappingProxyType(keys) for name, keys in found.items()}),
        tuple(records),
        tuple(lines),
        lora_layers(lacking),
        tuple(files),
    )


def _said_once(file: str, matches: Mapping[str, Match]) -> Iterator[str]:
    """Yields a file's problems, each once, with the transformer unless all have it."""
    places: dict[str, list[str]] = {}
    for name, match in matches.items():
        for problem in match.problems:
            places.setdefault(problem, []).append(name)
    for problem, names in places.items():
        yield f"{file}: {problem}" if len(names) == len(matches) else f"{file} on {names[0]}: {problem}"


def _line(record: Lora, changed: int, left_out: Sequence[str], count: int) -> str:
    line = f"LoRA {record}: changes {changed} weights; sha256 {record.sha256}"
    if not left_out:
        return line
    return (
        f"{line}; {len(left_out)} of its {count} tensors are left out, of layers that this model lacks: "
        f"{shortly(lora_layers(left_out), LISTED)}"
    )


def _check_requests(requests: Sequence[LoraRequest], shapes: Shapes) -> None:
    for request in requests:
        if request.component is not None and request.component not in shapes:
            raise UsageError(
                "no_effect",
                f"{request.path.name} is for {request.component}, which this checkpoint does not have",
                expected=" or ".join(shapes),
                remedy="it has one transformer: use --lora" if len(shapes) == 1 else None,
            )
        if not math.isfinite(request.scale):
            raise UsageError(
                "out_of_range",
                f"the scale of {request.path.name} is {request.scale}",
                expected="a finite number",
            )
        if not request.path.is_file():
            raise UsageError("missing_file", f"there is no LoRA file {request.path}", remedy="check the path")


def _record(request: LoraRequest, left_out: int) -> Lora:
    """Returns a LoRA's record in the manifest: all that its deltas depend on, without the path."""
    own = uses_config_file(request.path)
    return Lora(
        file=request.path.name,
        sha256=file_sha256(request.path),
        scale=request.scale,
        component=request.component,
        adapter_config_sha256=file_sha256(request.path.with_name(PEFT_CONFIG)) if own else "",
        left_out=left_out,
    )
