"""The manifest of a converted artifact, the facts and defaults of its model, and the lines of its report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from wanbuild.conversion.component_plans import ComponentPlan
from wanbuild.conversion.convert_request import ConvertRequest
from wanbuild.conversion.defaults import model_record, with_defaults
from wanbuild.conversion.provenance import SmallFiles, recognised_lines, source_record
from wanbuild.conversion.sampling import sampling_doubts
from wanbuild.conversion.writer import WrittenComponent
from wanbuild.lora.merge import Loras
from wanbuild.source.checkpoint import Source
from wanbuild.source.scheduler import read_scheduler
from wanbuild.staging import leftover
from wanbuild.variants.variant import Variant
from wanrun import __version__
from wanrun.artifact.manifest import Manifest, Tokenizer
from wanrun.artifact.model import Defaults as DefaultOptions
from wanrun.artifact.model import Model, Pyramid
from wanrun.files import sha256_of
from wanrun.units import in_bytes


def converted_model(
    source: Source, variant: Variant, plans: Mapping[str, ComponentPlan], request: ConvertRequest
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


def converted_manifest(
    source: Source,
    model: Model,
    small: SmallFiles,
    plans: Mapping[str, ComponentPlan],
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


def converted_warnings(manifest: Manifest, request: ConvertRequest) -> Iterator[str]:
    """Yields doubts about the sampling, and the replaced artifact if it could not be removed."""
    merged = bool(request.loras) or "transformer" in request.files
    task, repository = manifest.model.task.name, manifest.source.get("repository")
    yield from sampling_doubts(request.sampling, task, repository, merged)
    if (old := leftover(request.artifact)) is not None:
        yield f"the artifact that was replaced is in {old}, and cannot be removed; remove it"


def converted_lines(manifest: Manifest, request: ConvertRequest) -> Iterator[str]:
    """Yields what was recognised or assumed of the source, and the size and digest of the weights."""
    yield from recognised_lines(manifest, request.defaults)
    size = in_bytes(sum(component.nbytes for component in manifest.components.values()))
    source = request.source or request.files["transformer"]
    yield f"converted {source} to {request.artifact}: {size}, {manifest.content_digest}"
