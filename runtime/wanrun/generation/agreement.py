"""Agreement of the processes of a group, before they load an artifact and before each generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from wanrun.artifact.manifest import Manifest
from wanrun.artifact.programs import Profile
from wanrun.errors import UsageError, field
from wanrun.files import sha256_of
from wanrun.media.inputs import Inputs
from wanrun.opened.policy import SHAPE, LoadPolicy
from wanrun.request.generation import Generation

if TYPE_CHECKING:
    from wanrun.cluster.process_group import ProcessGroup


_OWN = frozenset({*SHAPE, "profile", "target", "weights"})
"""Options of loading that may differ between processes: these agree on the profile and the target that were
chosen, and each host has its own folder of weights."""


def together(
    group: ProcessGroup | None,
    manifest: Manifest,
    target: str,
    profile: Profile,
    policy: LoadPolicy,
    prompts: Sequence[str] | None,
    inputs: Inputs | None,
) -> LoadPolicy:
    """Checks that all processes load the same, and returns the policy that they load it with.

    Without a group it is the given one. Raises, in every process, ArtifactError if their artifacts or targets
    differ, and UsageError if their prompts or choices do, or for a choice that several processes cannot have:
    ``allow_compile``, ``build`` and ``text_encoder_device``.
    """
    if group is None:
        return policy
    for name, expected, first in (
        ("allow_compile", "a target that fits every host", "run wanbuild compile, and "),
        ("build", "a profile that every host has", "run wanbuild compile, and "),
        ("text_encoder_device", "the same embeddings in all of them, and their CPUs may differ", ""),
    ):
        if getattr(policy, name):
            what = f"{field(name)} is not possible with several processes"
            raise UsageError("conflict", what, expected=expected, remedy=f"{first}leave it out")
    # A prompt that only one host has encoded before would not be encoded by all.
    if policy.embeddings == "all":
        policy = structs.replace(policy, embeddings="artifact")
    group.agree_on_artifact({**manifest.digests, "target": target})
    group.agree_on_request(
        {
            "profile": profile.name,
            "prompts": None if prompts is None else list(prompts),
            **{name: value for name, value in structs.asdict(policy).items() if name not in _OWN},
            **_facts_of(inputs),
        }
    )
    return policy


def agree_on_generation(
    group: ProcessGroup | None, generation: Generation, inputs: Inputs | None, latents: np.ndarray | None
) -> None:
    """Checks that all processes of a group, if there is one, are about to make the same video.

    Raises UsageError in every process, naming the first option that differs.
    """
    if group is None:
        return
    noise = None if latents is None else sha256_of(np.ascontiguousarray(latents).tobytes())
    facts = {"profile": generation.profile.name, **generation.options, "latents": noise}
    group.agree_on_request({**facts, **_facts_of(inputs)})


def _facts_of(inputs: Inputs | None) -> Mapping[str, Any]:
    return {} if inputs is None else {f"{name} of the media": fact for name, fact in inputs.facts.items()}
