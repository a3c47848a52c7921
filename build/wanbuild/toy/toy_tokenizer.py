"""Makes a small Unigram tokenizer like T5's, offline."""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>", "<s>")
"""Ids 0 to 3. UMT5 itself has <s> = 2 and <unk> = 3, but transformers 5's T5TokenizerFast uses id 2 for
unknown text, whatever the file says; in this order it and `tokenizers` give the same ids for any text. It
also ignores an NFKC normalizer in the file, so there is none."""

WORDS = """
a an the and or of in on at to with by for from over under into near through across behind
is are was it its as no not very two three one many more
cat dog bird horse fish man woman child boy girl person people robot car train boat ship bike
city street house room forest tree river sea ocean lake mountain hill sky sun moon star cloud rain snow
fire water light night day morning sunset beach field garden flower grass road bridge window door table
red green blue white black yellow orange golden silver dark bright soft warm cold small large big old young
walks walking runs running sits sitting stands standing flies flying swims swimming plays playing
looks looking eats eating dances dancing moves moving slow slowly fast quickly quiet calm
video film camera shot close wide view scene style realistic cinematic detailed high quality low worst best
blurred blurry static overexposed subtitles deformed extra fingers hands face eyes hair hat dress
"""
_PARTS = "ing ed er est ly tion ment ness ful th sh ch ck nd nt st tr pr br gr ou ea ee oo ai an en in on re"


def vocabulary(words: str = WORDS) -> list[tuple[str, float]]:
    """Returns pieces and log probabilities in id order: special tokens, words, parts of words, characters."""
    whole = dict.fromkeys("▁" + word for word in words.split())
    characters = [char for char in string.printable if not char.isspace()]
    pieces = [(token, 0.0) for token in SPECIAL_TOKENS]
    pieces += [(word, -5.0 - 0.01 * rank) for rank, word in enumerate(whole)]
    pieces += [(part, -7.0 - 0.01 * rank) for rank, part in enumerate(_PARTS.split())]
    return pieces + [("▁", -4.0)] + [(char, -9.0 - 0.01 * rank) for rank, char in enumerate(characters)]


def write_tokenizer(folder: Path, max_length: int = 512, words: str = WORDS) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json into an existing folder.

    ``max_length`` is the prompt length in tokens that the config states. ``words`` are those with a separate
    piece, separated by white space.
    """
    tokenizer = Tokenizer(models.Unigram(vocabulary(words), unk_id=SPECIAL_TOKENS.index("<unk>")))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", SPECIAL_TOKENS.index("</s>"))]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {**names, "extra_ids": 0, "model_max_length": max_length, "tokenizer_class": "T5Tokenizer"}
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
