"""Resolved options and generations, of no more than a test needs: all defaults are those of the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from helpers.manifests import built_with, plain_manifest
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Component, Manifest
from wanrun.artifact.programs import Profile
from wanrun.media.types import Media
from wanrun.request.generation import Generation
from wanrun.request.resolve import request_of, resolve_request

PROFILE = Profile(96, 64, 9, 1, True, 0, built_with(loop="both", max_steps=50))


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
