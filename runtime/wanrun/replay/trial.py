"""Tries all executables of a profile that were built elsewhere: loads them, and compares what they make.

They make the recorded video again. A profile without one is tried with a small one that has one and stands
for it: the small one's executables make its video, the profile's steps repeat its tokens, and what is no step
is compared with the same program compiled here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.programs import Profile, Role
from wanrun.artifact.select import named_profile
from wanrun.denoising.state import zeros
from wanrun.errors import ArtifactError, VerificationError, WanError
from wanrun.executables.tolerance import ALIKE, TOLERANCES, VELOCITY_TOLERANCES, W8A8_FACTOR, relative_error
from wanrun.executables.tuning import difference, drawn_like
from wanrun.files import check_digest, digest_found
from wanrun.generation.load import load
from wanrun.generation.pipeline import Pipeline
from wanrun.replay.golden import (
    MAX_GOLDEN_BYTES,
    NEGATIVE_PROMPT,
    PROMPT,
    Golden,
    compare,
    read_golden,
    recorded_generation,
    replayed,
)
from wanrun.replay.tiled import apart
from wanrun.replay.velocity import Start
from wanrun.trust.proxy import witness_of
from wanrun.trust.verdict import Verdict

Tell = Callable[[Verdict], None]

COMPARED: tuple[Role, ...] = ("once", "window", "decode")
"""The roles of the programs that are compared with the same ones, compiled here."""


def tried(artifact: Path, target: str, profile: str, weights: str | None, tell: Tell) -> Verdict:
    """Loads and runs the executables of a profile, and compares the result with the recorded one.

    Args:
        weights: a folder or URL of the weights instead of the artifact's.
        tell: gets a refusal for what is about to be done, which holds if this process does not come back.

    Returns:
        The verdict. It is not to be kept if the trial could not begin, or if something else than an
        executable is wrong, such as damaged weights.
    """
    try:
        manifest = read_manifest(artifact)
        wanted = named_profile(manifest, artifact, profile)
        witness = witness_of(manifest, manifest.targets[target], wanted)
        if witness is None:
            raise ArtifactError(f"profile {profile} has no recorded result in golden/")
        golden = _golden(artifact, manifest, witness.name)
        w8a8 = manifest.program_sets[manifest.targets[target].program_set].kernels.w8a8
        pipeline = load(  # opens the device and checks all files; nothing is loaded yet
            artifact,
            profile=witness.name,
            target=target,
            weights=weights,
            embeddings="none",
            lazy=True,
            tuned=False,
            trial=True,
        )
        pipeline.session(wanted)  # reads its files too, which may be damaged
    except Exception as error:
        return Verdict(outcome="refused", reason=_one_line(error), keep=False)
    factor = W8A8_FACTOR if w8a8 else 1.0
    with pipeline:
        environment = pipeline.environment
        device = {name: environment[name] for name in ("device_kind", "platform_version")}

        def refused(reason: str, keep: bool = True) -> Verdict:
            return Verdict(outcome="refused", reason=reason, keep=keep, **device)

        try:
            tell(refused("while they were loaded"))
            for each in dict.fromkeys((witness, wanted)):
                pipeline.load_executables(each)
        except Exception as error:
            return refused(_one_line(error), _is_kept(error, ArtifactError))
        try:
            tell(refused("while they made the recorded video"))
            agreement = _replay(pipeline, golden, factor)
            _compare_encoders(pipeline)
            if wanted != witness:
                tell(refused(f"while they repeated the tokens of {witness.name}"))
                agreement += _compare_steps(pipeline, wanted, factor)
                tell(refused("while their programs were compiled here, and compared"))
                _compare_others(pipeline, wanted)
        except Exception as error:
            return refused(_one_line(error), _is_kept(error, VerificationError))
    return Verdict(outcome="passed", reason=agreement, **device)


def _golden(artifact: Path, manifest: Manifest, profile: str) -> Golden:
    """Reads the recorded result."""
    record = manifest.golden[profile]
    path = artifact / record.file
    remedy = "copy the artifact again"
    check_digest(digest_found(path, MAX_GOLDEN_BYTES), record.sha256, f"{path} is damaged", remedy)
    return read_golden(path)


def _replay(pipeline: Pipeline, golden: Golden, factor: float) -> str:
    """Makes the recorded video with each form of the loop, and returns how the first agrees; all must."""
    replays = (replayed(pipeline, pipeline.environment, form) for form in pipeline.profile.options.forms)
    first, *_ = [compare(golden, replay, factor) for replay in replays]
    return first


def _compare_encoders(pipeline: Pipeline) -> None:
    """Compares the text encoder's programs by short prompts, with the one that made the video."""
    for prompt in (PROMPT, NEGATIVE_PROMPT):
        first: np.ndarray | None = None
        for length, rows in pipeline.encoded_at_lengths(prompt).items():
            values = rows.astype(np.float64)
            first = values if first is None else first
            error, most = relative_error(first, values), TOLERANCES[pipeline.profile.options.dtype]
            if not error <= most:
                raise VerificationError(
                    f"the text encoder of {length} tokens differs from the shortest one",
                    expected=f"at most {most:g} relative",
                    found=f"{error:.2e}",
                )


def _compare_steps(pipeline: Pipeline, large: Profile, factor: float) -> str:
    """Compares a profile's steps with those of the loaded one, and says how the first form agrees.

    ``factor`` multiplies the tolerance.
    """
    generation = recorded_generation(pipeline)
    start = Start.of(pipeline, generation, generation.read_media())
    most, errors = factor * VELOCITY_TOLERANCES[large.options.dtype], list[float]()
    for form in large.options.forms:
        errors.append(error := apart(pipeline, start, large, form))
        if not error <= most:
            raise VerificationError(
                f"the steps of {large.name} differ from those of {pipeline.profile.name} for the same tokens",
                expected=f"at most {most:g} relative",
                found=f"{error:.2e}",
            )
    return f"; the steps of {large.name} agree with those of {pipeline.profile.name} within {errors[0]:.1e}"


def _compare_others(pipeline: Pipeline, large: Profile) -> None:
    """Compares a profile's programs that are no steps, and that the loaded one has not, with what is compiled
    here.
    """
    import jax

    programs = pipeline.session(large).programs
    known = {program.sha256 for program in pipeline.session(pipeline.profile).programs.values()}
    executables = programs.weights.executables
    for name, program in programs.items():
        if program.role in COMPARED and program.sha256 not in known:
            weights = {one: pipeline.component_weights(one) for one in programs.components(name)}
            inputs = jax.tree.map(drawn_like, zeros(program.avals["inputs"]))
            (loading,) = executables.request(large, [name])
            forms = loading.result(), executables.compiled(large, name)
            results = [jax.tree.map(np.asarray, form(**weights, **inputs)) for form in forms]
            said = jax.tree.map(lambda built, here: difference(built, here, ALIKE), *results)
            if wrong := next(filter(None, jax.tree.leaves(said)), ""):
                raise VerificationError(f"{name} differs from what is compiled here {wrong}")


def _is_kept(error: Exception, kind: type[WanError]) -> bool:
    """Returns whether an error blames the executables, not memory or another file."""
    if isinstance(error, WanError):
        return isinstance(error, kind)
    return not (isinstance(error, MemoryError | OSError) or "RESOURCE_EXHAUSTED" in str(error))


def _one_line(error: Exception) -> str:
    if isinstance(error, WanError):  # the remedy is another here
        return WanError(error.what, expected=error.expected, found=error.found).text
    return f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"
