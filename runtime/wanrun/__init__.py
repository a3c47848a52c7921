"""Thin runtime for ahead-of-time artifacts of Wan video-diffusion models.

Importing this package loads neither jax nor numpy, so that ``wanrun --help`` answers at once.
The exported names are resolved on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, whose import takes longer than the rest of this module
__version__ = "0.2.0"
__all__ = [
    "EIGHT_BITS",
    "SUFFIXES",
    "Artifact",
    "CancelToken",
    "Chunk",
    "Event",
    "Generation",
    "Job",
    "Live",
    "Manifest",
    "Media",
    "Named",
    "Outcome",
    "Output",
    "PackedJob",
    "Pipeline",
    "Progress",
    "Result",
    "Step",
    "Timings",
    "__version__",
    "errors",
    "file_sha256",
    "from_wire",
    "groups",
    "in_bytes",
    "join",
    "load",
    "needed",
    "open_artifact",
    "open_regular",
    "options",
    "outputs_of",
    "pack",
    "read_bounded",
    "relative_error",
    "replace_file",
    "resolve",
    "run_all",
    "run_job",
    "schema",
    "temporary_path",
    "to_wire",
    "user_copies",
]

if TYPE_CHECKING:
    from typing import Any

    from wanrun import errors
    from wanrun.artifact.artifact import Artifact, groups, open_artifact
    from wanrun.artifact.layout import EIGHT_BITS
    from wanrun.artifact.manifest import Manifest
    from wanrun.artifact.named import Named
    from wanrun.cluster.join import join
    from wanrun.executables.tolerance import relative_error
    from wanrun.files import file_sha256, open_regular, read_bounded, replace_file, user_copies
    from wanrun.generation.live import Chunk, Live
    from wanrun.generation.load import load
    from wanrun.generation.needs import needed
    from wanrun.generation.pipeline import Pipeline
    from wanrun.generation.result import Result
    from wanrun.generation.step import Step
    from wanrun.job.job import Job, run_job
    from wanrun.job.line import run_all
    from wanrun.job.outcome import Outcome, from_wire, to_wire
    from wanrun.job.outputs import Output, outputs_of
    from wanrun.job.packed import PackedJob, pack
    from wanrun.job.progress import Event, Progress
    from wanrun.media.inputs import Media
    from wanrun.media.video_paths import SUFFIXES
    from wanrun.opened.cancel import CancelToken
    from wanrun.request.generation import Generation
    from wanrun.request.resolve import resolve
    from wanrun.request.schema import rows as options
    from wanrun.request.schema import schema
    from wanrun.temporary import temporary_path
    from wanrun.timing.timings import Timings
    from wanrun.units import in_bytes


def __getattr__(name: str) -> Any:
    modules = {
        "EIGHT_BITS": "wanrun.artifact.layout",
        "SUFFIXES": "wanrun.media.video_paths",
        "Artifact": "wanrun.artifact.artifact",
        "CancelToken": "wanrun.opened.cancel",
        "Chunk": "wanrun.generation.live",
        "Event": "wanrun.job.progress",
        "Generation": "wanrun.request.generation",
        "Job": "wanrun.job.job",
        "Live": "wanrun.generation.live",
        "Manifest": "wanrun.artifact.manifest",
        "Media": "wanrun.media.inputs",
        "Named": "wanrun.artifact.named",
        "Outcome": "wanrun.job.outcome",
        "Output": "wanrun.job.outputs",
        "PackedJob": "wanrun.job.packed",
        "Pipeline": "wanrun.generation.pipeline",
        "Progress": "wanrun.job.progress",
        "Result": "wanrun.generation.result",
        "Step": "wanrun.generation.step",
        "Timings": "wanrun.timing.timings",
        "file_sha256": "wanrun.files",
        "from_wire": "wanrun.job.outcome",
        "groups": "wanrun.artifact.artifact",
        "in_bytes": "wanrun.units",
        "join": "wanrun.cluster.join",
        "load": "wanrun.generation.load",
        "needed": "wanrun.generation.needs",
        "open_artifact": "wanrun.artifact.artifact",
        "open_regular": "wanrun.files",
        "options": "wanrun.request.schema",
        "outputs_of": "wanrun.job.outputs",
        "pack": "wanrun.job.packed",
        "read_bounded": "wanrun.files",
        "relative_error": "wanrun.executables.tolerance",
        "replace_file": "wanrun.files",
        "resolve": "wanrun.request.resolve",
        "schema": "wanrun.request.schema",
        "temporary_path": "wanrun.temporary",
        "run_all": "wanrun.job.line",
        "run_job": "wanrun.job.job",
        "to_wire": "wanrun.job.outcome",
        "user_copies": "wanrun.files",
    }
    import importlib

    if name == "errors":  # a module, for its classes
        return importlib.import_module("wanrun.errors")
    if name in modules:
        return getattr(importlib.import_module(modules[name]), "rows" if name == "options" else name)
    from wanrun.request.elsewhere import no_attribute

    raise no_attribute("module 'wanrun'", name)


def __dir__() -> list[str]:
    return sorted(__all__)
