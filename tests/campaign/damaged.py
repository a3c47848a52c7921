"""Faults of content: damaged artifacts, edited manifests, hostile checkpoints. They run in one process."""

from __future__ import annotations

import random
import stat
from pathlib import Path

from campaign.damage import copied, damage, files_below
from campaign.fault import Call, Case
from campaign.manifest_edits import edit_manifest
from campaign.source_edits import edit_source
from campaign.sources import Sources
from wanrun.files import file_sha256


def damaged_run(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """A run with a damaged artifact gives the video that it should, or none."""
    sample = rng.choice(sources.samples)
    artifact, output = copied(sample.artifact, folder / "artifact"), folder / "video.npy"
    what = damage(rng, artifact)
    options = [*rng.choice(((), (), ("--verify", "sha256"), ("--memory", "low"), ("--loop", "scan")))]
    if rng.random() < 0.5:
        options.append("--no-embedding-cache")  # so that tokenizer and text encoder are read
    call = sample.run(artifact, output, *options, codes=(0, 3))
    return Case("damaged run", what, [call], {sample.video}, clean=[folder])


def damaged_verify(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """Nothing that changed a file's content may be called verified."""
    artifact = copied(rng.choice(sources.samples).artifact, folder / "artifact")
    before = _kinds(artifact), _content(artifact)
    what = damage(rng, artifact)
    # A device or a FIFO is not read: its kind differs already.
    changed = _kinds(artifact) != before[0] or _content(artifact) != before[1]
    arguments = ["verify", "--artifact", str(artifact)]
    call = Call("wanbuild", arguments, frozenset({3} if changed else {0}))
    return Case("damaged verify", what, [call], clean=[folder])


def damaged_inspect(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """Commands that only show an artifact."""
    artifact = copied(rng.choice(sources.samples).artifact, folder / "artifact")
    what = damage(rng, artifact)
    command, arguments = rng.choice((("wanrun", ["--list"]), ("wanbuild", ["inspect"])))
    call = Call(command, [*arguments, "--artifact", str(artifact)], frozenset({0, 3}))
    return Case("damaged inspect", what, [call], clean=[folder])


def damaged_source(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """A hostile checkpoint is refused, or what was changed in it means nothing."""
    source = rng.choice([*sources.checkpoints, *(sample.checkpoint for sample in sources.samples)])
    checkpoint, artifact = copied(source, folder / "checkpoint"), folder / "artifact"
    what = damage(rng, checkpoint) if rng.random() < 0.4 else edit_source(rng, checkpoint)
    call = Call("wanbuild", ["convert", str(checkpoint), "--artifact", str(artifact)], frozenset({0, 4}))
    return Case("hostile source", f"{source.name}: {what}", [call], artifact=artifact, clean=[folder])


def edited_manifest(sources: Sources, rng: random.Random, folder: Path) -> Case:
    """An edit is refused; one that its maker has signed may mean something, and is no internal error."""
    sample = rng.choice(sources.samples)
    artifact, output = copied(sample.artifact, folder / "artifact"), folder / "video.npy"
    what, signed = edit_manifest(rng, artifact)
    codes = frozenset({0, 2, 3} if signed else {0, 3})
    command, *arguments = rng.choice(
        (
            *[("wanrun", *sample.generation(artifact, output))] * 3,
            ("wanrun", "--artifact", str(artifact), "--list"),
            ("wanbuild", "inspect", "--artifact", str(artifact)),
            ("wanbuild", "verify", "--artifact", str(artifact)),
        )
    )
    checked = output if str(output) in arguments and not signed else None
    if signed and "verify" in arguments:
        codes |= {1}  # what was recorded is not what this artifact computes
    what = f"{'signed ' * signed}{what}"
    return Case(
        "edited manifest", what, [Call(command, arguments, codes, checked)], {sample.video}, clean=[folder]
    )


def _content(folder: Path) -> dict[str, str]:
    """Digests by name; reading what may be read."""
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in files_below(folder)}


def _kinds(folder: Path) -> dict[str, tuple[int, int]]:
    """Kind and size of everything in a folder, by name."""
    status = {path.relative_to(folder).as_posix(): path.lstat() for path in sorted(folder.rglob("*"))}
    return {name: (stat.S_IFMT(found.st_mode), found.st_size) for name, found in status.items()}
