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
from typing import Any

from wanbuild.check.embed import add_embeddings, open_profile, runnable_profiles
from wanbuild.check.findings import Findings
from wanbuild.check.preview import fitted
from wanbuild.check.weights import check_weights, check_with_orbax
from wanbuild.listed import unlisted
from wanbuild.programs.instructions import check_level
from wanbuild.programs.jax_flags import pinned
from wanbuild.programs.signature import check_signature
from wanbuild.programs.wiring import check_set
from wanbuild.staging import build_running, changing
from wanbuild.targets.levels import CPU_LEVELS
from wanbuild.targets.target import platforms_of
from wanrun.artifact.manifest import MANIFEST, Manifest, Recorded, read_manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import select_target
from wanrun.errors import ArtifactError
from wanrun.executables.lowering import deserialized
from wanrun.files import check_digest, digest_found, replace_file, sha256_of
from wanrun.generation.pipeline import Pipeline
from wanrun.intact import check_others, checked_programs
from wanrun.machine.environment import open_devices
from wanrun.replay.golden import NEGATIVE_PROMPT, PROMPT, STEPS, Golden, compare, read_golden, replayed
from wanrun.replay.proof import check_all_ran, prove_encoders

COPY = "copy the artifact again or rebuild it"

Report = Callable[[str], None]


def check_files(artifact: Path, manifest: Manifest, report: Report) -> None:
    """Reads every file that the manifest lists and checks its digest.

    Raises:
        ArtifactError: naming the first file that is missing or damaged, or unlisted in weights/.
    """
    check_weights(artifact, manifest, report)
    for name, program, program_set, data in checked_programs(artifact, manifest, report):
        bits, exported = program_set.kernels.weight_bits, deserialized(data, name)
        check_signature(name, program, manifest.components, bits, exported)
    check_others(artifact, manifest, report)
    for target in manifest.targets.values():
        if (level := CPU_LEVELS.get(target.environment.get("cpu_level", ""))) is not None:
            for file in {entry.file for entries in target.executables.values() for entry in entries.values()}:
                check_level(artifact / target.folder / file, level)


def check_spelling(artifact: Path, manifest: Manifest) -> None:
    """Checks that manifest.json has the very bytes that were written, and not others of the same meaning.

    Raises:
        ArtifactError: if it has not.
    """
    path = artifact / MANIFEST
    written = manifest.encoded()
    found, expected = digest_found(path, len(written)), sha256_of(written)
    if found != expected and read_manifest(artifact) != manifest:
        raise ArtifactError(f"{path} was changed while it was verified", remedy="verify it again")
    check_digest(found, expected, f"{path} is damaged", COPY)


def check_unlisted(artifact: Path, manifest: Manifest, report: Report) -> None:
    """Refuses a file that does not belong to the artifact, unless a build is adding it.

    Raises:
        ArtifactError: naming one.
    """
    path = next(unlisted(artifact, manifest), None)
    if path is None:
        return
    if build_running(artifact) or read_manifest(artifact) != manifest:
        report("a build is at work: files that are not listed yet are not looked at")
        return
    raise ArtifactError(
        f"{path} does not belong to the artifact",
        expected="nothing there that the manifest does not list",
        remedy="remove it, or run wanbuild compile, which removes what a killed build has left",
    )


def check_all(artifact: Path, manifest: Manifest, report: Report, building: bool = False) -> None:
    """Checks every file, that there are no others, and that plain Orbax restores the same weights.

    Args:
        artifact: the artifact's folder.
        manifest: its manifest.
        report: gets one line per check.
        building: whether the caller builds, and removes unlisted files itself.

    Raises:
        ArtifactError: for a file that is damaged or does not belong there, and for programs that do not fit
            together.
    """
    check_spelling(artifact, manifest)
    for key in manifest.program_sets:
        check_set(manifest, key)
    if not building:
        check_unlisted(artifact, manifest, report)
    check_files(artifact, manifest, report)
    check_with_orbax(artifact, manifest, report)


def _run(
    artifact: Path,
    manifest: Manifest,
    profile: Profile,
    findings: Findings | None,
    look: Callable[[Pipeline], object] = str,
    steps: int | None = None,
) -> tuple[Golden, Any]:
    """Runs one profile from the fixed seed, and proves all of its programs.

    Returns:
        The result, and what a function finds in the profile's pipeline.

    Raises:
        VerificationError: if a program is wrong.
    """
    environment = select_target(manifest, artifact, profile).target.environment
    with open_profile(artifact, profile) as pipeline:
        title = f"{profile.name}, {steps or STEPS} steps of: {PROMPT}"
        watched = pipeline if findings is None else findings.watched(pipeline, title)
        prove_encoders(pipeline, (PROMPT, NEGATIVE_PROMPT))
        replay = replayed(watched, environment, steps=steps)
        for form in profile.options.forms:
            replay.prove(pipeline.session(profile), form)
        check_all_ran(pipeline)
        return replay.golden, look(pipeline)


def start_jax() -> None:
    """Starts JAX on this machine's accelerator, if there is one, and on its CPU; or as JAX_PLATFORMS says.

    Orbax asks JAX for devices, so an error of JAX's devices comes before gigabytes are read. By itself JAX
    would start every compiler that is installed, with a traceback of each that finds no chip.

    Raises:
        ArtifactError: if JAX has no device.
    """
    with pinned(platforms_of(["local"])):
        open_devices()


def record(artifact: Path, report: Report, findings: Findings | None = None) -> None:
    """Checks every file, runs every profile that can run here, and commits the results to golden/.

    It also embeds the default negative prompt.

    Args:
        artifact: the artifact's folder.
        report: gets one line per check and profile.
        findings: gets the videos, for a report.

    Raises:
        ArtifactError: if the artifact is damaged, if JAX has no device, or if no profile can run here.
        VerificationError: if a program is wrong; nothing of its profile is recorded then.
    """
    artifact = artifact.resolve()
    with changing(artifact):
        start_jax()
        manifest = read_manifest(artifact)
        check_all(artifact, manifest, report, building=True)
        profiles = runnable_profiles(artifact, manifest, report)
        if not profiles:
            raise ArtifactError(f"no profile of {artifact} can run here", remedy="run wanbuild compile first")
        for profile in profiles:
            recorded = _run(artifact, manifest, profile, findings, fitted)
            manifest = with_golden(artifact, manifest, profile, *recorded)
            manifest.write(artifact)  # minutes of a large profile are not lost with a later one
            report(f"{profile.name}: recorded")
        add_embeddings(artifact, manifest, profiles, (), report, report).write(artifact)


def with_golden(
    artifact: Path,
    manifest: Manifest,
    profile: Profile,
    golden: Golden,
    preview: tuple[tuple[float, float, float], ...] = (),
) -> Manifest:
    """Writes a profile's recorded result, and returns a manifest that lists it."""
    text = json.dumps(golden.as_json(), sort_keys=True, indent=1).encode()
    digest = sha256_of(text)
    file = f"golden/{profile.name}-{digest[:12]}.json"
    (artifact / "golden").mkdir(exist_ok=True)
    replace_file(artifact / file, text)
    record = Recorded(file=file, sha256=digest, preview=preview)
    return manifest.changed(golden={**manifest.golden, profile.name: record})


def replay(artifact: Path, report: Report, findings: Findings | None = None) -> dict[str, str]:
    """Checks every file and runs every recorded profile again that can run here.

    Args:
        artifact: the artifact's folder.
        report: gets one line per check and profile.
        findings: gets the comparisons and the videos, for a report.

    Returns:
        For each profile that was run, the text of ``compare``.

    Raises:
        ArtifactError: if the artifact is damaged, or if JAX has no device.
        VerificationError: if a profile's result differs from the record, or a program is wrong.
    """
    start_jax()  # imported before the manifest is read, which a build may replace
    manifest = read_manifest(artifact)
    check_all(artifact, manifest, report)
    outcomes: dict[str, str] = {}
    for profile in runnable_profiles(artifact, manifest, report):
        if profile.name not in manifest.golden:
            report(f"{profile.name}: no golden/ record; make one with wanbuild verify --record")
            continue
        file = manifest.golden[profile.name].file
        expected = read_golden(artifact / file)
        found, _ = _run(artifact, manifest, profile, findings, steps=expected.steps)
        if findings is not None:
            findings.replayed(profile.name, file, expected, found)
        outcomes[profile.name] = compare(expected, found)
        report(f"{profile.name}: {outcomes[profile.name]}")
    return outcomes
