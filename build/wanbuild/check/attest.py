"""Tries executables that were built elsewhere on the chip of this machine, and records the verdicts.

A recorded verdict holds on other machines of the kind: see ``wanrun.trust.recorded``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from wanbuild.staging import changing
from wanhub.signature import SIGNATURE, is_signed
from wanrun import Artifact, open_artifact, replace_file
from wanrun.artifact.select import compared_targets, named_profile
from wanrun.errors import ArtifactError
from wanrun.errors import field as option
from wanrun.trust.afresh import Afresh

Report = Callable[[str], None]


def attest(folder: Path, profiles: Sequence[str], record: bool, report: Report) -> None:
    """Tries executables that were built elsewhere and fit this machine, even if verdicts are known.

    ``profiles`` are names; none for all. ``record`` puts passed verdicts into the artifact. ``report`` also
    gets why a target is not tried. Raises ArtifactError for an unknown profile, or if nothing fits this
    machine or executables are refused, and UsageError if the artifact cannot be changed or a verdict cannot
    be kept.
    """
    tried, refused = 0, 0
    with changing(folder.resolve()) if record else contextlib.nullcontext(open_artifact(folder)) as artifact:
        for trial in _fitting(artifact, profiles, report):
            tried += 1
            try:
                trial.run(report)
            except ArtifactError as error:
                report(f"{trial.profile.name}: {error.what}; found {error.found}")
                refused += 1
            if record:  # at once: minutes of a large profile are not lost with a later one
                artifact = _recorded(artifact, trial, report)
    if record and (folder / SIGNATURE).exists() and not is_signed(folder):
        report(f"{SIGNATURE} is of the manifest before: sign it again with wanbuild sign")
    if refused:
        raise ArtifactError(
            "wrong_machine",
            f"executables of {artifact} cannot be used on this chip",
            found=f"{refused} of {tried} profile(s) refused",
            remedy=f"run with {option('allow_compile')}, or wanbuild compile --target local here",
        )


def _fitting(artifact: Artifact, profiles: Sequence[str], report: Report) -> Iterator[Afresh]:
    """Yields the trials of each profile; reports once why a target is not tried."""
    by_index = sorted(artifact.manifest.profiles.values(), key=lambda one: one.index)
    wanted = [named_profile(artifact, name) for name in dict.fromkeys(profiles)] or by_index
    told, elsewhere, fits = set[str](), list[str](), False
    for profile in wanted:
        for selected in compared_targets(artifact, profile):
            if profile.name not in selected.target.executables:
                continue
            if selected.built_elsewhere and not selected.mismatches:
                fits = True
                yield Afresh(artifact, selected, profile)
            elif selected.name not in told:
                told.add(selected.name)
                if selected.built_elsewhere:
                    elsewhere.append(selected.reason)
                else:
                    report(f"target {selected.name} was compiled where it runs: nothing is to be attested")
    if not fits and (elsewhere or not told):
        raise ArtifactError(
            "wrong_machine",
            f"no target of {artifact} that was built elsewhere fits this machine",
            found="; ".join(elsewhere) or "no executables",
            remedy="attest it on a machine of that kind" if elsewhere else "run wanbuild compile",
        )
    for reason in elsewhere:
        report(f"not attested: {reason}")


def _recorded(artifact: Artifact, trial: Afresh, report: Report) -> Artifact:
    """Commits the verdict of a trial, or removes one that no longer holds."""
    found, listed, name = trial.recorded(), dict(artifact.manifest.verdicts), trial.profile.name
    if found is not None and not trial.comparable:
        report(f"{name}: not recorded, as the system does not name its driver here")
        return artifact
    if found is not None:
        record, data = found
        if (known := listed.get(trial.key)) is not None and known.sha256 == record.sha256:
            report(f"{name}: recorded before")
            return artifact
        path = artifact.folder / record.file
        path.parent.mkdir(exist_ok=True)
        replace_file(path, data)
        listed[trial.key] = record
        report(f"{name}: recorded")
    elif not trial.refused or listed.pop(trial.key, None) is None:
        return artifact
    changed = artifact.changed(verdicts=listed)
    changed.write()
    return changed
