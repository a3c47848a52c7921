"""Checks every byte of an artifact, and that its results agree with the recorded ones.

``record`` runs every profile that can run here for two steps from a fixed seed, one step for each of two
experts, and keeps digests and a sample of the result in golden/. ``replay`` runs the profiles again: on the
kind of machine that recorded them the digests must be equal, elsewhere the samples must agree within the
recorded tolerance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wanbuild.check.embed import add_embeddings, open_profile, runnable_profiles
from wanbuild.check.weights import check_weights, check_with_orbax
from wanbuild.listed import unlisted
from wanbuild.staging import build_lock, build_running, remove_unlisted
from wanbuild.toy.media import sample_media
from wanrun.artifact.environment import open_devices, usable_cores
from wanrun.artifact.manifest import MANIFEST, Manifest, read_manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.record import ListedFile
from wanrun.artifact.select import select_target
from wanrun.denoising.schedule import boundary_between
from wanrun.errors import ArtifactError, VerificationError
from wanrun.files import check_digest, digest_found, read_bounded, replace_file, sha256_of
from wanrun.generation.options import has_guidance
from wanrun.loading.executables import check_entry, read_program
from wanrun.text.embeddings import ArtifactEmbeddings

PROMPT = "A red fox runs through fresh snow at dawn."
NEGATIVE_PROMPT = "blurry"
SEED = 20_240_817
STEPS = 2
GUIDANCE_SCALE = 5.0
"""Of a profile with guidance, where the artifact's own scale turns it off."""
SAMPLES = 256

MAX_GOLDEN_BYTES = 2**20
"""Of a recorded result, which has some kilobytes."""

MAX_SMALL_BYTES = 2**30
"""Of a tokenizer, a record or a file of requirements; the largest, UMT5's tokenizer, has 17 MB."""

COPY = "copy the artifact again or rebuild it"

TOLERANCES: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 5e-2}
"""Relative error allowed on another kind of machine, by compute dtype.

Sums in another order change float32 latents by 1e-6 to 1e-5, and bfloat16 latents by about 1e-2. Both bounds
leave a factor of five to ten. A wrong weight or program changes the latents by more than 1e-1.
"""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Golden:
    """The recorded result of one profile.

    Args:
        latents_sha256: digest of the final latents' bytes.
        frames_sha256: digest of the frames' bytes.
        samples: evenly spaced values of the final latents.
        machine: environment of the machine: device, CPU features, package versions and number of cores.
        tolerance: relative error allowed on another kind of machine.
    """

    latents_sha256: str
    frames_sha256: str
    samples: tuple[float, ...]
    machine: Mapping[str, Any]
    tolerance: float

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt": PROMPT,
            "negative_prompt": NEGATIVE_PROMPT,
            "seed": SEED,
            "steps": STEPS,
            "latents_sha256": self.latents_sha256,
            "frames_sha256": self.frames_sha256,
            "samples": list(self.samples),
            "machine": dict(self.machine),
            "tolerance": self.tolerance,
        }

    @classmethod
    def from_json(cls, data: Any) -> Golden:
        """Raises ValueError for what is no such record."""
        return msgspec.convert(data, cls)


def read_golden(path: Path) -> Golden:
    """Reads a recorded result, whose digest was checked.

    Raises:
        ArtifactError: if it is something else.
    """
    try:
        return Golden.from_json(msgspec.json.decode(read_bounded(path, MAX_GOLDEN_BYTES)))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{path} is no recorded result", found=str(error), remedy="run wanbuild verify --record"
        ) from None


def check_files(artifact: Path, manifest: Manifest, report: Report) -> None:
    """Reads every file that the manifest lists and checks its digest.

    Raises:
        ArtifactError: naming the first file that is missing or damaged, or unlisted in weights/.
    """
    check_weights(artifact, manifest, report)
    for key, program_set in manifest.program_sets.items():
        for profile_name, programs in program_set.programs.items():
            for name, program in programs.items():
                read_program(artifact, name, program)
            report(f"{profile_name}: programs of {key} intact")
    for target_name, target in manifest.targets.items():
        for entries in target.executables.values():
            for name, entry in entries.items():
                check_entry(artifact, target, name, entry)
        report(f"target {target_name}: executables intact")
    requirements = [target.requirements for target in manifest.targets.values()]
    for record in [manifest.tokenizer, *manifest.golden.values(), *requirements]:
        path = artifact / record.file
        check_digest(digest_found(path, MAX_SMALL_BYTES), record.sha256, f"{path} is damaged", COPY)
    embeddings = ArtifactEmbeddings(artifact, manifest)
    for key in manifest.embeddings:
        embeddings.read(key)
    if manifest.embeddings:
        report(f"{len(manifest.embeddings)} prompt embedding(s) intact")


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
        ArtifactError: for a file that is damaged or does not belong there.
    """
    check_spelling(artifact, manifest)
    if not building:
        check_unlisted(artifact, manifest, report)
    check_files(artifact, manifest, report)
    check_with_orbax(artifact, manifest, report)


def _run(artifact: Path, manifest: Manifest, profile: Profile) -> Golden:
    """Runs one profile from the fixed seed."""
    environment = select_target(manifest, artifact, profile).target.environment
    boundary = boundary_between(manifest, STEPS)  # each expert has a step, whatever the shift
    scale = GUIDANCE_SCALE if profile.guidance and not has_guidance(manifest) else None
    with open_profile(artifact, profile) as pipeline:
        result = pipeline.generate(
            PROMPT,
            NEGATIVE_PROMPT,
            guidance_scale=scale,
            seed=SEED,
            num_steps=STEPS,
            boundary=boundary,
            media=sample_media(manifest, profile),
        )
    flat = result.latents.reshape(-1)
    samples = flat[np.linspace(0, flat.size - 1, min(SAMPLES, flat.size)).astype(np.int64)]
    return Golden(
        sha256_of(result.latents.tobytes()),
        sha256_of(result.frames.tobytes()),
        tuple(float(value) for value in samples),
        # The number of cores may decide the order in which partial sums are added.
        {**environment, "cores": usable_cores()},
        TOLERANCES[profile.options.dtype],
    )


def record(artifact: Path, report: Report) -> None:
    """Checks every file, runs every profile that can run here, and commits the results to golden/.

    It also embeds the default negative prompt.

    Args:
        artifact: the artifact's folder.
        report: gets one line per check and profile.

    Raises:
        ArtifactError: if the artifact is damaged, if JAX has no device, or if no profile can run here.
    """
    artifact = artifact.resolve()
    with build_lock(artifact):
        open_devices()  # Orbax asks JAX for them: what keeps JAX from them is told before gigabytes are read
        manifest = read_manifest(artifact)
        check_all(artifact, manifest, report, building=True)
        golden = dict(manifest.golden)
        profiles = runnable_profiles(artifact, manifest, report)
        if not profiles:
            raise ArtifactError(f"no profile of {artifact} can run here", remedy="run wanbuild compile first")
        for profile in profiles:
            text = json.dumps(_run(artifact, manifest, profile).as_json(), sort_keys=True, indent=1)
            digest = sha256_of(text.encode())
            file = f"golden/{profile.name}-{digest[:12]}.json"
            (artifact / "golden").mkdir(exist_ok=True)
            replace_file(artifact / file, text.encode())
            golden[profile.name] = ListedFile(file=file, sha256=digest)
            report(f"{profile.name}: recorded")
        manifest = add_embeddings(artifact, manifest.changed(golden=golden), profiles, (), report, report)
        manifest.write(artifact)
        remove_unlisted(artifact, manifest)


def compare(expected: Golden, found: Golden) -> str:
    """Compares a replay with the record, and returns how they agree, for a report.

    Raises:
        VerificationError: if they do not agree.
    """
    if expected.machine == found.machine:
        for what in ("latents_sha256", "frames_sha256"):
            if getattr(expected, what) != getattr(found, what):
                raise VerificationError(
                    f"{what} differs from golden/ on the same kind of machine",
                    expected=getattr(expected, what),
                    found=getattr(found, what),
                    remedy="the artifact does not compute what it did; rebuild it or record again",
                )
        return "digests equal"
    reference, values = np.asarray(expected.samples), np.asarray(found.samples)
    if reference.shape != values.shape:
        raise VerificationError(
            "golden/ has another number of samples", expected=reference.size, found=values.size
        )
    error = float(np.linalg.norm(values - reference) / np.linalg.norm(reference))
    if not error <= expected.tolerance:
        raise VerificationError(
            "the latents differ from golden/ by more than another kind of machine explains",
            expected=f"at most {expected.tolerance:g} relative",
            found=f"{error:.2e}",
            remedy="compare with the reference: wanbuild verify --source",
        )
    return f"recorded on another kind of machine, relative difference {error:.1e}"


def replay(artifact: Path, report: Report) -> dict[str, str]:
    """Checks every file and runs every recorded profile again that can run here.

    Args:
        artifact: the artifact's folder.
        report: gets one line per check and profile.

    Returns:
        For each profile that was run, the text of ``compare``.

    Raises:
        ArtifactError: if the artifact is damaged, or if JAX has no device.
        VerificationError: if a profile's result differs from the record.
    """
    open_devices()  # as above; and JAX is imported before the manifest is read, which a build may replace
    manifest = read_manifest(artifact)
    check_all(artifact, manifest, report)
    outcomes: dict[str, str] = {}
    for profile in runnable_profiles(artifact, manifest, report):
        if profile.name not in manifest.golden:
            report(f"{profile.name}: no golden/ record; make one with wanbuild verify --record")
            continue
        expected = read_golden(artifact / manifest.golden[profile.name].file)
        outcomes[profile.name] = compare(expected, _run(artifact, manifest, profile))
        report(f"{profile.name}: {outcomes[profile.name]}")
    return outcomes
