"""The model card of an artifact: README.md of its repository, written from its manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import TINY_VAE, Manifest
from wanrun.artifact.targets import Target
from wanrun.errors import UsageError
from wanrun.files import open_regular
from wanrun.media.write_video import read_metadata
from wanrun.replay.golden import read_golden
from wanrun.units import in_bytes

CARD = "README.md"
BEGIN, END = "<!-- wanbuild: begin -->", "<!-- wanbuild: end -->"
"""The marks around the part that a push writes again; the rest of the card is its owner's."""

STEPS = ("denoise_step", "chunk")
"""The programs of a step: of a whole video, and of a chunk."""

SHOWN = (".mp4", ".webp", ".gif")
"""Videos that a page shows."""

LICENCES: Mapping[str, str] = {"Wan-AI": "apache-2.0"}
"""The licence of the published models, by their owner on the hub: https://huggingface.co/Wan-AI."""

LICENCE_OF: Mapping[str, str] = {TINY_VAE: "MIT"}
"""The licence of components that are not the source's: https://github.com/madebyollin/taehv."""


@dataclass(frozen=True)
class Example:
    """A video that was made from the artifact, and the metadata that wanrun has written into it."""

    path: Path
    metadata: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name in the repository."""
        return f"example{self.path.suffix.lower()}"

    @classmethod
    def read(cls, path: Path, manifest: Manifest) -> Example:
        """Reads a video's metadata.

        Raises UsageError if a page cannot show the file as a video, or it was not made from this artifact.
        """
        if path.suffix.lower() not in SHOWN:
            raise UsageError("wrong_kind", f"{path} cannot be an example", expected=" or ".join(SHOWN))
        try:
            open_regular(path).close()  # whoever reads its metadata would wait for a pipe's writer
        except OSError as error:
            raise UsageError("unreadable", f"{path} cannot be read", found=error.strerror) from None
        metadata = read_metadata(path)
        if metadata.get("content_digest") != manifest.content_digest:
            raise UsageError(
                "mismatch",
                f"{path} was not made from this artifact",
                expected=manifest.content_digest,
                found=metadata.get("content_digest", "no digest"),
                remedy="make one: wanrun ARTIFACT --prompt TEXT -o example.mp4",
            )
        return cls(path, metadata)


def merged_card(
    there: str | None,
    artifact: Artifact,
    repository: str,
    licence: str | None = None,
    example: Example | None = None,
) -> str | None:
    """Returns a new card, or ``there``, the repository's card, with our part written again.

    It is None if the card in the repository was written without wanbuild. ``licence`` is of the weights, as
    the hub names it; None for that of a known source.
    """
    part = "\n".join([BEGIN, *_lines(artifact, repository, example), END])
    if there is None:
        head = json.dumps(_header(artifact.manifest, licence), indent=2)  # JSON is YAML
        return f"---\n{head}\n---\n\n{part}\n"
    before, begin, rest = there.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{part}{after}" if begin and end else None


def _header(manifest: Manifest, licence: str | None) -> dict[str, Any]:
    """Returns the card's metadata, which the hub reads: https://huggingface.co/docs/hub/model-cards."""
    source = str(manifest.source.get("repository") or "")
    takes_image = any(one.required for one in manifest.model.task.inputs.values())
    header = {
        "license": licence or licence_of(manifest),
        "library_name": "wanrun",
        "pipeline_tag": "image-to-video" if takes_image else "text-to-video",
        "base_model": source or None,
        "tags": ["wan", "jax", "stablehlo", "orbax"],
    }
    return {key: value for key, value in header.items() if value}


def licence_of(manifest: Manifest) -> str | None:
    """Returns the licence of a published source, or None."""
    return LICENCES.get(str(manifest.source.get("repository") or "").partition("/")[0])


def _lines(artifact: Artifact, repository: str, example: Example | None) -> Iterator[str]:
    manifest = artifact.manifest
    nbytes = sum(component.nbytes for component in manifest.components.values())
    yield f"# {repository.partition('/')[2]}\n"
    yield f"An ahead-of-time artifact of **{manifest.model.variant}** for JAX: weights that are stacked and"
    yield "cast, StableHLO, and compiled executables. Nothing is converted, traced or compiled at a start."
    yield f"\n    wanrun hf://{repository} --prompt TEXT\n"
    yield f"A run fetches what its machine needs. The weights have {in_bytes(nbytes)}."
    if example is not None:
        yield from _shown(example)
    yield "\n## Source\n"
    yield from _source(manifest)
    yield "\n## Profiles\n"
    yield from _table(("profile", "size", "targets", "recorded result"), _profiles(artifact))
    if manifest.targets:
        yield "\n## Targets\n"
        yield from _table(("target", "built for", "executables", "a step", "its memory"), _targets(manifest))
        yield "\nFLOPs and bytes of a step are the compiler's, of the largest profile."
    if manifest.verdicts:
        yield "\nExecutables that were built without their chip were tried on it:\n"
        verdicts = sorted(manifest.verdicts.values(), key=lambda one: (one.target, one.profile, one.made))
        tried = ((one.target, one.profile, one.device_kind, one.made[:10]) for one in verdicts)
        yield from _table(("target", "profile", "right on", "day"), tried)
    if manifest.schedules:
        yield "\n## Few steps\n"
        rows = ((name, one.describe()) for name, one in sorted(manifest.schedules.items()))
        yield from _table(("schedule", "measured"), rows)
    if manifest.adapters:
        yield "\n## Adapters\n"
        rows = ((name, _plain(one.describe())) for name, one in sorted(manifest.adapters.items()))
        yield from _table(("adapter", "made of"), rows)
    yield "\n## Parity\n"
    yield "`wanbuild verify` makes each recorded video again. On the kind of machine that recorded it digests"
    yield "are equal; elsewhere values agree within the tolerance of the table. With `--source` it compares"
    yield "components and a video with diffusers."


def _shown(example: Example) -> Iterator[str]:
    """The example, and how it was made."""
    facts = example.metadata
    names = {"seed": "seed", "num_steps": "steps"}
    told = ", ".join(f"{name} {facts[key]}" for key, name in names.items() if key in facts)
    video = f'<video src="{example.name}" controls loop muted></video>'
    yield f"\n{video if example.name.endswith('.mp4') else f'![the example]({example.name})'}\n"
    yield f"> {_plain(facts.get('prompt', ''))} ({told})"


def _source(manifest: Manifest) -> Iterator[str]:
    revision = manifest.source.get("revision")
    source = manifest.source.get("repository") or "a folder without a published name"
    yield f"- weights: {source}" + (f" at `{revision}`" if revision else "")
    if TINY_VAE in manifest.components:
        yield f"- tiny decoder, for `--decoder tiny`: TAEHV's, {LICENCE_OF[TINY_VAE]}"
    for lora in manifest.loras:
        yield f"- merged LoRA: {_plain(str(lora))}, sha256 `{_plain(lora.sha256)}`"
    yield f"- content digest: `{manifest.content_digest}`"
    yield f"- manifest digest: `{manifest.manifest_digest}`"


def _profiles(artifact: Artifact) -> Iterator[tuple[str, ...]]:
    manifest = artifact.manifest
    for name, profile in sorted(manifest.profiles.items(), key=lambda item: item[1].index):
        targets = [key for key, target in sorted(manifest.targets.items()) if name in target.executables]
        recorded = ""
        if name in manifest.golden:
            golden = read_golden(artifact, name)
            machine = golden.machine.get("device_kind", golden.machine["platform"])
            recorded = f"on {machine}, latents within {golden.tolerance:g}"
        size = f"{profile.width}x{profile.height}, {profile.num_frames} frames"
        yield f"`{name}`", size, ", ".join(targets) or "none", recorded


def _targets(manifest: Manifest) -> Iterator[tuple[str, ...]]:
    for name, target in sorted(manifest.targets.items()):
        facts = target.environment
        kind = facts.get("cpu_level") or facts.get("device_kind") or facts["platform"]
        packages = ", ".join(f"{key} {value}" for key, value in facts.get("packages", {}).items())
        count = sum(len(named) for named in target.executables.values())
        yield name, f"{kind}; {packages}", str(count), *_cost(target)


def _cost(target: Target) -> tuple[str, str]:
    """Returns FLOPs and bytes of the costliest step, by the compiler's statistics."""
    steps = [
        figures
        for named in target.statistics.values()
        for program, figures in named.items()
        if program in STEPS and "flops" in figures
    ]
    if not steps:
        return "", ""
    most = max(steps, key=lambda figures: figures["flops"])
    nbytes = sum(most.get(part, 0) for part in ("argument_bytes", "temporary_bytes"))
    return f"{most['flops'] / 1e9:.4g} GFLOP", in_bytes(int(nbytes))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(_plain(cell) for cell in row) + " |"


def _plain(text: object) -> str:
    """Returns text for a line of Markdown: no line break, no bar, no tag."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")
