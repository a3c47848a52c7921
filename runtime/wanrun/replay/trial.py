"""Tries all executables of a profile that were built elsewhere: loads them, and compares what they make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.select import named_profile
from wanrun.errors import ArtifactError, VerificationError, WanError
from wanrun.executables.tolerance import TOLERANCES, relative_error
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
    replayed,
)
from wanrun.trust.verdict import Verdict

Tell = Callable[[Verdict], None]


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
        name = named_profile(manifest, artifact, profile).name
        golden = _golden(artifact, manifest, name)
        pipeline = load(  # opens the device and checks all files; nothing is loaded yet
            artifact,
            profile=name,
            target=target,
            weights=weights,
            embeddings="none",
            lazy=True,
            tuned=False,
            trial=True,
        )
    except Exception as error:
        return Verdict(outcome="refused", reason=_one_line(error), keep=False)
    with pipeline:
        environment = pipeline.environment
        device = {name: environment[name] for name in ("device_kind", "platform_version")}

        def refused(reason: str, keep: bool = True) -> Verdict:
            return Verdict(outcome="refused", reason=reason, keep=keep, **device)

        try:
            tell(refused("while they were loaded"))
            pipeline.load_executables()
        except Exception as error:
            return refused(_one_line(error), _is_kept(error, ArtifactError))
        try:
            tell(refused("while they made the recorded video"))
            agreement = _replay(pipeline, golden)
            _compare_encoders(pipeline)
        except Exception as error:
            return refused(_one_line(error), _is_kept(error, VerificationError))
    return Verdict(outcome="passed", reason=agreement, **device)


def _golden(artifact: Path, manifest: Manifest, profile: str) -> Golden:
    """Reads the recorded result; ArtifactError if there is none."""
    if profile not in manifest.golden:
        raise ArtifactError(f"profile {profile} has no recorded result in golden/")
    record = manifest.golden[profile]
    path = artifact / record.file
    remedy = "copy the artifact again"
    check_digest(digest_found(path, MAX_GOLDEN_BYTES), record.sha256, f"{path} is damaged", remedy)
    return read_golden(path)


def _replay(pipeline: Pipeline, golden: Golden) -> str:
    """Makes the recorded video with each form of the loop, and returns how the first agrees; all must."""
    forms = pipeline.profile.options.forms
    first, *_ = [compare(golden, replayed(pipeline, pipeline.environment, loop=form)) for form in forms]
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


def _is_kept(error: Exception, kind: type[WanError]) -> bool:
    """Returns whether an error blames the executables, not memory or another file."""
    if isinstance(error, WanError):
        return isinstance(error, kind)
    return not (isinstance(error, MemoryError | OSError) or "RESOURCE_EXHAUSTED" in str(error))


def _one_line(error: Exception) -> str:
    if isinstance(error, WanError):  # the remedy is another here
        return WanError(error.what, expected=error.expected, found=error.found).text
    return f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"
