"""Converts prompts to token ids, with the ``tokenizers`` package alone."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wanrun.errors import ArtifactError

if TYPE_CHECKING:
    from tokenizers import Encoding


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
    """Tokenizes like ``T5TokenizerFast`` with ``padding="max_length"`` and ``truncation=True``.

    Args:
        max_length: L, tokens per prompt.
        data: the file's content, if it was already read.

    Raises:
        ArtifactError: if the file is not a readable tokenizer, or has no token with that id.
    """

    def __init__(self, path: Path, max_length: int = 512, pad_id: int = 0, data: bytes | None = None) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(
                (path.read_bytes() if data is None else data).decode("utf-8")
            )
        except FileNotFoundError:
            raise ArtifactError(f"{path} is missing", remedy="build the artifact again") from None
        except Exception as error:  # the tokenizers package raises bare Exception for a malformed file
            raise ArtifactError(
                f"{path} cannot be read as a tokenizer", found=error, remedy="build the artifact again"
            ) from error
        pad_token = self._tokenizer.id_to_token(pad_id)
        if pad_token is None:
            raise ArtifactError(
                f"{path} has no token {pad_id} to pad with", remedy="build the artifact again"
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
