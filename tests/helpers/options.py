"""Resolved options, generations and runs, of no more than a test needs: all defaults are the code's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from helpers.manifests import built_with, plain_manifest, with_model
from wancli.jobs.run_options import RunOptions
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Component, Manifest
from wanrun.artifact.programs import Profile
from wanrun.errors import WanError
from wanrun.media.inputs import Media
from wanrun.request.generation import Generation
from wanrun.request.options import resolve_options
from wanrun.request.reading import read_request
from wanrun.request.request import Request
from wanrun.request.resolve import request_of, resolve_request
from wanrun.rows import record_of

PROFILE = Profile(96, 64, 9, 1, True, 0, built_with(loop="both", max_steps=50))


ONE = plain_manifest(
    components={"transformer": Component("transformer", {})},
)
TWO = with_model(ONE, options={"guidance_scale_2": 3.0, "boundary": 0.875}).changed(
    components={name: Component(name, {}) for name in ("transformer", "transformer_2")},
)


def profile(guidance: bool = True, loop: str = "both") -> Profile:
    """A profile with these programs."""
    return msgspec.structs.replace(PROFILE, guidance=guidance, options=built_with(loop=loop, max_steps=50))


def resolve(manifest: Manifest, where: Profile, /, **options: Any) -> dict[str, Any]:
    """The options of a generation by it; None is not given."""
    given = {name: value for name, value in options.items() if value is not None}
    request = read_request({"prompt": "a fox", **given}.items(), Request)
    return resolve_options(Artifact(manifest, Path("my art")), where, request)


def refusal(manifest: Manifest, where: Profile, /, **options: Any) -> WanError:
    """The error for such options."""
    with pytest.raises(WanError) as caught:
        resolve(manifest, where, **options)
    return caught.value


def generation(manifest: Manifest | None = None, profile: Profile = PROFILE, **options: Any) -> Generation:
    """A generation of "a fox" with these options, by a plain artifact of text to video if none is given."""
    if manifest is None:
        manifest = plain_manifest(components={"transformer": Component("transformer", {})})
    request = request_of({"prompt": "a fox", **options})
    return resolve_request(
        request, Artifact(manifest.changed(profiles={profile.name: profile}), Path("artifact"))
    )


def options(**given: Any) -> dict[str, Any]:
    """The options of such a generation: with all defaults, those of a new option too."""
    return dict(generation(**given).options)


def of_media(manifest: Any, profile: Any, media: Media | None) -> Generation:
    """A generation of which nothing is known but its media, whatever these are."""
    nothing = cast(Any, None)
    return Generation(manifest, profile, {}, nothing, (), 16.0, media)


def run_options(**changes: Any) -> RunOptions:
    """The command line's defaults, with these changes: options of a run, and those of loading."""
    output = changes.pop("output", "out.mp4")
    return record_of(RunOptions, {"output": output and str(output), **changes})
