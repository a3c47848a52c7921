"""Turns prompts into token ids: cleans them, and loads an artifact's tokenizer on first use.

UMT5's tokenizer.json has 256 000 pieces. The ``tokenizers`` package takes a second to load them and holds
the GIL all that time. In a thread it would delay everything else: the import of jax, and the threads that
read weights between two blocks. So a large one is loaded in a separate process.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from wanrun.artifact.artifact import Artifact
from wanrun.artifact.manifest import Tokenizer
from wanrun.artifact.named import TOKENIZER
from wanrun.errors import ArtifactError
from wanrun.files import read_bounded, sha256_of

if TYPE_CHECKING:
    from tokenizers import Encoding

LARGE_BYTES = 2**20
"""A tokenizer.json from this size on is loaded in a separate process; a smaller one takes milliseconds."""

_PLAIN = re.compile(r"[ -%'-~\t\n\r]*")
"""Printable ASCII without the ampersand, and line ends: text that needs no repair."""


def clean_prompt(text: str) -> str:
    """Cleans a prompt as the reference does before tokenizing (diffusers, ``prompt_clean`` of Wan).

    Repairs broken encodings with ftfy, unescapes HTML twice, and makes every run of white space one space.
    """
    if not _PLAIN.fullmatch(text):
        import ftfy  # the import takes 30 ms of a start

        text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split())


@dataclass(frozen=True, eq=False)
class TokenizedPrompts:
    """P prompts as token ids, padded to L.

    Attributes:
        ids: (P, L) int32.
        mask: (P, L) int32, 1 for a token, including the end-of-sequence token, and 0 for padding.
        lengths: the number of tokens of each prompt.
        cut: for each prompt, the end of its text that did not fit, or None.
    """

    ids: np.ndarray
    mask: np.ndarray
    lengths: list[int]
    cut: list[str | None]


class PromptTokenizer:
    """A tokenizer like ``T5TokenizerFast`` with ``padding="max_length"`` and ``truncation=True``.

    ``max_length`` is L, tokens per prompt; ``data`` the file's content, if it was already read. Raises
    ArtifactError if the file is not a readable tokenizer, or has no token ``pad_id``.
    """

    def __init__(self, path: Path, max_length: int = 512, pad_id: int = 0, data: bytes | None = None) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(
                (path.read_bytes() if data is None else data).decode("utf-8")
            )
        except FileNotFoundError:
            raise ArtifactError(
                "missing_file", f"{path} is missing", remedy="build the artifact again"
            ) from None
        except Exception as error:  # the tokenizers package raises bare Exception for a malformed file
            raise ArtifactError(
                "unreadable",
                f"{path} cannot be read as a tokenizer",
                found=error,
                remedy="build the artifact again",
            ) from error
        pad_token = self._tokenizer.id_to_token(pad_id)
        if pad_token is None:
            raise ArtifactError(
                "damaged", f"{path} has no token {pad_id} to pad with", remedy="build the artifact again"
            )
        # These replace the file's own settings.
        self._tokenizer.enable_truncation(max_length)
        self._tokenizer.enable_padding(length=max_length, pad_id=pad_id, pad_token=pad_token)
        self.max_length = max_length

    def __call__(self, texts: Sequence[str]) -> TokenizedPrompts:
        """Tokenizes P prompts, which must already have passed through ``clean_prompt``.

        A prompt that is too long keeps its first L - 1 tokens and the end-of-sequence token; an empty prompt
        is only the end-of-sequence token.
        """
        encodings = self._tokenizer.encode_batch(list(texts))
        shape = (len(texts), self.max_length)
        mask = np.array([encoding.attention_mask for encoding in encodings], np.int32).reshape(shape)
        return TokenizedPrompts(
            ids=np.array([encoding.ids for encoding in encodings], np.int32).reshape(shape),
            mask=mask,
            lengths=mask.sum(axis=1).tolist(),
            cut=[_cut(text, encoding) for text, encoding in zip(texts, encodings, strict=True)],
        )


def _cut(text: str, encoding: Encoding) -> str | None:
    """Returns the text that truncation removed, from the first token that did not fit."""
    if not encoding.overflowing:
        return None
    return text[encoding.overflowing[0].offsets[0][0] :].strip()


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

        Raises ArtifactError if the tokenizer is missing or damaged.
        """
        if len(self._read()) >= LARGE_BYTES:
            pool = ThreadPoolExecutor(1, "tokenizer")
            self._beside = list(texts), pool.submit(_beside, self._path, self._record, list(texts))
            pool.shutdown(wait=False)

    def __call__(self, texts: Sequence[str]) -> TokenizedPrompts:
        """Tokenizes P prompts, like ``PromptTokenizer``; raises ArtifactError if it is missing or damaged."""
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
