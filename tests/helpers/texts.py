"""Prompts of many kinds, a small tokenizer that cuts them up, and random embeddings."""

from __future__ import annotations

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from wanrun.weights.buffers import DTYPES

WORDS = ("a", "cat", "dog", "walking", "on", "the", "beach", "at", "sunset", "ing", "er", "猫", "в")

RECORDED = (
    ("a cat walking on the beach at sunset", None, [41, 42, 44, 45, 46, 47, 48, 49, 1]),
    ("", None, [1]),
    ("   ", "", [1]),
    ("a", None, [41, 1]),
    (
        "A ﬁne “quote”, 猫が歩く — ﷺ  ｆｕｌｌ ｗｉｄｔｈ",
        'A fine "quote", 猫が歩く — ﷺ full width',
        [4, 3, 4, 10, 13, 18, 9, 4, 3, 21, 25, 19, 24, 9, 3, 32, 52, 3, 4, 38, 4, 3, 4, 1],
    ),
    (
        "emoji 🐈\u200d⬛ and combining e\u0301 and \u200bzero width \ufeff",
        "emoji 🐈\u200d⬛ and combining é and \u200bzero width",
        [4, 9, 17, 19, 14, 13, 4, 3, 41, 18, 8, 4, 7, 19, 17, 6, 13, 18, 62, 4, 3, 41, 18, 1],
    ),
    (
        "tom &amp;amp; jerry &lt;cat&gt; &eacute;",
        "tom & jerry <cat> é",
        [4, 24, 19, 17, 4, 33, 4, 14, 63, 22, 29, 4, 35, 54, 36, 4, 3, 1],
    ),
    (
        "broken: schÃ¶n â€œquotedâ€\x9d",
        'broken: schön "quoted"',
        [4, 6, 22, 19, 15, 9, 18, 3, 4, 23, 7, 12, 3, 18, 4, 3, 21, 25, 19, 24, 9, 8, 3, 1],
    ),
    (
        "tabs\tand\nnew\r\nlines \x0b\x1c\u2028\u00a0end ",
        "tabs and new lines end",
        [4, 24, 5, 6, 23, 41, 18, 8, 4, 18, 9, 27, 4, 16, 13, 18, 9, 23, 4, 9, 18, 8, 1],
    ),
    ("</s> in the <pad> text <unk>", None, [1, 4, 13, 18, 46, 4, 0, 4, 24, 9, 28, 24, 4, 3, 1]),
)
"""Rows of a prompt; what diffusers' ``prompt_clean`` makes of it, None for the prompt itself; and the first
24 tokens of that, by transformers' T5TokenizerFast around ``small_tokenizer``. Parity tests hold both."""

PROMPTS = (*(prompt for prompt, _, _ in RECORDED), "sunset " * 700, "猫" * 600)


def small_tokenizer() -> Tokenizer:
    """A small Unigram tokenizer with UMT5's arrangement of special tokens."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<s>", 0.0), ("<unk>", -20.0), ("▁", -4.0)]
    pieces += [(c, -6.0 - i / 100) for i, c in enumerate("abcdefghijklmnopqrstuvwxyz.,&;<>/—“”")]
    pieces += [("▁" + word, -3.0 - i / 10) for i, word in enumerate(WORDS)]
    pieces += [(word, -5.0 - i / 10) for i, word in enumerate(WORDS) if len(word) > 1 or word == "猫"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("</s>", "<unk>", "<pad>")])
    return tokenizer


PROMPT = "a fox — “quoted” 猫 \U0001f98a"


def random_rows(length: int, width: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((length, width)).astype(DTYPES[dtype])


def same(first: np.ndarray | None, second: np.ndarray) -> bool:
    """Equal in dtype, shape and every bit."""
    return (
        first is not None
        and first.dtype == second.dtype
        and first.shape == second.shape
        and first.tobytes() == second.tobytes()
    )
