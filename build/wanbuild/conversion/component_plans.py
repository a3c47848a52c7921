"""Plans the weights of every component, and writes them all at once.

A plan has the config, the dtypes, and the tensors of the source that fill each parameter.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from flax import nnx

from wanbuild.components import KINDS, DtypePolicy, kind_of
from wanbuild.conversion.chosen import (
    chosen_layers,
    in_eight_bits,
    stored_in_eight_bits,
)
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.conversion.writer import ComponentWriter, WrittenComponent, component_layouts
from wanbuild.lora.merge import Loras
from wanbuild.mapping.engine import Assignment, assign, describe_problems
from wanbuild.progress_line import ProgressLine
from wanbuild.source.checkpoint import Source
from wanbuild.source.checkpoint_parts import ADDED
from wanbuild.source.experts import check_same_config
from wanbuild.variants.variant import Variant
from wanrun.errors import SourceError, UsageError
from wanrun.undo import undone_at_exit

CANCEL_SECONDS = 1.0
"""How long the end of the process waits for the writers, which stop after a block."""


@dataclass(frozen=True)
class ComponentPlan:
    """The plan for one component."""

    config: Any
    policy: DtypePolicy
    assignments: tuple[Assignment, ...]

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        """The source tensors that fill a parameter."""
        return frozenset(fill.key for item in self.assignments for fill in item.fills)

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return sum(layout.nbytes for layout in component_layouts(self.assignments).values())


def plan_components(
    source: Source, variant: Variant, request: ConvertRequest, loras: Loras
) -> dict[str, ComponentPlan]:
    """Plans every component; raises one error with the problems of all of them."""
    modules: dict[str, nnx.Module] = {}
    assigned: dict[str, tuple[Assignment, ...]] = {}
    problems, wrong = list[str](), list[str]()
    components = {name: source.component(name) for name in _weight_components(source, variant)}
    kinds = {name: kind_of(name, component.class_name) for name, component in components.items()}
    configs = {
        name: kinds[name].parse(component.config, str(component.config_file))
        for name, component in components.items()
    }
    check_same_config({source.component(name).config_file: configs[name] for name in variant.transformers})
    policies = _policies(components, variant, request)
    for name, config in configs.items():
        component, kind, policy = components[name], kinds[name], policies[name]
        modules[name] = kind.module(config, policy)
        assigned[name], found = assign(kind.rules, component.shapes, modules[name], name)
        problems += found
        wrong += [f"{components[name].weights} ({components[name].config_file})"] if found else []
    if problems:
        raise SourceError(
            "mismatch",
            f"{', '.join(wrong)}: weights do not fit their config: {describe_problems(problems)}",
            remedy="check that the download is complete and is the checkpoint its config describes",
        )
    stored = {
        name: stored_in_eight_bits(components[name], items, loras.changes.get(name, {}).keys())
        for name, items in assigned.items()
    }
    return {
        name: ComponentPlan(
            configs[name],
            msgspec.structs.replace(policies[name], eight_bit=layers),
            in_eight_bits(assigned[name], layers),
        )
        for name, layers in chosen_layers(request.quantise, modules, stored).items()
    }


def _weight_components(source: Source, variant: Variant) -> tuple[str, ...]:
    """Returns the sorted names of components with weights: the variant's and those added to it."""
    return tuple(sorted({*variant.weight_components, *(source.components.keys() & ADDED)}))


def _policies(components: Iterable[str], variant: Variant, request: ConvertRequest) -> dict[str, DtypePolicy]:
    """Returns dtypes by component; UsageError if they differ between experts, which one program serves."""
    dtypes = dict(request.dtypes)
    for name in variant.transformers[1:]:
        first = dtypes.get(variant.transformers[0])
        if (found := dtypes.setdefault(name, first)) != first:
            raise UsageError(
                "mismatch",
                "the experts' weights have to be of one dtype",
                expected=f"{variant.transformers[0]} and {name} in {first or 'the default'}",
                found=f"{name} in {found}",
            )
    return {name: KINDS[name].policy(dtypes.get(name)) for name in components}


def write_components(
    source: Source, plans: Mapping[str, ComponentPlan], loras: Loras, building: Path, threads: int
) -> dict[str, WrittenComponent]:
    """Writes all components at once, the largest tensors first, so that the threads end together."""
    stop = threading.Event()

    def on_bytes(count: int) -> None:
        if stop.is_set():
            raise CancelledError
        progress.advance(count)

    total = sum(source.component(name).entry(key).nbytes for name, plan in plans.items() for key in plan.keys)
    with ProgressLine(total, "convert") as progress:
        writers = {
            name: ComponentWriter(
                building / "weights" / name,
                plan.assignments,
                source.component(name),
                loras.deltas(name),
                on_bytes,
            )
            for name, plan in plans.items()
        }
        pieces = [piece for writer in writers.values() for piece in writer.pieces()]
        pieces.sort(key=lambda piece: -piece.nbytes)
        with ThreadPoolExecutor(threads) as pool:

            def cancel() -> None:
                stop.set()
                pool.shutdown(cancel_futures=True)

            def cancel_beside() -> None:  # the main thread may be paused with the pool's lock
                thread = threading.Thread(target=cancel, daemon=True)
                thread.start()
                thread.join(CANCEL_SECONDS)

            try:
                with undone_at_exit(cancel_beside):  # before the folder is removed
                    for future in as_completed([pool.submit(piece.run) for piece in pieces]):
                        future.result()
            except BaseException:
                cancel()
                raise
        return {name: writer.finish() for name, writer in writers.items()}
