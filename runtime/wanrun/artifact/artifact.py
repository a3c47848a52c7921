"""An artifact: the folder that it is in, and the manifest that says what it is."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from wanrun.artifact.adapter import PlacedAdapter
from wanrun.artifact.layout import CRC_BYTES, array_folder
from wanrun.artifact.manifest import Manifest, read_manifest
from wanrun.artifact.named import (
    ADAPTER,
    EMBEDDING,
    EXECUTABLE,
    GOLDEN,
    PROGRAM,
    REQUIREMENTS,
    TOKENIZER,
    VERDICT,
    WEIGHTS,
    Kind,
    Named,
)
from wanrun.artifact.parameters import Component
from wanrun.artifact.programs import PlainFile, Profile, Program
from wanrun.artifact.record import ListedFile, Record
from wanrun.artifact.target_names import built_target
from wanrun.artifact.targets import Executable, Target
from wanrun.errors import ArtifactError, UsageError
from wanrun.errors import field as option
from wanrun.machine.environment import usable_cores


@dataclass(frozen=True)
class Built:
    """Profiles of an artifact that were built on this machine, in ``folder``, which has a manifest too.

    ``own`` is the artifact's manifest without them, ``manifest`` the folder's, with only the profiles whose
    files are all there. ``files`` are name and sha256 of the files that are there and not in the artifact.
    """

    folder: Path
    own: Manifest
    manifest: Manifest
    profiles: frozenset[str]
    files: frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Artifact:
    """An artifact.

    Attributes:
        manifest: its manifest.
        folder: where its files are.
        origin: the address that they come from; empty for those that were made or copied here.
        beside: further adapters by name, whose files are elsewhere.
        built: the profiles of the manifest that were built here; None if there are none.
    """

    manifest: Manifest
    folder: Path
    origin: str = ""
    beside: Mapping[str, PlacedAdapter] = field(default_factory=dict)
    built: Built | None = None

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def influences(self) -> dict[str, str]:
        """The entries of a video's metadata about the artifact's address; none for a local one."""
        return {"artifact": self.origin} if self.origin else {}

    @property
    def alone(self) -> Artifact:
        """The artifact without the profiles that were built here."""
        return self if self.built is None else replace(self, manifest=self.built.own, built=None)

    def built_here(self, profile: str) -> dict[str, str]:
        """The entries of a video's metadata about a profile that was built on this machine; else none."""
        return {"profile_built": "here"} if self.built is not None and profile in self.built.profiles else {}

    def compiling(self, profile: Profile, further: str = "", **options: Any) -> str:
        """Returns the command that builds a profile into it, for messages.

        Args:
            profile: the profile.
            further: options that a profile does not record.
            options: build options that differ from the profile's.
        """
        other = structs.replace(profile, options=structs.replace(profile.options, **options))
        said = f"{other.compile_options} {further}".rstrip()
        return f"wanbuild compile {said} --artifact {shlex.quote(str(self))}"

    def target_named(self, text: str) -> str | None:
        """Returns the target that a user's name means, as ``built_target`` understands it; None for none."""
        sets = self.manifest.program_sets
        meshes = {name: sets[one.program_set].mesh for name, one in self.manifest.targets.items()}
        return built_target(text, meshes)

    @property
    def adapters(self) -> dict[str, PlacedAdapter]:
        """All adapters by name: its own, and those in other folders."""
        own = self.manifest.adapters.items()
        return {**{name: PlacedAdapter(self.folder / one.file, one) for name, one in own}, **self.beside}

    def named(self) -> Iterator[Named]:
        """Yields every file that the manifest lists, once for what it belongs to; no other place knows them.

        Orbax's metadata of the weights is not listed: it follows from the manifest.
        """
        for name, component in self.manifest.components.items():
            yield from named_weights(name, component)
        yield _listed(TOKENIZER, self.manifest.tokenizer)
        for key, own in self.manifest.program_sets.items():
            programs = (each for of_profile in own.programs.values() for each in of_profile.values())
            files = (one for each in programs for one in (each, each.plain) if one is not None)
            yield from dict.fromkeys(_listed(PROGRAM, one, key) for one in files)
        for name, target in self.manifest.targets.items():
            entries = (each for of_profile in target.executables.values() for each in of_profile.values())
            yield from dict.fromkeys(named_executable(name, target, entry) for entry in entries)
            yield named_requirements(name, target)
        yield from (_listed(EMBEDDING, record, key) for key, record in self.manifest.embeddings.items())
        yield from (_listed(GOLDEN, record, name) for name, record in self.manifest.golden.items())
        yield from (_listed(VERDICT, record, key) for key, record in self.manifest.verdicts.items())
        for name, adapter in self.manifest.adapters.items():
            yield Named(ADAPTER, adapter.file, name, adapter.sha256, adapter.nbytes)

    def only(
        self, *, profiles: Collection[str] | None = None, targets: Collection[str] | None = None
    ) -> Artifact:
        """Returns the artifact with only some targets and profiles, and what belongs to those.

        Args:
            profiles: names of profiles; None for all that the targets have.
            targets: names of targets, as users write them; None for all.

        Raises:
            UsageError: for a target that the artifact does not have.
        """
        manifest = self.manifest
        if profiles is None and targets is None:
            return self
        if targets is not None:
            targets = [self.target_named(name) or name for name in targets]
        if unknown := sorted({*(targets or ())} - manifest.targets.keys()):
            raise UsageError(
                "unknown_name",
                f"{self} has no target {unknown[0]}",
                expected="one of " + ", ".join(manifest.targets),
                remedy="choose one of these, or run wanbuild compile",
            )
        kept = {name: one for name, one in manifest.targets.items() if targets is None or name in targets}
        sets = manifest.program_sets.keys() if targets is None else {one.program_set for one in kept.values()}
        if profiles is None:
            profiles = {profile for target in kept.values() for profile in target.executables}

        def of_profiles(each: Mapping[str, Any]) -> dict[str, Any]:
            return {name: one for name, one in each.items() if name in profiles}

        def shorter(record: Record, *fields: str) -> Any:
            return structs.replace(record, **{name: of_profiles(getattr(record, name)) for name in fields})

        narrowed = manifest.changed(
            targets={name: shorter(one, "executables", "statistics") for name, one in kept.items()},
            program_sets={
                key: shorter(one, "programs") for key, one in manifest.program_sets.items() if key in sets
            },
            profiles=of_profiles(manifest.profiles),
            golden=of_profiles(manifest.golden),
        )
        return replace(self, manifest=narrowed)

    def changed(self, **fields: Any) -> Artifact:
        """Returns the artifact with other fields of the manifest; nothing is written."""
        return replace(self, manifest=self.manifest.changed(**fields))

    def renewed(self) -> Artifact:
        """Returns the artifact as it is where its manifest is written again: see ``Manifest.renewed``."""
        return replace(self, manifest=self.manifest.renewed())

    def write(self) -> None:
        """Commits the artifact: replaces its manifest atomically and durably."""
        self.manifest.write(self.folder)

    def path(self, named: Named) -> Path:
        """Returns where a file is."""
        return (self.folder if self.has(named) or self.built is None else self.built.folder) / named.name

    def has(self, named: Named) -> bool:
        """Whether a file is the artifact's own, and not one of those that were built here."""
        return self.built is None or (named.name, named.sha256) not in self.built.files

    def program(self, program: Program | PlainFile) -> bytes:
        """Returns a serialized program. Raises ArtifactError if it is missing or another one."""
        return self._read(_listed(PROGRAM, program))

    def executable(self, target: Target, entry: Executable) -> bytes:
        """Returns an executable's entry. Raises ArtifactError if it is missing or another one."""
        return self._read(named_executable("", target, entry))

    def listed(self, kind: Kind, record: ListedFile) -> bytes:
        """Returns a file of the records. Raises ArtifactError if it is missing or another one."""
        return self._read(_listed(kind, record))

    def _read(self, named: Named) -> bytes:
        with self._of_built(named):
            return named.read(self.path(named))

    @contextlib.contextmanager
    def _of_built(self, named: Named) -> Iterator[None]:
        """Lets the error of a file that was built here say what to do: copying the artifact does not help."""
        try:
            yield
        except ArtifactError as error:
            if self.built is None or self.has(named):
                raise
            remedy = f"remove {self.built.folder} if it is there, and run it again with {option('build')}"
            raise ArtifactError(**{**error.parts, "remedy": remedy}) from None

    def check(self, group: Sequence[Named], *, missing: bool = False) -> None:
        """Compares files with the manifest, and a parameter of which all files are there.

        Args:
            group: files of one group, as of ``groups``.
            missing: whether some may be missing.

        Raises:
            ArtifactError: naming the first that is missing, cannot be read, or is another one.
        """
        there = [one for one in group if not missing or self.path(one).exists()]
        rows = list[list[bytes]]()
        for one in there:
            with self._of_built(one):
                rows.append(one.check(self.path(one)))
        if there and (parameter := there[0].parameter) is not None and len(rows) == parameter.layout.chunks:
            there[0].check_rows(rows, self.folder / there[0].group)

    def whole(self, names: Iterable[Named]) -> bool:
        """Whether files are there, and are those of the manifest."""
        try:
            self.check_all(names)
        except ArtifactError:
            return False
        return True

    def check_all(self, names: Iterable[Named], *, missing: bool = False) -> None:
        """Compares files with the manifest, several at a time. Raises ArtifactError as ``check``."""
        from concurrent.futures import ThreadPoolExecutor  # not for those who only read a manifest

        with ThreadPoolExecutor(usable_cores(), thread_name_prefix="check") as pool:
            waiting = [pool.submit(self.check, group, missing=missing) for group in groups(names)]
            try:
                for one in waiting:
                    one.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def open_artifact(folder: str | os.PathLike[str], origin: str = "", again: bool = False) -> Artifact:
    """Reads and checks the manifest in a folder.

    Args:
        folder: the artifact's folder.
        origin: the address that it comes from; empty for none.
        again: as of ``read_manifest``.

    Raises:
        ArtifactError: as ``read_manifest``.
    """
    return Artifact(read_manifest(folder, again), Path(folder), origin)


def groups(names: Iterable[Named]) -> list[list[Named]]:
    """Returns files in groups that are compared together: a parameter's files in order, or one other file."""
    found: dict[str, list[Named]] = {}
    for one in names:
        found.setdefault(one.group, []).append(one)
    return [sorted(group, key=lambda one: one.index) for group in found.values()]


def named_weights(name: str, component: Component) -> Iterator[Named]:
    """Yields the files of a component's weights."""
    for path, parameter in sorted(component.parameters.items()):
        folder, layout = f"{component.folder}/{array_folder(path)}", parameter.layout
        for index in range(layout.chunks):
            file, nbytes = f"{folder}/{layout.chunk_file(index)}", layout.chunk_bytes + CRC_BYTES
            yield Named(WEIGHTS, file, name, "", nbytes, parameter, index, folder)


def _listed(kind: Kind, record: ListedFile | Program, of: str = "") -> Named:
    return Named(kind, record.file, of, record.sha256)


def named_executable(of: str, target: Target, entry: Executable) -> Named:
    """Returns the file of an executable of a target, whose name is ``of``."""
    return Named(EXECUTABLE, f"{target.folder}/{entry.file}", of, entry.sha256, entry.nbytes)


def named_requirements(of: str, target: Target) -> Named:
    """Returns the file of the package versions of a target, whose name is ``of``."""
    return _listed(REQUIREMENTS, target.requirements, of)
