"""Checks every byte of an artifact, and that its results agree with the recorded ones.

``record`` runs every profile that can run here for four steps from a fixed seed, with steps of each of two
experts, and keeps digests and a sample of the result in golden/. ``replay`` runs the profiles again: on the
kind of machine that recorded them the digests must be equal, elsewhere the samples must agree within the
recorded tolerance. Both prove every program, in every form of the loop: see ``wanrun.replay.proof``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from wanbuild.check.embed import add_embeddings, open_profile, runnable_profiles
from wanbuild.check.findings import Findings
from wanbuild.check.weights import check_places, check_with_orbax
from wanbuild.programs.jax_flags import pinned
from wanbuild.programs.wiring import check_program, check_set
from wanbuild.staging import build_running, changing, unlisted
from wanbuild.targets.target import platforms_of
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import MANIFEST, MAX_BYTES, Recorded, manifest_of, read_manifest, spelled
from wanrun.artifact.named import GOLDEN
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import select_target
from wanrun.errors import ArtifactError
from wanrun.executables.executables import unreadable
from wanrun.executables.lowering import UnreadableProgramError, deserialized
from wanrun.files import check_digest, read_bounded, replace_file, sha256_of
from wanrun.intact import check_intact
from wanrun.machine.environment import open_devices
from wanrun.replay.golden import NEGATIVE_PROMPT, PROMPT, STEPS, Golden, compare, read_golden, replayed
from wanrun.replay.proof import check_all_ran, prove_encoders

COPY = "copy the artifact again or rebuild it"

Report = Callable[[str], None]


def check_files(artifact: Artifact, report: Report) -> None:
    """Checks the digest of every listed file, and that every program can be read and fits its record.

    Raises ArtifactError for the first one that is missing, damaged or wrong, or unlisted in weights/.
    """
    check_places(artifact)
    check_intact(artifact, report)
    manifest = artifact.manifest
    for own in manifest.program_sets.values():
        for programs in own.programs.values():
            for name, program in programs.items():
                for file in (program, program.plain) if program.plain else (program,):
                    try:
                        exported = deserialized(artifact.program(file), name)
                    except UnreadableProgramError as error:
                        raise unreadable(artifact, own, name, error.reader, error.found) from error
                    check_program(name, program, manifest.components, own.kernels.weight_bits, exported)


def check_spelling(artifact: Artifact) -> None:
    """Raises ArtifactError if manifest.json has other bytes than were written, even of the same meaning."""
    path = artifact.folder / MANIFEST
    found = read_bounded(path, MAX_BYTES)
    if manifest_of(found, path) != artifact.manifest:
        raise ArtifactError("changed", f"{path} was changed while it was verified", remedy="verify it again")
    written = spelled(json.loads(found))  # its own content: an older release has written other records
    check_digest(sha256_of(found), sha256_of(written), f"{path} is damaged", COPY)


def check_unlisted(artifact: Artifact, report: Report) -> None:
    """Raises ArtifactError for a file that does not belong to the artifact, unless a build is adding it."""
    path = next(unlisted(artifact), None)
    if path is None:
        return
    if build_running(artifact.folder) or read_manifest(artifact.folder) != artifact.manifest:
        report("a build is at work: files that are not listed yet are not looked at")
        return
    raise ArtifactError(
        "mismatch",
        f"{path} does not belong to the artifact",
        expected="nothing there that the manifest does not list",
        remedy="remove it, or run wanbuild compile, which removes what a killed build has left",
    )


def check_all(artifact: Artifact, report: Report, building: bool = False) -> None:
    """Checks every file, that there are no others, and that plain Orbax restores the same weights.

    With ``building`` it ignores unlisted files, which the caller removes. Raises ArtifactError for a damaged
    or unlisted file, or for programs that do not fit together.
    """
    check_spelling(artifact)
    for key in artifact.manifest.program_sets:
        check_set(artifact.manifest, key)
    if not building:
        check_unlisted(artifact, report)
    check_files(artifact, report)
    check_with_orbax(artifact, report)


def _run(
    artifact: Artifact,
    profile: Profile,
    findings: Findings | None,
    steps: int | None = None,
) -> Golden:
    """Runs one profile from the fixed seed, proves all of its programs, and returns the result."""
    environment = select_target(artifact, profile).target.environment
    with open_profile(artifact, profile) as pipeline:
        title = f"{profile.name}, {steps or STEPS} steps of: {PROMPT}"
        watched = pipeline if findings is None else findings.watched(pipeline, title)
        prove_encoders(pipeline, (PROMPT, NEGATIVE_PROMPT))
        replay = replayed(watched, environment, steps=steps)
        replay.prove(pipeline.session(profile), profile.options.forms)
        check_all_ran(pipeline)
        return replay.golden


def start_jax() -> None:
    """Starts JAX on this machine's CPU and its accelerator, if there is one, or as JAX_PLATFORMS says.

    Raises ArtifactError if JAX has no device: Orbax asks JAX for devices, so the error comes before gigabytes
    are read. Unpinned, JAX would start every installed compiler, and print a traceback for each without a
    chip.
    """
    with pinned(platforms_of(["local"])):
        open_devices()


def record(folder: Path, report: Report, findings: Findings | None = None) -> None:
    """Checks every file, runs every profile that can run here, and commits the results to golden/.

    It also embeds the default negative prompt. ``findings`` gets the videos. Raises ArtifactError if the
    artifact is damaged, JAX has no device or no profile can run here, and VerificationError if a program is
    wrong; then nothing is recorded of its profile.
    """
    with changing(folder.resolve()) as artifact:
        start_jax()
        check_all(artifact, report, building=True)
        profiles = runnable_profiles(artifact, report)
        if not profiles:
            raise ArtifactError(
                "not_built", f"no profile of {artifact} can run here", remedy="run wanbuild compile first"
            )
        for profile in profiles:
            artifact = with_golden(artifact, profile, _run(artifact, profile, findings))
            artifact.write()  # minutes of a large profile are not lost with a later one
            report(f"{profile.name}: recorded")
        add_embeddings(artifact, profiles, (), report, report).write()


def with_golden(artifact: Artifact, profile: Profile, golden: Golden) -> Artifact:
    """Writes a profile's recorded result, and returns the artifact with it; its manifest is not written."""
    text = json.dumps(golden.as_json(), sort_keys=True, indent=1).encode()
    digest = sha256_of(text)
    file = f"{GOLDEN.folder}/{profile.name}-{digest[:12]}.json"
    (artifact.folder / GOLDEN.folder).mkdir(exist_ok=True)
    replace_file(artifact.folder / file, text)
    record = Recorded(file=file, sha256=digest)
    return artifact.changed(golden={**artifact.manifest.golden, profile.name: record})


def replay(folder: Path, report: Report, findings: Findings | None = None) -> dict[str, str]:
    """Checks every file, and runs recorded profiles that can run here; returns each one's ``compare`` text.

    ``findings`` gets the comparisons and the videos. Raises ArtifactError if the artifact is damaged or JAX
    has no device, and VerificationError if a result differs from the record or a program is wrong.
    """
    start_jax()  # imported before the manifest is read, which a build may replace
    artifact = open_artifact(folder)
    check_all(artifact, report)
    outcomes: dict[str, str] = {}
    for profile in runnable_profiles(artifact, report):
        if profile.name not in artifact.manifest.golden:
            report(f"{profile.name}: no golden/ record; make one with wanbuild verify --record")
            continue
        file = artifact.manifest.golden[profile.name].file
        expected = read_golden(artifact, profile.name)
        found = _run(artifact, profile, findings, steps=expected.steps)
        if findings is not None:
            findings.replayed(profile.name, file, expected, found)
        outcomes[profile.name] = compare(expected, found)
        report(f"{profile.name}: {outcomes[profile.name]}")
    return outcomes
