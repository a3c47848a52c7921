"""Tries all executables of a profile that were built elsewhere: loads them, and compares what they make.

They make the recorded video again. A profile without one is tried with a small one that has one and stands
for it: the small one's executables make its video, the profile's steps repeat its tokens, and what is no step
is compared with the same program compiled here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from wanrun.artifact.artifact import open_artifact
from wanrun.artifact.programs import Profile
from wanrun.artifact.roles import FORMS, ROLES
from wanrun.artifact.select import named_profile
from wanrun.denoising.state import zeros
from wanrun.errors import ArtifactError, VerificationError, WanError
from wanrun.executables.tolerance import (
    ALIKE,
    VELOCITY_TOLERANCES,
    W8A8_FACTOR,
    first_difference,
    relative_error,
)
from wanrun.generation.load import load
from wanrun.generation.pipeline import Pipeline
from wanrun.replay.golden import (
    NEGATIVE_PROMPT,
    PROMPT,
    Golden,
    Replay,
    compare,
    read_golden,
    replayed,
)
from wanrun.replay.proof import prove_encoders, prove_steps
from wanrun.replay.tiled import repeated
from wanrun.replay.velocity import velocity
from wanrun.trust.proxy import witness_of
from wanrun.trust.verdict import Verdict

Tell = Callable[[Verdict], None]

DRAWN = 65_537
"""Random values that are drawn; larger arrays repeat them."""


def tried(folder: Path, target: str, profile: str, tell: Tell, **how: Any) -> Verdict:
    """Loads and runs the executables of a profile, and compares what they make with what is recorded.

    Args:
        tell: gets a refusal for what is about to be done, which holds if this process does not come back.
        how: keywords of ``load``. With ``memory="stream"`` the stream form is tried, else the others.

    Returns:
        The verdict. It is not to be kept if the trial could not begin, or if something else than an
        executable is wrong, such as damaged weights.
    """
    try:
        artifact = open_artifact(folder)
        manifest, wanted = artifact.manifest, named_profile(artifact, profile)
        witness = witness_of(manifest, manifest.targets[target], wanted)
        if witness is None:
            raise ArtifactError(f"profile {profile} has no recorded result in golden/, nor has a proxy")
        golden = read_golden(artifact, witness.name)
        w8a8 = manifest.program_sets[manifest.targets[target].program_set].kernels.w8a8
        pipeline = load(  # opens the device and checks all files; nothing is loaded yet
            artifact,
            profile=witness.name,
            target=target,
            embeddings="none",
            lazy=True,
            trial=True,
            **how,
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
        built, streams = wanted.options.forms, how.get("memory") == "stream"
        forms = [form for form in built if FORMS[form].streams == streams] or built
        try:
            tell(refused("while they made the recorded video"))
            prove_encoders(pipeline, (PROMPT, NEGATIVE_PROMPT))
            agreement, first = _replay(pipeline, golden, forms, factor)
            if wanted != witness:
                tell(refused(f"while they repeated the tokens of {witness.name}"))
                agreement += _compare_steps(pipeline, first, wanted, forms, factor)
        except Exception as error:
            return refused(_one_line(error), _is_kept(error, VerificationError))
        try:
            if wanted != witness:
                tell(refused("while programs were compiled here, to be compared", keep=False))
                _compare_others(pipeline, wanted)
        except Exception as error:  # a compiler that fails says nothing of the executables
            return refused(_one_line(error), isinstance(error, VerificationError))
    return Verdict(outcome="passed", reason=agreement, **device)


def _replay(pipeline: Pipeline, golden: Golden, forms: Sequence[str], factor: float) -> tuple[str, Replay]:
    """Makes the recorded video with each form of the loop, and proves its steps.

    Returns:
        How the first form agrees, and what it made.
    """
    found = []
    for form in forms:
        replay = replayed(pipeline, pipeline.environment, form, golden.steps)
        found.append((compare(golden, replay.golden, factor), replay))
        replay.prove(pipeline.session(pipeline.profile), form, factor)
    return found[0]


def _compare_steps(
    pipeline: Pipeline, first: Replay, large: Profile, forms: Sequence[str], factor: float
) -> str:
    """Compares a profile's steps with those of the loaded one, and says how the first form agrees.

    Raises:
        VerificationError: if they differ; and as ``velocity``.
    """
    start, expected = repeated(pipeline, first.start, first.velocity, large)
    most, errors = factor * VELOCITY_TOLERANCES[large.options.dtype], list[float]()
    for form in forms:
        found = velocity(pipeline.session(large), start, form)
        errors.append(error := relative_error(found, expected))
        if not error <= most:
            raise VerificationError(
                f"the steps of {large.name} differ from those of {pipeline.profile.name} for the same tokens",
                expected=f"at most {most:g} relative",
                found=f"{error:.2e}",
            )
        prove_steps(pipeline.session(large), start, form, expected, found, factor)
    return f"; the steps of {large.name} agree with those of {pipeline.profile.name} within {errors[0]:.1e}"


def _compare_others(pipeline: Pipeline, large: Profile) -> None:
    """Compares a profile's programs that are no steps, and that the loaded one has not, with what is compiled
    here, for random inputs, and whole numbers of 0 and of 1: they turn parts of a program on.

    Raises:
        VerificationError: if they differ.
    """
    import jax

    programs = pipeline.session(large).programs
    known = {program.sha256 for program in pipeline.session(pipeline.profile).programs.values()}
    executables = programs.weights.executables
    most = max(ALIKE, VELOCITY_TOLERANCES[large.options.vae_dtype])
    for name, program in programs.items():
        if ROLES[program.role].proven.by == "record" and program.sha256 not in known:
            weights = {one: pipeline.component_weights(one) for one in programs.components(name)}
            (loading,) = executables.request(large, [name])
            forms = loading.result(), executables.compiled(large, name)
            for number in (0, 1):
                inputs = jax.tree.map(partial(_drawn, number=number), zeros(program.avals["inputs"]))
                results = [jax.tree.map(np.asarray, form(**weights, **inputs)) for form in forms]
                if wrong := first_difference(results[0], results[1], most):
                    raise VerificationError(f"{name} differs from what is compiled here {wrong}")


def _drawn(zero: np.ndarray, number: int) -> np.ndarray:
    """Returns random values of an array's shape and dtype, normal or bytes; scalars are ``number``."""
    import jax

    if not zero.ndim:
        return np.full_like(zero, number)
    random = np.random.default_rng(zero.ndim)
    if zero.ndim > 1 and zero.dtype == np.uint8:
        return np.resize(random.integers(0, 256, DRAWN, dtype=np.uint8), zero.shape)
    if zero.ndim > 1 and jax.dtypes.issubdtype(zero.dtype, np.floating):
        return np.resize(random.standard_normal(DRAWN, np.float32), zero.shape).astype(zero.dtype)
    return zero.copy()  # rows of coefficients, tokens


def _is_kept(error: Exception, kind: type[WanError]) -> bool:
    """Returns whether an error blames the executables, not memory or another file."""
    if isinstance(error, WanError):
        return isinstance(error, kind)
    return not (isinstance(error, MemoryError | OSError) or "RESOURCE_EXHAUSTED" in str(error))


def _one_line(error: Exception) -> str:
    if isinstance(error, WanError):  # the remedy is another here
        return WanError(error.what, expected=error.expected, found=error.found).text
    return f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"
