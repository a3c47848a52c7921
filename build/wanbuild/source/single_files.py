"""A checkpoint of single files, one for each component, as users of ComfyUI have them.

Facts that such files lack are as published: the scheduler, the boundary of the experts, and how images are
prepared for the image encoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

from wanbuild.published.base_configs import MODEL_INDEXES
from wanbuild.published.schedulers import scheduler_config
from wanbuild.source.all_in_one import holds_tokenizer
from wanbuild.source.checkpoint import Source
from wanbuild.source.checkpoint_parts import ADDED, NEEDED, OPTIONS, TOKENIZER
from wanbuild.source.component import SourceComponent, open_part
from wanbuild.source.configs import SCHEDULER, beside, given_scheduler, of_parts, scheduler_beside
from wanbuild.source.derived import as_class, shown_fields
from wanbuild.source.image_processor import ImageProcessorConfig
from wanbuild.source.match import given_parts, misfits, nearest_misfits
from wanbuild.source.tokenizer import open_tokenizer
from wanbuild.variants.table import variants
from wanbuild.variants.variant import IMAGE_ENCODER, IMAGE_PROCESSOR, Variant
from wanrun.errors import SourceError, UsageError


def open_files(files: Mapping[str, Path], configs: Mapping[str, Path] = MappingProxyType({})) -> Source:
    """Opens a checkpoint of single files, whose tensors decide the variant.

    ``files`` has the weight file of each component, and the tokenizer's folder or file. ``configs`` are given
    by the user, by part; their facts are not assumed. Raises UsageError if a needed part is missing, or a
    config is of no part, and SourceError if a file is missing, damaged or not what its option names, or the
    parts are of no supported variant.
    """
    if missing := [OPTIONS[name] for name in NEEDED if name not in files]:
        raise UsageError(
            "missing_parameter",
            "a checkpoint of single files needs all of its parts",
            expected=", ".join(OPTIONS[name] for name in NEEDED),
            found=f"no {', no '.join(missing)}",
            remedy="give the rest"
            + (_where_tokenizer(files) if OPTIONS[TOKENIZER] in missing else "")
            + ", or a SOURCE whose parts the given files replace",
        )
    schedulers = {} if (file := scheduler_beside(files)) is None else {SCHEDULER: file}
    configs = of_parts({**beside(files), **schedulers, **configs}, files)
    with ExitStack() as stack:
        components = {
            name: open_part(name, None, path, None, stack, configs.get(name))
            for name, path in sorted(files.items())
            if name != TOKENIZER
        }
        processors = (IMAGE_PROCESSOR,) if IMAGE_ENCODER in files else ()
        source = Source(
            path=files["transformer"],
            layout=False,
            repository=None,
            revision=None,
            pipeline_class="",
            boundary_ratio=None,
            expand_timesteps=False,
            component_names=tuple(sorted({*files, "scheduler", *processors} - ADDED)),
            components=MappingProxyType(components),
            scheduler_config=given_scheduler(configs[SCHEDULER]) if SCHEDULER in configs else {},
            tokenizer=open_tokenizer(files[TOKENIZER]),
            image_processor=_processor(components[IMAGE_ENCODER]) if processors else None,
            image_processor_file=None,
            configs=MappingProxyType(configs),
            given=MappingProxyType(dict(files)),
        )
        source = _matched(source)
        stack.pop_all()
    return source


def _where_tokenizer(files: Mapping[str, Path]) -> str:
    inside = holds_tokenizer(files.get("text_encoder"))
    unread = f"; the SentencePiece model in {files['text_encoder'].name} is not read" if inside else ""
    return (
        " (for the tokenizer --tokenizer google/umt5-xxl, a hub id, or the folder of this name of the "
        f"official repositories{unread})"
    )


def _matched(source: Source) -> Source:
    """Returns the source with the published settings of the variant that its parts are of."""
    candidates = [(variant, _as_published(source, variant)) for variant in variants().values()]
    found = [(variant, misfits(variant, candidate)) for variant, candidate in candidates]
    for (_, candidate), (_, problems) in zip(candidates, found, strict=True):
        if not problems:
            return candidate
    raise SourceError(
        "unsupported",
        f"the files are of no supported variant: {(said := nearest_misfits(found))}",
        found=given_parts(source, said),
        remedy="check that each file is of the same model, and give those that are missing",
    )


def _as_published(source: Source, variant: Variant) -> Source:
    """Returns the source with a variant's published settings."""
    index = MODEL_INDEXES[variant.name]
    return dataclasses.replace(
        source,
        pipeline_class=variant.pipeline_class,
        boundary_ratio=index.get("boundary_ratio"),
        expand_timesteps=variant.expand_timesteps,
        scheduler_config=source.scheduler_config or scheduler_config(variant.scheduler, variant.flow_shift),
        assumed=tuple(_assumed(source, variant, index.get("boundary_ratio"))),
    )


def taken_as(source: Source, name: str) -> Source:
    """Returns a source as one of the variant ``name``, whose weights have the same tensors.

    Facts that neither the weights nor a given config states are as published for that variant.
    """
    variant, components = variants()[name], dict(source.components)
    if source.pipeline_class == variant.pipeline_class:
        return source
    for part in components.keys() & {*variant.transformers}:
        (full,) = variant.components[part]
        found, class_name = components[part], full.rpartition(".")[2]
        config = as_class(class_name, found.config, found.shapes)
        components[part] = dataclasses.replace(found, class_name=class_name, config=config)
    given = source.scheduler_config if SCHEDULER in source.configs else {}
    taken = dataclasses.replace(source, components=MappingProxyType(components), scheduler_config=given)
    return _as_published(taken, variant)


def _assumed(source: Source, variant: Variant, boundary: float | None) -> Iterator[str]:
    """Yields the assumed facts, which decide a video and are not in files of weights."""
    stated = source.components.keys() if source.layout else source.configs.keys()
    if "transformer" not in stated:
        yield f"heads of {source.component('transformer').config['attention_head_dim']} channels"
        if variant.flow_map:
            yield "how the time at which a step ends is embedded"
    if (chunk := source.component("transformer").config.get("num_frames_per_block")) is not None:
        yield f"chunks of {chunk} latent frames"
    if "vae" not in stated:
        yield "the VAE's means and deviations of latents"
    if not source.scheduler_config:
        solver = "UniPC" if variant.solver == "unipc" else variant.solver
        shift = (
            f"flow_shift {variant.flow_shift:g}" if variant.pyramid is None else "the stages of Helios-Base"
        )
        yield f"{solver} with {shift}"
    if boundary is not None:
        yield f"boundary {boundary:g} of the experts"
    if source.image_processor is not None and source.image_processor_file is None:
        yield "how images are prepared"


def _processor(encoder: SourceComponent) -> ImageProcessorConfig:
    """Returns the published preprocessing for an image encoder's size."""
    size = shown_fields(encoder.name, encoder.shapes, str(encoder.files[0]))["image_size"]
    return ImageProcessorConfig(size=size, crop_size=size)
