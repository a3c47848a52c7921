"""``wanrun.load``: opens an artifact and loads a profile of it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from msgspec import structs

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.overlay import overlaid
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import SelectedTarget, UnbuiltError
from wanrun.errors import ArtifactError
from wanrun.generation.agreement import together
from wanrun.generation.choice import Choice, Tell
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.session import first_expert
from wanrun.machine.environment import device_environment
from wanrun.machine.rates import Rates
from wanrun.media.inputs import Inputs
from wanrun.opened.cancel import CancelToken
from wanrun.opened.device import OpenDevice, open_device
from wanrun.opened.opened_artifact import OpenedArtifact
from wanrun.opened.policy import LoadPolicy
from wanrun.request.arguments import artifact_of, check_objects, policy_of, texts_of
from wanrun.request.building import built
from wanrun.request.profiles import choose_profile
from wanrun.terminal.status import Status, shown
from wanrun.text.encoder import silent
from wanrun.text.placement import opened_on_cpu
from wanrun.text.stage import TextStages
from wanrun.timing.timings import Recorder, Timings
from wanrun.trust.trust import Trust
from wanrun.weights.readahead import ReadAhead
from wanrun.weights.store import WeightStore

if TYPE_CHECKING:
    from wanrun.cluster.process_group import ProcessGroup


class LoadKeywords(LoadPolicy, frozen=True, kw_only=True):
    """The keywords of ``load``: the options of loading, and what only Python can give.

    Attributes:
        prompts: the prompts of the next generations, with the negative ones. They are encoded meanwhile, and
            the text encoder is not read if all their embeddings are stored. None means any prompt.
        inputs: the images and videos of the first generation, which are encoded meanwhile.
        later: names of profiles of later generations. Executables of theirs that were built elsewhere are
            tried now too: once the device is open, no other process can have it.
        timings: where the times are recorded; None for new ones.
        warn: gets messages about problems that do not stop the run.
        report: gets messages about decisions: where two experts are kept.
        group: the processes that share the target's mesh; None for only this one. All of them make the
            same calls in the same order; the user's cache of embeddings, which may differ, is not read.
        cancel: ends ``load`` when another thread asks for it.
        progress: whether standard error says what loading and each generation wait for; None: in a notebook.
    """

    prompts: Sequence[str] | None = None
    inputs: Inputs | None = None
    later: Sequence[str] = ()
    timings: Timings | None = None
    warn: Tell = silent
    report: Tell = silent
    group: ProcessGroup | None = None
    cancel: CancelToken | None = None
    progress: bool | None = None


_Keywords = ParamSpec("_Keywords")
_Load = Callable[Concatenate[str | os.PathLike[str] | Artifact, _Keywords], Pipeline]


def _takes(
    record: Callable[_Keywords, LoadKeywords],
) -> Callable[[Callable[..., Pipeline]], _Load[_Keywords]]:
    """Shows type checkers, and ``help``, that ``load`` takes the keywords of a record's constructor."""

    def signed(function: Callable[..., Pipeline]) -> _Load[_Keywords]:
        artifact, _ = inspect.signature(function).parameters.values()
        defaults = zip(LoadKeywords.__struct_fields__, LoadKeywords.__struct_defaults__, strict=True)
        keywords = [inspect.Parameter(name, artifact.KEYWORD_ONLY, default=value) for name, value in defaults]
        function.__signature__ = inspect.Signature([artifact, *keywords])  # type: ignore[attr-defined]
        return function

    return signed


def python_only() -> list[str]:
    """Returns the keywords of ``load`` that are no options of loading: only Python can give them."""
    return [name for name in LoadKeywords.__struct_fields__ if name not in LoadPolicy.__struct_fields__]


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
        ClusterError: if a process of a group is gone.
    """
    others = python_only()
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
        opened = overlaid(artifact_of(artifact))
    with ExitStack() as undo, Status(lambda: timings.running) if shows else nullcontext():
        choice = _built(Choice(opened, policy), timings, given.report)
        weights, texts = on_device(choice, given, timings, undo)
        pipeline = Pipeline(weights, texts, choice.profile, timings, shows)
        undo.callback(pipeline.close)
        with _compared(weights, timings):
            pipeline.start(prompts, given.inputs, given.cancel)
        undo.pop_all()
    return pipeline


@contextmanager
def _compared(weights: WeightStore, timings: Timings) -> Iterator[None]:
    """Gives the timings of a start the best rates of earlier ones here, and keeps better ones."""
    rates = Rates.of(weights.opened.selected.target.environment, what="start")
    timings.known_rates = rates.known
    yield
    rates.raise_to(timings.rates)


def _built(choice: Choice, timings: Timings, report: Tell) -> Choice:
    """Returns a choice whose profile is built, now if the options of loading say so."""
    if choice.policy.build:
        try:
            _ = choice.profile
        except UnbuiltError as error:
            return replace(
                choice, artifact=built(choice.artifact, error, choice.policy.target, timings, report)
            )
    return choice


def on_device(
    choice: Choice, given: LoadKeywords, timings: Timings, undo: ExitStack
) -> tuple[WeightStore, TextStages]:
    """Opens an artifact on the device of its target; ``undo`` closes what is opened.

    Returns its weights and executables, and its text stages, of which nothing is loaded yet. The caller
    closes both. Raises as ``load``.
    """
    artifact, policy, manifest = choice.artifact, choice.policy, choice.artifact.manifest
    with timings.phase("manifest"):
        profile, selected = choice.profile, choice.target(choice.profile)
        _say(selected, given.report)
    streams = choice.streams  # refuses a form that is not built
    policy = together(given.group, manifest, selected.name, profile, policy, given.prompts, given.inputs)
    selected = _tried(choice, selected, given, timings)
    cancel, expert = given.cancel or CancelToken(), first_expert(manifest, policy)
    ahead = ReadAhead(artifact.folder, policy)
    cancel.check()
    # The text encoder may come first; of a mesh it is not known yet which rows this process reads.
    if not (policy.lazy or policy.low_memory or selected.mesh or streams):
        ahead.touch(expert, manifest.components[expert])
        undo.callback(ahead.stop)
    text, trust = choice.text_target(selected, profile), choice.trust(selected)
    cpu = None if text is None else "cpu"
    device = open_device(selected, policy.allow_compile, timings, given.warn, given.group, cpu, ahead.read)
    cancel.check()
    check = _checked(trust, device)
    if not device.foreign:
        check(profile)
    opened = OpenedArtifact(
        artifact, selected, device, policy, Recorder(), given.warn, given.report, cache(check)
    )
    beside = None if text is None else opened_on_cpu(opened, text)
    return WeightStore(opened, ahead), TextStages(opened, None if beside is None else WeightStore(beside))


def _checked(trust: Trust, device: OpenDevice) -> Callable[[Profile], Collection[str]]:
    """Returns a function that checks whether a profile's executables are trusted on an open device."""
    found = device_environment(device.devices)

    def check(profile: Profile) -> Collection[str]:
        if not device.foreign:
            trust.check_device(profile, found)
        return trust.check(profile)

    return check


def _say(selected: SelectedTarget, report: Tell) -> None:
    """Reports why other targets do not fit, and which CPU level the chosen one is for."""
    if selected.others:
        report(f"target {selected.name}; others do not fit: {', '.join(selected.others)}")
    elif "cpu_level" in selected.target.environment:
        report(f"target {selected.name}")


def _tried(choice: Choice, selected: SelectedTarget, given: LoadKeywords, timings: Timings) -> SelectedTarget:
    """Tries executables that were built elsewhere, of later profiles too; returns the target with that."""
    if given.group is not None and choice.trust(selected).needed and not selected.mismatches:
        raise ArtifactError(
            "wrong_machine",
            f"target {selected.name} was built without its chip, and several processes do not try "
            "executables",
            expected="a target that was compiled on these chips",
            remedy="run wanbuild compile --target local on them",
        )
    for name in dict.fromkeys(given.later):
        if name != choice.profile.name:
            later = choose_profile(choice.artifact, {"profile": name})
            choice.try_ahead(later, timings, given.report)
    return replace(selected, refusal=choice.tried(selected, choice.profile, timings, given.report))
