"""The recorded result of a profile: four steps from a fixed seed, with steps of each of two experts.

On the kind of machine that recorded it, a replay has equal digests; elsewhere its samples agree within the
recorded tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec
import numpy as np
from msgspec import Meta

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import TINY_VAE
from wanrun.artifact.named import GOLDEN
from wanrun.artifact.roles import FORMS, FormName
from wanrun.denoising.boundary import boundary_between
from wanrun.errors import ArtifactError, VerificationError
from wanrun.executables.tolerance import (
    LEVELS,
    TOLERANCES,
    levels_apart,
    most_levels,
    relative_error,
)
from wanrun.files import sha256_of
from wanrun.generation.pipeline import Pipeline
from wanrun.generation.sampler import Sampler
from wanrun.machine.cpu import cpu_features
from wanrun.machine.environment import usable_cores
from wanrun.replay.proof import prove_steps
from wanrun.replay.random_steps import LoopStart
from wanrun.replay.samples import sample_media
from wanrun.request.generation import Generation
from wanrun.request.profiles import has_guidance

PROMPT = "A red fox runs through fresh snow at dawn."
NEGATIVE_PROMPT = "blurry"
SEED = 20_240_817
STEPS = 4
"""So many that a solver of the second order uses all of its history. Older records have two."""
MOST_STEPS = 64
"""Of a record that is read."""
GUIDANCE_SCALE = 5.0
"""Of a profile with guidance, where the artifact's own scale turns it off."""
NAG_SCALE = 11.0
"""Of a profile that is built for NAG."""
SAMPLES = 256


@dataclass(frozen=True)
class Golden:
    """The recorded result of one profile.

    Attributes:
        samples: evenly spaced values of the final latents.
        machine: environment of the machine: device, CPU features, package versions and number of cores.
        tolerance: relative error allowed on another kind of machine.
        frame_samples: evenly spaced values of the frames, 0 to 255.
        steps: the video's denoising steps.
        tiny_samples: evenly spaced values of the frames by the tiny decoder; empty without one.
    """

    latents_sha256: str
    frames_sha256: str
    samples: tuple[float, ...]
    machine: Mapping[str, Any]
    tolerance: float
    frame_samples: tuple[int, ...]
    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)] = STEPS
    tiny_samples: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        own = msgspec.to_builtins(self)
        if not self.tiny_samples:
            del own["tiny_samples"]
        return {"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT, "seed": SEED, **own}


def read_golden(artifact: Artifact, profile: str) -> Golden:
    """Reads the recorded result of a profile. Raises ArtifactError if it is damaged or something else."""
    record = artifact.manifest.golden[profile]
    try:
        return msgspec.json.decode(artifact.listed(GOLDEN, record), type=Golden)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            "unreadable",
            f"{artifact.folder / record.file} is no recorded result",
            found=str(error),
            remedy="run wanbuild verify --record",
        ) from None


def _own_features(environment: Mapping[str, Any]) -> dict[str, Any]:
    """This CPU's features, where a target has those of its level: jaxlib's own kernels use them all."""
    return {"cpu_features": list(cpu_features())} if "cpu_level" in environment else {}


@dataclass(frozen=True)
class Replay:
    """A result as it is recorded, and the start of the steps that prove its programs."""

    golden: Golden
    start: LoopStart

    def prove(self, sampler: Sampler, forms: Sequence[str]) -> None:
        """Proves the programs of forms of the loop that make steps, with every expert of the profile.

        Raises VerificationError, naming one that is wrong.
        """
        whole = None
        for form in forms:
            whole = prove_steps(sampler, self.start, form, whole)


def replayed(
    pipeline: Pipeline, environment: Mapping[str, Any], loop: str | None = None, steps: int | None = None
) -> Replay:
    """Runs a pipeline's loaded profile from the fixed seed, without stored embeddings.

    ``environment`` is the machine's. ``loop`` is None for the pipeline's own form of the loop, ``steps`` for
    a new record's number; else as many as the record has.
    """
    generation, dtype = recorded_generation(pipeline, loop, steps), pipeline.profile.options.dtype
    inputs = generation.read_media()
    result = pipeline.run(generation, inputs=inputs)
    golden = Golden(
        sha256_of(result.all_latents.tobytes()),
        sha256_of(result.frames.tobytes()),
        tuple(float(value) for value in _sampled(result.all_latents)),
        # The number of cores may decide the order in which partial sums are added.
        {**environment, **_own_features(environment), "cores": usable_cores()},
        TOLERANCES[dtype],
        tuple(int(value) for value in _sampled(result.frames)),
        len(generation.table.timesteps),
        _tiny_samples(pipeline, result.latents),
    )
    return Replay(golden, LoopStart.of(pipeline, generation, inputs))


def _tiny_samples(pipeline: Pipeline, latents: np.ndarray) -> tuple[int, ...]:
    """Returns values of the frames that the tiny decoder makes of a result's latents, if there is one."""
    if TINY_VAE not in pipeline.manifest.components:
        return ()
    return tuple(int(value) for value in _sampled(pipeline.decode(latents, decoder="tiny")))


def recorded_generation(pipeline: Pipeline, loop: str | None = None, steps: int | None = None) -> Generation:
    """Returns the record of a pipeline's loaded profile; arguments as of ``replayed``."""
    manifest, profile = pipeline.manifest, pipeline.profile
    scale = GUIDANCE_SCALE if profile.guidance and not has_guidance(manifest) else None
    looped = any(FORMS[form].looped for form in profile.options.forms)
    steps = steps or (min(STEPS, profile.options.max_steps) if looped else STEPS)
    # Of a video to begin with there is nothing left at full strength.
    of_video = {"num_steps": 2 * steps, "strength": 0.5} if profile.options.video_to_video else {}
    run: dict[str, Any] = {"num_steps": steps, **of_video}
    generation = pipeline.resolve(
        PROMPT,
        NEGATIVE_PROMPT,
        guidance_scale=scale,
        nag_scale=NAG_SCALE if profile.options.nag else None,
        seed=SEED,
        **run,
        boundary=boundary_between(manifest, **run),  # each expert has a step, whatever the shift
        loop=cast("FormName | None", loop),
        media=sample_media(manifest, profile),
    )
    return generation.on_own_grid()


def _sampled(array: np.ndarray) -> np.ndarray:
    flat = array.reshape(-1)
    return flat[np.linspace(0, flat.size - 1, min(SAMPLES, flat.size)).astype(np.int64)]


def compare(expected: Golden, found: Golden) -> str:
    """Compares a replay with the record, and returns how they agree, for a report.

    Raises VerificationError if they do not agree.
    """
    if expected.machine == found.machine:
        for what in ("latents_sha256", "frames_sha256"):
            if getattr(expected, what) != getattr(found, what):
                raise VerificationError(
                    "other_results",
                    f"{what} differs from golden/ on the same kind of machine",
                    expected=getattr(expected, what),
                    found=getattr(found, what),
                    remedy="the artifact does not compute what it did; rebuild it or record again",
                )
        _frames_apart(expected.tiny_samples, found.tiny_samples, 0)
        return "digests equal"
    error = _apart("latents", expected.samples, found.samples, expected.tolerance)
    for what in ("frame_samples", "tiny_samples"):
        most = most_levels(expected.tolerance)
        _frames_apart(getattr(expected, what), getattr(found, what), most)
    return f"recorded on another kind of machine, relative difference {error:.1e}"


def _frames_apart(expected: Sequence[int], found: Sequence[int], most: float) -> None:
    """Raises VerificationError if samples of frames differ by more than this many levels."""
    if not expected and not found:
        return
    difference = levels_apart(np.asarray(expected, np.float64), np.asarray(found, np.float64))
    if not difference <= most:
        raise VerificationError(
            "other_results",
            "the frames differ from golden/ by more than another kind of machine explains",
            expected=f"at most {most:.3g} of {LEVELS} levels",
            found=f"{difference:.3g}",
            remedy="compare with the reference: wanbuild verify --source",
        )


def _apart(what: str, expected: Sequence[float], found: Sequence[float], most: float) -> float:
    """Returns the relative error of samples. Raises VerificationError if it is too large."""
    if len(expected) != len(found):
        raise VerificationError(
            "other_results",
            f"golden/ has another number of samples of the {what}",
            expected=len(expected),
            found=len(found),
        )
    if not (error := relative_error(np.asarray(found), np.asarray(expected))) <= most:
        raise VerificationError(
            "other_results",
            f"the {what} differ from golden/ by more than another kind of machine explains",
            expected=f"at most {most:g} relative",
            found=f"{error:.2e}",
            remedy="compare with the reference: wanbuild verify --source",
        )
    return error
