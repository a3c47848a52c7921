"""Checks of a request that cost nothing, made before the work that costs minutes."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wanrun.errors import UsageError
from wanrun.manifest import Manifest, Profile, read_manifest
from wanrun.noise import initial_noise
from wanrun.options import check_latents, latents_shape, resolve_options
from wanrun.select import select_profile
from wanrun.solvers import solver_table
from wanrun.video import check_output, metadata_sidecar


def _read_latents(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    try:
        # Mapped, so that a header that promises more than the file holds is refused, not allocated.
        latents = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(
            f"the latents {path} cannot be read: {error}", remedy="give a float32 .npy file"
        ) from None
    if not isinstance(latents, np.ndarray):
        raise UsageError(f"the latents {path} are not one array", remedy="give a float32 .npy file")
    check_latents(latents, shape)
    return np.array(latents)


def _check_file_target(path: Path | None, option: str, overwrite: bool) -> None:
    """Finds out before the work whether a file can be written."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written", remedy="name a file in a writable folder")
    if path.exists() and not overwrite:
        raise UsageError(f"{option} {path} exists", remedy="pass --overwrite to replace it")


def _check_numbers(fps: float | None, guidance_scale: float | None) -> None:
    """Refuses what no profile and no video can have."""
    if fps is not None and not 0.1 <= fps <= 240:  # what every container can hold
        raise UsageError("--fps is out of range", expected="0.1 to 240", found=fps)
    if guidance_scale is not None and not math.isfinite(guidance_scale):
        raise UsageError("--guidance-scale is out of range", expected="a number", found=guidance_scale)


def _check_distinct(paths: Sequence[Path | None]) -> None:
    """Refuses to write two results into one file."""
    names = [os.path.realpath(path) for path in paths if path is not None]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"two outputs are the same file, {name}",
                remedy="give --output, --save-latents and --timing-json names of their own",
            )


def _check_outside(artifact: Path, paths: Sequence[Path | None]) -> None:
    """Refuses to write into the artifact: its files are what its manifest says."""
    for path in paths:
        if path is not None and path.resolve().is_relative_to(artifact.resolve()):
            raise UsageError(f"{path} lies inside the artifact", remedy="write the results elsewhere")


def preflight(
    artifact: Path, options: Mapping[str, Any]
) -> tuple[Manifest, Profile, list[Path], np.ndarray | None]:
    """Checks everything that can be found wrong before jax is imported and a weight is read.

    Args:
        artifact: the artifact's folder.
        options: the command line's options by name.

    Returns:
        The manifest, the chosen profile, the path of each video, and the initial latents if they were given.

    Raises:
        UsageError: for an option out of range, latents that do not fit, or an output that cannot be written.
        ArtifactError: if the artifact cannot be read or has no such profile.
    """
    if options["prompt"] is None:
        raise UsageError("no prompt was given", remedy="pass --prompt TEXT (an empty one is allowed)")
    _check_numbers(options["fps"], options["guidance_scale"])
    manifest = read_manifest(artifact)
    defaults = manifest.model["defaults"]
    scale = options["guidance_scale"]
    guidance = (defaults["guidance_scale"] if scale is None else scale) > 1
    profile = select_profile(
        manifest, artifact, options["size"], options["frames"], options["num_videos"], guidance
    )
    try:
        outputs = check_output(options["output"], options["overwrite"], options["num_videos"])
        _check_file_target(options["save_latents"], "--save-latents", options["overwrite"])
        _check_file_target(options["timing_json"], "--timing-json", overwrite=True)
    except OSError as error:  # a name that is too long for the file system
        raise UsageError(
            f"{error.filename} cannot be written", found=error.strerror, remedy="choose another name"
        ) from None
    sidecars = [metadata_sidecar(path) for path in outputs]
    _check_distinct([*outputs, *sidecars, options["save_latents"], options["timing_json"]])
    _check_outside(artifact, [*outputs, options["save_latents"], options["timing_json"]])
    initial_noise(options["seed"], (1,))  # refuses a bad seed
    resolved = resolve_options(
        manifest,
        profile,
        guidance_scale=scale,
        num_steps=options["steps"],
        flow_shift=options["flow_shift"],
        solver=options["solver"],
        negative_prompt=None,
    )
    train = manifest.model["num_train_timesteps"]
    solver_table(resolved["solver"], resolved["num_steps"], resolved["flow_shift"], train)
    latents = options["latents"]
    noise = None if latents is None else _read_latents(latents, latents_shape(manifest, profile))
    return manifest, profile, outputs, noise
