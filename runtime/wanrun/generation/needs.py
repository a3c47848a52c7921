"""The files of an artifact that a run reads, by its manifest: remote ones are fetched before the run."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.named import ADAPTER, EMBEDDING, GOLDEN, REQUIREMENTS, VERDICT, WEIGHTS, Kind, Named
from wanrun.artifact.programs import Profile
from wanrun.artifact.roles import DECODERS
from wanrun.artifact.select import SelectedTarget
from wanrun.errors import ArtifactError
from wanrun.generation.choice import Choice
from wanrun.generation.load import python_only
from wanrun.opened.policy import LoadPolicy
from wanrun.request.arguments import artifact_of, policy_of
from wanrun.request.options import resolve_loop
from wanrun.text.embeddings import TEXT_ENCODER, EmbeddingFormat
from wanrun.text.tokenizer import clean_prompt
from wanrun.trust.verdict import verdict_key


def needed(
    artifact: str | os.PathLike[str] | Artifact,
    loading: Mapping[str, Any] = MappingProxyType({}),
    *,
    profiles: Sequence[Profile] | None = None,
    prompts: Sequence[str] | None = None,
    loras: Collection[str] | None = None,
    decoders: Collection[str] | None = None,
) -> list[Named]:
    """Returns the files that ``load``, and generations after it, read of an artifact.

    They are those of one target, of the text encoder's on the CPU where that is asked for, and of these
    profiles; the text encoder's weights are left out if the artifact has the embeddings of all prompts.

    Args:
        artifact: the artifact's folder; or the artifact, of which only the manifest needs to be there.
        loading: keywords of ``load``, of which those decide that choose the target and the weights. Its
            ``prompts`` are those of the next generations, and do not decide.
        profiles: the profiles of the generations; None for all that the target has.
        prompts: their prompts, with the negative ones; None for any.
        loras: their LoRAs by name; None for all that one of the profiles has slots for.
        decoders: what makes their frames, of ``full`` and ``tiny``; None for any.

    Raises:
        ArtifactError, UsageError: as ``load``: if nothing fits this machine, or an option is wrong.
    """
    others = python_only()
    policy = policy_of({name: value for name, value in loading.items() if name not in others}, others)
    choice = Choice(artifact_of(artifact), policy)
    first = profiles[0] if profiles else choice.profile
    selected = choice.target(first)
    # A form that is not built is refused before anything is fetched.
    resolve_loop(choice.artifact, first, policy.form)
    text = choice.text_target(selected, first)
    targets = [selected.name, *([] if text is None else [text.name])]
    for profile in profiles or ():
        with suppress(ArtifactError):  # reported in its turn
            targets.append(choice.target(profile).name)
    own = choice.artifact.only(profiles=_read_profiles(choice, selected, profiles), targets=targets)
    unread = _unread(own, None if selected.built_elsewhere else prompts, policy)
    unread |= _unread_adapters(own, loras) | _unread_verdicts(own, choice, selected)
    if decoders is not None and not selected.built_elsewhere:  # else all programs are tried
        unread |= _unread_decoders(own, decoders)
    kept = (
        one
        for one in own.named()
        if one.kind not in (REQUIREMENTS, GOLDEN) and (one.kind, one.of) not in unread
    )
    return [*kept, *_spreading(choice.artifact, selected)]


def _read_profiles(choice: Choice, selected: SelectedTarget, profiles: Sequence[Profile] | None) -> set[str]:
    """Returns the names of the profiles whose programs are read."""
    manifest, target = choice.artifact.manifest, selected.target
    if profiles is None:
        built = {*target.executables, choice.profile.name}
        if choice.policy.allow_compile:
            built |= manifest.program_sets[target.program_set].programs.keys()
        profiles = [manifest.profiles[name] for name in built]
    return {profile.name for profile in profiles}


def _unread(artifact: Artifact, prompts: Sequence[str] | None, policy: LoadPolicy) -> set[tuple[Kind, str]]:
    """Returns the embeddings of other prompts, and the components whose weights are not read."""
    manifest, unread = artifact.manifest, set[tuple[Kind, str]]()
    if policy.weights is not None:
        unread |= {(WEIGHTS, name) for name in manifest.components}
    if prompts is not None:
        dtypes = {profile.options.dtype for profile in manifest.profiles.values()}
        names, cleaned = EmbeddingFormat(manifest), {clean_prompt(prompt) for prompt in prompts}
        keys = {names.key(prompt, dtype) for prompt in cleaned for dtype in dtypes}
        unread |= {(EMBEDDING, key) for key in manifest.embeddings.keys() - keys}
        if policy.embeddings != "none" and keys <= manifest.embeddings.keys():
            unread.add((WEIGHTS, TEXT_ENCODER))
    return unread


def _unread_adapters(artifact: Artifact, loras: Collection[str] | None) -> set[tuple[Kind, str]]:
    """Returns the adapters that no request chooses, or that no profile has slots for."""
    manifest = artifact.manifest
    slots = any(profile.options.lora_rank for profile in manifest.profiles.values())
    read = (manifest.adapters if loras is None else loras) if slots else ()
    return {(ADAPTER, name) for name in manifest.adapters if name not in read}


def _unread_verdicts(artifact: Artifact, choice: Choice, selected: SelectedTarget) -> set[tuple[Kind, str]]:
    """Returns the verdicts that are of another kind of machine than this one."""
    trust, manifest, read = choice.trust(selected), artifact.manifest, set[str]()
    if trust.needed and manifest.verdicts:
        read = {verdict_key(trust.facts(profile)) for profile in manifest.profiles.values()}
    return {(VERDICT, name) for name in manifest.verdicts if name not in read}


def _unread_decoders(artifact: Artifact, decoders: Collection[str]) -> set[tuple[Kind, str]]:
    """Returns the components that only programs of other decoders take."""
    manifest = artifact.manifest
    others = {role for name in DECODERS.keys() - set(decoders) for role in DECODERS[name]}
    taken: dict[bool, set[str]] = {True: set(), False: set()}
    for one in manifest.program_sets.values():
        for program in (program for named in one.programs.values() for program in named.values()):
            if program.role != "spread":
                taken[program.role in others] |= manifest.components.keys() & set(program.inputs)
    return {(WEIGHTS, name) for name in taken[True] - taken[False]}


def _spreading(artifact: Artifact, selected: SelectedTarget) -> Iterator[Named]:
    """Yields the programs that spread weights over a mesh: that of any profile may be run for all."""
    manifest, target = artifact.manifest, selected.target
    if selected.mesh:
        names = {
            program.file
            for profile in manifest.profiles.values()
            for program in manifest.programs(target, profile).values()
            if program.role == "spread"
        }
        yield from (one for one in artifact.named() if one.name in names)
