"""Opens an address: pins its revision, and makes a copy of it in the user's cache."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import wanrun
from wanhub.address import Address, parse_address
from wanhub.copy import check_places
from wanhub.marker import MARKER
from wanhub.origin import Origin, mark, read_copied
from wanhub.pins import Pin, held, lock_file, pin, read_pins
from wanhub.remote_files import RemoteFiles, resolved
from wanhub.signature import MANIFEST, MAX_MANIFEST_BYTES, MAX_SIGNATURE_BYTES, SIGNATURE
from wanhub.url_reader import ForbiddenError, Report, quiet
from wanrun.errors import ArtifactError, unwritable


class Opened(NamedTuple):
    """A copy of the revision that an address has now, and what pins that revision.

    ``pin`` reports a revision that was not pinned before, and raises UsageError if the lock file cannot be
    written.
    """

    folder: Path
    pin: Callable[[Report], None]


def open_copy(text: str, cache: Path, report: Report) -> Path:
    """Returns the folder of a copy of the artifact at an address, at the revision that is pinned.

    An address without a pin gets one: the revision that it has now. With a pin and a copy nothing is
    requested. ``cache`` is the folder of copies, and of the lock file unless ``WANRUN_LOCK`` names one.
    ``report`` gets a line for a revision that was not pinned before, and one about a wait.

    Raises ArtifactError if the address gives no answer, has no artifact, or has another one than is pinned,
    and UsageError if the address is invalid, a package is missing, or the folder cannot be written.
    """
    asked = parse_address(text)
    pinned, at = read_pins(lock_file(cache)).get(asked.text), asked
    if pinned is not None:
        folder = copy_folder(cache, pinned.manifest_digest)
        at = asked.at(pinned.revision) if pinned.revision and asked.repository else asked
        if (folder / MARKER).is_file():
            where, remedy = f"the copy {folder}", f"remove {folder}, and run it again"
            _compare(read_copied(folder, where, remedy).manifest, pinned, where, remedy)
            with suppress(OSError):  # one that cannot be written comes from where it came from
                mark(folder, Origin(at.text, at.url))
            return folder
    opened = _opened(asked, at, cache, pinned, report)
    opened.pin(report)
    return opened.folder


def open_newest(text: str, cache: Path, report: Report = quiet) -> Opened:
    """Makes a copy of what an address has now, ignoring the pin; otherwise as ``open_copy``."""
    asked, lock = parse_address(text), lock_file(cache)
    with held(lock):  # it is written last: its faults are reported before anything is fetched
        read_pins(lock)
    return _opened(asked, asked, cache, None, report)


def _opened(asked: Address, at: Address, cache: Path, pinned: Pin | None, report: Report) -> Opened:
    place = resolved(at, report)
    folder, manifest = _copied(place, at, cache, pinned, report)
    value = Pin(place.revision, manifest.manifest_digest)

    def settle(report: Report) -> None:
        if value != pinned:
            lock = lock_file(cache)
            pin(lock, asked.text, value)
            report(f"{place.text}, manifest {manifest.manifest_digest[:19]}, pinned in {lock}")

    return Opened(folder, settle)


def copy_folder(cache: Path, manifest_digest: str) -> Path:
    """Returns the folder of the copy of an artifact."""
    return cache / manifest_digest.removeprefix("sha256:")[:32]


def _copied(
    place: Address, asked: Address, cache: Path, pinned: Pin | None, report: Report
) -> tuple[Path, wanrun.Manifest]:
    """Fetches the manifest, and makes the copy unless it exists."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache, prefix=".new-"))
        try:
            return _made(RemoteFiles(place, report), place, asked, cache, pinned, made)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise unwritable(f"the cache {cache}", error, "set XDG_CACHE_HOME to another folder") from error


def _made(
    store: RemoteFiles, place: Address, asked: Address, cache: Path, pinned: Pin | None, made: Path
) -> tuple[Path, wanrun.Manifest]:
    try:
        (made / MANIFEST).write_bytes(store.small(MANIFEST, MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        raise ArtifactError(
            "wrong_kind", f"{place.text} is no artifact", found=f"no {MANIFEST}", remedy="check the address"
        ) from None
    artifact = read_copied(made, place.text, "ask who published it")
    manifest = artifact.manifest
    if pinned is not None:
        _compare(manifest, pinned, asked.text, f"run wanbuild pull {asked.text} to move the pin")
    check_places(artifact)  # refuses one whose files would come among weights that copies share
    folder, origin = copy_folder(cache, manifest.manifest_digest), Origin(place.text, place.url)
    try:
        signature = store.small(SIGNATURE, MAX_SIGNATURE_BYTES)
    except (FileNotFoundError, ForbiddenError):  # most artifacts are not signed; a bucket may refuse to say
        signature = b""
    if not (folder / MARKER).is_file():
        for name, component in manifest.components.items():
            shared = cache / "components" / f"{name}-{_digest(component)}"
            shared.mkdir(parents=True, exist_ok=True)
            (made / component.folder).parent.mkdir(parents=True, exist_ok=True)
            (made / component.folder).symlink_to(shared.resolve(), target_is_directory=True)
        mark(made, origin)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / MARKER).is_file():  # another process has made it
                raise
    mark(folder, origin)
    if signature:
        wanrun.replace_file(folder / SIGNATURE, signature)
    else:
        (folder / SIGNATURE).unlink(missing_ok=True)
    return folder, manifest


def _compare(manifest: wanrun.Manifest, pinned: Pin, what: str, remedy: str) -> None:
    if manifest.manifest_digest != pinned.manifest_digest:
        raise ArtifactError(
            "changed",
            f"{what} is another artifact than the one that is pinned",
            expected=pinned.manifest_digest,
            found=manifest.manifest_digest,
            remedy=remedy,
        )


def _digest(component: Any) -> str:
    """Returns a name for the bytes of a component's chunk files."""
    lines = (f"{path} {one.layout} {one.sha256}\n" for path, one in sorted(component.parameters.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]
