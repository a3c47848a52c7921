"""Builds a profile that an artifact lacks: with ``wanbuild``, in a child process, into the user's cache."""

from __future__ import annotations

__all__ = ["build_beside", "built"]

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.named import EXECUTABLE, PROGRAM
from wanrun.artifact.overlay import merged_of, overlaid, overlay_of
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import BUILD_EXTRA, UnbuiltError, can_build, select_target
from wanrun.errors import ArtifactError, UsageError, field
from wanrun.machine.environment import built_elsewhere
from wanrun.opened.cancel import CancelToken
from wanrun.opened.opened_artifact import OpenedArtifact
from wanrun.temporary import temporary_path
from wanrun.timing.spans import Spans
from wanrun.undo import begun


def built(
    artifact: Artifact,
    error: UnbuiltError,
    target: str | None,
    timings: Spans,
    report: Callable[[str], None],
    cancel: CancelToken | None = None,
    started: Mapping[str, Any] = MappingProxyType({}),
) -> Artifact:
    """Builds the profile that an error says is lacking; another process that builds it is waited for.

    Args:
        artifact: the artifact, in which nothing is written.
        error: says what is lacking, and the profile whose options it gets.
        target: the target that was asked for; None for the one that fits this machine.
        timings: where the seconds are recorded.
        report: gets the lines of the build.
        cancel: ends the build, and the waiting for another process, when another thread asks for it.
        started: further keywords of ``subprocess.Popen`` for the child.

    Returns:
        The artifact with the profile.

    Raises:
        UsageError: without ``wanbuild``, if the cache cannot be written, or naming what the build says.
        CancelledError: once ``cancel`` is cancelled.
    """
    name, kept = error.lacking.name, overlay_of(artifact.manifest)
    if not can_build():
        raise UsageError(
            "not_installed", f"{field('build')} needs wanbuild, which is not installed", remedy=BUILD_EXTRA
        ) from error
    own, cancel = artifact.alone, cancel or CancelToken()
    with timings.phase("build", name), kept.held(cancel.check):
        found = overlaid(own)
        if name not in found.manifest.profiles:  # else another process has built it meanwhile
            place = _prepared(found, kept.make(), error.nearest, target)
            command = [*_command(kept.path, error), "--target", place]
            _run_child(command, name, report, cancel, started)
            kept.make_room()
            found = overlaid(own)
    if name not in found.manifest.profiles:
        raise ArtifactError(
            "other_release",
            f"profile {name} was built in {kept.path}, and cannot be read",
            remedy="run it again",
        )
    return found


def build_beside(opened: OpenedArtifact, error: UnbuiltError, cancel: CancelToken | None = None) -> None:
    """Builds the profile that an error says is lacking for the open target, which has it then.

    Args:
        opened: the artifact on its device, with its weights.
        error, cancel: as for ``built``.

    Raises:
        UsageError: where the compiler needs the device, which this process has; and as ``built``.
        ArtifactError, CancelledError: as ``built``.
    """
    name, own = error.lacking.name, opened.artifact
    if opened.device.device.platform != "cpu":
        raise UsageError(
            "not_built",
            f"profile {name} is not built, and its compiler needs the device, which this process has",
            remedy=f"name this shape to wanrun.load(..., {field('build')}=True) in a new process, or run "
            f"wanbuild compile {error.lacking.compile_options} --artifact {shlex.quote(str(own))} before",
        ) from error
    opened.grow(built(own, error, opened.selected.name, opened.recorder, opened.report, cancel))


def _command(folder: Path, error: UnbuiltError) -> list[str]:
    """Returns the command of the child, without its target."""
    asked = error.lacking
    shape = ["--size", f"{asked.width}x{asked.height}", "--frames", str(asked.num_frames)]
    shape += ["--guidance" if asked.guidance else "--no-guidance", "--num-videos", str(asked.num_videos)]
    shape += ["--reference-images", str(asked.num_references), "--like", error.nearest.name]
    return [sys.executable, "-P", "-m", "wanbuild", "compile", str(folder), *shape]


def _prepared(artifact: Artifact, folder: Path, nearest: Profile, target: str | None) -> str:
    """Fills the folder to build in, with the nearest profile; returns the name of the target."""
    own = artifact.alone
    try:
        selected = select_target(artifact, nearest, target)
        place = "local" if built_elsewhere(selected.target.environment) else selected.name
    except ArtifactError:
        if target not in (None, "local"):
            raise
        place = "local"
    base = own.only(profiles={nearest.name}, targets={place} & own.manifest.targets.keys())
    files = [one for one in base.named() if one.kind in (PROGRAM, EXECUTABLE)]
    if not all(own.path(one).is_file() for one in files):  # of an address, of which a part was fetched
        base, files = own.only(profiles={nearest.name}, targets=()), []
    profiles = {nearest.name: nearest}
    manifest = base.manifest.changed(profiles=profiles, golden={}, embeddings={}, adapters={}, schedules={})
    if artifact.built is not None:
        manifest = merged_of(manifest, artifact.built.manifest).changed()
    for one in files:
        _copied(own.path(one), folder / one.name)
    manifest.write(folder)
    return place


def _copied(file: Path, there: Path) -> None:
    """Copies a file unless that was done before. A second name of it would not do: it could be written to."""
    there.parent.mkdir(parents=True, exist_ok=True)
    if not there.exists():
        with temporary_path(there) as new:
            shutil.copyfile(file, new)
            new.replace(there)


def _stopped(child: subprocess.Popen[str]) -> None:
    child.terminate()
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _run_child(
    command: list[str],
    name: str,
    report: Callable[[str], None],
    cancel: CancelToken,
    started: Mapping[str, Any],
) -> None:
    """Runs a build, and passes its lines on; it ends with this process. Raises UsageError if it fails."""

    def start() -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, **pipes, **started)

    last = ""
    with begun(start, _stopped) as child, cancel.ending(child.terminate):
        for line in child.stdout or ():
            last = line.strip() or last
            if not last.startswith("error:"):
                report(last)
        failed = child.wait()
        cancel.check()
        if failed:
            found = last.removeprefix("error:").strip()
            raise UsageError(
                "unsupported",
                f"profile {name} cannot be built here",
                found=found,
                remedy=shlex.join(command[1:]),
            )
