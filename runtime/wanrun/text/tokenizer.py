"""An artifact's tokenizer, loaded on first use and, if it is large, in a separate process.

UMT5's tokenizer.json has 256 000 pieces. The ``tokenizers`` package takes a second to load them and holds
the GIL all that time. In a thread it would delay everything else: the import of jax, and the threads that
read weights between two blocks. A separate process does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Tokenizer
from wanrun.artifact.named import TOKENIZER
from wanrun.files import read_bounded, sha256_of
from wanrun.text.prompt import PromptTokenizer, TokenizedPrompts

LARGE_BYTES = 2**20
"""A tokenizer.json from this size on is loaded in a separate process; a smaller one takes milliseconds."""


class ArtifactTokenizer:
    """Tokenizes prompts; thread-safe."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact, self._record = artifact, artifact.manifest.tokenizer
        self._path = artifact.folder / self._record.file
        self.max_length: int = self._record.max_length
        self._lock = threading.Lock()
        self._tokenizer: PromptTokenizer | None = None
        self._beside: tuple[list[str], Future[TokenizedPrompts | None]] | None = None
        self._last: tuple[list[str], TokenizedPrompts] | None = None

    def start(self, texts: Sequence[str]) -> None:
        """Starts to tokenize prompts that will be asked for next; returns at once.

        Raises:
            ArtifactError: if the tokenizer is missing or damaged.
        """
        if len(self._read()) >= LARGE_BYTES:
            pool = ThreadPoolExecutor(1, "tokenizer")
            self._beside = list(texts), pool.submit(_beside, self._path, self._record, list(texts))
            pool.shutdown(wait=False)

    def __call__(self, texts: Sequence[str]) -> TokenizedPrompts:
        """Tokenizes P prompts, like ``PromptTokenizer``.

        Raises:
            ArtifactError: if the tokenizer is missing or damaged.
        """
        with self._lock:
            if self._last is not None and self._last[0] == list(texts):
                return self._last[1]
            beside, self._beside = self._beside, None
        tokens = beside[1].result() if beside is not None and beside[0] == list(texts) else None
        if tokens is None:
            tokens = self.load()(texts)
        with self._lock:
            self._last = list(texts), tokens
        return tokens

    def load(self) -> PromptTokenizer:
        """Loads the tokenizer into this process, once. Raises ArtifactError if it is missing or damaged."""
        with self._lock:
            if self._tokenizer is None:
                data = self._read()
                self._tokenizer = PromptTokenizer(self._path, self.max_length, self._record.pad_id, data)
            return self._tokenizer

    def _read(self) -> bytes:
        """Returns the file's content after checking its digest."""
        return self._artifact.listed(TOKENIZER, self._record)


def _beside(path: Path, record: Tokenizer, texts: list[str]) -> TokenizedPrompts | None:
    """Tokenizes prompts in a separate process; returns None if that fails."""
    command = [sys.executable, "-P", "-m", __name__]
    request = json.dumps([str(path), msgspec.to_builtins(record), texts]).encode()
    try:
        answer = subprocess.run(command, input=request, capture_output=True, check=True).stdout
        ids, mask, lengths, cut = json.loads(answer)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return TokenizedPrompts(np.array(ids, np.int32), np.array(mask, np.int32), lengths, cut)


def main() -> None:
    """Tokenizes a request from stdin: path, the manifest's record of the tokenizer, and texts, as JSON."""
    path, record, texts = json.load(sys.stdin)
    data = read_bounded(Path(path), TOKENIZER.most)
    if sha256_of(data) != record["sha256"]:
        sys.exit("changed meanwhile")
    tokens = PromptTokenizer(Path(path), record["max_length"], record["pad_id"], data)(texts)
    json.dump([tokens.ids.tolist(), tokens.mask.tolist(), tokens.lengths, tokens.cut], sys.stdout)


if __name__ == "__main__":
    main()
