"""The request of a conversion; opens the source and the LoRAs that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wanbuild.build_options import DTYPE_OF
from wanbuild.conversion.chosen import Quantise, parse_quantise
from wanbuild.conversion.sampling import with_sampling
from wanbuild.convert_options import PlainConvert
from wanbuild.hub.repository import locate_source, locate_tokenizer
from wanbuild.lora.merge import LoraRequest, Loras, misplaced, open_loras, parse_lora_file
from wanbuild.source.all_in_one import all_in_one
from wanbuild.source.checkpoint import Source, open_source
from wanbuild.source.checkpoint_parts import OPTIONS, TOKENIZER
from wanbuild.source.single_files import open_files
from wanbuild.variants.variant import Variant
from wanrun.artifact.record import Dtype
from wanrun.errors import UsageError
from wanrun.terminal.lines import warn


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
        sampling: the name of the sampling that ``defaults`` has; None for none. Only warnings depend on it.
    """

    source: str | Path | None
    artifact: Path
    dtypes: Mapping[str, Dtype | None] = {}
    loras: Sequence[LoraRequest] = ()
    defaults: Mapping[str, Any] = {}
    files: Mapping[str, Path] = {}
    configs: Mapping[str, Path] = {}
    quantise: Quantise | None = None
    sampling: str | None = None


def convert_request(source: str | None, artifact: Path, options: Mapping[str, Any]) -> ConvertRequest:
    """Makes a request of options of ``wanbuild convert`` by name; raises UsageError for one that is wrong."""
    parts = {name: path for name in OPTIONS if (path := options.get(name)) is not None}
    experts = {"lora": None, "lora_high": "transformer", "lora_low": "transformer_2"}
    loras = [
        LoraRequest(*parse_lora_file(text), component)
        for option, component in experts.items()
        for text in options.get(option, ())
    ]
    return ConvertRequest(
        source=source,
        artifact=artifact,
        dtypes={name: options.get(option) for name, option in DTYPE_OF.items()},
        loras=loras,
        defaults=with_sampling(options.get("sampling"), options.get("defaults", {})),
        files=parts,
        configs=options.get("configs", {}),
        quantise=parse_quantise(options.get("quantise"), options.get("keep", ())),
        sampling=options.get("sampling"),
        **{name: options[name] for name in PlainConvert.__struct_fields__ if name in options},
    )


def opened_source(request: ConvertRequest) -> Source:
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


def opened_loras(source: Source, variant: Variant, request: ConvertRequest) -> Loras:
    """Opens the LoRAs, which the caller closes; raises UsageError for experts that the model lacks."""
    requests = request.loras
    if len(variant.transformers) == 1 and any(request.component for request in requests):
        raise UsageError(
            "unsupported", "this checkpoint has one transformer, not two experts", remedy="use --lora"
        )
    for line in misplaced(requests, variant.transformers):
        warn(line)
    shapes = {name: source.component(name).shapes for name in variant.transformers}
    return open_loras(requests, shapes, request.strict)
