"""Converts a checkpoint into an artifact's weights, in one pass over the source."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from flax import nnx

from wanbuild.components import KINDS, DtypePolicy, kind_of
from wanbuild.conversion.chosen import (
    Quantise,
    chosen_layers,
    in_eight_bits,
    lost_lines,
    stored_in_eight_bits,
    widened_lines,
)
from wanbuild.conversion.defaults import check_defaults, model_record, with_defaults
from wanbuild.conversion.provenance import SmallFiles, read_small_files, source_record
from wanbuild.conversion.replacement import check_place, keep_valid
from wanbuild.conversion.writer import ComponentWriter, WrittenComponent, component_layouts
from wanbuild.convert_options import PlainConvert
from wanbuild.hub.repository import locate_source, locate_tokenizer
from wanbuild.lora.merge import LoraRequest, Loras, misplaced, open_loras
from wanbuild.mapping.engine import Assignment, assign, describe_problems
from wanbuild.progress import Progress
from wanbuild.source.all_in_one import all_in_one
from wanbuild.source.checkpoint import Source, open_source
from wanbuild.source.configs import scheduler_left
from wanbuild.source.experts import check_experts, check_same_config
from wanbuild.source.match import variant_of
from wanbuild.source.parts import ADDED, TOKENIZER
from wanbuild.source.scheduler import read_scheduler
from wanbuild.source.single_files import open_files, taken_as
from wanbuild.staging import build_lock, building_folder, check_free_space, check_leftover, commit
from wanbuild.variants.variant import Variant
from wanrun import __version__
from wanrun.artifact.manifest import Manifest, Tokenizer
from wanrun.artifact.model import Defaults as DefaultOptions
from wanrun.artifact.model import Model, Pyramid
from wanrun.artifact.record import Dtype
from wanrun.errors import SourceError, UsageError, lacks_space
from wanrun.files import sha256_of, write_durable
from wanrun.temporary import remove_tree
from wanrun.terminal.lines import warn
from wanrun.undo import undone_at_exit

CANCEL_SECONDS = 1.0
"""How long the end of the process waits for the writers, which stop after a block."""

SPARE_BYTES = 64 * 2**20
"""Free space required beyond the weights: metadata, programs and executables."""


class ConvertRequest(PlainConvert, frozen=True):
    """The source, target and options of a conversion.

    Attributes:
        source: a checkpoint folder in the diffusers layout, a hub id, or an all-in-one file; None if
            ``files`` holds every component.
        dtypes: weights dtype by component; absent components have their default dtype, and a second expert
            the first one's.
        loras: LoRAs to merge into the transformers, in this order.
        defaults: replacements for the variant's and the checkpoint's default options, by key.
        files: weight files by component, and the tokenizer's folder, file or hub id, that replace the
            source's.
        configs: config files by part, which replace the source's or the assumed ones.
        quantise: which layers are stored in 8 bits; None for none.
    """

    source: str | Path | None
    artifact: Path
    dtypes: Mapping[str, Dtype | None] = {}
    loras: Sequence[LoraRequest] = ()
    defaults: Mapping[str, Any] = {}
    files: Mapping[str, Path] = {}
    configs: Mapping[str, Path] = {}
    quantise: Quantise | None = None


@dataclass(frozen=True)
class _Plan:
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


def _plan_components(
    source: Source, variant: Variant, request: ConvertRequest, loras: Loras
) -> dict[str, _Plan]:
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
        name: _Plan(
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


def _model_record(
    source: Source, variant: Variant, plans: Mapping[str, _Plan], request: ConvertRequest
) -> Model:
    """Returns the facts and defaults of the model, which the runtime needs because it has no model code."""
    defaults = _default_options(source, variant, request)
    everywhere = {name: defaults.pop(name) for name in DefaultOptions.__struct_fields__ if name in defaults}
    if timesteps := everywhere.get("timesteps"):
        everywhere["timesteps"] = tuple(timesteps)
    processor = source.image_processor
    return model_record(
        variant,
        {name: plan.config for name, plan in plans.items()},
        image_processor=None if processor is None else processor.record,
        expand_timesteps=source.expand_timesteps,
        defaults=DefaultOptions(**everywhere),
        options=defaults,
        pyramid=_pyramid(source, variant),
    )


def _pyramid(source: Source, variant: Variant) -> Pyramid | None:
    """Returns the scheduler's stages of a chunk; no file says that the first chunk is doubled."""
    found, published = read_scheduler(source.scheduler_config).pyramid, variant.pyramid
    if found is None or published is None:
        return None
    return msgspec.structs.replace(found, doubled=published.doubled)


def _default_options(source: Source, variant: Variant, request: ConvertRequest) -> dict[str, Any]:
    """Returns the manifest's default options; raises UsageError as ``with_defaults`` does."""
    scheduler = read_scheduler(source.scheduler_config)
    negative = variant.negative_prompt if request.negative_prompt is None else request.negative_prompt
    boundary = {} if source.boundary_ratio is None else {"boundary": source.boundary_ratio}
    own = {
        "num_steps": variant.steps,
        "guidance_scale": variant.guidance_scale,
        "flow_shift": scheduler.flow_shift,
        "solver": scheduler.solver,
        "fps": variant.fps,
        "negative_prompt": negative,
        **variant.options,
        **boundary,
    }
    return with_defaults(own, request.defaults)


def _open_loras(source: Source, variant: Variant, request: ConvertRequest) -> Loras:
    requests = request.loras
    if len(variant.transformers) == 1 and any(request.component for request in requests):
        raise UsageError(
            "unsupported", "this checkpoint has one transformer, not two experts", remedy="use --lora"
        )
    for line in misplaced(requests, variant.transformers):
        warn(line)
    shapes = {name: source.component(name).shapes for name in variant.transformers}
    return open_loras(requests, shapes, request.strict)


def _write_components(
    source: Source, plans: Mapping[str, _Plan], loras: Loras, building: Path, threads: int
) -> dict[str, WrittenComponent]:
    """Writes all components at once, the largest tensors first, so that the threads end together."""
    stop = threading.Event()

    def on_bytes(count: int) -> None:
        if stop.is_set():
            raise CancelledError
        progress.advance(count)

    total = sum(source.component(name).entry(key).nbytes for name, plan in plans.items() for key in plan.keys)
    with Progress(total, "convert") as progress:
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


def convert(request: ConvertRequest, report: Callable[..., None] = lambda *lines: None) -> Manifest:
    """Creates an artifact with the source's weights, and returns its manifest.

    ``report`` gets lines about LoRAs, a scheduler that is not used, quantised weights that become larger, and
    errors of rounding to 8 bits. Raises UsageError if the artifact exists without ``force``, its folder holds
    other files, or defaults are invalid, and SourceError if the source is not usable or the disk is full.
    """
    artifact = Path(os.path.realpath(request.artifact))  # resolve() raises on a loop of links
    check_place(artifact, request.force)  # before any download; checked again under the build lock
    check_defaults(request.defaults)
    with ExitStack() as stack:
        source = stack.enter_context(_open(request))
        if request.variant is not None:
            source = taken_as(source, request.variant)
        variant = variant_of(source)
        files = {name: source.component(name).files[0] for name in variant.transformers}
        check_experts(files, variant.name, given=not request.files.keys().isdisjoint(files))
        loras = stack.enter_context(_open_loras(source, variant, request))
        report(*loras.lines, *scheduler_left(source.given, source.configs, source.scheduler_config))
        plans = _plan_components(source, variant, request, loras)
        model = _model_record(source, variant, plans, request)
        small = read_small_files(source)
        with build_lock(artifact):
            check_place(artifact, request.force)
            check_leftover(artifact)
            check_free_space(artifact.parent, sum(plan.nbytes for plan in plans.values()) + SPARE_BYTES)
            with _new_folder(artifact) as building:
                threads = request.threads or os.cpu_count() or 1
                written = _write_components(source, plans, loras, building, threads)
                (building / "tokenizer").mkdir()
                write_durable(building / "tokenizer" / "tokenizer.json", small.tokenizer)
                manifest = _manifest(source, model, small, plans, written, loras)
                if request.force:
                    manifest = keep_valid(artifact, manifest, building)
                manifest.write(building)
                commit(artifact)
        if request.quantise is None:
            sizes = {name: plan.nbytes for name, plan in plans.items()}
            dtypes = {name: plan.policy.weights for name, plan in plans.items()}
            report(*widened_lines(source.components, sizes, dtypes))
    report(*lost_lines({name: item.lost for name, item in written.items()}))
    return manifest


def _open(request: ConvertRequest) -> Source:
    """Opens the source: a folder, a hub's repository, an all-in-one file, or only files."""
    files = dict(request.files)
    if (tokenizer := files.get(TOKENIZER)) is not None:
        files[TOKENIZER] = locate_tokenizer(tokenizer)
    parts = all_in_one(request.source)
    if parts and request.revision is not None:
        raise UsageError(
            "no_effect", f"--revision is for a hub id, and {request.source} is a file", remedy="leave it out"
        )
    if request.source is None or parts:
        return open_files({**parts, **files}, request.configs)
    located = locate_source(request.source, request.revision, without=files.keys())
    return open_source(located.path, located.repository, located.revision, files, request.configs)


@contextmanager
def _new_folder(artifact: Path) -> Iterator[Path]:
    """Creates the folder in which an artifact is built, and removes it if anything fails."""
    # A full disk stays an OSError, which the command line explains.
    building = building_folder(artifact)
    try:
        building.mkdir()
        yield building
    except OSError as error:
        remove_tree(building)
        if lacks_space(error):
            raise
        raise SourceError(
            "unwritable",
            f"the artifact {artifact} cannot be written: {error.strerror}",
            remedy="check the disk, or choose another folder",
        ) from None
    except BaseException:
        remove_tree(building)
        raise


def _manifest(
    source: Source,
    model: Model,
    small: SmallFiles,
    plans: Mapping[str, _Plan],
    written: Mapping[str, WrittenComponent],
    loras: Loras,
) -> Manifest:
    """Returns the manifest of weights without compiled programs."""
    configs = {name: source.component(name).recorded_config for name in plans}
    crcs = {name: item.source_crc32c for name, item in written.items()}
    return Manifest(
        model=model,
        configs={**configs, "scheduler": dict(source.scheduler_config)},
        source=source_record(source, small, {name: plan.keys for name, plan in plans.items()}, crcs),
        loras=loras.records,
        dtypes={name: plan.policy for name, plan in plans.items()},
        components={name: item.component for name, item in written.items()},
        tokenizer=Tokenizer(
            file="tokenizer/tokenizer.json",
            sha256=sha256_of(small.tokenizer),
            max_length=512,
            pad_id=source.tokenizer.pad_id,
        ),
        profiles={},
        program_sets={},
        targets={},
        golden={},
        embeddings={},
        tool={"name": "wanbuild", "version": __version__},
        times={"converted": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
    )
