"""Precomputes prompt embeddings with the artifact's own text encoder.

A run that finds its prompts in the artifact does not read the text encoder. This machine's executables make
the embeddings, once for each compute dtype of the profiles that can run here. They serve every target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from wanbuild.staging import changing
from wanbuild.targets.topology import open_exactly
from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Embedding, Manifest
from wanrun.artifact.mesh import num_devices
from wanrun.artifact.named import EMBEDDING
from wanrun.artifact.programs import Profile
from wanrun.artifact.record import Dtype
from wanrun.artifact.select import select_target
from wanrun.errors import ArtifactError, UsageError, lacks_space
from wanrun.files import replace_file, sha256_of
from wanrun.generation.load import load
from wanrun.generation.pipeline import Pipeline
from wanrun.text.embeddings import ArtifactEmbeddings, EmbeddingFormat, encode_rows
from wanrun.text.encoder import cut_warning
from wanrun.text.tokenizer import ArtifactTokenizer, TokenizedPrompts, clean_prompt

Report = Callable[[str], None]
Warn = Callable[[str], None]


def no_warning(message: str) -> None:
    """Ignores a warning."""


def runnable_profiles(artifact: Artifact, report: Report) -> list[Profile]:
    """Returns the profiles with executables for this machine, in building order; reports the others."""
    profiles = []
    for profile in sorted(artifact.manifest.profiles.values(), key=lambda profile: profile.index):
        try:
            select_target(artifact, profile)
        except ArtifactError as error:
            report(f"{profile.name}: not run, {error}")
        else:
            profiles.append(profile)
    return profiles


def open_profile(artifact: Artifact, profile: Profile, lazy: bool = False) -> Pipeline:
    """Loads a profile with this machine's executables and without stored embeddings.

    ``lazy`` loads each part at its first use.
    """
    selected = select_target(artifact, profile)
    open_exactly(selected.target.environment["platform"], num_devices(selected.mesh))
    return load(artifact, profile=profile.name, embeddings="none", lazy=lazy)


def embed_prompts(folder: Path, prompts: Sequence[str], report: Report, warn: Warn = no_warning) -> Manifest:
    """Adds the embeddings of prompts to an artifact, and returns its new manifest.

    Without prompts it embeds the default negative prompt. It also removes files that the manifest does not
    list. ``warn`` gets a warning for each prompt that is cut. Raises ArtifactError if the artifact is damaged
    or no profile can run here, UsageError if it cannot be written, OSError if the disk is full or a file
    would be too large.
    """
    with changing(folder.resolve()) as artifact:
        reasons: list[str] = []
        profiles = runnable_profiles(artifact, reasons.append)
        if not profiles:
            found = "; ".join(reasons) or None
            raise ArtifactError(
                "not_built",
                f"no profile of {artifact} can run here",
                found=found,
                remedy="run wanbuild compile first",
            )
        try:
            changed = add_embeddings(artifact, profiles, prompts, report, warn)
            if changed != artifact:
                changed.write()
        except OSError as error:
            if lacks_space(error):
                raise  # the command line has a message for it
            raise UsageError(
                "unwritable",
                f"embeddings cannot be written into {artifact}",
                found=error.strerror or error,
                remedy="make it writable, or embed in a copy",
            ) from None
    return changed.manifest


def add_embeddings(
    artifact: Artifact,
    profiles: Sequence[Profile],
    prompts: Sequence[str],
    report: Report,
    warn: Warn = no_warning,
) -> Artifact:
    """Writes the embeddings of prompts, and returns the artifact that lists them.

    Without prompts it embeds the default negative prompt. The caller holds the build lock and commits the
    manifest. ``profiles`` can run here; one of each compute dtype is loaded. ``warn`` gets a warning for each
    prompt that is cut.
    """
    manifest = artifact.manifest
    given = list(prompts) or [manifest.model.defaults.negative_prompt]
    cleaned = list(dict.fromkeys(clean_prompt(prompt) for prompt in given))
    tokens = _tokenize(artifact, cleaned, warn)
    lengths = dict(zip(cleaned, tokens.lengths, strict=True))
    by_dtype: dict[Dtype, Profile] = {}
    for profile in profiles:
        by_dtype.setdefault(profile.options.dtype, profile)
    listed = dict(manifest.embeddings)
    stored, names = ArtifactEmbeddings(artifact), EmbeddingFormat(manifest)
    for dtype, profile in by_dtype.items():
        missing = [prompt for prompt in cleaned if not _intact(stored, prompt, dtype)]
        for prompt in cleaned:
            if prompt not in missing:
                report(f"{_shown(prompt)}: {dtype}, up to date")
        if not missing:
            continue
        with open_profile(artifact, profile, lazy=True) as pipeline:
            embeddings = pipeline.encode_prompts(missing)
        for prompt, embedding in zip(missing, embeddings, strict=True):
            length = lengths[prompt]
            key = names.key(prompt, dtype)
            data = encode_rows(embedding[:length])
            file = f"{EMBEDDING.folder}/{key}.npy"
            path = artifact.folder / file
            path.parent.mkdir(exist_ok=True)
            replace_file(path, data)
            listed[key] = Embedding(
                file=file, sha256=sha256_of(data), prompt=prompt, dtype=dtype, length=length
            )
            counted = "1 token" if length == 1 else f"{length} tokens"
            report(f"{_shown(prompt)}: {dtype}, {counted} embedded")
    return artifact.changed(embeddings=listed)


def _tokenize(artifact: Artifact, cleaned: Sequence[str], warn: Warn) -> TokenizedPrompts:
    """Returns the prompts' tokens, and warns of each prompt that is cut."""
    tokenizer = ArtifactTokenizer(artifact)
    tokens = tokenizer(cleaned)
    for cut in tokens.cut:
        if cut is not None:
            warn(cut_warning(tokenizer.max_length, cut))
    return tokens


def _intact(stored: ArtifactEmbeddings, prompt: str, dtype: str) -> bool:
    """Returns whether an intact embedding is stored; a damaged one is made again."""
    try:
        return stored.find(prompt, dtype) is not None
    except ArtifactError:
        return False


def _shown(prompt: str) -> str:
    """Returns a prompt for a line of a report, cut to 60 characters."""
    return repr(prompt if len(prompt) <= 60 else f"{prompt[:57]}...") if prompt else "the empty prompt"
