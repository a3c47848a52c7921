"""Builds an artifact so that a killed build leaves the old artifact or none.

A new artifact is built in a sibling folder ``.NAME.building`` and renamed. A replacement moves the old
artifact to ``.NAME.replaced`` first; after a kill the next build finishes or undoes this. A lock file next
to the artifact admits one builder at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from wanhub.marker import is_copy
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import MANIFEST
from wanrun.artifact.named import ADAPTER, EMBEDDING, EXECUTABLE, GOLDEN, PROGRAM, VERDICT
from wanrun.errors import ArtifactError, SourceError, UsageError, WanError, lacks_space
from wanrun.files import fsync_directory
from wanrun.temporary import remove_abandoned, remove_tree
from wanrun.undo import begun, undone_at_exit
from wanrun.units import in_bytes

SYNC_THREADS = 8
"""An fsync waits for the device, so more of them than cores run at once."""

WAIT_SECONDS = 0.05
"""How often a builder that waits for another one looks again."""

REBUILT = tuple(kind.folder for kind in (PROGRAM, EXECUTABLE, GOLDEN, EMBEDDING, ADAPTER, VERDICT))
"""The folders in which a build removes files that the manifest does not list."""

REQUIREMENTS = "requirements*.txt"
"""Files of package versions, next to those folders."""


def _sibling(artifact: Path, role: str) -> Path:
    return artifact.with_name(f".{artifact.name}.{role}")


def building_folder(artifact: Path) -> Path:
    """Returns the folder in which a new artifact is built."""
    return _sibling(artifact, "building")


@contextlib.contextmanager
def new_folder(artifact: Path) -> Iterator[Path]:
    """Creates the folder in which an artifact is built, and removes it if anything fails."""
    # A full disk stays an OSError, which the command line explains.
    building = building_folder(artifact)
    try:
        building.mkdir()
        yield building
    except OSError as error:
        remove_tree(building)
        if lacks_space(error):
            raise
        raise SourceError(
            "unwritable",
            f"the artifact {artifact} cannot be written: {error.strerror}",
            remedy="check the disk, or choose another folder",
        ) from None
    except BaseException:
        remove_tree(building)
        raise


def _take_lock(path: Path) -> int | None:
    """Opens the lock file and takes the lock; returns None if another builder has it."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The builder before us removes the file; a lock on a removed file excludes nobody.
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


@contextlib.contextmanager
def _locked(artifact: Path, path: Path) -> Iterator[None]:
    """Waits for other builders and holds the lock; removes its file at the end, even if the process exits."""

    def release(descriptor: int | None) -> None:
        if descriptor is not None:
            try:
                _recover(artifact)  # a stop between the renames of commit must not hide the old artifact
            finally:
                path.unlink(missing_ok=True)
                os.close(descriptor)

    while True:
        with begun(functools.partial(_take_lock, path), release) as descriptor:
            if descriptor is not None:
                yield
                return
        time.sleep(WAIT_SECONDS)


@contextlib.contextmanager
def build_lock(artifact: Path) -> Iterator[None]:
    """Holds the artifact's build lock, and removes the remains of a killed build.

    Raises UsageError if the parent folder is missing or not writable, or if the body of the ``with`` cannot
    write into the artifact. A full disk stays an OSError, which the command line explains.
    """
    parent = artifact.parent
    if not parent.is_dir():
        raise UsageError(
            "missing_file", f"the artifact's parent folder {parent} does not exist", remedy="create it first"
        )
    path = _sibling(artifact, "lock")
    with contextlib.ExitStack() as locked:
        try:
            locked.enter_context(_locked(artifact, path))
        except OSError as error:
            if lacks_space(error):
                raise
            raise UsageError(
                "unwritable",
                f"the artifact {artifact} cannot be built: {error.strerror}",
                remedy=f"make {parent} writable",
            ) from None
        try:
            _recover(artifact)
            yield
        except BaseException as error:
            if (refused := _refused(artifact, error)) is not None:
                raise refused from error
            if isinstance(error, OSError) and lacks_space(error) and error.filename is None:
                error.filename = str(artifact)  # a write to an open file does not know its name
            raise


@contextlib.contextmanager
def changing(folder: Path, again: bool = False) -> Iterator[Artifact]:
    """Holds the build lock of an artifact and yields it; then removes files that its manifest does not list.

    It removes them after an error or a signal too; after SIGKILL the next build does. ``again`` is that of
    ``read_manifest``. Raises ArtifactError if there is no artifact or only a partial copy, UsageError as
    ``build_lock`` does.
    """
    open_artifact(folder, again=again)
    if is_copy(folder):
        raise ArtifactError(
            "damaged",
            f"{folder} is a partial copy",
            expected="a whole artifact",
            remedy="wanbuild pull ADDRESS -o DIR --all-targets makes one",
        )

    def tidy() -> None:
        with contextlib.suppress(WanError, OSError):
            remove_unlisted(open_artifact(folder, again=again))

    with build_lock(folder), undone_at_exit(tidy):
        try:
            yield open_artifact(folder, again=again)
        except BaseException:
            tidy()
            raise
        remove_unlisted(open_artifact(folder))


def build_running(artifact: Path) -> bool:
    """Whether a build holds the artifact's lock; a link's lock is next to the folder that it leads to."""
    try:
        descriptor = os.open(_sibling(Path(os.path.realpath(artifact)), "lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _refused(artifact: Path, error: BaseException) -> UsageError | None:
    """Returns the error to report for a file system's error in or next to the artifact; None for others."""
    if not isinstance(error, OSError) or lacks_space(error) or not isinstance(error.filename, str):
        return None
    if not Path(error.filename).is_relative_to(artifact.parent):
        return None
    return UsageError(
        "unwritable",
        f"the artifact {artifact} cannot be changed",
        found=f"{error.filename}: {error.strerror}",
        remedy="make it writable, or work on a copy",
    )


def _recover(artifact: Path) -> None:
    """Undoes or finishes a build that was killed."""
    replaced = _sibling(artifact, "replaced")
    if (artifact / MANIFEST).exists():
        remove_tree(replaced)
    elif replaced.exists():
        try:
            replaced.rename(artifact)
        except OSError as error:
            raise UsageError(
                "unwritable",
                f"a build that was killed has left the artifact {artifact} in {replaced}, and it cannot be "
                "moved back",
                found=error.strerror,
                remedy=f"move {artifact} away",
            ) from None
        fsync_directory(artifact.parent)
    remove_tree(building_folder(artifact))


def leftover(artifact: Path) -> Path | None:
    """Returns the folder of a replaced artifact that could not be removed because another user owns it."""
    replaced = _sibling(Path(os.path.realpath(artifact)), "replaced")
    return replaced if os.path.lexists(replaced) else None


def check_leftover(artifact: Path) -> None:
    """Raises UsageError if a replaced artifact could not be removed: the next replacement needs its name."""
    if (replaced := leftover(artifact)) is not None:
        raise UsageError(
            "unwritable",
            f"{replaced} is left from a replaced artifact, and cannot be removed",
            remedy="remove it, as the user that it belongs to",
        )


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_tree(folder: Path) -> None:
    """Makes every file and every name below a folder durable."""
    # It runs once, at the end: the first fsync commits the file system's journal for all files, and the
    # others find little to do (docs/notes/convert.md, "Durability").
    walked = list(os.walk(folder))
    with ThreadPoolExecutor(SYNC_THREADS) as pool:
        list(pool.map(_fsync, [f"{parent}/{name}" for parent, _, names in walked for name in names]))
        list(pool.map(_fsync, [parent for parent, _, _ in walked]))


def commit(artifact: Path) -> None:
    """Makes the finished building folder durable and renames it to the artifact, replacing an old one."""
    building, replaced = building_folder(artifact), _sibling(artifact, "replaced")
    _fsync_tree(building)
    if artifact.exists():
        artifact.rename(replaced)
    building.rename(artifact)
    fsync_directory(artifact.parent)
    remove_tree(replaced)


def remove_unlisted(artifact: Artifact) -> None:
    """Deletes files that the manifest does not list, in the folders that builds write."""
    folder, listed = artifact.folder, {one.name for one in artifact.named()}
    for name in REBUILT:
        root = folder / name
        for path in sorted(root.rglob("*"), reverse=True) if root.is_dir() else ():
            if path.is_dir():
                with contextlib.suppress(OSError):  # not empty
                    path.rmdir()
            elif path.relative_to(folder).as_posix() not in listed:
                path.unlink()
    for path in folder.glob(REQUIREMENTS):
        if path.name not in listed:
            path.unlink()
    remove_abandoned(folder / EXECUTABLE.folder)


def check_free_space(folder: Path, needed: int) -> None:
    """Raises SourceError if a folder's file system has fewer than ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SourceError(
            "no_space",
            f"the disk of {folder} is too full",
            expected=f"{in_bytes(needed)} free",
            found=in_bytes(free),
            remedy="free some space or choose another folder",
        )


def unlisted(artifact: Artifact) -> Iterator[Path]:
    """Yields files and folders that the manifest does not imply, in the places where nothing else belongs.

    These places are the tokenizer's folder, the folders of ``REBUILT``, and names like a requirements file's.
    Other files next to the manifest, such as a licence, are the user's. Links are followed, as a run does. A
    folder that does not belong there is yielded without its content.
    """
    root, files = artifact.folder, {one.name for one in artifact.named()}
    implied = files | {str(parent) for name in files for parent in PurePosixPath(name).parents}
    tokenizer = PurePosixPath(artifact.manifest.tokenizer.file).parts
    for own in (*REBUILT, *tokenizer[: len(tokenizer) > 1]):
        for folder, folders, names in os.walk(root / own, followlinks=True):
            place = Path(folder)
            for name in sorted((*folders, *names)):
                if (place / name).relative_to(root).as_posix() not in implied:
                    yield place / name
            folders[:] = [name for name in folders if (place / name).relative_to(root).as_posix() in implied]
    yield from (path for path in sorted(root.glob(REQUIREMENTS)) if path.name not in files)
