"""What runs the text encoder: the artifact's executables, or torch on hosts where that is faster.

A backend starts loading when it is asked to, gives embeddings, and lets go of its memory again.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from wanrun.artifact.environment import device_environment, host_environment
from wanrun.artifact.manifest import Manifest, Profile
from wanrun.files import canonical_json, sha256_of
from wanrun.loading.policy import Loading
from wanrun.loading.weights import Loader
from wanrun.text.embedding_cache import EmbeddingCache, made_by_jax
from wanrun.text.embeddings import TEXT_ENCODER, ArtifactEmbeddings
from wanrun.text.encoder import EmbeddingStore
from wanrun.timing import Timings

if TYPE_CHECKING:
    from wanrun.text.torch_encoder import TorchTextEncoder


class TextBackend(Protocol):
    """Runs a text encoder."""

    def made_by(self) -> Mapping[str, Any]:
        """What the bits of its embeddings depend on beside prompt, weights and dtype, as JSON."""

    def request(self, lengths: Iterable[int] | None = None) -> Sequence[Future[Any]]:
        """Starts loading what prompts of these numbers of tokens need, or any prompt where None."""

    def __call__(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """ids and mask, int32 (P, L), to embeddings (P, L, D) in the compute dtype."""

    def warm_up(self) -> None:
        """Runs it once, at every length that it has a program for."""

    def release(self) -> None:
        """Frees its memory until it is asked again."""


def text_programs(names: Iterable[str], max_length: int) -> dict[int, str]:
    """The programs that encode text, by the number of tokens they take, smallest first.

    ``encode_text`` takes max_length tokens and ``encode_text_64`` takes 64.
    """
    found = {}
    for name in names:
        match = re.fullmatch(r"encode_text(?:_(\d+))?", name)
        if match is not None:
            found[int(match[1] or max_length)] = name
    return dict(sorted(found.items()))


class ArtifactTextEncoder:
    """The artifact's own ``encode_text`` programs: one prompt a call, in the shortest program that holds it.

    Padding is masked, so a shorter program gives a prompt's rows what the longest gives them, for less work;
    which one runs depends on the prompt alone.

    Args:
        loader: of the profile.
        max_length: L, tokens of the longest program.
        environment: of the target, or of this machine where programs are compiled here.
    """

    def __init__(self, loader: Loader, max_length: int, environment: Mapping[str, Any]) -> None:
        self._loader, self._environment = loader, environment
        self._programs = text_programs(loader.programs, max_length)

    def made_by(self) -> Mapping[str, Any]:
        digests = {name: self._loader.programs[name].sha256 for name in self._programs.values()}
        return made_by_jax(sha256_of(canonical_json(digests)), self._environment)

    def _length(self, tokens: int) -> int:
        return next(length for length in self._programs if length >= tokens)

    def request(self, lengths: Iterable[int] | None = None) -> Sequence[Future[Any]]:
        wanted = self._programs if lengths is None else sorted({self._length(n) for n in lengths})
        programs = [self._programs[length] for length in wanted]
        return self._loader.request(programs=programs, components=[TEXT_ENCODER])

    def __call__(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        embeddings: list[np.ndarray] = []
        for one, keep in zip(ids, mask, strict=True):
            length = self._length(int(keep.sum()))
            encode = self._loader.bound(self._programs[length])
            rows = np.asarray(encode(ids=one[None, :length], mask=keep[None, :length])["embeddings"])[0]
            padded = np.zeros((len(one), rows.shape[1]), rows.dtype)
            padded[:length] = rows
            embeddings.append(padded)
        return np.stack(embeddings)

    def warm_up(self) -> None:
        """Executes every program once."""
        for length in self._programs:
            self(np.ones((1, length), np.int32), np.ones((1, length), np.int32))

    def release(self) -> None:
        self._loader.release(TEXT_ENCODER)


def environment_of(environment: Mapping[str, Any], foreign: bool, device: Any) -> Mapping[str, Any]:
    """The facts that executables ran under: the target's, or this machine's where they were compiled here."""
    if not foreign:
        return environment
    return {**host_environment(environment["platform"]), **device_environment([device])}


class TorchBackend:
    """transformers' text encoder, loaded in the background (``wanrun.text.torch_encoder``).

    Args:
        artifact: the artifact's folder.
        manifest: its manifest.
        dtype: to compute in.
        device: a torch device.
        verify: 'fast' or 'sha256'.
        weights: where the components lie, if not in the artifact.
        timings: where loading is recorded.
        warn: told when it cannot be compiled.

    Raises:
        UsageError: if torch or transformers is not installed, or there is no such device.
    """

    def __init__(
        self,
        artifact: Path,
        manifest: Manifest,
        dtype: str,
        device: str,
        *,
        verify: str,
        weights: str | None,
        timings: Timings,
        warn: Callable[[str], None],
    ) -> None:
        from wanrun.text.torch_encoder import TorchTextEncoder, check_torch

        check_torch(device)
        self._device = device
        self._timings = timings
        self._make = functools.partial(
            TorchTextEncoder,
            artifact,
            manifest,
            dtype=dtype,
            device=device,
            verify=verify,
            weights=weights,
            clock=timings.now,
            warn=warn,
        )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._lock = threading.Lock()
        self._encoder: Future[TorchTextEncoder] | None = None

    def made_by(self) -> Mapping[str, Any]:
        from wanrun.text.torch_encoder import torch_facts

        return {"backend": "torch", **torch_facts(self._device)}

    def request(self, lengths: Iterable[int] | None = None) -> Sequence[Future[Any]]:
        with self._lock:
            if self._encoder is None:
                self._encoder = self._pool.submit(self._load)
            return [self._encoder]

    def _load(self) -> TorchTextEncoder:
        with self._timings.phase("import", "torch"):
            encoder = self._make()
        self._timings.add("restore", *encoder.restored, TEXT_ENCODER)
        return encoder

    def __call__(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        (encoder,) = self.request()
        return np.asarray(encoder.result().encode(ids, mask))

    def warm_up(self) -> None:
        """Compiles it."""
        self(np.ones((1, 64), np.int32), np.ones((1, 64), np.int32))

    def release(self) -> None:
        with self._lock:
            encoder, self._encoder = self._encoder, None
        if encoder is not None and not encoder.cancel() and encoder.exception() is None:
            encoder.result().close()


def text_backend(
    artifact: Path,
    manifest: Manifest,
    profile: Profile,
    loader: Loader,
    loading: Loading,
    environment: Mapping[str, Any],
    timings: Timings,
    warn: Callable[[str], None],
) -> TextBackend:
    """The text encoder that a pipeline was told to use.

    Args:
        artifact: the artifact's folder.
        manifest: its manifest.
        profile: the chosen profile.
        loader: brings the artifact's own to the device.
        loading: which one, and from where.
        environment: what the bits of the artifact's own depend on.
        timings: where the time is recorded.
        warn: told what should be known.
    """
    if loading.text_encoder == "jax":
        return ArtifactTextEncoder(loader, manifest.tokenizer.max_length, environment)
    return TorchBackend(
        artifact,
        manifest,
        profile.options.dtype,
        loading.text_encoder_device,
        verify=loading.verify,
        weights=loading.weights,
        timings=timings,
        warn=warn,
    )


def embedding_stores(
    artifact: Path,
    manifest: Manifest,
    backend: TextBackend,
    which: str,
    warn: Callable[[str], None],
) -> list[EmbeddingStore]:
    """Where embeddings may be taken from, the first first; which is one of ``loading.EMBEDDINGS``."""
    stores: list[EmbeddingStore] = []
    if which != "none":
        stores.append(ArtifactEmbeddings(artifact, manifest))
    if which == "all":
        stores.append(EmbeddingCache(manifest, backend.made_by(), warn=warn))
    return stores
