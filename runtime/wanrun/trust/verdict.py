"""Verdicts about executables that were tried on a chip, in the user's cache: one small file each."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Manifest
from wanrun.artifact.named import VERDICT
from wanrun.artifact.programs import Profile
from wanrun.artifact.select import SelectedTarget
from wanrun.errors import unwritable
from wanrun.files import canonical_json, read_bounded, replace_file, sha256_of, user_cache
from wanrun.machine.attached import ROOT, attached
from wanrun.machine.environment import package_versions

MAX_VERDICT_BYTES = VERDICT.most
"""The largest file of a verdict, in bytes; real ones have about one kilobyte."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of a trial.

    Attributes:
        outcome: whether the executables may be used.
        reason: why not, or how the results agree, in one line.
        native: the programs whose executables give other results, cannot be loaded, or did not run: those
            compiled here are used instead.
        device_kind: JAX's name of the device that they were tried on; empty if it was not opened.
        platform_version: JAX's text about its driver and compiler.
        facts: the facts for which the verdict holds.
        keep: whether it is about the executables; False for a trial that could not begin.
    """

    outcome: Literal["passed", "refused"]
    reason: str
    native: tuple[str, ...] = ()
    device_kind: str = ""
    platform_version: str = ""
    facts: Mapping[str, Any] = msgspec.field(default_factory=dict)
    keep: bool = True

    @property
    def passed(self) -> bool:
        """Whether the executables may be used."""
        return self.outcome == "passed"

    @property
    def device(self) -> dict[str, str]:
        """JAX's facts about the device of the trial, by name."""
        return {"device_kind": self.device_kind, "platform_version": self.platform_version}

    def encoded(self) -> bytes:
        """The bytes of the verdict's file."""
        return msgspec.json.encode(self)


def decoded_verdict(data: bytes) -> Verdict | None:
    """Reads a verdict; None if these bytes are not one."""
    try:
        return msgspec.json.decode(data, type=Verdict)
    except (ValueError, RecursionError):
        return None


def trial_facts(
    manifest: Manifest, selected: SelectedTarget, profile: Profile, root: Path = ROOT
) -> dict[str, Any]:
    """Returns the facts for which a verdict holds; none of them needs JAX.

    The content digest does not cover executables, so the facts have a digest of theirs. It is that of only
    this profile and target, whatever others there are. Two machines of a kind have the same facts: how
    many chips each has is not among them. ``root`` is that of the files in which the system describes its
    devices.
    """
    platform_name = selected.target.environment["platform"]
    there = attached(platform_name, root)
    own = Artifact(manifest, Path()).only(profiles=[profile.name], targets=[selected.name])
    built = selected.target.executables.get(profile.name, {})
    return {
        "content_digest": own.manifest.content_digest,
        "target": selected.name,
        "profile": profile.name,
        "executables": sha256_of(canonical_json({name: one.sha256 for name, one in built.items()})),
        "packages": package_versions(platform_name),
        "driver": "" if there is None else there.driver,
        "chip": [] if there is None else list(dict.fromkeys(there.chips)),
    }


def verdict_key(facts: Mapping[str, Any]) -> str:
    """Returns the digest of facts, hexadecimal: the name of their verdict."""
    return sha256_of(canonical_json(facts))


def verdict_file(facts: Mapping[str, Any]) -> Path:
    """Returns where the verdict about these facts is kept."""
    return user_cache() / "verdicts" / f"{verdict_key(facts)}.json"


def read_verdict(facts: Mapping[str, Any]) -> Verdict | None:
    """Returns the kept verdict about these facts; None if there is none, or the file is damaged."""
    try:
        found = decoded_verdict(read_bounded(verdict_file(facts), MAX_VERDICT_BYTES))
    except OSError:
        return None
    return found if found is not None and found.facts == facts else None


def keep_verdict(facts: Mapping[str, Any], verdict: Verdict) -> None:
    """Writes a verdict about these facts. Raises UsageError if the cache cannot be written."""
    with _written(facts) as path:
        replace_file(path, msgspec.structs.replace(verdict, facts=facts).encoded())


def check_keepable(facts: Mapping[str, Any]) -> None:
    """Raises what ``keep_verdict`` would raise of the cache, before a trial that takes minutes."""
    with _written(facts) as path, tempfile.TemporaryFile(dir=path.parent) as probe:
        probe.write(bytes(4096))


@contextlib.contextmanager
def _written(facts: Mapping[str, Any]) -> Iterator[Path]:
    """Yields the path of a verdict in a folder that is made; its errors are UsageErrors."""
    path = verdict_file(facts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        raise unwritable(f"the verdict {path}", error, "set XDG_CACHE_HOME to a folder") from None


def drop_verdict(facts: Mapping[str, Any]) -> None:
    """Removes the verdict about these facts, so that the next run tries again."""
    with contextlib.suppress(OSError):
        verdict_file(facts).unlink()
