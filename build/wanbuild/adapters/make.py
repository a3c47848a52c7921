"""Makes adapters from published LoRA files, in an artifact or in separate files, and removes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from wanbuild.adapters.adapter_file import write_adapter
from wanbuild.adapters.lora_options import AdapterRequest
from wanbuild.adapters.tensors import PlannedTensor, layout_of, planned_tensors
from wanbuild.conversion.defaults import with_defaults
from wanbuild.conversion.sampling import sampling_doubts, with_sampling
from wanbuild.convert_options import default_rows
from wanbuild.lora.merge import LoraRequest, misplaced, open_loras, parse_lora_file
from wanbuild.source.safetensors import DTYPES
from wanbuild.staging import changing, check_free_space
from wanhub.marker import is_copy
from wanrun import Artifact, Manifest, open_artifact, temporary_path
from wanrun.artifact.adapter import ADAPTER_FORMAT, LORA_A, NAME, Adapter, AdapterContent, SamplingDefaults
from wanrun.artifact.manifest import TRANSFORMERS
from wanrun.artifact.named import ADAPTER
from wanrun.errors import UsageError, quoted, unwritable
from wanrun.files import fsync_directory

Report = Callable[..., None]


@dataclass(frozen=True)
class _Plan:
    """An adapter that is not written yet."""

    tensors: Sequence[PlannedTensor]
    content: AdapterContent

    def write(self, path: Path) -> Adapter:
        """Writes a new file, and returns its record, with the file's own name."""
        check_free_space(path.parent, sum(one.nbytes for one in self.tensors))
        digest, nbytes = write_adapter(path, self.tensors, self.content)
        return Adapter(file=path.name, sha256=digest, nbytes=nbytes, content=self.content)


def make_adapter(request: AdapterRequest, report: Report, warn: Report) -> None:
    """Makes an adapter in an artifact, or writes it to a file; ``warn`` gets doubts about a LoRA or sampling.

    Raises UsageError for contradictory options, a name that is taken or an artifact that cannot be changed,
    SourceError for a LoRA that does not fit the model or changes whole matrices, ArtifactError for damage.
    """
    loras = _loras(request)
    if request.output is not None:
        path = request.output
        with _planned(open_artifact(request.artifact).manifest, request, loras, report, warn) as plan:
            try:
                with temporary_path(path) as temporary:
                    made = plan.write(temporary)
                    temporary.replace(path)
                fsync_directory(path.absolute().parent)
            except OSError as error:
                raise unwritable(f"the adapter {path}", error, "choose another --output") from error
        report(f"wrote {path}: {made.describe()}")
        return
    name = _name(request, loras)
    with _changing(request.artifact) as artifact:
        if name in artifact.manifest.adapters and not request.force:
            raise UsageError(
                "unknown_name",
                f"{artifact} has an adapter {name}",
                remedy="choose another --name, or pass --force",
            )
        with _planned(artifact.manifest, request, loras, report, warn) as plan:
            made = _added(artifact, name, plan)
    report(f"added adapter {name} to {request.artifact}: {made.describe()}")


def remove_adapters(folder: Path, names: Sequence[str], report: Report) -> None:
    """Removes adapters from an artifact; raises UsageError for an unknown name or a read-only artifact."""
    with _changing(folder) as artifact:
        adapters = artifact.manifest.adapters
        if unknown := [name for name in names if name not in adapters]:
            raise UsageError(
                "unknown_name",
                f"{artifact} has no adapter {quoted(unknown[0])}",
                expected=f"one of {', '.join(adapters)}" if adapters else None,
            )
        kept = {name: one for name, one in adapters.items() if name not in names}
        artifact.changed(adapters=kept).write()
    report(f"removed {', '.join(names)} from {folder}")


def _loras(request: AdapterRequest) -> list[LoraRequest]:
    """Returns the LoRA files, in the order of ``wanbuild convert``."""
    given = ((None, request.lora), (TRANSFORMERS[0], request.lora_high), (TRANSFORMERS[1], request.lora_low))
    return [LoraRequest(*parse_lora_file(text), expert) for expert, texts in given for text in texts]


def _name(request: AdapterRequest, loras: Sequence[LoraRequest]) -> str:
    """Returns the adapter's name: the given one, or that of the only file."""
    name = request.name
    if name is None:
        if len(loras) > 1:
            raise UsageError(
                "missing_parameter",
                "an adapter of several files needs a name",
                remedy="give it one with --name",
            )
        name = loras[0].path.stem
    if not NAME.fullmatch(name):
        raise UsageError(
            "unsupported",
            f"an adapter cannot be named {quoted(name)}",
            expected="at most 100 letters, digits and _ . + -, of which the first is a letter or a digit",
            remedy="give another --name",
        )
    return name


@contextmanager
def _changing(folder: Path) -> Iterator[Artifact]:
    """Holds the build lock of an artifact that can be changed."""
    beside = "-o FILE writes an adapter's file for it; wanrun --lora FILE takes it"
    if is_copy(folder):
        raise UsageError("unwritable", f"{folder} is a copy of an artifact that is elsewhere", remedy=beside)
    place = folder.resolve()
    if place.is_dir() and not all(os.access(one, os.W_OK) for one in (place, place.parent)):
        raise UsageError(
            "unwritable", f"the artifact {folder} cannot be changed: it is read-only", remedy=beside
        )
    with changing(place) as artifact:
        yield artifact


@contextmanager
def _planned(
    manifest: Manifest, request: AdapterRequest, loras: Sequence[LoraRequest], report: Report, warn: Report
) -> Iterator[_Plan]:
    """Opens the LoRA files, and plans the adapter of a model."""
    model = manifest.model
    experts = tuple(name for name in TRANSFORMERS if name in manifest.components)
    options = _sampling(request.sampling, manifest)
    if len(experts) == 1 and any(lora.component for lora in loras):
        raise UsageError(
            "unsupported", "this model has one transformer, not two experts", remedy="give only FILE"
        )
    for line in (*misplaced(loras, experts), *_doubts(request.sampling, manifest)):
        warn(line)
    layout = layout_of(manifest, experts[0])  # experts have the same layers
    dtype = DTYPES["F32" if manifest.dtypes[experts[0]].weights == "float32" else "BF16"]
    with open_loras(loras, dict.fromkeys(experts, layout.shapes), request.strict) as opened:
        report(*opened.lines)
        tensors = {
            name: planned_tensors(name, layout, opened.changes[name], dtype)
            for name in experts
            if opened.changes[name]
        }
        every = [one for own in tensors.values() for one in own]
        ranks = (one.shape[-2] for one in every if one.name.endswith(f"/{LORA_A}"))
        content = AdapterContent(
            format=ADAPTER_FORMAT,
            variant=model.variant,
            rank=max(ranks, default=0),
            experts=tuple(tensors),
            loras=opened.records,
            left_out=opened.left_out,
            options=options,
        )
        yield _Plan(every, content)


def _added(artifact: Artifact, name: str, plan: _Plan) -> Adapter:
    """Writes an adapter into an artifact; one that it replaces stays until the new manifest is written."""
    folder = artifact.folder / ADAPTER.folder
    folder.mkdir(exist_ok=True)
    with temporary_path(folder / name) as temporary:
        written = plan.write(temporary)
        file = f"{ADAPTER.folder}/{name}-{written.sha256[:12]}.safetensors"
        temporary.replace(artifact.folder / file)
    fsync_directory(folder)
    made = msgspec.structs.replace(written, file=file)
    artifact.changed(adapters={**artifact.manifest.adapters, name: made}).write()
    return made


def _sampling(sampling: str | None, manifest: Manifest) -> SamplingDefaults:
    """Returns a sampling's defaults, as a conversion of this model would have them."""
    given, own = with_sampling(sampling, {}), manifest.model.default_options()
    found = with_defaults(own, given)
    names = {default_rows()[key].name for key in given}
    names |= {"num_steps"} if "timesteps" in names else set()
    names |= {"guidance_scale_2"} if "guidance_scale" in names and "guidance_scale_2" in own else set()
    return msgspec.convert({name: found[name] for name in names}, SamplingDefaults)


def _doubts(sampling: str | None, manifest: Manifest) -> Iterator[str]:
    """Yields the reasons why a sampling may not suit a model."""
    repository = manifest.source.get("repository")
    yield from sampling_doubts(sampling, manifest.model.task.name, repository, merged=True)
