"""Publishes an artifact on the Hugging Face hub: one commit of the files that the hub lacks.

The library asks the hub for each file's digest, uploads what is not there, and then makes the commit, which
is one request. So a push that is cut off leaves the old revision whole, and the next one uploads the rest.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from wanbuild.conversion.orbax import add_metadata
from wanbuild.hub.errors import SilentHubError
from wanbuild.share.card import CARD, Example, merged_card
from wanbuild.share.oci_layers import layers_of
from wanbuild.share.share_options import PushRequest
from wanhub.address import parse_address
from wanhub.origin import read_copied
from wanhub.remote_files import RemoteFiles
from wanhub.signature import MAX_MANIFEST_BYTES, SIGNATURE, is_signed
from wanrun.artifact.artifact import Artifact, open_artifact
from wanrun.artifact.manifest import MANIFEST
from wanrun.errors import ArtifactError, UsageError
from wanrun.intact import check_intact

GIT_ATTRIBUTES = ".gitattributes"
ATTRIBUTES = tuple(
    f"{pattern} filter=lfs diff=lfs merge=lfs -text"
    for pattern in (
        "weights/**/c/**",
        "programs/**",
        "executables/**",
        "embeddings/**",
        "tokenizer/**",
        "example.*",
    )
)
"""The files that git keeps as large files."""

CONFLICT = frozenset({409, 412})
"""The hub's answers where the branch has moved since it was read."""

MAX_TEXT_BYTES = 2**20
Report = Callable[[str], None]


def push(request: PushRequest, report: Report) -> str:
    """Publishes an artifact; returns its address at the new commit.

    Raises ArtifactError if the artifact is damaged, SilentHubError if the hub does not answer, and UsageError
    for an unknown target, another artifact's example, a repository that may not be written, or a
    concurrent push.
    """
    from huggingface_hub import CommitOperationDelete, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    whole = open_artifact(request.artifact)
    artifact = whole.only(targets=request.targets or None)
    example = None if request.example is None else Example.read(request.example, whole.manifest)
    check_intact(artifact, report)
    add_metadata(artifact)
    signed = artifact == whole and is_signed(request.artifact)
    artifact = artifact if signed else artifact.renewed()
    if (request.artifact / SIGNATURE).exists() and not signed:
        report(f"without {SIGNATURE}, which is of another manifest")
    with _explained(request.repository), _quiet():
        api = HfApi()
        api.create_repo(request.repository, private=request.private, exist_ok=True)
        found = api.model_info(request.repository, revision="main")
        there = {one.rfilename for one in found.siblings or ()}
        store = RemoteFiles(parse_address(f"hf://{request.repository}@{found.sha}"), report)
        attributes, there_card = (
            store.small(name, MAX_TEXT_BYTES).decode("utf-8", "replace") if name in there else None
            for name in (GIT_ATTRIBUTES, CARD)
        )
        content = _content(artifact, signed, attributes or "")
        if example is not None:
            content[example.name] = example.path
        card = merged_card(there_card, artifact, request.repository, request.licence, example)
        if card is None:
            report(f"{CARD} of {request.repository} was not written by wanbuild, and stays")
        else:
            content[CARD] = card.encode()
        stale = _stale(store, there - content.keys(), report) if MANIFEST in there else []
        operations = [*_additions(content), *(CommitOperationDelete(name) for name in stale)]
        try:
            commit = api.create_commit(
                request.repository,
                operations,
                commit_message=f"{artifact.manifest.model.variant} {artifact.manifest.content_digest[:19]}",
                parent_commit=found.sha,
            )
        except HfHubHTTPError as error:
            if error.response.status_code in CONFLICT:
                raise UsageError(
                    "changed",
                    f"somebody else has pushed to {request.repository} meanwhile",
                    remedy="push again; what was uploaded is kept",
                ) from None
            raise
    return f"hf://{request.repository}@{commit.oid}"


def _content(artifact: Artifact, signed: bool, attributes: str) -> dict[str, Path | bytes]:
    """Returns the artifact's files, or their bytes, by name, the manifest last; keeps git's attributes."""
    names = [name for layer in layers_of(artifact, signed) for name in layer.files]
    lines = attributes.splitlines()
    lines += [line for line in ATTRIBUTES if line not in lines]
    content: dict[str, Path | bytes] = {GIT_ATTRIBUTES: "".join(f"{line}\n" for line in lines).encode()}
    content |= {name: artifact.folder / name for name in names if name != MANIFEST}
    own = (artifact.folder / MANIFEST).read_bytes() if signed else artifact.manifest.encoded()
    return content | {MANIFEST: own}


def _additions(content: dict[str, Path | bytes]) -> Iterator[Any]:
    from huggingface_hub import CommitOperationAdd

    for name, one in content.items():
        yield CommitOperationAdd(name, one if isinstance(one, bytes) else str(one))


def _stale(store: RemoteFiles, others: Collection[str], report: Report) -> list[str]:
    """Returns those of these files that belong to the artifact now on the hub, by its manifest."""
    with tempfile.TemporaryDirectory(prefix="wan-push-") as folder:
        (Path(folder) / MANIFEST).write_bytes(store.small(MANIFEST, MAX_MANIFEST_BYTES))
        try:
            before = read_copied(Path(folder), "the repository", "")
        except ArtifactError as error:
            report(f"files of the present {MANIFEST} stay: {error.what}")
            return []
    listed = {SIGNATURE, *(one.name for one in before.named())}
    components = before.manifest.components.values()
    weights = tuple(f"{component.folder}/" for component in components)  # Orbax's metadata
    return sorted(name for name in others if name in listed or name.startswith(weights))


@contextlib.contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Turns the exceptions of huggingface_hub's functions into one line."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status not in (401, 403, 404):
            raise _unsent(repository, error) from None
        raise UsageError(
            "unwritable",
            f"hf://{repository} may not be written",
            found=f"HTTP {status}",
            remedy="log in with a token that may write (hf auth login, or HF_TOKEN), and check the name",
        ) from None
    except (HTTPError, RuntimeError, ValueError, LookupError) as error:  # of an upload, or of no hub's answer
        raise _unsent(repository, error) from None
    except OSError as error:
        if error.errno is not None and error.filename is not None:
            raise
        raise _unsent(repository, error) from None


def _unsent(repository: str, error: Exception) -> SilentHubError:
    cause = error.__cause__ or error
    return SilentHubError(
        "unreachable",
        f"hf://{repository} was not written",
        found=f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:300],
        remedy="try again: what was uploaded is kept",
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Shows the library's progress only on a terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
