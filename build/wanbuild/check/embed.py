"""Precomputed prompt embeddings: what the artifact's own text encoder gives for chosen prompts.

A run that finds its prompts there does not read the text encoder. They are made by the executables of this
machine's target, once for each compute dtype among the profiles that can run here, and serve every target.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

from wanbuild.staging import build_lock, remove_unlisted
from wanrun.artifact.manifest import Embedding, Manifest, read_manifest
from wanrun.artifact.programs import Profile
from wanrun.artifact.record import Dtype
from wanrun.artifact.select import select_target
from wanrun.errors import ArtifactError, UsageError
from wanrun.files import replace_file, sha256_of
from wanrun.generation.pipeline import Pipeline, load
from wanrun.text.embeddings import ArtifactEmbeddings, embedding_file, embedding_key, encode_rows
from wanrun.text.encoder import cut_warning
from wanrun.text.prompt import TokenizedPrompts, clean_prompt
from wanrun.text.tokenizer import ArtifactTokenizer

Report = Callable[[str], None]
Warn = Callable[[str], None]


def no_warning(message: str) -> None:
    """Takes a warning that nobody wants."""


def runnable_profiles(artifact: Path, manifest: Manifest, report: Report) -> list[Profile]:
    """Profiles that have executables for this machine, in the order of building."""
    profiles = []
    for profile in sorted(manifest.profiles.values(), key=lambda profile: profile.index):
        try:
            select_target(manifest, artifact, profile)
        except ArtifactError as error:
            report(f"{profile.name}: not run, {error}")
        else:
            profiles.append(profile)
    return profiles


def open_profile(artifact: Path, profile: Profile, lazy: bool = False) -> Pipeline:
    """Loads a profile with this machine's executables; no stored embedding is used.

    Args:
        artifact: the artifact's folder.
        profile: what to load.
        lazy: load nothing before it is used.
    """
    return load(
        artifact,
        size=(profile.width, profile.height),
        num_frames=profile.num_frames,
        num_videos=profile.num_videos,
        guidance=profile.guidance,
        num_references=profile.num_references,
        embeddings="none",
        lazy=lazy,
    )


def embed_prompts(
    artifact: Path, prompts: Sequence[str], report: Report, warn: Warn = no_warning
) -> Manifest:
    """Adds the embeddings of prompts to an artifact, and removes files that it does not list.

    Args:
        artifact: the artifact's folder.
        prompts: what to embed; the default negative prompt where there are none.
        report: told one line an embedding.
        warn: told of a prompt that was cut.

    Returns:
        The artifact's new manifest.

    Raises:
        ArtifactError: if the artifact is damaged, or no profile can run here.
        UsageError: if it cannot be written.
    """
    artifact = artifact.resolve()
    read_manifest(artifact)
    with build_lock(artifact):
        manifest = read_manifest(artifact)
        reasons: list[str] = []
        profiles = runnable_profiles(artifact, manifest, reasons.append)
        if not profiles:
            found = "; ".join(reasons) or None
            raise ArtifactError(
                f"no profile of {artifact} can run here", found=found, remedy="run wanbuild compile first"
            )
        try:
            changed = add_embeddings(artifact, manifest, profiles, prompts, report, warn)
            if changed != manifest:
                changed.write(artifact)
            manifest = changed
            remove_unlisted(artifact, manifest)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # the command line has a message for these
            raise UsageError(
                f"embeddings cannot be written into {artifact}",
                found=error.strerror or error,
                remedy="make it writable, or embed in a copy",
            ) from None
    return manifest


def add_embeddings(
    artifact: Path,
    manifest: Manifest,
    profiles: Sequence[Profile],
    prompts: Sequence[str],
    report: Report,
    warn: Warn = no_warning,
) -> Manifest:
    """Writes embedding files; the caller holds the build lock and commits the manifest.

    Args:
        artifact: the artifact's folder.
        manifest: its manifest.
        profiles: that can run here; one of each compute dtype is loaded.
        prompts: what to embed; the default negative prompt where there are none.
        report: told one line an embedding.
        warn: told of a prompt that was cut.

    Returns:
        The manifest with the embeddings listed.
    """
    given = list(prompts) or [manifest.model.defaults.negative_prompt]
    cleaned = list(dict.fromkeys(clean_prompt(prompt) for prompt in given))
    tokens = _tokenize(artifact, manifest, cleaned, warn)
    lengths = dict(zip(cleaned, tokens.lengths, strict=True))
    by_dtype: dict[Dtype, Profile] = {}
    for profile in profiles:
        by_dtype.setdefault(profile.options.dtype, profile)
    listed = dict(manifest.embeddings)
    stored = ArtifactEmbeddings(artifact, manifest)
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
            key = embedding_key(manifest, prompt, dtype)
            data = encode_rows(embedding[:length])
            path = artifact / embedding_file(key)
            path.parent.mkdir(exist_ok=True)
            replace_file(path, data)
            listed[key] = Embedding(
                file=embedding_file(key), sha256=sha256_of(data), prompt=prompt, dtype=dtype, length=length
            )
            report(f"{_shown(prompt)}: {dtype}, {length} tokens embedded")
    return manifest.changed(embeddings=listed)


def _tokenize(artifact: Path, manifest: Manifest, cleaned: Sequence[str], warn: Warn) -> TokenizedPrompts:
    """Counts each prompt's tokens, and warns of those that are cut."""
    tokenizer = ArtifactTokenizer(artifact, manifest)
    tokens = tokenizer(cleaned)
    for cut in tokens.cut:
        if cut is not None:
            warn(cut_warning(tokenizer.max_length, cut))
    return tokens


def _intact(stored: ArtifactEmbeddings, prompt: str, dtype: str) -> bool:
    """Whether an embedding is there; one that is damaged is made again."""
    try:
        return stored.find(prompt, dtype) is not None
    except ArtifactError:
        return False


def _shown(prompt: str) -> str:
    """A prompt in a line of a report."""
    return repr(prompt if len(prompt) <= 60 else f"{prompt[:57]}...")
