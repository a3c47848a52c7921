"""``wanrun.load``: opens an artifact and loads a profile of it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, Concatenate, ParamSpec

from msgspec import structs

from wanrun.artifact.artifact import Artifact
from wanrun.generation.opening import LoadKeywords, Opening
from wanrun.generation.pipeline import Pipeline
from wanrun.opened.policy import LoadPolicy
from wanrun.request.arguments import artifact_of, check_objects, policy_of, texts_of
from wanrun.terminal.status import Status, shown
from wanrun.timing.timings import Timings

_Keywords = ParamSpec("_Keywords")
_Load = Callable[Concatenate[str | os.PathLike[str] | Artifact, _Keywords], Pipeline]


def _takes(
    record: Callable[_Keywords, LoadKeywords],
) -> Callable[[Callable[..., Pipeline]], _Load[_Keywords]]:
    """Tells type checkers, and ``help``, that ``load`` takes the keywords of a record's constructor."""

    def signed(function: Callable[..., Pipeline]) -> _Load[_Keywords]:
        artifact, _ = inspect.signature(function).parameters.values()
        defaults = zip(LoadKeywords.__struct_fields__, LoadKeywords.__struct_defaults__, strict=True)
        keywords = [inspect.Parameter(name, artifact.KEYWORD_ONLY, default=value) for name, value in defaults]
        function.__signature__ = inspect.Signature([artifact, *keywords])  # type: ignore[attr-defined]
        return function

    return signed


@_takes(LoadKeywords)
def load(artifact: str | os.PathLike[str] | Artifact, **keywords: Any) -> Pipeline:
    """Opens an artifact, and loads one profile until its first step can run; the VAE is loaded later.

    Args:
        artifact: the artifact's folder; or the artifact, whose manifest is not read again then.
        keywords: the fields of ``LoadPolicy``, which say what is loaded, and how; and those of
            ``LoadKeywords``.

    Raises:
        ArtifactError: if the artifact is damaged, was built for another machine, or has no such profile.
        UsageError: for an argument of another type, a choice that there is not, or a text encoder or weights
            that cannot be had; in a fork of one that has loaded one; and if a group's requests differ.
        CancelledError: once ``cancel`` is cancelled.
        ClusterError: if JAX cannot connect the processes of a group.
    """
    others = [name for name in LoadKeywords.__struct_fields__ if name not in LoadPolicy.__struct_fields__]
    given = LoadKeywords(**{name: keywords.pop(name) for name in others if name in keywords})
    check_objects(
        inputs=given.inputs,
        cancel=given.cancel,
        timings=given.timings,
        group=given.group,
        warn=given.warn,
        report=given.report,
    )
    timings = Timings() if given.timings is None else given.timings
    prompts = None if given.prompts is None else texts_of(given.prompts)
    policy = policy_of(keywords, others)
    given = structs.replace(given, prompts=prompts, later=texts_of(given.later, "later"))
    shows = shown(given.progress)
    with timings.phase("manifest"):
        opened = artifact_of(artifact)
    with ExitStack() as undo, Status(lambda: timings.running) if shows else nullcontext():
        weights, texts, profile = Opening(opened, policy, timings, given).open(undo)
        pipeline = Pipeline(weights, texts, profile, timings, shows)
        undo.callback(pipeline.close)
        pipeline.start(prompts, given.inputs, given.cancel)
        if policy.retune:
            pipeline.retune()
        undo.pop_all()
    return pipeline
