"""The prefixes that programs put before the names of a part's tensors: one list, for every kind of file.

Sources: ComfyUI's supported_models.py (``unet_config`` of WAN21_T2V: ``model.diffusion_model.``,
``vae_key_prefix``, ``text_encoder_key_prefix``) and the prefixes of its older models; files of PEFT, and
diffusers' LoRAs; DiffSynth-Studio and UniAnimate-DiT (``pipe.dit.``), rCM and TurboDiffusion (``net.``),
Self-Forcing and LongLive (``generator.model.``); torch's wrappers of a module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from wanrun.errors import SourceError

PREFIXES: Mapping[str, str] = MappingProxyType(
    {
        "base_model.model.": "transformer",
        "model.diffusion_model.": "transformer",
        "diffusion_model.": "transformer",
        "transformer.": "transformer",
        "pipe.dit.": "transformer",
        "dit.": "transformer",
        "generator.": "transformer",
        "generator_ema.": "transformer",
        "net.": "transformer",
        "unet.": "transformer",
        "model.": "transformer",
        "vae.": "vae",
        "first_stage_model.": "vae",
        "text_encoders.umt5xxl.transformer.": "text_encoder",
        "cond_stage_model.umt5xxl.transformer.": "text_encoder",
        "text_encoders.umt5xxl.logit_scale": "",
        "text_encoders.spiece_model": "tokenizer",
        "cond_stage_model.spiece_model": "tokenizer",
    }
)
"""The part of each; empty for unused tensors. A prefix comes before a shorter one that it begins with."""

TRANSFORMER = tuple(prefix for prefix, part in PREFIXES.items() if part == "transformer")
"""Those of the transformer. A file of one part, of any, may have several of them one after the other."""

_WRAPPER = re.compile(
    r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", re.ASCII
)
"""The prefix of names in a module that torch wraps: the whole model, or each of its blocks."""

LEADING = re.compile(f"({'|'.join(map(re.escape, TRANSFORMER))})*")
"""Any number of prefixes of one key."""


def unwrapped(key: str) -> str:
    """Returns a key without torch's wrappers."""
    return _WRAPPER.sub("", key)


def common_prefix(keys: Iterable[str]) -> str:
    """Returns the prefixes of ``TRANSFORMER`` with which every key starts; empty if there are none."""
    keys, prefix = tuple(keys), ""
    while keys:
        found = next((one for one in TRANSFORMER if all(key.startswith(prefix + one) for key in keys)), None)
        if found is None:
            break
        prefix += found
    return prefix


def plain_names(keys: Iterable[str], where: str) -> dict[str, str]:
    """Returns each key of a part's weights without wrappers, and without the prefix that all of them have.

    Raises SourceError if two keys have the same name then.
    """
    names = {key: unwrapped(key) for key in keys}
    prefix = common_prefix(names.values())
    plain = {key: name.removeprefix(prefix) for key, name in names.items()}
    if len(stored := {name: key for key, name in plain.items()}) < len(plain):
        twice = next(key for key, name in plain.items() if stored[name] != key)
        raise SourceError(
            "conflict",
            f"{where} holds {plain[twice]} twice",
            expected="one copy of each weight",
            found=f"{twice} and {stored[plain[twice]]}",
            remedy="save the model without its wrappers, or use the file as published",
        )
    return plain
